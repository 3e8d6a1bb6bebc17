"""The engine whose clients are other machines, reached through Flower's Grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import torch
from flwr.app import MetricRecord, RecordDict

from fednorms.core import border
from fednorms.core.errors import Diverged, RunFailed
from fednorms.core.individual import received, view_of
from fednorms.core.part import Part, Pass
from fednorms.core.round import server_update
from fednorms.core.states import Broadcast, ClientState, ServerState, Task, Upload
from fednorms.core.tree import Tree
from fednorms.core.views import Weights
from fednorms.engines.base import DEFAULTS, Engine, EngineSettings, SplitName, Trained
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore
from fednorms.flower import messages
from fednorms.flower.agreement import agreement
from fednorms.flower.generations import NONE
from fednorms.flower.rehearsal import Rehearsal
from fednorms.flower.roster import Answers, Roster
from fednorms.flower.schema import BadMessage, printable
from fednorms.methods.normbound import NormBound
from fednorms.runs.store.clients import ClientStore

T = TypeVar("T")
AFTER_LOCAL = "after_local"  # the record of a score right after training


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
        self._capped: set[str] = set()  # sites whose weight was noted to be limited
        self._shortened: set[str] = set()  # sites of which an update was noted to be shortened
        self._rehearsal = Rehearsal(task, roster.facts, settings.threads)
        self._kept: dict[str, int] = {}  # the rounds of the states that sites keep, until `average` accepts them

    @property
    def clients(self) -> list[str]:
        """Names of the sites, in the order of the run."""
        return list(self.roster.names)

    def samples(self, name: str) -> int:
        """Number of training images of a site, from its card, limited by `deploy.max_weight`."""
        return self.roster.samples[name]

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
        bad: dict[str, str] = {}
        for name, content in sorted(answers.contents.items()):
            try:
                found[name] = messages.unpack_measured(content, self._device)
            except BadMessage as error:
                bad[name] = _unreadable(error)
        trial = self._rehearsal.measured(sent, p, job)
        odd = border.unusable_measures(self.task, p, job.reduce, found, self._images(found), trial=trial)
        bad |= {name: printable(wrong) for name, wrong in odd.items()}
        self.refused += len(bad)
        why = {**answers.lost, **answers.diverged, **bad}
        when = f"after round {sent.round}" if sent.round else "before round 1"
        self.notes += [f"{p.name}, {when}: {n} {reason}" for n, reason in sorted(why.items())]
        good = {name: (Tree(), up) for name, up in found.items() if name not in bad}
        self._require(len(good), f"{p.name}, {when}", why)
        return good

    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        """Let sites train for a round; those that fail, answer late or send unusable data are left out and named."""
        self.roster.wait_for(min(self.roster.deployment.minimum, len(cohort)), list(cohort))
        answers = self._ask("train", sent, cohort, {"score": score})
        done = Trained([], diverged=answers.diverged, lost={**answers.lost, **self.roster.news()})
        uploads: dict[str, Upload] = {}
        bad: dict[str, str] = {}
        self._kept = {}
        for name, content in sorted(answers.contents.items()):
            try:
                uploads[name] = self._upload(name, content, sent)
                if AFTER_LOCAL in content.metric_records:
                    done.after_local[name] = self._score(name, content.metric_records[AFTER_LOCAL], "test")
            except BadMessage as error:
                bad[name] = printable(str(error))
        uploads = {n: u for n, u in uploads.items() if n not in bad}
        trial = partial(self._rehearsal.uploads, sent)
        started = {name: sent.to(name).model for name in uploads} if sent.addressing else {}
        odd = border.unusable(self.task, sent.model, uploads, self._images(uploads), started=started, trial=trial)
        bad |= {name: printable(wrong) for name, wrong in odd.items()}
        self.refused += len(bad)
        done.lost |= bad
        uploads = {n: u for n, u in uploads.items() if n not in bad}
        if len(done.diverged) > len(uploads) and self.settings.on_divergence == "stop":
            raise Diverged(min(done.diverged.items())[1] + self._way_back(sent.round))
        self._require(len(uploads), f"Round {sent.round + 1}", done.lost | done.diverged)
        done.after_local = {n: score for n, score in done.after_local.items() if n in uploads}
        done.uploads = [uploads[name] for name in cohort if name in uploads]
        return done

    def average(self, state: ServerState, done: Trained) -> ServerState:
        """The server's next state. Uploads that would break the model are left out before anything is stored."""
        done.uploads = self._bounded(state, done.uploads)

        def attempt(names: Sequence[str]) -> tuple[ServerState, str]:
            after = server_update(self.task, state, [u for u in done.uploads if u.client in names])
            return after, border.exploded(state, after)

        after, guilty = self._sound(attempt, [u.client for u in done.uploads], f"Round {state.round + 1}", state.round)
        done.lost |= guilty
        done.uploads = [u for u in done.uploads if u.client not in guilty]
        for upload in done.uploads:
            if (kept := self._kept[upload.client]) != NONE:
                self.store.put(upload.client, ClientState(kept, Tree(), {}))
        return after

    def _pooled(self, p: Part, job: Pass, state: ServerState, uploads: Mapping[str, Tree]) -> Tree:
        def attempt(names: Sequence[str]) -> tuple[Tree, str]:
            found = super(Remote, self)._pooled(p, job, state, {n: uploads[n] for n in names})
            return found, "" if found.finite() else f"the state of {p.name} would not be finite"

        when = f"{p.name}, after round {state.round}" if state.round else f"{p.name}, before round 1"
        found, guilty = self._sound(attempt, list(uploads), when, state.round)
        self.notes += [f"{when}: {name} {reason}" for name, reason in sorted(guilty.items())]
        return found

    def _sound(
        self, attempt: Callable[[Sequence[str]], tuple[T, str]], names: list[str], when: str, good: int
    ) -> tuple[T, dict[str, str]]:
        """The result of an attempt with the uploads of these sites, without those that break it on their own.

        An attempt returns what is wrong with its result. It may raise anything on values that nobody expected.
        """

        def tried(some: Sequence[str]) -> tuple[T | None, Exception | str]:
            try:
                found, wrong = attempt(some)
            except Exception as error:
                return None, error
            return (None, wrong) if wrong else (found, "")

        found, why = tried(names)
        if found is not None:
            return found, {}
        alone = {name: tried([name])[1] for name in names}
        guilty = {n: f"would break the model: {printable(str(reason))}" for n, reason in alone.items() if reason}
        if isinstance(why, Exception) and len(guilty) == len(names):
            raise why  # of a part, whatever sites send
        rest = [name for name in names if name not in guilty]
        self.refused += len(guilty)
        self._require(len(rest), when, guilty)
        if guilty:
            found, why = tried(rest)
        if found is None:
            raise RunFailed(
                f"{when}: what {', '.join(rest)} sent would break the model together ({why}). The checkpoint of round "
                f"{good} is the last good one: run again to continue from it, with a smaller training.lr or without "
                "one of these sites."
            )
        return found, guilty

    def _bounded(self, state: ServerState, uploads: list[Upload]) -> list[Upload]:
        """The uploads with no update longer than `deploy.norm_bound` times that of the median site, in this round."""
        most = self.roster.deployment.norm_bound
        few = len(uploads) < 3  # the median of two is the shorter: a site that sends nothing would stop the other
        if not most or few or self.task.method.moves_without_clients:  # whose updates have their own length
            return uploads
        part = NormBound(relative=most)
        start = part.init(Weights(Tree(), {}))[0]
        seen = view_of(self.task, state, part, start, uploads, [1.0] * len(uploads))
        bounded, _ = received(self.task, part, seen, uploads)
        for old, new in zip(uploads, bounded, strict=True):
            if new is not old and new.client not in self._shortened:
                self._shortened.add(new.client)
                self.notes.append(
                    f'Round {state.round + 1}: the update of "{new.client}" was more than {most:g} times as long as '
                    "that of the median site, and was shortened to that (deploy.norm_bound)."
                )
        return bounded

    def _upload(self, name: str, content: RecordDict, sent: Broadcast) -> Upload:
        """A site's upload as it can be read; raises BadMessage."""
        parts = [p.name for p in self.task.method.parts]
        try:
            upload = messages.unpack_upload(content, name, float(self.samples(name)), parts, self._device)
            kept = messages.unpack_kept(content)
        except BadMessage as error:
            raise BadMessage(_unreadable(error)) from None
        if kept not in (self._accepted(name), sent.round + 1):
            raise BadMessage(f"says that it keeps the state after round {kept}")
        self._kept[name] = kept
        return upload

    def _score(self, name: str, record: MetricRecord, split: str) -> SiteScore:
        card = self.roster.cards[name]
        try:
            return messages.unpack_score(record, card.facts.num_classes, card.sizes[split])
        except BadMessage as error:
            raise BadMessage(f"sent a score that cannot be used ({error})") from None

    def _way_back(self, accepted: int) -> str:
        return (
            f" If the model of round {accepted} is the cause, continue from the round before: flwr run ... "
            f"--run-config 'deploy.restart={accepted - 1}'."
            if accepted > 1
            else ""
        )

    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        """Test a mode at all sites that are connected; one message asks for all planned tests of a round."""
        sent = next(iter(jobs.values()))
        key = (sent.round, f"{mode}/{split}")
        if key not in self._scores:
            last = sent.round >= self.task.rounds
            planned = [(m, s) for m, s in self.tests if last or m.model != "adapted"]
            wanted = planned if (mode, split) in planned else [(mode, split)]
            if sent.addressing:  # a message has one model: the server's, or the one made for the site
                wanted = [(m, s) for m, s in wanted if (m.model == "global") == (mode.model == "global")]
            same = {k: found for k, found in self._scores.items() if k[0] == sent.round}
            self._scores = same | self._test(sent, list(jobs), [f"{m}/{s}" for m, s in wanted], mode)
        return self._scores[key]

    def _test(
        self, sent: Broadcast, names: Sequence[str], tests: list[str], mode: Mode
    ) -> dict[tuple[int, str], dict[str, SiteScore]]:
        answers = self._ask("evaluate", sent, names, {"tests": tests}, mode)
        lost = {**answers.lost, **answers.diverged}
        self.notes += [f"test of round {sent.round}: {n} {why}" for n, why in sorted(lost.items())]
        scores: dict[tuple[int, str], dict[str, SiteScore]] = {(sent.round, label): {} for label in tests}
        for name in names:
            for label in tests if name in answers.contents else ():
                if (record := answers.contents[name].metric_records.get(label)) is None:
                    continue  # it has no such data
                try:
                    scores[sent.round, label][name] = self._score(name, record, label.rpartition("/")[2])
                except BadMessage as error:
                    self.refused += 1
                    self.notes.append(f"test of round {sent.round}: {name} {error}")
        return scores

    def _measured(self, tested: ServerState, cohort: Sequence[str]) -> dict[str, Tree]:
        if tested.round not in self._cached_measures:  # a test and the checkpoint after it need the same
            self._cached_measures = {tested.round: super()._measured(tested, cohort)}
        return self._cached_measures[tested.round]

    # -- messages -----------------------------------------------------------------------------------------------
    def _ask(
        self, kind: str, sent: Broadcast, names: Sequence[str], words: messages.About, mode: Mode | None = None
    ) -> Answers:
        net = self.task.net
        travels = set(net.exchanged)
        travels |= {n for n, t in sent.model.items() if n not in travels and not torch.equal(t, net.initial[n])}
        fixed = net.initial.pick(n for n in net.initial if n not in set(net.exchanged))
        agreed = agreement(self.roster.facts)
        self._note_capped()
        contents: dict[str, RecordDict] = {}
        for name in names:
            about = {**words, "agreement": agreed, "accepted": self._accepted(name)}
            once = Tree() if name in self._have_fixed else fixed
            here = mode.received(sent, name) if mode else sent.to(name)
            model = here.model.pick(n for n in here.model if n in travels)
            contents[name] = messages.pack_broadcast(here, model, once, about)
        answers = self.roster.ask(kind, contents)
        self._have_fixed |= set(answers.contents)
        self._have_fixed -= {*answers.lost, *answers.diverged}
        return answers

    def _note_capped(self) -> None:
        most, counted = self.roster.deployment.max_weight, self.roster.samples
        for name, card in self.roster.cards.items():
            if counted[name] < card.facts.samples and name not in self._capped:
                self._capped.add(name)
                self.notes.append(
                    f'"{name}" counts for {counted[name]:,} training images, not for the {card.facts.samples:,} of its '
                    f"card: no minority of sites has more than {100 * most:g} % of all (deploy.max_weight)."
                )

    def _accepted(self, name: str) -> int:
        state = self.store.get(name)
        return state.round if state else NONE

    def _images(self, names: Iterable[str]) -> dict[str, int]:
        """The training images on the sites' cards, whatever weight they have."""
        return {name: self.roster.cards[name].facts.samples for name in names}

    @property
    def _device(self) -> torch.device:
        return self.task.like.device

    def _require(self, answered: int, when: str, why: dict[str, str]) -> None:
        if answered < self.roster.deployment.minimum:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(why.items()))
            raise RunFailed(
                f"{when}: {answered} usable answer{'s' * (answered != 1)} from sites, but deploy.minimum is "
                f"{self.roster.deployment.minimum} ({reasons}). Run again to continue from the last checkpoint."
            )


def _unreadable(error: BadMessage) -> str:
    return f"sent a message that cannot be read ({printable(str(error))})"
