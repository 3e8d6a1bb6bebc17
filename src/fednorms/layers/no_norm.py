"""Remove a normalization layer and keep everything else that it did.

Paper: FedWon: Triumphing Multi-domain Federated Learning Without Normalization. Zhuang and Lyu. ICLR 2024.
https://arxiv.org/abs/2306.05879
"""

from __future__ import annotations

from torch import nn

from fednorms.core.norm_act import keep_act


def no_norm_like(norm: nn.Module) -> nn.Module:
    """Identity in place of a normalization layer; a fused layer keeps its drop layer and activation. y = x.

    >>> no_norm_like(nn.BatchNorm2d(4))
    Identity()
    """
    identity = nn.Identity()
    identity.train(norm.training)
    return keep_act(norm, identity)
