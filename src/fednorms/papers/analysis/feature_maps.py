"""How similar two models' feature maps of the same images are."""

from __future__ import annotations

import torch
from torch import Tensor


def map_cosines(a: Tensor, b: Tensor) -> Tensor:
    """The cosines of two models' maps (N x C x H x W) of the same images, over images and channels; FedWon, Figure 5.

    Channels in which one of the two is zero are left out.

    >>> map_cosines(torch.eye(2).view(1, 2, 1, 2), torch.ones(1, 2, 1, 2) * torch.tensor([1.0, 0.0])).tolist()
    [1.0, 0.0]
    """
    x, y = a.double().flatten(2), b.double().flatten(2)
    lengths = x.norm(dim=-1) * y.norm(dim=-1)
    there = lengths > 0
    return (x * y).sum(-1)[there] / lengths[there]


def drawn_maps(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps for drawing: mean over channels, resized to the image, scaled to [0, 1].

    >>> drawn_maps(torch.tensor([[[[0.0, 2.0]], [[0.0, 4.0]]]]), (1, 2)).tolist()
    [[[0.0, 1.0]]]
    """
    mean = maps.float().mean(1, keepdim=True)
    large = torch.nn.functional.interpolate(mean, size=size, mode="bilinear", align_corners=False).squeeze(1)
    low, high = large.amin((1, 2), keepdim=True), large.amax((1, 2), keepdim=True)
    return (large - low) / (high - low).clamp_min(1e-12)
