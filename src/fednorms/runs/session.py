"""Session: a recipe turned into the things that run: federation, model, task and engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from fednorms.core import checks
from fednorms.core.accounting import Guarantee
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.sampling import Participation
from fednorms.core.states import Task
from fednorms.data import Federation, Protocol
from fednorms.data.partition import partition
from fednorms.data.registry import federation as read_federation
from fednorms.engines.base import Engine, EngineSettings
from fednorms.engines.devices import dtype_of
from fednorms.engines.open import open_engine
from fednorms.evaluation.modes import Mode, headline
from fednorms.models import build
from fednorms.runs.losses import Loss, base_loss
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.clients import ClientStore


@dataclass
class Session:
    """A recipe with its federation, task and engine; `federation` is as the user gave it, before any part pooled it."""

    recipe: Recipe
    federation: Federation
    task: Task
    engine: Engine
    participation: Participation
    modes: list[Mode]
    headline: Mode
    guarantee: Guarantee | None = None  # of differential privacy

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        federation: Federation | None = None,
        model: nn.Module | None = None,
        loss: Loss | None = None,
        spill: Path | None = None,
    ) -> Session:
        """Build everything a recipe names; objects given here replace what it would build."""
        recipe = recipe.resolved()
        if recipe.data.partition and recipe.federation.startswith("custom:"):
            raise BadInput(
                f'A federation of your own is divided before the run: fednorms.partition(federation, "'
                f'{recipe.data.partition}"), and data.partition is left out.'
            )
        given = open_federation(recipe) if federation is None else federation
        recipe = recipe.adopting(given.protocol)
        method = recipe.whole_method()
        training = given
        for p in method.parts:
            training = checks.one(p, "arrange", p.arrange(training), Federation)
        net = Net(
            open_model(recipe, given) if model is None else model,
            method,
            head=recipe.head or None,
            name=recipe.model,
            dtype=dtype_of(recipe.precision),
            autocast=recipe.precision == "bfloat16",
            device=recipe.device,
        )
        needs_two = net.probe(given.shape, given.num_classes)
        _check_sizes(training, recipe, needs_two, net.name)
        task = Task(
            net=net,
            training=recipe.training,
            rounds=recipe.rounds,
            seed=recipe.seed,
            clients=len(training.clients),
            samples=sum(len(s.train) for s in training.clients if s.train is not None),
            preprocessing=given.preprocessing,
            loss=loss or base_loss(recipe.loss, recipe.class_weights, training),
            weighting=None if recipe.weighting == "auto" else recipe.weighting,
            needs_two=needs_two,
        )
        method.weighting(task.weighting)  # two parts that insist on different weightings are an error now
        participation = participation_of(recipe, method)
        names = [s.name for s in training.clients]
        participation.cohort(names, recipe.seed, 0)
        task = replace(task, cohort=participation.expected(len(names)))
        guarantee = Guarantee.of(method, participation, names, recipe.seed)
        store = ClientStore(recipe.state_limit_mb * 2**20, spill)
        settings = EngineSettings(recipe.threads, recipe.on_divergence, recipe.workers)
        engine = open_engine(recipe.engine, task, training, given, store, settings)
        first = headline(task)
        modes = modes_of(recipe, task, first, given)
        return cls(recipe, given, task, engine, participation, modes, first, guarantee)

    @property
    def notes(self) -> list[str]:
        """What is odd about the data and the settings, and what was taken from the data's protocol."""
        recipe, protocol = self.recipe, self.federation.protocol
        same = Protocol(
            protocol.augment if recipe.data.augment == protocol.augment else "none",
            protocol.loss if recipe.loss == protocol.loss else "cross_entropy",
            protocol.class_weights if recipe.class_weights == list(protocol.class_weights) else (),
            protocol.metric if recipe.metric == protocol.metric else "accuracy",
        )
        said = [f"as the data set's protocol says: {', '.join(same.facts)}"] if same.facts else []
        return said + recipe.training.without_effect + data_notes(self.federation)


def data_notes(federation: Federation) -> list[str]:
    """What is odd about a federation, whoever trains on it.

    >>> from fednorms.data import from_arrays
    >>> import numpy as np
    >>> data_notes(from_arrays({"a": (np.zeros((4, 2, 2), np.uint8), np.zeros(4, int))}, test=0.25))
    ['there is one class alone, so that every answer is right']
    """
    notes = list(federation.source.get("notes", []))
    without = [s.name for s in federation.clients if "test" not in s.splits]
    if without and len(without) < len(federation.clients):
        some = ", ".join(without[:5]) + (f" and {len(without) - 5} more" if len(without) > 5 else "")
        notes.append(f"no test images: {some}; scores are those of the other sites")
    if federation.num_classes == 1:
        notes.append("there is one class alone, so that every answer is right")
    return notes


def participation_of(recipe: Recipe, method: Method) -> Participation:
    """Who takes part; a method that adds noise for privacy also lives through rounds in which tosses choose nobody."""
    return replace(Participation.read(recipe.participation), empty=method.moves_without_clients)


def open_federation(recipe: Recipe) -> Federation:
    """The federation that a recipe names: held-out sites turned into unseen ones, the others divided anew if asked."""
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
    )
    if options.hold_out:
        found = found.hold_out(*options.hold_out)
    return partition(found, options.partition, options.seed or 0) if options.partition else found


def open_model(recipe: Recipe, federation: Federation) -> nn.Module:
    """The model that a recipe names, built for a federation's images and classes."""
    channels, height, width = federation.shape
    if height != width and not recipe.model.startswith(("torchvision:", "timm:")):
        raise BadInput(
            f'Model "{recipe.model}" takes square images, but federation "{federation.name}" has {height}x{width}. '
            "Give the federation a size, or pass a model of your own."
        )
    return build(
        recipe.model,
        classes=federation.num_classes,
        channels=channels,
        size=height,
        seed=recipe.seed,
        pretrained=recipe.pretrained,
        weights=recipe.weights or None,
    )


def modes_of(recipe: Recipe, task: Task, first: Mode, federation: Federation) -> list[Mode]:
    """The modes that a recipe tests; `first` is the one that its method is judged by."""
    modes: list[Mode] = []
    for text in recipe.evaluate:
        if text != "auto":
            mode = Mode.read(text).resolved(task)
            if mode.model == "unseen" and not federation.unseen:
                raise BadInput(
                    f'evaluate: "{text}" tests sites that do not train, and all {len(federation.clients)} sites of '
                    f'federation "{federation.name}" do. Hold some out (hold_out, --hold-out), or leave it out.'
                )
            modes.append(mode)
            continue
        modes.append(first)
        if task.method.evaluation().phases:
            modes.append(Mode("adapted").resolved(task))
        if federation.unseen:
            modes.append(Mode("unseen").resolved(task))
    return list(dict.fromkeys(modes))


def _check_sizes(training: Federation, recipe: Recipe, needs_two: bool, model: str) -> None:
    if not needs_two:
        return
    alone = [s.name for s in training.clients if s.train is not None and len(s.train) == 1]
    if recipe.training.batch_size == 1:
        alone = [s.name for s in training.clients]
    if alone:
        raise BadInput(
            f'Batch normalisation in model "{model}" cannot train on a batch of one image, which is all that '
            f"{', '.join(alone[:3])}{' and others' if len(alone) > 3 else ''} would give it (one training image or "
            'batch_size=1). Give the site more data, raise batch_size, or add "+ gn" or "+ fedwon" to the method.'
        )
