"""The engine whose clients are other machines, reached through Flower's Grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from flwr.app import RecordDict

from fednorms.core.errors import Diverged, RunFailed
from fednorms.core.part import Part, Pass
from fednorms.core.states import Broadcast, ClientState, ServerState, Task, Upload
from fednorms.core.tree import Tree
from fednorms.engines.base import DEFAULTS, Engine, EngineSettings, SplitName, Trained
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore
from fednorms.flower import messages
from fednorms.flower.agreement import agreement
from fednorms.flower.generations import NONE
from fednorms.flower.roster import Answers, Roster
from fednorms.runs.store.clients import ClientStore


class Remote(Engine):
    """Asks sites to compute. Its store holds, for each site, the round of the state that the server accepted last.

    The states themselves are on the sites' disks. The store is part of every checkpoint, so a server that is restarted
    tells every site where to continue. `tests` are the modes and splits that a round's evaluation will ask for.
    """

    name: ClassVar[str] = "flower"

    def __init__(
        self,
        task: Task,
        roster: Roster,
        settings: EngineSettings = DEFAULTS,
        tests: Sequence[tuple[Mode, SplitName]] = (),
    ) -> None:
        super().__init__(task, settings)
        self.roster, self.tests = roster, tests
        self._store: ClientStates = ClientStore(2**30)
        self._have_fixed: set[str] = set()  # sites that have received the tensors that are sent only once
        self._scores: dict[tuple[int, str], dict[str, SiteScore]] = {}  # of the last tested round, by "mode/split"
        self._cached_measures: dict[int, dict[str, Tree]] = {}  # of the last tested round

    @property
    def clients(self) -> list[str]:
        """Names of the sites, in the order of the run."""
        return list(self.roster.names)

    def samples(self, name: str) -> int:
        """Number of training images of a site, from its card."""
        return self.roster.cards[name].facts.samples

    def tested(self, split: str, *, unseen: bool = False) -> dict[str, str]:
        """All sites with their domains; which of them have images in the split is known when they answer."""
        return {} if unseen else dict(self.roster.facts.domain_of)

    @property
    def store(self) -> ClientStates:
        """The round of each site's accepted state; the states themselves are at the sites."""
        return self._store

    def use(self, store: ClientStates) -> None:
        """Continue with these accepted rounds."""
        self._store = store

    def close(self) -> None:
        """Do nothing: Flower runs the processes of the sites."""

    # -- what clients do ----------------------------------------------------------------------------------------
    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        """Run an extra pass at sites; returns what each uploads, and nothing in place of what it keeps."""
        answers = self._ask("query.measure", sent, names, {"part": p.name, "when": job.when})
        found: dict[str, Tree] = {}
        for name, content in sorted(answers.contents.items()):
            try:
                found[name] = messages.trees(content, self._device)["up"]
            except Exception as error:  # a malformed message can raise anything
                answers.lost[name] = _unreadable(error)
        answers.lost |= {n: "sent values that are not finite" for n, up in found.items() if not up.finite()}
        answers.lost |= {} if job.reduce in ("list", "grouped") else _odd_ones(found)
        when = f"after round {sent.round}" if sent.round else "before round 1"
        self.notes += [f"{p.name}, {when}: {n} {why}" for n, why in sorted(answers.lost.items())]
        good = {name: (Tree(), up) for name, up in found.items() if name not in answers.lost}
        self._require(len(good), f"{p.name}, {when}", answers.lost)
        return good

    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        """Let sites train for a round; those that fail, answer late or send unusable data are left out and named."""
        self.roster.wait_for(min(self.roster.deployment.minimum, len(cohort)), list(cohort))
        answers = self._ask("train", sent, cohort, {"score": score})
        done = Trained([], diverged=answers.diverged, lost={**answers.lost, **self.roster.news()})
        uploads: dict[str, Upload] = {}
        kept: dict[str, int] = {}
        for name, content in sorted(answers.contents.items()):
            try:
                parts = [p.name for p in self.task.method.parts]
                upload = messages.unpack_upload(content, name, float(self.samples(name)), parts, self._device)
                kept[name] = int(str(messages.about(content)["kept"]))
                if "after_local" in content:
                    done.after_local[name] = messages.unpack_score(content.metric_records["after_local"])
            except Exception as error:
                done.lost[name] = _unreadable(error)
                continue
            if kept[name] not in (self._accepted(name), sent.round + 1):
                done.lost[name] = f"says that it keeps the state after round {kept[name]}"
            elif wrong := self._wrong(upload):
                done.lost[name] = wrong
            else:
                uploads[name] = upload
        for name, why in self._odd_parts(uploads).items():
            done.lost[name] = why
            del uploads[name]
        if done.diverged and self.settings.on_divergence == "stop":
            raise Diverged(min(done.diverged.items())[1])
        self._require(len(uploads), f"Round {sent.round + 1}", done.lost | done.diverged)
        done.after_local = {n: score for n, score in done.after_local.items() if n in uploads}
        for name in cohort:
            if name in uploads:
                done.uploads.append(uploads[name])
                if kept[name] != NONE:
                    self.store.put(name, ClientState(kept[name], Tree(), {}))
        return done

    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        """Test a mode at all sites that are connected; one message asks for all planned tests of a round."""
        sent = next(iter(jobs.values()))
        key = (sent.round, f"{mode}/{split}")
        if key not in self._scores:
            last = sent.round >= self.task.rounds
            planned = [(m, s) for m, s in self.tests if last or m.model != "adapted"]
            wanted = planned if (mode, split) in planned else [(mode, split)]
            self._scores = self._test(sent, list(jobs), [f"{m}/{s}" for m, s in wanted])
        return self._scores[key]

    def _test(
        self, sent: Broadcast, names: Sequence[str], tests: list[str]
    ) -> dict[tuple[int, str], dict[str, SiteScore]]:
        answers = self._ask("evaluate", sent, names, {"tests": tests})
        self.notes += [f"test of round {sent.round}: {n} {why}" for n, why in sorted(answers.lost.items())]
        scores: dict[tuple[int, str], dict[str, SiteScore]] = {(sent.round, label): {} for label in tests}
        for name in names:
            for label in tests if name in answers.contents else ():
                if (record := answers.contents[name].metric_records.get(label)) is None:
                    continue  # it has no such data
                try:
                    scores[sent.round, label][name] = messages.unpack_score(record)
                except Exception as error:
                    self.notes.append(f"test of round {sent.round}: {name} {_unreadable(error)}")
        return scores

    def _measured(self, tested: ServerState, cohort: Sequence[str]) -> dict[str, Tree]:
        if tested.round not in self._cached_measures:  # a test and the checkpoint after it need the same
            self._cached_measures = {tested.round: super()._measured(tested, cohort)}
        return self._cached_measures[tested.round]

    # -- messages -----------------------------------------------------------------------------------------------
    def _ask(self, kind: str, sent: Broadcast, names: Sequence[str], words: messages.About) -> Answers:
        net = self.task.net
        travels = set(net.exchanged)
        travels |= {n for n, t in sent.model.items() if n not in travels and not torch.equal(t, net.initial[n])}
        model = sent.model.pick(n for n in sent.model if n in travels)
        fixed = net.initial.pick(n for n in net.initial if n not in set(net.exchanged))
        agreed = agreement(self.roster.facts)
        contents: dict[str, RecordDict] = {}
        for name in names:
            about = {**words, "agreement": agreed, "accepted": self._accepted(name)}
            once = Tree() if name in self._have_fixed else fixed
            contents[name] = messages.pack_broadcast(sent, model, once, about)
        answers = self.roster.ask(kind, contents)
        self._have_fixed |= set(answers.contents)
        self._have_fixed -= {*answers.lost, *answers.diverged}
        return answers

    def _accepted(self, name: str) -> int:
        state = self.store.get(name)
        return state.round if state else NONE

    @property
    def _device(self) -> torch.device:
        return self.task.like.device

    # -- checks of what sites sent ------------------------------------------------------------------------------
    def _wrong(self, upload: Upload) -> str:
        """What is wrong with an upload (names, shapes, types, values that are not finite); empty if nothing."""
        net = self.task.net
        expected = {n: (tuple(net.initial[n].shape), net.initial[n].dtype) for n in net.exchanged}
        found = {n: (tuple(t.shape), t.dtype) for n, t in upload.model.items()}
        if differing := [n for n in {**expected, **found} if expected.get(n) != found.get(n)]:
            name = differing[0]
            return f"sent {name} as {_form(found.get(name))}, expected {_form(expected.get(name))}"
        if infinite := [n for n, t in (*upload.model.items(), *_named(upload.parts)) if not Tree({n: t}).finite()]:
            return f"sent {infinite[0]}, which is not finite"
        return ""

    def _odd_parts(self, uploads: dict[str, Upload]) -> dict[str, str]:
        odd: dict[str, str] = {}
        for p in self.task.method.parts:
            jobs = [job for job in p.passes() if job.when in ("before", "after")]
            how = jobs[0].reduce if jobs else p.reduction
            if how not in ("list", "grouped"):
                odd |= _odd_ones({n: u.parts.get(p.name, Tree()) for n, u in uploads.items()})
        return odd

    def _require(self, answered: int, when: str, why: dict[str, str]) -> None:
        if answered < self.roster.deployment.minimum:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(why.items()))
            raise RunFailed(
                f"{when}: {answered} usable answer{'s' * (answered != 1)} from sites, but deploy.minimum is "
                f"{self.roster.deployment.minimum} ({reasons}). Run again to continue from the last checkpoint."
            )


def _odd_ones(trees: dict[str, Tree]) -> dict[str, str]:
    """Sites that sent tensors of other names or shapes than most sites, which cannot be averaged with theirs."""
    forms = {n: tuple((k, tuple(t.shape), t.dtype) for k, t in sorted(tree.items())) for n, tree in trees.items()}
    if len(set(forms.values())) < 2:
        return {}
    usual, _ = Counter(forms.values()).most_common(1)[0]
    return {n: "sent other tensors than the other sites" for n, form in forms.items() if form != usual}


def _unreadable(error: Exception) -> str:
    return f"sent a message that cannot be read ({type(error).__name__}: {error})"


def _named(parts: dict[str, Tree]) -> list[tuple[str, torch.Tensor]]:
    return [(f"{part}/{k}", t) for part, tree in parts.items() for k, t in tree.items()]


def _form(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "nothing" if found is None else f"{found[1]} of shape {found[0]}".removeprefix("torch.")
