"""The reference engine: one client after the other, eagerly, on the CPU or one GPU. The debugger of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from fednorms.core import checks
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.noise import seed_of
from fednorms.core.part import Part, Pass
from fednorms.core.passes import LocalView, passes
from fednorms.core.reductions import reduce_uploads
from fednorms.core.round import broadcast, load, local_update, own_state
from fednorms.core.states import Broadcast, Client, ClientState, Combined, ServerState, Task, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.data import Federation, Site, Split
from fednorms.engines.joint import Begun, begin_together, go_on
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import MEASURED, Mode, model_for, score_site, tested_state, unseen_broadcast
from fednorms.evaluation.scores import Scores, SiteScore

AFTER_LOCAL = Mode("after_local", "own")


@dataclass
class Trained:
    """What a round of training gave: uploads, clients left out because they diverged, scores right after training.

    An engine that adds uploads up itself gives the result as `combined`; its uploads then hold shapes only.
    """

    uploads: list[Upload]
    diverged: dict[str, str] = field(default_factory=dict)
    after_local: dict[str, SiteScore] = field(default_factory=dict)
    combined: Combined | None = None
    lost: dict[str, str] = field(default_factory=dict)  # clients that did not answer, or not usefully, and why


@contextmanager
def repeatable(threads: int, *names: object) -> Iterator[None]:
    """Within this context torch uses so many threads and its global generator starts from a seed hashed from names.

    A model that draws from that generator (functional dropout) still repeats, and leaves no trace.

    >>> with repeatable(1, "test"): a = torch.rand(1)
    >>> with repeatable(1, "test"): torch.equal(a, torch.rand(1))
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            torch.manual_seed(seed_of("torch", *names))
            yield
    finally:
        torch.set_num_threads(before)


