"""Check what hooks return: a wrong value is an error that names part, hook and fix.

Names, shapes and types are checked; inside a step, only in the first step of a phase. Numbers are checked only for a
server's step, once a round.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fednorms.core.errors import BadInput, Diverged
from fednorms.core.options import did_you_mean, few
from fednorms.core.part import Part, Phase
from fednorms.core.tree import Tree

T = TypeVar("T")

# By hook: what it returns, and how it is written.
_RETURNS = {
    "surgery": ("a list of Changes, or None", "Change the model in place and return what fednorms.layers.swap returns"),
    "arrange": ("a Federation", "Return the federation itself if all sites train"),
    "plan": ("a list of Phases", "Return phases, or [dataclasses.replace(phase, ...) for phase in phases]"),
    "begin": ("the model, a Tree with all its tensors", "Return model, or fn.Tree({**model, name: tensor})"),
    "batch": ("images and labels", "Return x, y"),
    "objective": ("the loss, one number as a tensor", "Return its mean over the batch, as s.base(s.logits, s.y) is"),
    "loss": ("one number, or 0.0 if it has nothing to add", "Take the mean or the sum of a vector"),
    "watches": ("True or False", "Return isinstance(module, ...)"),
    "twin": ("one number, or 0.0 if it has nothing to add", "Take the mean or the sum of a vector"),
    "oracle": ("a function of (params, draw) that gives a gradient, a Tree", "Return gradf if nothing changes"),
    "grad": ("the gradient, a Tree", "Return g if nothing changes, or g.map(function)"),
    "decay": ("a Tree to add to the gradient", "Return fn.Tree() if there is nothing to add"),
    "path": ("a value that can be hashed", "Return None, a word, a number or a tuple of them"),
    "init": ("two Trees, the server's state and a client's", "Return fn.Tree(), fn.Tree() for no state"),
    "down": ("a Tree, what clients are sent of the server's state", "Return fn.Tree() to send nothing"),
    "down_to": ("a Tree, what only this client is sent", "Return fn.Tree() for a client that gets what all get"),
    "model_to": ("tensors of the model, a Tree", "Return model for a client that gets the server's"),
    "finish": ("two Trees, the new state and what is sent", "Return e.mine, fn.Tree() to change and send nothing"),
    "send": ("the update, a Tree", "Return delta if nothing changes"),
    "privacy": ("a Privacy, or None", "Return fn.Privacy(protect=...)"),
    "protect": ("the update, a Tree", "Return update if nothing changes"),
    "release": ("the update, a Tree", "Return update if nothing changes"),
    "receive": ("an update for each client, and the new state", "Return r.updates, r.mine if nothing changes"),
    "weigh": (
        "one number >= 0 for each client, and the new state",
        "Return [1.0] * len(r.clients), r.mine if nothing changes",
    ),
    "remember": ("the new state, a Tree", "Return r.mine if nothing is new"),
    "aggregate": (
        "two Trees, the model in place of the mean and the new state",
        "Return fn.Tree({name: ... for name in r.model}), r.mine",
    ),
    "server": ("two Trees, the update and the new state", "Return delta, r.mine if nothing changes"),
    "stats": ("the update of the statistics, a Tree", "Return delta if nothing changes"),
    "passes": ("a list of Passes", "Return [fn.Pass(...)], also for a single one"),
    "client of a pass": ("two Trees, what is kept and what is sent", "Return local.mine, fn.Tree() for nothing new"),
    "server of a pass": ("the server's new state, a Tree", "Return r.mine if nothing changes"),
    "evaluation": ("an Eval", "Return fn.Eval(...)"),
    "adapt of evaluation": (
        "two Trees, the changed tensors of the model and what to remember",
        "Return fn.Tree(), memory to change nothing",
    ),
}


def wrong(p: Part, hook: str, got: str, fix: str = "") -> BadInput:
    """The error for a hook that returns a wrong value."""
    what, how = _RETURNS[hook]
    return BadInput(f"{p.name}: {hook} must return {what}, got {got}. {fix or how}.")


def kind(given: object) -> str:
    """What was returned, in a few words.

    >>> kind(torch.zeros(2, 3)), kind((1.0, None)), kind([]), kind(int)
    ('a tensor of (2, 3)', 'float and NoneType', 'an empty list', 'the class int')
    """
    if isinstance(given, Tensor):
        return f"a tensor of {tuple(given.shape)}"
    if isinstance(given, (tuple, list)):
        inside = " and ".join(kind(one) for one in given[:3]) + " and more" * (len(given) > 3)
        return inside or f"an empty {type(given).__name__}"
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def one(p: Part, hook: str, given: object, expected: type[T]) -> T:
    """What a hook returned, if it is of the expected class."""
    if not isinstance(given, expected):
        raise wrong(p, hook, kind(given))
    return given


def several(p: Part, hook: str, given: object, expected: type[T]) -> list[T]:
    """The same for a hook that returns a list."""
    if not isinstance(given, (list, tuple)):
        raise wrong(p, hook, kind(given))
    if others := [item for item in given if not isinstance(item, expected)]:
        raise wrong(p, hook, f"{kind(others[0])} in it")
    return list(given)


# -- trees ----------------------------------------------------------------------------------------------------------
def tree(p: Part, hook: str, given: object) -> Tree:
    """A Tree of tensors."""
    return _of_tensors(p, hook, one(p, hook, given, Tree))


def two_trees(p: Part, hook: str, given: object) -> tuple[Tree, Tree]:
    """Two Trees of tensors."""
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(t, Tree) for t in given)):
        raise wrong(p, hook, kind(given))
    return _of_tensors(p, hook, given[0]), _of_tensors(p, hook, given[1])


def _of_tensors(p: Part, hook: str, given: Tree) -> Tree:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise wrong(p, hook, f'{kind(value)} as the entry "{name}"', "Make a tensor of it: torch.tensor(...)")
    return given


def fitting(p: Part, hook: str, given: object, like: Mapping[str, Tensor]) -> Tree:
    """A Tree with some of these names and these shapes; another shape would be broadcast silently."""
    found = tree(p, hook, given)
    for name, value in found.items():
        if name not in like:
            fix = f"Leave it out; {did_you_mean(name, like)}it may return {few(list(like)) or 'no entry at all'}"
            raise wrong(p, hook, f'an entry "{name}", which it may not change here', fix)
        if value.shape != like[name].shape:
            fix = f"Give it the shape of the model's tensor, {tuple(like[name].shape)}"
            raise wrong(p, hook, f'{kind(value)} as the entry "{name}"', fix)
    return found


def update(p: Part, hook: str, given: object, like: Mapping[str, Tensor]) -> Tree:
    """The same for what is added to a model, which must not change its dtype."""
    found = fitting(p, hook, given, like)
    for name, value in found.items():
        if torch.promote_types(value.dtype, like[name].dtype) != like[name].dtype:
            got = f'a tensor of {value.dtype} as the entry "{name}", which is {like[name].dtype} in the model'
            raise wrong(p, hook, got.replace("torch.", ""), f"Convert it: .to({like[name].dtype})")
    return found


def model(p: Part, given: object, like: Tree) -> Tree:
    """What `begin` returned: the whole model."""
    found = update(p, "begin", given, like)
    if missing := [name for name in like if name not in found]:
        raise wrong(p, "begin", f"a Tree without {few(missing)}")
    return found


def aggregated(p: Part, given: object, like: Tree) -> tuple[Tree, Tree]:
    """What `aggregate` returned: all that the mean would have, and the new state."""
    found, mine = two_trees(p, "aggregate", given)
    update(p, "aggregate", found, like)
    if missing := [name for name in like if name not in found]:
        raise wrong(p, "aggregate", f"a Tree without {few(missing)}")
    return found.pick(like), mine


def updates(p: Part, given: object, clients: int, like: Tree) -> tuple[list[Tree], Tree]:
    """What `receive` returned: an update for each client, and the new state."""
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (tuple, list))):
        raise wrong(p, "receive", kind(given))
    if len(given[0]) != clients:
        raise wrong(p, "receive", f"{len(given[0])} updates of {clients} clients")
    return [update(p, "receive", one, like) for one in given[0]], tree(p, "receive", given[1])


def factors(p: Part, given: object, clients: int, t: int) -> tuple[list[float], Tree]:
    """What `weigh` returned: a number for each client, and the new state."""
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (tuple, list, Tensor))):
        raise wrong(p, "weigh", kind(given))
    found = [float(one) for one in given[0].flatten().tolist()] if isinstance(given[0], Tensor) else list(given[0])
    if any(not isinstance(one, (int, float)) and not (isinstance(one, Tensor) and not one.dim()) for one in found):
        raise wrong(p, "weigh", kind(given[0]))
    if len(found) != clients:
        raise wrong(p, "weigh", f"{len(found)} numbers for {clients} clients")
    found = [float(one) for one in found]
    if not all(math.isfinite(one) for one in found):
        raise Diverged(
            f"The clients' weights of round {t + 1} are not finite: {p.name} (weigh) computed {found}. Look for a "
            "division by zero there."
        )
    if any(one < 0 for one in found):
        raise wrong(p, "weigh", f"{min(found):g}", "Return 0 to leave a client out")
    return found, tree(p, "weigh", given[1])


def still_finite(p: Part, hook: str, changed: Tree, t: int) -> None:
    """Refuse a server step that is not finite; otherwise every client of the next round would seem to diverge."""
    if not changed.finite():
        raise Diverged(
            f"The server's step of round {t + 1} is not finite: {p.name} ({hook}) computed it from finite updates. "
            "Look for a division by zero, a root of a negative number or too large a step there."
        )


def hashable(p: Part, given: Hashable) -> Hashable:
    """What `path` returned."""
    try:
        hash(given)
    except TypeError:
        raise wrong(p, "path", kind(given)) from None
    return given


# -- local training -------------------------------------------------------------------------------------------------
def phases(p: Part, given: object) -> list[Phase]:
    """What `plan` returned."""
    found = several(p, "plan", given, Phase)
    if any(phase.weight_decay is not None or phase.plain for phase in found):  # the recipe's optimizer is recorded
        raise BadInput(
            f"{p.name}: plan must return phases without a weight decay, and not plain ones; only phases of "
            "`evaluation` may be so. Leave out weight_decay and plain."
        )
    return found


def images_and_labels(p: Part, given: object, like: Tensor) -> tuple[Tensor, Tensor]:
    """What `batch` returned for images like these."""
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(t, Tensor) for t in given)):
        raise wrong(p, "batch", kind(given))
    x, y = given
    if x.dim() != like.dim() or x.shape[1] != like.shape[1] or x.dtype != like.dtype:
        got = f"images of {tuple(x.shape)} and {x.dtype} for {tuple(like.shape)} and {like.dtype}"
        raise wrong(p, "batch", got.replace("torch.", ""), "Keep the axes, the channels and the type of the numbers")
    if len(x) != len(y):
        raise wrong(p, "batch", f"{len(x)} images with {len(y)} labels", "Return a label for every image")
    return x, y


def objective(p: Part, given: object) -> Tensor:
    """What `objective` returned."""
    if not isinstance(given, Tensor) or given.dim():
        raise wrong(p, "objective", kind(given))
    return given


def term(p: Part, hook: str, given: object) -> Tensor | float:
    """What `loss` or `twin` returned."""
    if not isinstance(given, (Tensor, float, int)) or (isinstance(given, Tensor) and given.dim()):
        raise wrong(p, hook, kind(given))
    return given
