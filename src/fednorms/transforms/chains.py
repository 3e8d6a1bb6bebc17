"""The augmentations of the papers: chains of transforms of images in [0, 1], from keyed uniforms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednorms.transforms.colour import adjust, draw_tone
from fednorms.transforms.crop import Fill, centre_crop, crop, draw_crop
from fednorms.transforms.cutout import cutout, draw_centre
from fednorms.transforms.flip import draw_choice, flip
from fednorms.transforms.warp import affine, between, rotate

Uniform = Callable[..., Tensor]  # shape -> numbers in (0, 1)
Chain = Callable[[Tensor, Uniform], Tensor]

# The colours that the papers' normalisations turn into 0, for codes that pad or cover after normalising.
_CIFAR10 = (0.4914, 0.4822, 0.4465)
_CIFAR100 = (0.5071, 0.4867, 0.4408)


def _flipped(x: Tensor, uniform: Uniform) -> Tensor:
    return flip(x, draw_choice(uniform(len(x))))


def _shifted(x: Tensor, uniform: Uniform, padding: int = 4, fill: Fill = 0.0) -> Tensor:
    size = tuple(x.shape[-2:])
    return crop(x, *draw_crop(uniform(len(x), 2), size, size, padding), size, padding, fill)


def _crop_flip(x: Tensor, uniform: Uniform) -> Tensor:
    return _flipped(_shifted(x, uniform), uniform)


def _crop_flip_cutout(x: Tensor, uniform: Uniform) -> Tensor:
    x = _crop_flip(x, uniform)
    return cutout(x, *draw_centre(uniform(len(x), 2), x.shape), 16, _CIFAR10)


def _feddyn(x: Tensor, uniform: Uniform, fill: Fill = _CIFAR10) -> Tensor:
    x = _flipped(x, uniform)
    chosen = draw_choice(uniform(len(x))).view(-1, 1, 1, 1)
    return torch.where(chosen, _shifted(x, uniform, 4, fill), x)


def _feddyn_cifar100(x: Tensor, uniform: Uniform) -> Tensor:
    return _feddyn(x, uniform, _CIFAR100)


def _flip_rotate(x: Tensor, uniform: Uniform) -> Tensor:
    return rotate(_flipped(x, uniform), between(uniform(len(x)), -30.0, 30.0))


def _fairface(x: Tensor, uniform: Uniform) -> Tensor:
    u = uniform(len(x), 5)
    height, width = x.shape[-2:]
    warped = affine(
        x,
        between(u[:, 0], -10.0, 10.0),
        between(u[:, 1], -0.1, 0.1) * width,
        between(u[:, 2], -0.1, 0.1) * height,
        between(u[:, 3], 0.9, 1.1),
        torch.zeros_like(u[:, 0]),
    )
    return _flipped(torch.where(draw_choice(u[:, 4]).view(-1, 1, 1, 1), warped, x), uniform)


def _isic(x: Tensor, uniform: Uniform) -> Tensor:
    n = len(x)
    u = uniform(n, 6)
    on = [draw_choice(u[:, i]).to(x.dtype) for i in range(3)]
    nil = torch.zeros_like(u[:, 0])
    # Scale, rotation and shear in one resampling instead of three.
    x = affine(
        x,
        between(u[:, 3], -50.0, 50.0) * on[0],
        nil,
        nil,
        1 + between(u[:, 4], -0.07, 0.07) * on[1],
        between(u[:, 5], -0.1, 0.1) * on[2],
        "bilinear",
        "reflection",
    )
    x = adjust(x, *draw_tone(uniform(n, 3), 0.15, 0.1, p=0.5))
    u = uniform(n, 2)  # half of the images are flipped: left-right, top-bottom or both
    flipped, kind = draw_choice(u[:, 0]), u[:, 1] * 3
    x = flip(flip(x, flipped & (kind < 2), -1), flipped & (kind >= 1), -2)
    size = centre_of(x.shape)
    x = crop(x, *draw_crop(uniform(n, 2), x.shape, size), size)
    u = uniform(n, 2)
    many = u[:, 0] * 8 * draw_choice(u[:, 1]).to(x.dtype)  # no square for half of the images, else one to eight
    side = max(2, 16 * size[0] // 200)
    for i in range(8):
        row, column = draw_centre(uniform(n, 2), x.shape)
        # A square that is not wanted is put outside.
        x = cutout(x, torch.where(many > i, row, -2 * side), column, side)
    return x


def centre_of(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """The window that Fed-ISIC2019 trains and tests on: 200 of 224 pixels.

    >>> centre_of((3, 224, 224))
    (200, 200)
    """
    height, width = (max(1, n * 200 // 224) for n in shape[-2:])
    return height, width


def _isic_test(x: Tensor, uniform: Uniform) -> Tensor:
    return centre_crop(x, centre_of(x.shape))


CHAINS: dict[str, Chain] = {
    "crop_flip": _crop_flip,
    "flip": _flipped,
    "crop_flip_cutout": _crop_flip_cutout,
    "feddyn": _feddyn,
    "feddyn_cifar100": _feddyn_cifar100,
    "flip_rotate": _flip_rotate,
    "fairface": _fairface,
    "isic": _isic,
}
"""What a training batch goes through, by name."""

TEST_CHAINS: dict[str, Chain] = {"isic": _isic_test}
"""What a test batch goes through, where that is anything at all."""
