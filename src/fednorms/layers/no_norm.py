"""Remove a normalisation layer and keep everything else it did."""

from __future__ import annotations

from torch import nn

from fednorms.core.norm_act import keep_act


def no_norm_like(norm: nn.Module) -> nn.Module:
    """Identity in place of a normalisation layer; a fused layer keeps its drop layer and activation. y = x.

    FedWon (ICLR 2024) removes every normalisation layer.

    >>> no_norm_like(nn.BatchNorm2d(4))
    Identity()
    """
    identity = nn.Identity()
    identity.train(norm.training)
    return keep_act(norm, identity)
