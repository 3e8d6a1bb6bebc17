"""Batch and instance normalization side by side, weighed by a softmax of two learned scores.

Paper: Efficiently Assemble Normalization Layers and Regularization for Federated Domain Generalization. Le et al. CVPR
2024. https://arxiv.org/abs/2403.15605
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, norm_layer
from fednorms.layers.replacement import (
    finite_momentum,
    keep_parameters,
    keep_statistics,
    place,
    refuse_single_positions,
    width,
)


@norm_layer(Statistics())
class AssembledNorm(nn.Module):
    """y = a BN(x) + (1 - a) IN(x), (a, 1 - a) = softmax(scores); both have their own gain and shift.

    The tensors of the batch normalization keep their names, those of the instance normalization start from its gain
    and shift, and both scores start equal. In evaluation, batch normalization uses its running statistics.

    >>> layer = AssembledNorm(3)
    >>> sorted(layer.state_dict())[:4]
    ['bias', 'instance_bias', 'instance_weight', 'num_batches_tracked']
    >>> x = torch.rand(2, 3, 4, 4)
    >>> both = nn.BatchNorm2d(3)(x), nn.InstanceNorm2d(3)(x)
    >>> torch.allclose(layer(x), (both[0] + both[1]) / 2)
    True
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum = channels, eps, momentum
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight: nn.Parameter | None = nn.Parameter(ones.clone())
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros_like(ones))
        self.instance_weight, self.instance_bias = nn.Parameter(ones.clone()), nn.Parameter(torch.zeros_like(ones))
        self.scores = nn.Parameter(ones.new_ones(2))
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones.clone())
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))

    @classmethod
    def like(cls, norm: nn.Module, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine, running statistics, momentum and eps."""
        refuse_single_positions(norm, "instance normalization", name)
        momentum, eps = finite_momentum(norm, name), float(getattr(norm, "eps", 1e-5))
        new = cls(width(norm, name), eps, momentum, **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        keep_statistics(norm, new.running_mean, new.running_var, new.num_batches_tracked)
        with torch.no_grad():
            for own, old in ((new.instance_weight, new.weight), (new.instance_bias, new.bias)):
                if old is not None:
                    own.copy_(old)
        return keep_act(norm, new)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        if self.training:
            self.num_batches_tracked.add_(1)
        kept = self.running_mean, self.running_var, self.weight, self.bias
        batch = F.batch_norm(x, *kept, self.training, self.momentum, self.eps)
        instance = F.instance_norm(x, weight=self.instance_weight, bias=self.instance_bias, eps=self.eps)
        share = self.scores.softmax(0)
        return share[0] * batch + share[1] * instance

    def extra_repr(self) -> str:
        """Width, momentum and eps."""
        return f"{self.channels}, momentum={self.momentum}, eps={self.eps}"
