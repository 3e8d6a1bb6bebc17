"""Group normalization in place of batch normalization, with the group counts that papers use.

Paper: Group Normalization. Wu and He. ECCV 2018. https://arxiv.org/abs/1803.08494
Paper: Layer Normalization. Ba, Kiros and Hinton. arXiv 2016. https://arxiv.org/abs/1607.06450
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.norm_act import keep_act
from fednorms.layers.replacement import keep_parameters, named, place, width


def paper_groups(channels: int) -> int:
    """The number of groups in FedWon's comparison for a width: 32; 8 below 32 channels; 24 at 144 channels.

    From the appendix of FedWon; it divides every width of ResNet-18 and MobileNetV2.

    >>> [paper_groups(c) for c in (16, 64, 144)]
    [8, 32, 24]
    """
    if channels == 144:
        return 24
    return 8 if channels < 32 else 32


def group_norm_like(norm: nn.Module, groups: int | Callable[[int], int] = paper_groups, name: str = "") -> nn.Module:
    """GroupNorm in place of a normalization layer, keeping its affine parameters and eps.

    y = gamma (x - mu) / sqrt(v + eps) + beta, mu and v (biased) per sample and group of channels. groups=1 is the "LN"
    of the federated literature (statistics over C, H, W and a per-channel affine). `groups` may be a rule from width to
    groups.

    >>> group_norm_like(nn.BatchNorm2d(6), groups=2).num_groups
    2
    """
    channels = width(norm, name)
    count = groups(channels) if callable(groups) else groups
    if count < 1 or channels % count:
        raise BadInput(
            f"{named(name)}: {channels} channels do not divide into {count} groups. Use a divisor of {channels}, "
            "groups=1 for example."
        )
    new = nn.GroupNorm(count, channels, eps=float(getattr(norm, "eps", 1e-5)), **place(norm))
    affine = getattr(norm, "weight", None) is not None
    new.affine = affine
    keep_parameters(norm, new, "weight", "bias")
    return keep_act(norm, new)