class Loop:
    """Runs clients' functions in a Python loop and keeps their states in a store."""

    name: ClassVar[str] = "loop"
    provides: ClassVar[frozenset[str]] = frozenset({"passes", "phases", "joint"})

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        threads: int = 1,
        on_divergence: Literal["stop", "skip"] = "stop",
    ) -> None:
        self._refuse_what_it_lacks(task)
        self.task, self.store, self.threads, self.on_divergence = task, store, threads, on_divergence
        self.sites: dict[str, Site] = {s.name: s for s in training.clients}
        self.data: dict[str, Split] = {s.name: s.train for s in training.clients if s.train is not None}
        self.tested: Federation = testing
        self.notes: list[str] = []  # what a user should know about how it ran

    def _refuse_what_it_lacks(self, task: Task) -> None:
        lacking = {p.name: sorted(p.requires - self.provides) for p in task.method.parts if p.requires - self.provides}
        if not lacking:
            return
        wanted = {what for names in lacking.values() for what in names}
        able = [kind.name for kind in (Loop,) if wanted <= kind.provides]
        raise BadInput(
            f'The engine "{self.name}" cannot run {", ".join(lacking)}, which needs {" and ".join(sorted(wanted))}. '
            + (f'Choose engine="{able[0]}".' if able else "No engine here offers that.")
        )

    @property
    def clients(self) -> list[str]:
        """Names of the training clients, in a fixed order."""
        return list(self.sites)

    def samples(self, name: str) -> int:
        """How many images a client trains on."""
        return len(self.data[name])

    def client(self, name: str) -> Client:
        """A training client with its data and its state of now."""
        return self._client(self.sites[name], self.data[name])

    def at_test(self, site: Site, data: Split) -> Client:
        """A site with its state of now, and with its training images, or the tested ones (`data`) if it has none."""
        return self._client(site, site.train if site.train is not None else data)

    def _client(self, site: Site, data: Split) -> Client:
        return Client(site.name, data, self.store.get(site.name), dict(site.attributes))

    def _at(self, *names: object) -> AbstractContextManager[None]:
        return repeatable(self.threads, self.task.seed, *names)

    # -- training -----------------------------------------------------------------------------------------------
    def setup(self, state: ServerState) -> ServerState:
        """Run the passes that come before the first round."""
        for p, job in passes(self.task, "setup"):
            mine = self._run(p, job, state, self.clients, keep=True)
            state = replace(state, parts={**state.parts, p.name: mine})
        return state

    def _run(self, p: Part, job: Pass, state: ServerState, names: Sequence[str], *, keep: bool) -> Tree:
        uploads, sizes = [], []
        for name, (kept, up) in self.measure(p, job, broadcast(self.task, state), sorted(names)).items():
            uploads.append(up)
            sizes.append(float(self.samples(name)))
            if keep:
                old = self.store.get(name) or ClientState(0, Tree(), {})
                self.store.put(name, replace(old, parts={**old.parts, p.name: kept}))
        reduced = reduce_uploads(uploads, sizes, job.reduce)
        context = context_of(self.task, state.round, None)
        view = Round(state.model, reduced, state.parts[p.name], len(uploads), len(self.sites), context)
        return checks.tree(p, "server of a pass", job.server(reduced, view))

    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        """Run an extra pass at clients: what each keeps, and what it uploads."""
        found: dict[str, tuple[Tree, Tree]] = {}
        for name in names:
            client = self.client(name)
            with self._at("pass", p.name, sent.round, name):
                mine = own_state(self.task, sent, client.state)
                context = context_of(self.task, sent.round, client)
                model = load(self.task, sent, client, context, mine)
                view = LocalView(self.task, p, client, model, context, sent, mine)
                found[name] = checks.two_trees(p, "client of a pass", job.client(view))
        return found

    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        """Train the clients of a cohort one after the other; with `score`, also test each right after."""
        done = Trained([])
        clients = [self.client(name) for name in cohort]
        begun: dict[str, Begun] = {}
        if any("joint" in p.requires for p in self.task.method.parts):
            with self._at("joint", sent.round):
                begun = begin_together(self.task, sent, clients)
        for client in clients:
            name, site = client.name, self.sites[client.name]
            try:
                with self._at("train", sent.round, name):
                    if name in begun:
                        upload, state = go_on(self.task, begun.pop(name))
                    else:
                        upload, state = local_update(self.task, sent, client)
            except Diverged as error:
                if self.on_divergence == "stop":
                    raise
                done.diverged[name] = str(error)
                continue
            done.uploads.append(upload)
            if score and site.test is not None:
                done.after_local[name] = self._score_upload(sent, replace(client, state=state), upload, site.test)
            self._keep(name, state)
        return done

    def _keep(self, name: str, state: ClientState) -> None:
        """Store a client's state; one that holds nothing is not worth an entry."""
        if state.local or state.velocity or any(state.parts.values()):
            self.store.put(name, state)

    def _score_upload(self, sent: Broadcast, client: Client, upload: Upload, test: Split) -> SiteScore:
        with self._at("test", sent.round, client.name):
            here, model, mine = self.model_after(sent, client, upload)
            return score_site(self.task, here, client, test, self.tested.num_classes, model, mine, AFTER_LOCAL)

    def model_after(self, sent: Broadcast, client: Client, upload: Upload) -> tuple[Broadcast, Tree, dict[str, Tree]]:
        """A client's model right after local training (its state is the new one), as if it had been broadcast.

        Parts that own tensors which are trained (FedNorm) send them under the names by which they install them.
        """
        net = self.task.net
        owners = [name for name, owned in net.owned_by.items() if not net.owned_with_trained.isdisjoint(owned)]
        trained = {name: Tree({**sent.parts[name], **upload.parts.get(name, {})}) for name in owners}
        model = Tree({**sent.model, **upload.model})
        here = replace(sent, round=sent.round + 1, model=model, parts={**sent.parts, **trained})
        return here, *model_for(self.task, here, client, AFTER_LOCAL)

    # -- testing ------------------------------------------------------------------------------------------------
    def evaluate(
        self, state: ServerState, mode: Mode, cohort: Sequence[str], split: Literal["test", "val", "train"] = "test"
    ) -> Scores | None:
        """Test a mode on all sites that have such data (None: no site has); `cohort` took part in the last round."""
        mode = mode.resolved(self.task)
        if mode.model == "after_local":
            raise BadInput('"after_local" can only be tested while a run trains: name it in the recipe\'s evaluate.')
        chosen = self.tested.unseen if mode.model == "unseen" else self.tested.clients
        tested = [s for s in chosen if split in s.splits]
        if not tested:
            return None
        sent = self.test_broadcast(state, cohort)
        # A site that is no client of its own (all data were pooled) has the model of those who trained, too.
        new = {s.name for s in chosen if mode.model == "unseen" or s.name not in self.sites}
        others = unseen_broadcast(self.task, sent, self.store.values()) if new else sent
        scores = self.score_sites([(others if s.name in new else sent, s) for s in tested], split, mode)
        return Scores(mode.model, mode.statistics, split, scores, {s.name: s.domain for s in chosen})

    def test_broadcast(self, state: ServerState, cohort: Sequence[str]) -> Broadcast:
        """What an evaluation broadcasts: the tested server model, and what "evaluate" passes measured under it."""
        tested = tested_state(self.task, state)
        return broadcast(self.task, replace(tested, parts={**state.parts, **self._measured(tested, cohort)}))

    def with_measurements(self, state: ServerState, cohort: Sequence[str]) -> ServerState:
        """The state with what "evaluate" passes measure beside it, so that its model can be used without the data."""
        found = self._measured(tested_state(self.task, state), cohort)
        return replace(state, parts={**state.parts, **{name + MEASURED: tree for name, tree in found.items()}})

    def _measured(self, tested: ServerState, cohort: Sequence[str]) -> dict[str, Tree]:
        jobs = passes(self.task, "evaluate")
        return {p.name: self._run(p, job, tested, cohort or self.clients, keep=False) for p, job in jobs}

    def score_sites(self, jobs: Sequence[tuple[Broadcast, Site]], split: str, mode: Mode) -> dict[str, SiteScore]:
        """Test a mode at sites, each with the broadcast it gets."""
        return {site.name: self.score(sent, site, site.splits[split], mode) for sent, site in jobs}

    def close(self) -> None:
        """End what the engine started beside this process; what is asked of it afterwards runs here."""

    def _near(self, data: Split) -> Split:
        """Test data where they are tested; an engine may keep them on its device."""
        return data

    def score(self, sent: Broadcast, site: Site, data: Split, mode: Mode) -> SiteScore:
        """Test a mode at one site."""
        data = self._near(data)
        client = self.at_test(site, data)
        with self._at("test", sent.round, site.name):
            model, mine = model_for(self.task, sent, client, mode)
            return score_site(self.task, sent, client, data, self.tested.num_classes, model, mine, mode)
