"""Representative batch normalization: BatchNorm with a calibration of every sample before and after.

Paper: Representative Batch Normalization with Feature Calibration. Gao et al. CVPR 2021.
https://openaccess.thecvf.com/content/CVPR2021/html/Gao_Representative_Batch_Normalization_With_Feature_Calibration_CVPR_2021_paper.html
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.moments import affine, per_channel
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, Tensors, norm_layer, unbiased_batch_moments
from fednorms.layers.replacement import finite_momentum, keep_parameters, keep_statistics, place, width


def pooled(x: Tensor) -> Tensor:
    """The mean over positions of x (N, C, ...), kept broadcastable; x itself if there are none.

    >>> pooled(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 1, 1])
    """
    return x.mean(tuple(range(2, x.dim())), keepdim=True) if x.dim() > 2 else x


def centred(x: Tensor, centre: Tensor) -> Tensor:
    """What the layer normalizes: x + w_m GAP(x), w_m the vector `centre`.

    >>> centred(torch.tensor([[[1.0, 3.0]]]), torch.tensor([-1.0]))
    tensor([[[-1.,  1.]]])
    """
    return x + per_channel(centre, x) * pooled(x)


def _measure(layer: nn.Module, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    return unbiased_batch_moments(layer, tensors, centred(x, tensors["centre"]))


@norm_layer(Statistics(measure=_measure))
class RepresentativeNorm(nn.Module):
    """Batch normalization that centers with, and scales by, a feature of each sample.

    x <- x + w_m GAP(x);  z = batch normalization of x;  y = gamma z sigmoid(w_v GAP(z) + w_b) + beta, all per channel;
    w_m = 0, w_v = 0, w_b = 1 at the start, where y = sigmoid(1) BN(x) = 0.731 BN(x). GAP is the mean over positions.
    Running statistics are BatchNorm's, of the centered input.

    >>> layer, x = RepresentativeNorm(2), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> torch.allclose(layer(x), 0.731059 * nn.BatchNorm1d(2)(x))
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
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum = channels, eps, momentum
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if affine else None
        self.centre = nn.Parameter(torch.zeros_like(ones))
        self.scale_weight = nn.Parameter(torch.zeros_like(ones))
        self.scale_bias = nn.Parameter(ones.clone())
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones.clone())
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))

    @classmethod
    def like(cls, norm: nn.Module, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine, running statistics, momentum and eps."""
        momentum = finite_momentum(norm, name)
        new = cls(width(norm, name), float(getattr(norm, "eps", 1e-5)), momentum, **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        keep_statistics(norm, new.running_mean, new.running_var, new.num_batches_tracked)
        return keep_act(norm, new)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        if self.training:
            self.num_batches_tracked.add_(1)
        z = F.batch_norm(
            centred(x, self.centre),
            self.running_mean,
            self.running_var,
            None,
            None,
            self.training,
            self.momentum,
            self.eps,
        )
        gate = torch.sigmoid(per_channel(self.scale_weight, x) * pooled(z) + per_channel(self.scale_bias, x))
        return affine(z * gate, self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Width, momentum and eps."""
        return f"{self.channels}, momentum={self.momentum}, eps={self.eps}"
