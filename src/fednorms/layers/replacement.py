"""What every `.like` shares: read the old layer, keep the tensors that still fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.norms import stored_statistics


def named(name: str) -> str:
    """A layer at the start of a message.

    >>> named("stem.conv"), named("")
    ('Layer "stem.conv"', 'A layer')
    """
    return f'Layer "{name}"' if name else "A layer"


def width(norm: nn.Module, name: str = "") -> int:
    """The number of channels of a batch or group normalization layer.

    >>> width(nn.BatchNorm2d(8)), width(nn.GroupNorm(2, 6))
    (8, 6)
    """
    for attribute in ("num_features", "num_channels", "channels"):
        value = getattr(norm, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    raise BadInput(
        f"{named(name)} is a {type(norm).__name__} without a known number of channels; expected a batch or group "
        "normalization layer that has one. Run a lazy layer once first."
    )


def tensor(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer of `module`, or None if it has none of that name.

    >>> tensor(nn.Linear(2, 2, bias=False), "bias") is None
    True
    """
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def has_trained(norm: nn.Module) -> bool:
    """Whether a batch normalization layer has gathered statistics; one without values (on "meta") has not.

    >>> has_trained(nn.BatchNorm2d(2))
    False
    """
    batches = tensor(norm, "num_batches_tracked")
    return batches is not None and not batches.is_meta and int(batches) > 0


def place(module: nn.Module) -> dict[str, Any]:
    """The dtype and device of a layer's tensors, as arguments for a tensor factory.

    >>> place(nn.BatchNorm2d(1).double())["dtype"]
    torch.float64
    """
    for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if value.is_floating_point():
            return {"dtype": value.dtype, "device": value.device}
    return {"dtype": torch.get_default_dtype(), "device": torch.device("cpu")}


def keep_parameters(old: nn.Module, new: nn.Module, *names: str) -> None:
    """Give `new` the Parameter objects of `old`, so dtype, device, requires_grad and tying stay; and its mode.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> keep_parameters(a, b, "weight", "bias")
    >>> b.weight is a.weight
    True
    """
    for name in names:
        setattr(new, name, getattr(old, name, None))
    new.train(old.training)


def finite_momentum(norm: nn.Module, name: str = "") -> float:
    """The momentum of a batch normalization layer, 0.1 if it has none; a cumulative average is refused.

    >>> finite_momentum(nn.BatchNorm1d(1, momentum=0.3))
    0.3
    """
    momentum = getattr(norm, "momentum", 0.1)
    if momentum is None:
        raise BadInput(
            f"{named(name)} has momentum=None, a cumulative average, which cannot be federated. Give it a number, 0.1 "
            "for example."
        )
    return float(momentum)


def keep_statistics(old: nn.Module, mean: Tensor, var: Tensor, batches: Tensor | None = None) -> None:
    """Copy the stored statistics of `old`, if it has any, and its counter of batches.

    >>> bn, mean, var = nn.BatchNorm1d(1), torch.ones(1), torch.zeros(1)
    >>> keep_statistics(bn, mean, var)
    >>> mean.item(), var.item()
    (0.0, 1.0)
    """
    if stored := stored_statistics(old):
        mean.copy_(stored[0])
        var.copy_(stored[1])
    counted = tensor(old, "num_batches_tracked")
    if batches is not None and counted is not None:
        batches.copy_(counted)


def refuse_other_forward(old: nn.Module, base: type[nn.Module], name: str = "") -> None:
    """Refuse a subclass whose own forward a replacement would silently lose.

    >>> refuse_other_forward(nn.Conv2d(1, 1, 3), nn.Conv2d)
    """
    if type(old).forward is not base.forward:
        raise BadInput(
            f"{named(name)} is a {type(old).__name__} with its own forward, which a replacement would lose; expected a "
            f"plain {base.__name__}. Replace it by hand, or leave out one of the parts that change it."
        )


def refuse_single_positions(norm: nn.Module, what: str, name: str = "") -> None:
    """Refuse a layer of vectors, (N, C): statistics over the positions of a sample need more than one.

    >>> refuse_single_positions(nn.BatchNorm2d(3), "instance normalization")
    """
    if isinstance(norm, nn.BatchNorm1d):
        raise BadInput(
            f"{named(name)}: {what} needs maps with several positions, got {type(norm).__name__}, which normalizes "
            'vectors. Choose a model whose normalization layers see images, such as "cnn-small".'
        )
