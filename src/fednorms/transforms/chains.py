"""The augmentations of the papers: chains of transforms of images in [0, 1], from keyed uniform numbers.

Papers:
    Oh, Kim, Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022,
    https://arxiv.org/abs/2106.06042 (crop_flip)
    Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022,
    https://arxiv.org/abs/2106.03097 (crop_flip_cutout)
    Acar et al., Federated Learning Based on Dynamic Regularization (FedDyn), ICLR 2021,
    https://arxiv.org/abs/2111.04263 (feddyn)
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
    https://arxiv.org/abs/2102.07623 (flip_rotate)
    Kang et al., FedNN: Federated learning on concept drift data using weight and adaptive group normalizations,
    Pattern Recognition 149 (2024), 110230, https://doi.org/10.1016/j.patcog.2023.110230 (fairface)
    Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic
    Healthcare Settings, NeurIPS 2022, https://arxiv.org/abs/2210.04620 (isic)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednorms.transforms.color import adjust, draw_tone
from fednorms.transforms.crop import Fill, crop, draw_crop
from fednorms.transforms.cutout import cutout, draw_center
from fednorms.transforms.flip import draw_choice, flip
from fednorms.transforms.warp import affine, between, rotate

Uniform = Callable[..., Tensor]  # shape -> numbers in (0, 1)
Size = tuple[int, int]
Chain = Callable[[Tensor, Uniform, Size], Tensor]  # images, numbers, height and width that the network takes

# The colors that become 0 after the papers' normalization, for papers that pad or cover after normalizing.
_FEDNTD = (0.49139968, 0.48215827, 0.44653124)
_FEDDYN = (0.491, 0.482, 0.447)
_FEDDYN_CIFAR100 = (0.5071, 0.4867, 0.4408)


def _flip(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """Mirror left-right with probability 1/2."""
    return _flipped(x, uniform)


def _flipped(x: Tensor, uniform: Uniform) -> Tensor:
    return flip(x, draw_choice(uniform(len(x))))


def _shifted(x: Tensor, uniform: Uniform, padding: int = 4, fill: Fill = 0.0) -> Tensor:
    size = tuple(x.shape[-2:])
    return crop(x, *draw_crop(uniform(len(x), 2), size, size, padding), size, padding, fill)


def _crop_flip(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """Pad 4 black pixels and crop, flip (FedBABU, FedFN)."""
    return _flipped(_shifted(x, uniform), uniform)


def _crop_flip_cutout(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """Pad 4 black pixels and crop, flip, cover a square of 16 pixels with the mean color (FedNTD, EasyFL)."""
    x = _crop_flip(x, uniform, size)
    return cutout(x, *draw_center(uniform(len(x), 2), x.shape), 16, _FEDNTD)


def _feddyn(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """Flip; with probability 1/2 pad 4 pixels of the mean color and crop (FedDyn, FedDC, FedNN)."""
    return _flip_perhaps_crop(x, uniform, _FEDDYN)


def _feddyn_cifar100(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """As feddyn, with the mean color of CIFAR-100."""
    return _flip_perhaps_crop(x, uniform, _FEDDYN_CIFAR100)


def _flip_perhaps_crop(x: Tensor, uniform: Uniform, fill: Fill) -> Tensor:
    x = _flipped(x, uniform)
    chosen = draw_choice(uniform(len(x))).view(-1, 1, 1, 1)
    return torch.where(chosen, _shifted(x, uniform, 4, fill), x)


def _flip_rotate(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """Flip, rotate up to 30 degrees (FedBN's and FedWon's Office and DomainNet, GReg)."""
    return rotate(_flipped(x, uniform), between(uniform(len(x)), -30.0, 30.0))


def _fairface(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """Affine (10 degrees, shifts of 0.1, scale 0.9 to 1.1) and flip, each with probability 1/2 (FedNN)."""
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


def _isic(x: Tensor, uniform: Uniform, size: Size) -> Tensor:
    """FLamby's: scale, rotation, shear, tone, flips, a random crop of what the network takes, covered squares."""
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
    x = crop(x, *draw_crop(uniform(n, 2), x.shape, size), size)
    u = uniform(n, 2)
    many = (
        u[:, 0] * 8 * draw_choice(u[:, 1]).to(x.dtype)
    )  # no square for half of the images, one to eight for the others
    side = max(2, 16 * size[0] // 200 // 2 * 2)
    places = torch.stack([uniform(n, 2) for _ in range(8)], 1)
    top, left = draw_crop(places, x.shape, (side, side))  # the whole square is inside
    wanted = torch.arange(8, device=x.device) < many.view(-1, 1)  # the others are placed outside the image
    return cutout(x, torch.where(wanted, top + side // 2, -2 * side), left + side // 2, side)


CHAINS: dict[str, Chain] = {
    "crop_flip": _crop_flip,
    "flip": _flip,
    "crop_flip_cutout": _crop_flip_cutout,
    "feddyn": _feddyn,
    "feddyn_cifar100": _feddyn_cifar100,
    "flip_rotate": _flip_rotate,
    "fairface": _fairface,
    "isic": _isic,
}
"""The augmentations of training batches by name; test batches are only preprocessed."""
