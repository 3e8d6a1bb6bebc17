"""Session: everything that a recipe runs with: federation, task, engine, participation and evaluation modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from fednorms.core import checks
from fednorms.core.accounting import Guarantee
from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.core.round import no_proxy
from fednorms.core.sampling import Participation
from fednorms.core.states import Task
from fednorms.data import Federation, Protocol
from fednorms.data.facts import Facts
from fednorms.data.partition import partition
from fednorms.data.registry import federation as read_federation
from fednorms.engines.base import Engine, EngineSettings
from fednorms.engines.open import open_engine
from fednorms.evaluation.modes import Mode, headline
from fednorms.models.zoo import LIBRARIES, input_normalization
from fednorms.runs.assemble import assemble, participation_of
from fednorms.runs.callables import NO_CALLABLES, Callables
from fednorms.runs.device import unused_gpu
from fednorms.runs.losses import Loss, base_loss
from fednorms.runs.option_names import option, setting
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.clients import ClientStore


class Plan(NamedTuple):
    """Who takes part in rounds, what is tested, and which privacy guarantee the run gives."""

    participation: Participation
    modes: list[Mode]
    headline: Mode
    guarantee: Guarantee | None  # of differential privacy

    @classmethod
    def of(cls, recipe: Recipe, task: Task, facts: Facts, *, secret: bool = True) -> Plan:
        """Check a recipe's plan before anything runs; `secret` says that nobody learns who took part."""
        participation = participation_of(recipe, task.method)
        participation.cohort(facts.clients, recipe.seed, 0)  # asking for more clients than there are is an error now
        guarantee = Guarantee.of(task.method, participation, facts.clients, recipe.seed, secret=secret)
        first = headline(task)
        return cls(participation, modes_of(recipe, task, first, facts), first, guarantee)


@dataclass
class Session:
    """A recipe with its facts, task and engine, and the fields of its `Plan`.

    `facts` describe the federation as the user gave it, before any part arranged it for training.
    """

    recipe: Recipe
    facts: Facts
    data: Federation | None  # None across machines
    task: Task
    engine: Engine
    participation: Participation
    modes: list[Mode]
    headline: Mode
    guarantee: Guarantee | None = None
    unused_gpu: str = ""  # why "auto" became the CPU on a machine with a GPU

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        federation: Federation | None = None,
        model: nn.Module | None = None,
        loss: Loss | None = None,
        spill: Path | None = None,
        known: tuple[Facts, Task] | None = None,
        own: Callables = NO_CALLABLES,
    ) -> Session:
        """Build everything that a recipe names; objects given here replace what it names.

        `known` is an assembled task with its facts. It is used again if the federation has the same facts.
        """
        note, recipe = unused_gpu(recipe.device), recipe.resolved()
        if recipe.data.partition and recipe.federation.startswith("custom:"):
            raise BadInput(
                "data.partition cannot divide a custom federation. Leave it out, and divide the federation before the "
                f'run: fednorms.partition(federation, "{recipe.data.partition}").'
            )
        given = open_federation(recipe) if federation is None else federation
        recipe = recipe.adopting(given.protocol)
        training = given
        for p in recipe.whole_method().parts:
            training = checks.one(p, "arrange", p.arrange(training), Federation)
        facts = Facts.of(given, training)
        recipe = recipe.model_copy(update={"training": own.with_epochs(recipe.training, training, given)})
        if known and known[0] == facts:
            task = known[1]
        else:
            loss = loss or base_loss(
                recipe.loss, recipe.class_weights, facts if training is given else Facts.of(training)
            )
            task = assemble(recipe, facts, model, loss, own=own)
        if given.proxy is not None:
            task = replace(task, proxy=given.proxy)
        elif known is None and (needing := task.method.using_proxy):
            raise no_proxy(needing[0], f'federation "{given.name}"')
        _check_sizes(training, task)
        plan = Plan.of(recipe, task, facts)
        store = ClientStore(recipe.state_limit_mb * 2**20, spill)
        settings = EngineSettings(recipe.threads, recipe.on_divergence, recipe.workers, recipe.memory or 0.0)
        engine = open_engine(recipe.engine, task, training, given, store, settings)
        return cls(recipe, facts, given, task, engine, *plan, unused_gpu=note)

    def cohort(self, t: int) -> list[str]:
        """The clients that take part in round t, counted from 0."""
        return self.participation.cohort(self.engine.clients, self.recipe.seed, t)

    @property
    def federation(self) -> Federation:
        """The federation as the user gave it; a run across machines has none."""
        assert self.data is not None
        return self.data

    @property
    def notes(self) -> list[str]:
        """What is unusual about the data and the settings, and what was taken from the data set's protocol."""
        recipe, protocol = self.recipe, self.facts.protocol
        same = Protocol(
            protocol.augment if recipe.data.augment == protocol.augment else "none",
            protocol.loss if recipe.loss == protocol.loss else "cross_entropy",
            protocol.class_weights if recipe.class_weights == list(protocol.class_weights) else (),
            protocol.metric if recipe.metric == protocol.metric else "accuracy",
        )
        adopted = [f"from the data set's protocol: {', '.join(same.facts)}"] if same.facts else []
        settings = adopted + recipe.training.without_effect + ([self.unused_gpu] if self.unused_gpu else [])
        if (proxy := self.task.proxy) is not None and not self.task.method.using_proxy:
            settings += [f"the method does not use the {len(proxy)} images that the server has"]
        settings += _other_normalization(recipe, self.facts.preprocessing)
        return settings + (data_notes(self.data) if self.data else _one_class(self.facts))


