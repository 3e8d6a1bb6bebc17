"""Instance normalization in place of batch normalization.

Paper: Instance Normalization: The Missing Ingredient for Fast Stylization. Ulyanov, Vedaldi and Lempitsky. arXiv 2016.
https://arxiv.org/abs/1607.08022
"""

from __future__ import annotations

from torch import nn

from fednorms.core.norm_act import keep_act
from fednorms.layers.replacement import keep_parameters, place, refuse_single_positions, width


def instance_norm_like(norm: nn.Module, name: str = "") -> nn.Module:
    """Instance normalization in place of a batch normalization layer, keeping its affine parameters and eps.

    y = gamma (x - mu) / sqrt(v + eps) + beta, mu and v (biased) over the positions of each sample and channel. No
    running statistics: training and evaluation are the same function.

    >>> sorted(instance_norm_like(nn.BatchNorm2d(6)).state_dict())
    ['bias', 'weight']
    """
    refuse_single_positions(norm, "instance normalization", name)
    kind = nn.InstanceNorm3d if isinstance(norm, nn.BatchNorm3d) else nn.InstanceNorm2d
    affine = getattr(norm, "weight", None) is not None
    new = kind(width(norm, name), eps=float(getattr(norm, "eps", 1e-5)), affine=affine, **place(norm))
    keep_parameters(norm, new, "weight", "bias")
    return keep_act(norm, new)
