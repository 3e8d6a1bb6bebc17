"""The tensors of a model, and what parts say about each: its route and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.norms import is_norm
from fednorms.core.optim import Rate
from fednorms.core.part import Part, Route, Slot


def slots_of(module: nn.Module, heads: list[str]) -> Iterator[tuple[str, Slot]]:
    """Every stored tensor of a model by its name; a tied parameter has one slot, under its first name.

    >>> [name for name, slot in slots_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["1"]) if slot.head]
    ['1.weight', '1.bias']
    """
    persistent = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    also: dict[int, list[str]] = {}  # of a tied parameter: one that is also the classifier's is the classifier's
    for n, t in persistent.items():
        first.setdefault(id(t), n)
        also.setdefault(id(t), []).append(n)
    layers = sum(_has_weights(m) for m in module.modules())
    layer = 0
    for prefix, m in module.named_modules():
        layer += _has_weights(m)
        for kind, tensors in (("param", m._parameters), ("buffer", m._buffers)):
            for leaf, tensor in tensors.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                if tensor is None or name not in persistent:
                    continue
                if kind == "param" and first[id(tensor)] != name:
                    continue
                trainable = kind == "param" and tensor.requires_grad
                head = any(n.startswith(h + ".") for n in also[id(tensor)] for h in heads)
                where = (max(layer, 1), layers, type(module).__name__)
                yield name, Slot(name, leaf, "param" if kind == "param" else "buffer", m, head, trainable, *where)


def answers(parts: Sequence[Part], slot: Slot) -> dict[str, Route]:
    """The route that each part asks for, and FROZEN for a parameter that the user froze."""
    said = {p.name: p.route(slot) for p in parts}
    for who, route in said.items():
        if not isinstance(route, Route):
            raise BadInput(f"{who}: route must return a Route, got {type(route).__name__} for {slot.name}.")
    if slot.kind == "param" and not slot.trainable:
        said["requires_grad=False"] = Route.FROZEN
    return said


def owners(said: Mapping[str, Route]) -> list[str]:
    """The parts that supply a tensor themselves."""
    return [who for who, route in said.items() if route is Route.OWNED]


def conflicts(slot: Slot, said: Mapping[str, Route]) -> Iterator[str]:
    """Answers about one tensor that exclude each other."""
    if len(both := owners(said)) > 1:
        yield f"{' and '.join(both)} both own {slot.name}"
    claims = {route: who for who, route in said.items()}
    if Route.FROZEN in claims and Route.LOCAL in claims and slot.trainable:
        yield f"{claims[Route.FROZEN]} freezes {slot.name} but {claims[Route.LOCAL]} keeps it local"


def rates_of(parts: Sequence[Part], slots: Iterable[Slot]) -> dict[str, Rate]:
    """The tensors that parts train at rates of their own."""
    found = {}
    for slot in slots:
        said = {p.name: factor for p in parts if (factor := p.lr_factor(slot)) is not None}
        for who, factor in said.items():
            if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
                raise BadInput(
                    f"{who}: lr_factor must return a finite number >= 0 or None, got {factor!r} for {slot.name}."
                )
        if said:
            found[slot.name] = Rate(tuple(said), math.prod(said.values()))
    return found


def _has_weights(m: nn.Module) -> bool:
    return not is_norm(m) and any(p is not None for p in m._parameters.values())
