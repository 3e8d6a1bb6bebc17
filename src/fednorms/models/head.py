"""Find the linear layers that produce the logits of any classifier."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fednorms.errors import BadInput

# What torchvision, timm and most own code call the last block.
_NAMES = ("head", "heads", "fc", "classifier")


def split_head(model: nn.Module, head: str | Sequence[str] | None = None) -> list[str]:
    """The names of the nn.Linear modules that produce the logits; several where a model has several heads.

    `head` names them, or blocks that end in them, for a model where they cannot be found. Otherwise: what
    timm's `get_classifier()` says; the last linear layer of a block called head, heads, fc or classifier; the
    linear layer that ends the model. A model without one is refused.

    >>> split_head(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    ['3']
    >>> split_head(nn.ModuleDict({"body": nn.Linear(4, 8), "fc": nn.Linear(8, 2), "aux": nn.Linear(8, 2)}))
    ['fc']
    """
    if head is not None:
        wanted = [head] if isinstance(head, str) else list(head)
        if not wanted:
            raise BadInput(f"{_title(model)}: head= names no module; expected the name of a linear layer")
        return _unique([_linear_of(model, name) for name in wanted])
    found = _by_timm(model) or _by_name(model) or _by_position(model)
    if not found:
        raise BadInput(
            f"{_title(model)}: cannot find the linear layer that produces the logits; {_hint(model)}"
            "if the last layer is not an nn.Linear, make it one"
        )
    return _unique(found)


def _title(model: nn.Module) -> str:
    return f"model {type(model).__name__}"


def _linears(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # The output projection inside MultiheadAttention is a Linear by class and never a classifier.
    return [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and not isinstance(child, NonDynamicallyQuantizableLinear)
    ]


def _hint(model: nn.Module) -> str:
    names = [name for name, _ in _linears(model) if name]
    if not names:
        return "it has no nn.Linear; "
    listed = ", ".join(names[-5:])
    return f"pass head= with its name ({listed}); "


def _unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _linear_of(model: nn.Module, name: str) -> str:
    try:
        block = model.get_submodule(name) if name else None
    except AttributeError:
        block = None
    if block is None:
        raise BadInput(f"{_title(model)}: head={name!r} is no module of it; {_hint(model)}".rstrip("; "))
    last = _last_linear(block)
    if last is None:
        raise BadInput(
            f"{_title(model)}: head={name!r} is a {type(block).__name__} that does not end in an nn.Linear; "
            f"{_hint(model)}".rstrip("; ")
        )
    return f"{name}.{last}" if last else name


def _last_linear(block: nn.Module) -> str | None:
    """The name, inside `block`, of its last linear layer; None where something with parameters follows it."""
    linears = _linears(block)
    if not linears:
        return None
    name, last = linears[-1]
    after = False
    for module in block.modules():
        if after and next(iter(module.parameters(recurse=False)), None) is not None:
            return None
        after = after or module is last
    return name


def _by_timm(model: nn.Module) -> list[str]:
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
        last = _last_linear(block)
        if last is None:
            return []
        name = names[id(block)]
        found.append(f"{name}.{last}" if last else name)
    return found


def _by_name(model: nn.Module) -> list[str]:
    for name in _NAMES:
        block = model._modules.get(name)
        last = None if block is None else _last_linear(block)
        if last is not None:
            return [f"{name}.{last}" if last else name]
    return []


def _by_position(model: nn.Module) -> list[str]:
    # A block that is called a head and does not end in a linear layer is a classifier of another kind
    # (SqueezeNet's convolution): then no other linear layer can be the head.
    if any(model._modules.get(name) is not None for name in _NAMES):
        return []
    last = _last_linear(model)
    # The name is "" where the model is itself a linear layer: there is no body to split from.
    return [last] if last else []
