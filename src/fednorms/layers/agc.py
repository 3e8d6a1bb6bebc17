"""Adaptive gradient clipping: no unit's gradient may be large compared with the unit's weights.

Paper: High-Performance Large-Scale Image Recognition Without Normalization. Brock et al. ICML 2021.
https://arxiv.org/abs/2102.06171
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def unitwise_norm(t: Tensor) -> Tensor:
    """The norm of each unit of `t`, shaped to broadcast against it.

    A unit is an output filter of a convolution or an output row of a linear layer (axis 0 of torch's
    layouts); a tensor with at most one axis longer than 1 (bias, gain) is one unit.

    >>> unitwise_norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([[5.],
            [2.]])
    >>> unitwise_norm(torch.tensor([3.0, 4.0]))
    tensor([5.])
    """
    dtype = torch.float32 if t.dtype in _HALF else t.dtype
    single = sum(size > 1 for size in t.shape) <= 1
    axes = tuple(range(t.dim())) if single else tuple(range(1, t.dim()))
    return torch.linalg.vector_norm(t, dim=axes or None, keepdim=bool(axes), dtype=dtype)


def adaptive_clip(grad: Tensor, weight: Tensor, clip: float, eps: float = 1e-3) -> Tensor:
    """The gradient with every unit scaled down to at most `clip` times the norm of its weights.

    G_i <- clip * max(|W_i|, eps) / |G_i| * G_i where |G_i| > clip * max(|W_i|, eps); other units are returned bit for
    bit. FedWon uses it at batch size 32. `clip` may be infinite (no clipping).

    >>> adaptive_clip(torch.tensor([[3.0, 4.0], [0.1, 0.0]]), torch.eye(2), clip=0.5)
    tensor([[0.3000, 0.4000],
            [0.1000, 0.0000]])
    """
    bound = clip * unitwise_norm(weight).clamp_min(eps)
    norm = unitwise_norm(grad)
    return (grad * torch.where(norm > bound, bound / norm, 1.0)).to(grad.dtype)
