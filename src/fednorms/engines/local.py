"""Clients whose data and states are in this process, and what can be done at one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from fednorms.core import checks
from fednorms.core.part import Part, Pass
from fednorms.core.passes import LocalView
from fednorms.core.round import load, own_state
from fednorms.core.states import Broadcast, Client, ClientState, ServerState, Task, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.data import Federation, Site, Split
from fednorms.data.on_demand import ByName, OnDemand
from fednorms.engines.base import DEFAULTS, Engine, EngineSettings, SplitName
from fednorms.engines.devices import repeatable
from fednorms.engines.states import ClientStates
from fednorms.evaluation.modes import Mode, model_for, predict_site, score_site
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import SiteScore

T = TypeVar("T")
AFTER_LOCAL = Mode("after_local", "own")


class LocalClients:
    """The clients of a federation with their states; `testing` has the sites that are tested."""

    def __init__(
        self, task: Task, training: Federation, testing: Federation, store: ClientStates, threads: int
    ) -> None:
        self.task, self.store, self.threads = task, store, threads
        self.sites = _by_name(training.clients, lambda s: s)
        self.data = _by_name(training.clients, lambda s: s.splits["train"])
        self.names = training.sites.names if isinstance(training.sites, OnDemand) else list(self.sites)
        self.testing = testing
        self.tested_sites = _by_name(testing.sites, lambda s: s)

    def client(self, name: str) -> Client:
        """A training client with its data and its present state."""
        return self._client(self.sites[name], self.data[name])

    def at_test(self, site: Site, data: Split) -> Client:
        """A tested site with its present state and its training images, or the tested ones (`data`) if it has none."""
        return self._client(site, site.train if site.train is not None else data)

    def _client(self, site: Site, data: Split) -> Client:
        return Client(site.name, data, self.store.get(site.name), dict(site.attributes), site.val)

    def seeded(self, *names: object) -> AbstractContextManager[None]:
        """Within this context, torch's threads and its random numbers depend only on the task and these names."""
        return repeatable(self.threads, self.task.seed, *names)

    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        """Run an extra pass at clients; returns what each keeps and what it uploads."""
        found: dict[str, tuple[Tree, Tree]] = {}
        for name in names:
            client, here = self.client(name), sent.to(name)
            with self.seeded("pass", p.name, sent.round, name):
                mine = own_state(self.task, here, client.state)
                context = context_of(self.task, here.round, client)
                model = load(self.task, here, client, context, mine)
                view = LocalView(self.task, p, client, model, context, here, mine)
                found[name] = checks.two_trees(p, "client of a pass", job.client(view))
        return found

    def score(self, sent: Broadcast, site: Site, data: Split, mode: Mode) -> SiteScore:
        """Test a mode at one site."""
        client, sent = self.at_test(site, data), mode.received(sent, site.name)
        with self.seeded("test", sent.round, site.name):
            model, mine = model_for(self.task, sent, client, mode)
            return score_site(self.task, sent, client, data, self.testing.num_classes, model, mine, mode)

    def predict(self, sent: Broadcast, site: Site, data: Split, mode: Mode) -> Predictions:
        """What a mode predicts at one site."""
        client, sent = self.at_test(site, data), mode.received(sent, site.name)
        with self.seeded("test", sent.round, site.name):
            model, mine = model_for(self.task, sent, client, mode)
            return predict_site(self.task, sent, client, data, model, mine, mode)

    def score_upload(self, sent: Broadcast, client: Client, upload: Upload, test: Split) -> SiteScore:
        """Test a client's model right after local training (its state is the new one)."""
        with self.seeded("test", sent.round, client.name):
            here, model, mine = self.model_after(sent, client, upload)
            return score_site(self.task, here, client, test, self.testing.num_classes, model, mine, AFTER_LOCAL)

    def model_after(self, sent: Broadcast, client: Client, upload: Upload) -> tuple[Broadcast, Tree, dict[str, Tree]]:
        """A client's model right after local training (its state is the new one), as if it had been broadcast.

        Parts that own trained tensors (FedNorm) upload them under the names under which they install them.
        """
        net, sent = self.task.net, sent.to(client.name)
        owners = [name for name, owned in net.owned_by.items() if not net.owned_with_trained.isdisjoint(owned)]
        trained = {name: Tree({**sent.parts[name], **upload.parts.get(name, {})}) for name in owners}
        model = Tree({**sent.model, **upload.model})
        here = replace(sent, round=sent.round + 1, model=model, parts={**sent.parts, **trained})
        return here, *model_for(self.task, here, client, AFTER_LOCAL)

    def keep(self, name: str, state: ClientState) -> None:
        """Store a client's new state, unless it is empty."""
        if state.local or state.velocity or any(state.parts.values()):
            self.store.put(name, state)


def _by_name(sites: Sequence[Site], what: Callable[[Site], T]) -> Mapping[str, T]:
    return ByName(sites, what) if isinstance(sites, OnDemand) else {s.name: what(s) for s in sites}


class LocalEngine(Engine):
    """An engine whose clients have their data and states on this machine."""

    local: LocalClients

    def __init__(
        self,
        task: Task,
        training: Federation,
        testing: Federation,
        store: ClientStates,
        settings: EngineSettings = DEFAULTS,
    ) -> None:
        super().__init__(task, settings)
        self.local = LocalClients(task, training, testing, store, settings.threads)

    @property
    def clients(self) -> Sequence[str]:
        """Names of the training clients, in the order of the federation."""
        return self.local.names

    def samples(self, name: str) -> int:
        """Number of training images of a client."""
        return len(self.local.data[name])

    def tested(self, split: str, *, unseen: bool = False) -> dict[str, str]:
        """Sites that have images in a split, each with its domain."""
        sites = self.local.testing.unseen if unseen else self.local.testing.scored
        return {s.name: s.domain for s in sites if split in s.splits}

    def score_site(self, name: str, sent: Broadcast, split: str, mode: Mode) -> SiteScore:
        """Test a mode at one site."""
        site = self.local.tested_sites[name]
        return self.local.score(sent, site, site.splits[split], mode)

    @override
    def predict(
        self, state: ServerState, mode: Mode, cohort: Sequence[str], split: SplitName = "test"
    ) -> dict[str, Predictions]:
        mode = mode.resolved(self.task)
        _, jobs = self.jobs(state, mode, cohort, split)
        sites = self.local.tested_sites
        return {n: self.local.predict(sent, sites[n], sites[n].splits[split], mode) for n, sent in jobs.items()}

    @property
    def store(self) -> ClientStates:
        """The newest state of every client."""
        return self.local.store

    def use(self, store: ClientStates) -> None:
        """Continue with these client states."""
        self.local.store = store

    def close(self) -> None:
        """Do nothing: everything runs in this process."""
