"""From stored pixels to what a network sees: scaling to [0, 1], an optional center crop, normalization."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.transforms.crop import center_crop


@dataclass(frozen=True)
class Preprocessing:
    """Pixels to network input: unit(x) = x / 255 for uint8 and x for floats, then (unit(x) - mean) / std.

    `mean` and `std` have one entry per channel, or a single one for all channels; without them there is no
    normalization. The channels are the third axis from the end, with or without a batch axis. With `crop`, the network
    sees the center square of that many pixels (in training, any such square that a transform cuts out).

    >>> bytes_ = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> Preprocessing((0.5,), (0.5,))(bytes_).flatten()
    tensor([-1.,  1.])
    >>> Preprocessing()(bytes_).flatten()
    tensor([0., 1.])
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: int | None = None

    def __post_init__(self) -> None:
        if self.crop is not None and (type(self.crop) is not int or self.crop < 1):
            raise BadInput(f"Preprocessing: crop must be a positive number of pixels, got {self.crop!r}.")
        if (self.mean is None) != (self.std is None):
            raise BadInput("Preprocessing: give both mean and std, or neither.")
        if self.mean is None or self.std is None:
            return
        try:
            mean, std = tuple(float(m) for m in self.mean), tuple(float(s) for s in self.std)
        except (TypeError, ValueError):
            raise BadInput(
                f"Preprocessing: mean and std must be numbers per channel, got {self.mean!r} and {self.std!r}."
            ) from None
        if not mean or len(mean) != len(std):
            raise BadInput(f"Preprocessing: mean and std need one number per channel, got {len(mean)} and {len(std)}.")
        if not all(map(math.isfinite, mean)) or not all(math.isfinite(s) and s > 0 for s in std):
            raise BadInput(f"Preprocessing: mean must be finite and std positive, got mean {mean} and std {std}.")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    @classmethod
    def centered(cls, channels: int) -> Preprocessing:
        """Mean and std of 0.5 in every channel, which maps [0, 1] to [-1, 1]: the default for images.

        >>> Preprocessing.centered(3).mean
        (0.5, 0.5, 0.5)
        """
        return cls((0.5,) * channels, (0.5,) * channels)

    @classmethod
    def imagenet(cls, crop: int | None = None) -> Preprocessing:
        """The mean and deviation of ImageNet's colors, which networks with pretrained weights expect.

        >>> Preprocessing.imagenet().std
        (0.229, 0.224, 0.225)
        """
        return cls((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop)

    @classmethod
    def read(cls, text: str, channels: int) -> Preprocessing:
        """A normalization as text: "imagenet", "half" (pixels in [-1, 1]), "none", or "MEAN/STD" in numbers.

        >>> Preprocessing.read("half", 1) == Preprocessing.centered(1)
        True
        >>> Preprocessing.read("0.5,0.4,0.3/0.2", 3)
        Preprocessing(mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2), crop=None)
        """
        if text in _NAMED:
            return _NAMED[text] if text != "half" else cls.centered(channels)
        try:
            mean, std = ([float(number) for number in side.split(",")] for side in text.split("/"))
        except ValueError:
            raise BadInput(
                f'Normalization "{text}" is not known. Give {", ".join(_NAMED)}, or mean and standard deviation in '
                'numbers, such as "0.5/0.25" or "0.49,0.46,0.41/0.23,0.22,0.22".'
            ) from None
        longest = max(len(mean), len(std))
        mean, std = (side * longest if len(side) == 1 else side for side in (mean, std))
        return cls(tuple(mean), tuple(std))

    def unit(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images as floats: uint8 is divided by 255, floats are only cast.

        >>> Preprocessing().unit(torch.tensor([51], dtype=torch.uint8))
        tensor([0.2000])
        """
        if x.dtype == torch.uint8:
            return x.to(dtype).div_(255)
        if not x.is_floating_point():
            raise BadInput(f"Preprocessing: images must be uint8 or floating point, got {x.dtype}.")
        return x.to(dtype)

    def window(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what a network sees of an image.

        >>> Preprocessing(crop=200).window(224, 224), Preprocessing().window(28, 28)
        ((200, 200), (28, 28))
        """
        return (height, width) if self.crop is None else (min(height, self.crop), min(width, self.crop))

    def cropped(self, x: Tensor) -> Tensor:
        """The center of each image, in the size that the network takes; an image of that size is returned as it is.

        >>> Preprocessing(crop=1).cropped(torch.arange(9).view(1, 1, 3, 3)).item()
        4
        """
        if self.crop is None:
            return x
        height, width = self.window(*x.shape[-2:])
        return x if (height, width) == tuple(x.shape[-2:]) else center_crop(x, (height, width))

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / std per channel; the identity without a mean.

        >>> Preprocessing((1.0, 2.0), (1.0, 4.0)).normalize(torch.full((1, 2, 1, 1), 2.0)).flatten()
        tensor([1., 0.])
        """
        if self.mean is None or self.std is None:
            return x
        if len(set(self.mean)) == 1 and len(set(self.std)) == 1:
            return (x - self.mean[0]) / self.std[0]
        return (x - _channels(self.mean, x.dtype, x.device)) / _channels(self.std, x.dtype, x.device)

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """All steps."""
        return self.normalize(self.cropped(self.unit(x, dtype)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, TOML and the header of an exported model; `crop` only if there is one.

        >>> Preprocessing.from_dict(Preprocessing.centered(1).to_dict()) == Preprocessing.centered(1)
        True
        """
        return {
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
            **({} if self.crop is None else {"crop": self.crop}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """The inverse of `to_dict`; absent entries mean no normalization.

        >>> Preprocessing.from_dict({}) == Preprocessing()
        True
        """
        if unknown := set(values) - {"mean", "std", "crop"}:
            raise BadInput(f"Preprocessing: unknown entries {sorted(unknown)}, expected mean, std and crop.")
        mean, std = values.get("mean"), values.get("std")
        pair = (None if mean is None else tuple(mean), None if std is None else tuple(std))
        return cls(*pair, values.get("crop"))


_NAMED = {"imagenet": Preprocessing.imagenet(), "half": Preprocessing.centered(1), "none": Preprocessing()}


@lru_cache(maxsize=64)
def _channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept per device: a copy to the device in every step would be slow, and not allowed in a captured graph.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)
