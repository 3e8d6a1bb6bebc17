"""The interface of all engines: an engine decides where clients run, never what they compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fednorms.core import border, checks
from fednorms.core.errors import BadInput
from fednorms.core.part import PROXY, Part, Pass
from fednorms.core.passes import passes
from fednorms.core.reductions import reduce_uploads
from fednorms.core.round import broadcast, server_update
from fednorms.core.states import Broadcast, ClientState, Combined, ServerState, Task, Upload, context_of
from fednorms.core.training import CUSTOM
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.data.on_demand import Numbered
from fednorms.engines.devices import repeatable
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import MEASURED, Mode, tested_state, unseen_broadcast
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import Scores, SiteScore

OnDivergence = Literal["stop", "skip"]
SplitName = Literal["test", "val", "train"]

PROVIDES: dict[str, frozenset[str]] = {
    "loop": frozenset({"passes", "phases", "joint", PROXY}),
    "graphs": frozenset({"passes", "phases", PROXY}),
    "workers": frozenset({"passes", "phases", PROXY}),
    "auto": frozenset({"passes", "phases", PROXY}),
    "flower": frozenset({"passes", "phases"}),
}
"""What each engine can do, by engine name. A part lists what it needs in `requires`."""


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs clients. Besides `on_divergence`, only `threads` can change the bits of a result."""

    threads: int = 1
    """CPU threads per client."""
    on_divergence: OnDivergence = "stop"
    """Whether a client whose update or loss is not finite stops the run or is left out of the average."""
    workers: int = 0
    """Worker processes (0: one per core or GPU)."""
    memory: float = 0.0
    """GPU memory to take: a share (up to 1) or bytes (0: what is free). It changes no result."""


DEFAULTS = EngineSettings()


@dataclass
class Trained:
    """The result of one round of training.

    An engine that averages uploads itself returns the result as `combined`; its uploads then hold only shapes.
    """

    uploads: list[Upload]
    diverged: dict[str, str] = field(default_factory=dict)  # clients that were left out, with the reason
    after_local: dict[str, SiteScore] = field(default_factory=dict)  # scores right after local training
    combined: Combined | None = None
    lost: dict[str, str] = field(default_factory=dict)  # clients without a usable answer, with the reason


