"""Find the layers that produce the logits of any classifier: linear ones, or 1x1 convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fednorms.core.errors import BadInput

# What torchvision, timm and most own code call the last block.
_NAMES = ("head", "heads", "fc", "classifier")

Kind = Callable[[nn.Module], bool]


def split_head(model: nn.Module, head: str | Sequence[str] | None = None) -> list[str]:
    """The names of the nn.Linear modules that produce the logits; several if a model has several heads.

    `head` names them, or blocks that end in them, for a model in which they cannot be found. Otherwise: what timm's
    `get_classifier()` returns; the last linear layer of a block called head, heads, fc or classifier; the linear layer
    that ends the model. If none is found, a 1x1 convolution in such a place (SqueezeNet). A model without either is
    refused.

    >>> split_head(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    ['3']
    >>> split_head(nn.ModuleDict({"body": nn.Linear(4, 8), "fc": nn.Linear(8, 2), "aux": nn.Linear(8, 2)}))
    ['fc']
    >>> split_head(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    ['1']
    """
    if head is not None:
        wanted = [head] if isinstance(head, str) else list(head)
        if not wanted:
            raise BadInput(f"{_title(model)}: head= names no module. Give it the name of a linear layer.")
        return _unique([_classifier_of(model, name) for name in wanted])
    for kind in (_linear, _pointwise):
        if found := _by_timm(model, kind) or _by_name(model, kind) or _by_position(model, kind):
            return _unique(found)
    raise BadInput(
        f"{_title(model)}: cannot find the linear layer that produces the logits. {_hint(model)} If the last layer is "
        "neither an nn.Linear nor a 1x1 convolution, make it one."
    )


def _title(model: nn.Module) -> str:
    return f"Model {type(model).__name__}"


def _linear(module: nn.Module) -> bool:
    # The output projection inside MultiheadAttention is a Linear by class and never a classifier.
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _pointwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1


def _layers(module: nn.Module, kind: Kind) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_modules() if kind(child)]


def _hint(model: nn.Module) -> str:
    names = [name for name, _ in _layers(model, _linear) if name]
    if not names:
        return "It has no nn.Linear."
    listed = ", ".join(names[-5:])
    return f"Pass head= with its name ({listed})."


def _unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _classifier_of(model: nn.Module, name: str) -> str:
    try:
        block = model.get_submodule(name) if name else None
    except AttributeError:
        block = None
    if block is None:
        raise BadInput(f'{_title(model)} has no module "{name}", which head= names. {_hint(model)}')
    last = next((found for kind in (_linear, _pointwise) if (found := _last(block, kind)) is not None), None)
    if last is None:
        raise BadInput(
            f'{_title(model)}: head="{name}" is a {type(block).__name__} that does not end in an nn.Linear. '
            f"{_hint(model)}"
        )
    return f"{name}.{last}" if last else name


def _last(block: nn.Module, kind: Kind) -> str | None:
    """The name, inside `block`, of its last layer of a kind; None if something with parameters follows it."""
    layers = _layers(block, kind)
    if not layers:
        return None
    name, last = layers[-1]
    after = False
    for module in block.modules():
        if after and next(iter(module.parameters(recurse=False)), None) is not None:
            return None
        after = after or module is last
    return name


def _by_timm(model: nn.Module, kind: Kind) -> list[str]:
    get_classifier = getattr(model, "get_classifier", None)
    if not callable(get_classifier):
        return []
    given = get_classifier()
    blocks = list(given) if isinstance(given, (tuple, list)) else [given]
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []
    for block in blocks:
        if not isinstance(block, nn.Module) or id(block) not in names:
            return []
        last = _last(block, kind)
        if last is None:
            return []
        name = names[id(block)]
        found.append(f"{name}.{last}" if last else name)
    return found


def _by_name(model: nn.Module, kind: Kind) -> list[str]:
    for name in _NAMES:
        block = model._modules.get(name)
        last = None if block is None else _last(block, kind)
        if last is not None:
            return [f"{name}.{last}" if last else name]
    return []


def _by_position(model: nn.Module, kind: Kind) -> list[str]:
    # A block that is called a head and does not end in such a layer is a classifier of another kind: then no other
    # layer can be the head.
    if any(model._modules.get(name) is not None for name in _NAMES):
        return []
    last = _last(model, kind)
    # The name is "" where the model is itself such a layer: there is no body to split from.
    return [last] if last else []