def data_notes(federation: Federation) -> list[str]:
    """What is unusual about a federation, whatever trains on it.

    >>> from fednorms.data import from_arrays
    >>> import numpy as np
    >>> data_notes(from_arrays({"a": (np.zeros((4, 2, 2), np.uint8), np.zeros(4, int))}, test=0.25))
    ['there is only one class, so every prediction is correct']
    """
    notes = list(federation.source.get("notes", []))
    without = [s.name for s in federation.scored if "test" not in s.splits]
    if without and len(without) < len(federation.scored):
        some = ", ".join(without[:5]) + (f" and {len(without) - 5} more" if len(without) > 5 else "")
        notes.append(f"no test images: {some}; scores are those of the other sites")
    return notes + _one_class(federation)


def _other_normalization(recipe: Recipe, used: Preprocessing) -> list[str]:
    """A note if a model's published weights were trained with another normalization of the input."""
    library, colon, name = recipe.model.partition(":")
    if not (recipe.pretrained or recipe.weights) or not colon or library not in LIBRARIES:
        return []
    known = input_normalization(library, name)
    if known is None or all(
        len(ours or ()) == len(theirs) and all(abs(a - b) < 0.01 for a, b in zip(ours or (), theirs, strict=True))
        for ours, theirs in zip((used.mean, used.std), known, strict=True)
    ):
        return []
    mean, std = (",".join(f"{v:.3g}" for v in side) for side in known)
    return [
        f"the published weights of {recipe.model} were trained on inputs with mean {mean} and standard deviation "
        f"{std}, but the data set is normalized differently; {setting('normalize', f'{mean}/{std}')} changes that"
    ]


def _one_class(data: Federation | Facts) -> list[str]:
    return ["there is only one class, so every prediction is correct"] if data.num_classes == 1 else []


def open_federation(recipe: Recipe) -> Federation:
    """Open the federation that a recipe names; hold sites out and partition the others as the recipe says."""
    options = recipe.data
    found = read_federation(
        recipe.federation,
        size=options.size,
        seed=options.seed,
        val=options.val,
        test=options.test,
        root=options.root or None,
        protocol=options.protocol or None,
        complete=None if options.complete else False,
        allow_pickle=options.allow_pickle or None,
        group=options.group or None,
        channels=options.channels,
        group_across=options.group_across or None,
        copies=None if options.copies == "keep" else options.copies,
        skip_broken=options.skip_broken or None,
        subset=options.subset,
        normalize=options.normalize or None,
    )
    if options.hold_out:
        found = found.hold_out(*options.hold_out)
    if options.proxy:
        found = found.with_proxy(options.proxy, options.seed or 0)
    return partition(found, options.partition, options.seed or 0) if options.partition else found


def modes_of(recipe: Recipe, task: Task, first: Mode, facts: Facts) -> list[Mode]:
    """The modes that a recipe tests; `first` is the one by which its method is judged."""
    modes: list[Mode] = []
    for text in recipe.evaluate:
        if text != "auto":
            mode = Mode.read(text).resolved(task)
            if mode.model == "unseen" and not facts.unseen:
                raise BadInput(
                    f'Mode "{text}" tests sites that do not train, but all {len(facts.sites)} sites of federation '
                    f'"{facts.name}" train. Hold some out ({option("hold_out")}), or leave the mode out.'
                )
            modes.append(mode)
            continue
        modes.append(first)
        if task.method.evaluation().phases:
            modes.append(Mode("adapted").resolved(task))
        if facts.unseen:
            modes.append(Mode("unseen").resolved(task))
    return list(dict.fromkeys(modes))


def _check_sizes(training: Federation, task: Task) -> None:
    """Refuse batches of one image where batch normalization needs two."""
    if not task.needs_two:
        return
    clients = [s for s in training.examined if s.train is not None]
    alone = [s.name for s in clients if task.training.batch_size == 1 or len(s.splits["train"]) == 1]
    if alone:
        raise BadInput(
            f'Batch normalization in model "{task.net.name}" cannot train on a batch of one image. '
            f"{', '.join(alone[:3])}{' and others' if len(alone) > 3 else ''} would give it only such batches (one "
            "training image, or batch_size=1). Give the site more data, raise the batch size "
            f'({option("batch_size")}), or add "+ gn" or "+ fedwon" to the method.'
        )
