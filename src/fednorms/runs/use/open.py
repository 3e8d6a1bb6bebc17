"""Open a finished or interrupted run: its task, and the models of the last, the best, or another stored round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import nn

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.option_names import option, setting
from fednorms.core.passes import passes
from fednorms.core.paths import given_path
from fednorms.core.round import broadcast, server_update
from fednorms.core.states import Broadcast, ClientState, ServerState, Task
from fednorms.core.training import CUSTOM
from fednorms.core.tree import Tree
from fednorms.data import Federation, Split
from fednorms.data.facts import Facts
from fednorms.engines.local import LocalClients, LocalEngine
from fednorms.evaluation.modes import MEASURED, tested_state, unseen_broadcast
from fednorms.models.custom import refuse_unasked
from fednorms.runs.assemble import assemble
from fednorms.runs.device import own_device
from fednorms.runs.identity import custom_name
from fednorms.runs.losses import LOSSES, Loss, cross_entropy
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session, open_federation
from fednorms.runs.store.checkpoint import Checkpoint, kept_rounds, load, load_best, load_round
from fednorms.runs.store.clients import ClientStore
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.choose import Chosen, choose

Which = Literal["last", "best"] | int


@dataclass(frozen=True)
class NextRound:
    """A repeated round: each client's whole model right after its training, and the server after averaging."""

    models: dict[str, Tree]
    state: ServerState
    tested: Broadcast  # what a test of that state broadcasts; tensors that clients keep are averaged


@dataclass
class OpenRun:
    """A run's task and states. Only `session` needs the run's data.

    `state` and `clients` are those of the last checkpoint, or of the round with the best validation accuracy.
    """

    directory: RunDirectory
    recipe: Recipe
    facts: Facts
    task: Task
    state: ServerState
    clients: Mapping[str, ClientState]
    which: Which
    notes: list[str] = field(default_factory=list)
    _federation: Federation | None = None
    _model: nn.Module | None = None
    lost_loss: str = ""  # the run's custom loss, if it was not passed again: fine-tuning would use another

    @cached_property
    def session(self) -> Session:
        """The session with the run's data, its engine holding the clients' states."""
        federation, recipe = self._federation, self.recipe
        if federation is None and recipe.across_machines(self.facts):
            raise BadInput(
                f"Run {self.directory.path} was trained across machines, so its images are at the sites. Its model for "
                "all sites, if it has one, can be tested on other images with `fednorms evaluate RUN --data FOLDER`. A "
                "site exports its own model with `fednorms deploy export`."
            )
        if federation is None and recipe.federation.startswith("custom:"):
            raise BadInput(
                f"Run {self.directory.path} was made with a custom federation "
                f"({recipe.federation.removeprefix('custom:')}). Pass it as federation=."
            )
        try:
            found = open_federation(recipe) if federation is None else federation
        except BadInput as error:
            raise BadInput(
                f"Run {self.directory.path} needs its data for this, but they cannot be read: {error}"
            ) from error
        if federation is None and recipe.fingerprint and recipe.fingerprint != found.fingerprint():
            raise BadInput(
                f'Run {self.directory.path} was made on other data: federation "{recipe.federation}" has changed '
                "since. Restore the data, or pass federation= to test on other data deliberately."
            )
        if tuple(found.classes) != self.facts.classes or found.shape != self.facts.shape:
            raise BadInput(
                f"Run {self.directory.path} has classes {', '.join(self.facts.classes)} and images of "
                f'{self.facts.shape}; federation "{found.name}" has {", ".join(found.classes)} and {found.shape}.'
            )
        session = Session.open(recipe, found, self._model, self.task.loss, known=(self.facts, self.task))
        session.engine.use(ClientStore(recipe.state_limit_mb * 2**20, source=self.clients))
        return session

    @property
    def local(self) -> LocalClients:
        """The run's clients with their data and states."""
        engine = self.session.engine
        assert isinstance(engine, LocalEngine)
        return engine.local

    @cached_property
    def cohort(self) -> list[str]:
        """The clients of the round that led to `state`."""
        return self.session.cohort(max(self.state.round - 1, 0))

    @cached_property
    def next_cohort(self) -> list[str]:
        """The clients of the round after `state`."""
        return self.session.cohort(self.state.round)

    def next_round(self) -> NextRound:
        """Repeat the round after `state`: the clients' models, with the tensors they keep, and the new server.

        Methods that change updates before they are sent have no model right after training and are refused.
        """
        if changing := self.task.method.changing:
            raise BadInput(
                f"{changing[0]} changes updates before they are sent, so clients' models right after training cannot "
                "be reproduced."
            )
        self.check_loss()
        engine = self.session.engine
        with engine.using(engine.store.starting_from(self.clients)):
            sent = broadcast(self.task, self.state)
            done = engine.train(sent, self.next_cohort).uploads
            models = {u.client: self.local.model_after(sent, self.local.client(u.client), u)[1] for u in done}
            state = server_update(self.task, self.state, done)
            tested = unseen_broadcast(
                self.task, engine.test_broadcast(state, self.next_cohort), list(engine.store.values())
            )
        return NextRound(models, state, tested)

    def check_loss(self) -> None:
        """Refuse to repeat training if the run's custom loss was not passed again, or it had a custom schedule."""
        if (schedule := self.recipe.training.schedule).startswith(CUSTOM):
            raise BadInput(
                f"Run {self.directory.path} was trained with a custom schedule ({custom_name(schedule)}), so its "
                "rounds cannot be repeated."
            )
        if self.lost_loss:
            raise BadInput(
                f"Run {self.directory.path} was trained with a custom loss "
                f"({custom_name(self.lost_loss)}). Pass the same as loss=."
            )

    def choose(self, site: str | None = None, data: Split | None = None, averaged: bool = False) -> Chosen:
        """Choose the model of a site, or the one for all sites; see `fednorms.runs.use.choose`."""
        return choose(self.task, self.facts, self.test_broadcast, self.clients, site, data, averaged)

    @cached_property
    def test_broadcast(self) -> Broadcast:
        """What an evaluation broadcasts; methods that measure for it use the run's records, or its data."""
        jobs = passes(self.task, "evaluate")
        missing = [p.name for p, _ in jobs if p.name + MEASURED not in self.state.parts]
        if missing:
            try:
                return self.session.engine.test_broadcast(self.state, self.cohort)
            except BadInput as error:
                raise BadInput(
                    f"{missing[0]} measures statistics on the clients' data for every test, but round "
                    f"{self.state.round} of this run has no record of them. {error}"
                ) from error
        measured = {p.name: self.state.parts[p.name + MEASURED] for p, _ in jobs}
        tested = tested_state(self.task, self.state)
        return broadcast(self.task, replace(tested, parts={**self.state.parts, **measured}))