class Engine(ABC):
    """Runs the clients of a task and keeps their states between rounds."""

    name: ClassVar[str]  # a key of PROVIDES

    def __init__(self, task: Task, settings: EngineSettings = DEFAULTS) -> None:
        _refuse_missing(task, self.name)
        self.task, self.settings = task, settings
        self.notes: list[str] = []  # what a user should know about how the run went
        self.refused = 0  # messages of clients that could not be used, since the start

    # -- what an engine implements ------------------------------------------------------------------------------
    @property
    @abstractmethod
    def clients(self) -> Sequence[str]:
        """Names of the training clients, in a fixed order."""

    @abstractmethod
    def samples(self, name: str) -> int:
        """Number of training images of a client."""

    @abstractmethod
    def tested(self, split: str, *, unseen: bool = False) -> dict[str, str]:
        """Sites that can be tested on a split, each with its domain; `unseen` selects the sites that never train."""

    @property
    @abstractmethod
    def store(self) -> ClientStates:
        """The newest state of every client. Replace it with `use` or `using`."""

    @abstractmethod
    def use(self, store: ClientStates) -> None:
        """Continue with these client states, for example those of a checkpoint."""

    @abstractmethod
    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        """Run an extra pass at clients; returns what each keeps and what it uploads."""

    @abstractmethod
    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        """Train the clients of a cohort for one round; with `score`, also test each right after its training."""

    @abstractmethod
    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        """Test a mode at sites, each with the broadcast it receives."""

    @abstractmethod
    def close(self) -> None:
        """Stop all processes that the engine started. Later calls run in this process."""

    # -- what follows from it -----------------------------------------------------------------------------------
    @contextmanager
    def using(self, store: ClientStates) -> Iterator[None]:
        """Use other client states within this context, and the present ones again afterwards."""
        before = self.store
        self.use(store)
        try:
            yield
        finally:
            self.use(before)

    def setup(self, state: ServerState) -> ServerState:
        """Run the passes that come before the first round."""
        for p, job in passes(self.task, "setup"):
            mine = self._run_pass(p, job, state, self.clients, keep=True)
            state = replace(state, parts={**state.parts, p.name: mine})
        return state

    def average(self, state: ServerState, done: Trained) -> ServerState:
        """The server's next state from a round's uploads."""
        uploads = {u.client: u for u in done.uploads}
        if self._readable and done.combined is None:
            bad = border.unusable(self.task, state.model, uploads, self._images(uploads), lengths=False)
        else:
            bad = {name: wrong for name, u in uploads.items() if (wrong := border.misfit(self.task, u))}
        _refuse(bad)
        found = done.combined or done.uploads
        if not self.task.method.using_proxy:
            return server_update(self.task, state, found)
        with repeatable(self.settings.threads, self.task.seed, "server", state.round):  # it runs the model there
            return server_update(self.task, state, found)

    def evaluate(
        self, state: ServerState, mode: Mode, cohort: Sequence[str], split: SplitName = "test"
    ) -> Scores | None:
        """Test a mode on all sites that have such data (None: no site has); `cohort` took part in the last round."""
        mode = mode.resolved(self.task)
        if mode.model == "after_local":
            raise BadInput(
                '"after_local" can only be tested while a run trains. Add it to "evaluate" in the recipe instead.'
            )
        domains, jobs = self.jobs(state, mode, cohort, split)
        found = self.score_sites(jobs, split, mode) if jobs else {}
        return Scores(mode.model, mode.statistics, split, found, domains) if found else None

    def predict(
        self, state: ServerState, mode: Mode, cohort: Sequence[str], split: SplitName = "test"
    ) -> dict[str, Predictions]:
        """What a mode predicts at all sites that have such data; nothing across machines, where images stay."""
        return {}

    def jobs(
        self, state: ServerState, mode: Mode, cohort: Sequence[str], split: SplitName
    ) -> tuple[dict[str, str], dict[str, Broadcast]]:
        """The sites that a mode tests, each with its domain, and what each receives for the test."""
        domains = {} if mode.model == "unseen" else self.tested(split)
        if mode.model in ("unseen", "averaged"):
            domains = domains | self.tested(split, unseen=True)
        if not domains:
            return {}, {}
        sent = self.test_broadcast(state, cohort)
        # Without clients of the same name (all data were pooled), sites also get the mean of what clients keep.
        new = set(domains) - (set() if mode.model in ("unseen", "averaged") else self._known(domains))
        others = unseen_broadcast(self.task, sent, self.store.values()) if new else sent
        return domains, {name: others if name in new else sent for name in domains}

    def _known(self, names: Iterable[str]) -> set[str]:
        """Those of some sites that are training clients."""
        clients = self.clients
        return {n for n in names if n in clients} if isinstance(clients, Numbered) else set(clients)

    def test_broadcast(self, state: ServerState, cohort: Sequence[str]) -> Broadcast:
        """What a test broadcasts: the tested server model, and what "evaluate" passes measured for it."""
        tested = tested_state(self.task, state)
        return broadcast(self.task, replace(tested, parts={**state.parts, **self._measured(tested, cohort)}))

    def with_measurements(self, state: ServerState, cohort: Sequence[str]) -> ServerState:
        """Add the results of "evaluate" passes to a state, whose model can then be used without the data."""
        found = self._measured(tested_state(self.task, state), cohort)
        return replace(state, parts={**state.parts, **{name + MEASURED: tree for name, tree in found.items()}})

    def _measured(self, tested: ServerState, cohort: Sequence[str]) -> dict[str, Tree]:
        jobs = passes(self.task, "evaluate")
        return {p.name: self._run_pass(p, job, tested, cohort or self.clients, keep=False) for p, job in jobs}

    def _run_pass(self, p: Part, job: Pass, state: ServerState, names: Sequence[str], *, keep: bool) -> Tree:
        found = self.measure(p, job, broadcast(self.task, state), sorted(names))
        uploads = {name: up for name, (_, up) in found.items()}
        if self._readable:
            images = self._images(uploads)
            _refuse(border.unusable_measures(self.task, p, job.reduce, uploads, images, lengths=False))
        for name, (kept, _) in found.items():
            if keep:
                old = self.store.get(name) or ClientState(0, Tree(), {})
                self.store.put(name, replace(old, parts={**old.parts, p.name: kept}))
        return self._pooled(p, job, state, uploads)

    @property
    def _readable(self) -> bool:
        """Whether reading values costs nothing: a GPU would have to wait for it."""
        return self.task.like.device.type == "cpu"

    def _images(self, names: Iterable[str]) -> dict[str, int]:
        """The training images of clients, as registered."""
        return {name: self.samples(name) for name in names}

    def _pooled(self, p: Part, job: Pass, state: ServerState, uploads: Mapping[str, Tree]) -> Tree:
        """The server's part of a pass: what clients uploaded, reduced, and what the part makes of it."""
        reduced = reduce_uploads(list(uploads.values()), [float(self.samples(n)) for n in uploads], job.reduce)
        context = context_of(self.task, state.round, None)
        view = Round(state.model, reduced, state.parts[p.name], len(uploads), len(self.clients), context)
        return checks.tree(p, "server of a pass", job.server(reduced, view))


def _refuse(bad: Mapping[str, str]) -> None:
    """Stop at an upload that cannot be used: clients that are not other machines are the user's own code."""
    for name, wrong in sorted(bad.items()):
        raise BadInput(f'Client "{name}" {wrong}. Check the hooks of custom parts.')


def _refuse_missing(task: Task, engine: str) -> None:
    """Raise BadInput if the optimizer or a part of the method needs something that an engine does not provide."""
    if task.training.optimizer.startswith(CUSTOM) and engine != "loop":
        raise BadInput(
            f'Engine "{engine}" cannot run the custom optimizer "{task.training.optimizer.removeprefix(CUSTOM)}". '
            'Choose engine="loop", or one of the optimizers sgd, adam and adamw.'
        )
    missing = {p.name: p.requires - PROVIDES[engine] for p in task.method.parts if p.requires - PROVIDES[engine]}
    if not missing:
        return
    wanted = set().union(*missing.values())
    able = [name for name, provided in PROVIDES.items() if wanted <= provided]
    raise BadInput(
        f'Engine "{engine}" cannot run {", ".join(missing)}, which needs {" and ".join(sorted(wanted))}. '
        + (f'Choose engine="{able[0]}".' if able else "No engine provides that.")
    )
