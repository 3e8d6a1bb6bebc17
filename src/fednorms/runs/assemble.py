"""Assemble a task: the only place where a recipe becomes a net and a task."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.sampling import Participation
from fednorms.core.states import Task
from fednorms.core.training import CUSTOM
from fednorms.data.facts import Facts
from fednorms.engines.devices import dtype_of, pick_device
from fednorms.models import build, models
from fednorms.models.custom import bare
from fednorms.runs.callables import NO_CALLABLES, Callables
from fednorms.runs.losses import Loss, base_loss
from fednorms.runs.option_names import option
from fednorms.runs.recipe import Recipe


def assemble(
    recipe: Recipe,
    facts: Facts,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    *,
    own: Callables = NO_CALLABLES,
    deployed: bool = False,
) -> Task:
    """Make the task of a recipe on a federation of which only the facts are known.

    `model`, `loss` and `own` replace what the recipe names. `deployed` is for runs across machines.

    >>> from fednorms.data.registry import federation
    >>> task = assemble(Recipe(method="fedbn", rounds=3), Facts.of(federation("digits-shift")))
    >>> str(task.method), task.clients, task.rounds
    ('fedbn', 5, 3)
    """
    recipe = recipe.adopting(facts.protocol).settled()
    if deployed and recipe.training.schedule.startswith(CUSTOM):
        raise BadInput(
            f'The custom schedule "{recipe.training.schedule}" cannot be sent to other machines. Choose const, '
            "exp, step or cosine, with or without a warm-up."
        )
    net = build_net(recipe, facts.num_classes, facts.shape, model)
    needs_two = _probed(net, recipe, facts, custom=model is not None)
    task = Task(
        net=net,
        training=recipe.training,
        rounds=recipe.rounds,
        seed=recipe.seed,
        clients=len(facts.clients),
        samples=facts.samples,
        preprocessing=facts.preprocessing,
        loss=loss or base_loss(recipe.loss, recipe.class_weights, facts),
        weighting=None if recipe.weighting == "auto" else recipe.weighting,
        needs_two=needs_two,
        cohort=participation_of(recipe, net.method).expected(len(facts.clients)),
        deployed=deployed,
        factors=own.factors(recipe.training, recipe.rounds),
        optimizer=own.make_optimizer(recipe.training),
    )
    net.method.weighting(task.weighting)  # parts that insist on different weightings are an error now
    return task


def _probed(net: Net, recipe: Recipe, facts: Facts, *, custom: bool) -> bool:
    """Try the model on an image: whether it needs two in a batch. Some of our models take squares only."""
    _, height, width = facts.shape
    try:
        return net.probe(facts.shape, facts.num_classes)
    except BadInput:
        if custom or height == width or recipe.model not in models():
            raise
        raise BadInput(
            f'Model "{recipe.model}" takes square images, but federation "{facts.name}" has {height}x{width}. Resize '
            f'the images ({option("size")}), or choose a model that takes any shape, such as "cnn-small" or "resnet20".'
        ) from None


def build_net(recipe: Recipe, classes: int, shape: tuple[int, int, int], model: nn.Module | None = None) -> Net:
    """Build the model that a recipe names, or take the one given, and apply the method's surgery."""
    if model is None:
        model = build(
            recipe.model,
            classes=classes,
            channels=shape[0],
            size=min(shape[1:]),
            seed=recipe.seed,
            pretrained=recipe.pretrained,
            weights=recipe.weights or None,
        )
    return Net(
        model,
        recipe.whole_method(),
        head=recipe.head or None,
        name=bare(recipe.model),
        dtype=dtype_of(recipe.precision),
        autocast=recipe.precision == "bfloat16",
        device=pick_device(recipe.device),
    )


def participation_of(recipe: Recipe, method: Method) -> Participation:
    """Which clients take part in a round; a method that adds noise for privacy accepts rounds without clients."""
    return replace(Participation.read(recipe.participation), empty=method.moves_without_clients)
