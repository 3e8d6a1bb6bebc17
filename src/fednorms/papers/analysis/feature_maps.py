"""How similar two models' feature maps of the same images are."""

from __future__ import annotations

import torch
from torch import Tensor


def map_similarity(a: Tensor, b: Tensor, *, flatten: bool = False) -> float:
    """The mean cosine of two models' maps (N x C x H x W) of the same images, over images and channels.

    Channels in which one of the two is zero are left out; `flatten` takes an image's maps as one vector. NaN if nothing
    is left. FedWon, Figure 5.

    >>> maps = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> round(map_similarity(maps, 2 * maps), 6)
    1.0
    """
    return float(map_cosines(a, b, flatten=flatten).mean())


def map_cosines(a: Tensor, b: Tensor, *, flatten: bool = False) -> Tensor:
    """The cosines themselves, of all pairs in which neither map is zero.

    >>> map_cosines(torch.eye(2).view(1, 2, 1, 2), torch.ones(1, 2, 1, 2) * torch.tensor([1.0, 0.0])).tolist()
    [1.0, 0.0]
    """
    start = 1 if flatten else 2
    x, y = a.double().flatten(start), b.double().flatten(start)
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
