"""From stored pixels to what a network sees: first the unit interval, then a mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fednorms.errors import BadInput


@dataclass(frozen=True)
class Preprocessing:
    """Pixels to network input: unit(x) = x / 255 for uint8 and x for floats, then (unit(x) - mean) / std.

    `mean` and `std` have one entry per channel, or a single one for all channels; without them there is no
    normalisation. A leading axis more or less does not matter: the channels are the third axis from the end.

    >>> bytes_ = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> Preprocessing((0.5,), (0.5,))(bytes_).flatten()
    tensor([-1.,  1.])
    >>> Preprocessing()(bytes_).flatten()
    tensor([0., 1.])
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise BadInput("preprocessing: give both mean and std, or neither")
        if self.mean is None or self.std is None:
            return
        try:
            mean, std = tuple(float(m) for m in self.mean), tuple(float(s) for s in self.std)
        except (TypeError, ValueError):
            raise BadInput(
                f"preprocessing: mean and std must be numbers per channel, got {self.mean!r} and {self.std!r}"
            ) from None
        if not mean or len(mean) != len(std):
            raise BadInput(f"preprocessing: mean and std need one number per channel, got {len(mean)} and {len(std)}")
        if not all(map(math.isfinite, mean)) or not all(math.isfinite(s) and s > 0 for s in std):
            raise BadInput(f"preprocessing: mean must be finite and std positive, got mean {mean} and std {std}")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    @classmethod
    def centred(cls, channels: int) -> Preprocessing:
        """Mean and std of one half in every channel, so that [0, 1] becomes [-1, 1]: the default for images.

        >>> Preprocessing.centred(3).mean
        (0.5, 0.5, 0.5)
        """
        return cls((0.5,) * channels, (0.5,) * channels)

    def unit(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images as floats: uint8 is divided by 255, floats are only cast.

        >>> Preprocessing().unit(torch.tensor([51], dtype=torch.uint8))
        tensor([0.2000])
        """
        if x.dtype == torch.uint8:
            return x.to(dtype).div_(255)
        if not x.is_floating_point():
            raise BadInput(f"preprocessing: images must be uint8 or floating point, got {x.dtype}")
        return x.to(dtype)

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std per channel; the identity without a mean.

        >>> Preprocessing((1.0, 2.0), (1.0, 4.0)).normalise(torch.full((1, 2, 1, 1), 2.0)).flatten()
        tensor([1., 0.])
        """
        if self.mean is None or self.std is None:
            return x
        if len(set(self.mean)) == 1 and len(set(self.std)) == 1:
            return (x - self.mean[0]) / self.std[0]
        return (x - _channels(self.mean, x.dtype, x.device)) / _channels(self.std, x.dtype, x.device)

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Both steps."""
        return self.normalise(self.unit(x, dtype))

    def to_dict(self) -> dict[str, list[float] | None]:
        """Plain lists, for JSON, TOML and the header of an exported model.

        >>> Preprocessing.from_dict(Preprocessing.centred(1).to_dict()) == Preprocessing.centred(1)
        True
        """
        return {
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[float] | None]) -> Preprocessing:
        """The inverse of `to_dict`; absent entries mean no normalisation.

        >>> Preprocessing.from_dict({}) == Preprocessing()
        True
        """
        if unknown := set(values) - {"mean", "std"}:
            raise BadInput(f"preprocessing: unknown entries {sorted(unknown)}, expected mean and std")
        mean, std = values.get("mean"), values.get("std")
        return cls(None if mean is None else tuple(mean), None if std is None else tuple(std))


@lru_cache(maxsize=64)
def _channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept per device: a copy to the device in every step would be slow, and not allowed in a captured graph.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)