def open_run(
    path: str | Path,
    which: Which = "last",
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str | None = "auto",
) -> OpenRun:
    """Open a run's directory at its last checkpoint, at its best validation round (which="best"), or after a round.

    which=12 is the state after round 12; its checkpoint must have been kept (keep_checkpoints of the recipe).

    A run with a custom model needs the same model again. The data are only needed for `session`. `device` is cpu, cuda
    or auto (the run's own, or the CPU if that is not here).

    >>> open_run("nowhere")
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    directory = RunDirectory(given_path("path", path))
    recipe = _portable(Recipe.from_toml(directory.read_recipe(), str(directory.recipe)), device or "auto")
    if recipe.model.startswith("custom:") and model is None:
        raise BadInput(
            f"Run {path} was made with a custom model ({custom_name(recipe.model)}). "
            "Use it from Python and pass the same model as model=."
        )
    if model is None:
        refuse_unasked(recipe.model, f"Run {path}")
    found = _checkpoint(directory, recipe, which)
    facts = directory.read_facts()
    if facts is None:  # an older run without this file: its data must be here
        facts = Session.open(recipe, federation, model, loss or cross_entropy).facts
    lost = recipe.loss if recipe.loss not in ("auto", *LOSSES) and loss is None else ""
    known = recipe.model_copy(update={"loss": "cross_entropy"}) if lost else recipe
    task = assemble(known, facts, model, loss)
    _check_fit(task, found.server, path)
    states = found.server, found.clients
    notes = [*found.notes, *directory.changed_recipe(found.extra.get("recipe"))]
    return OpenRun(directory, recipe, facts, task, *states, which, notes, federation, model, lost)


def _portable(recipe: Recipe, device: str) -> Recipe:
    """The recipe for this machine: all weights come from the checkpoint, and there may be no GPU."""
    chosen = own_device(device, recipe.device)
    here = {"engine": "loop", "device": chosen, "pretrained": False, "weights": ""}
    return recipe.model_copy(update=here)


def _checkpoint(directory: RunDirectory, recipe: Recipe, which: Which) -> Checkpoint:
    if isinstance(which, int):
        return _checkpoint_of_round(directory, recipe, which)
    if which not in ("last", "best"):
        raise BadInput(f'Unknown round "{which}". Expected "last", "best" (on validation data) or a number.')
    if which == "best":
        if (best := load_best(directory.checkpoints, recipe.device)) is not None:
            return best
        if recipe.keep_checkpoints == "resume":
            raise BadInput(
                f"Run {directory.path} kept no best model, because its recipe says so "
                f"({setting('keep_checkpoints', 'resume')}). Use the last round ({setting('which', 'last')})."
            )
        if (last := load(directory.checkpoints)) is not None and last.extra.get("best"):
            raise RunFailed(
                f"Run {directory.path} has lost its best model: {directory.checkpoints / 'best'} has no manifest. "
                "Restore it from a copy, or use the last round."
            )
        if last is not None:
            raise BadInput(
                f"Run {directory.path} has no best round, because none of its sites has validation data. "
                f"Use the last round ({setting('which', 'last')}), or run again with validation images "
                f"({option('val').rstrip('=')} above 0)."
            )
    if (last := load(directory.checkpoints, recipe.device)) is None:
        raise BadInput(f"Run {directory.path} has no checkpoint yet. Continue it with `{directory.resume_command}`.")
    ended = directory.summary()
    if ended is not None and not last.notes and last.server.round < int(ended.get("rounds", 0)):
        raise RunFailed(
            f"Run {directory.path} ended after round {ended['rounds']}, but its newest checkpoint is of round "
            f"{last.server.round}: its manifest is missing. `{directory.resume_command}` makes it again."
        )
    return last


def _checkpoint_of_round(directory: RunDirectory, recipe: Recipe, at: int) -> Checkpoint:
    if (found := load_round(directory.checkpoints, at, recipe.device)) is None:
        there = ", ".join(map(str, kept_rounds(directory.checkpoints))) or "none"
        raise BadInput(
            f"Run {directory.path} has no checkpoint of round {at}. It has: {there}. "
            'With keep_checkpoints="all", a run keeps one every checkpoint_every rounds.'
        )
    return found


def _check_fit(task: Task, state: ServerState, path: str | Path) -> None:
    """Refuse a custom model that is not the one that was trained."""
    ours, theirs = ({n: tuple(t.shape) for n, t in tree.items()} for tree in (task.net.initial, state.model))
    if wrong := [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]:
        raise BadInput(
            f'Model "{task.net.name}" is not the one of run {path}: tensor {wrong[0]} has shape {ours.get(wrong[0])}, '
            f"in the run {theirs.get(wrong[0])} ({len(wrong)} differ). Pass the model that the run was made with."
        )
