"""Filter response normalization, with the thresholded linear unit that replaces the following ReLU.

Paper: Filter Response Normalization Layer: Eliminating Batch Dependence in the Training of Deep Neural Networks. Singh
and Krishnan. CVPR 2020. https://arxiv.org/abs/1911.09737
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.moments import affine, per_channel, widened
from fednorms.core.norm_act import NormAct, is_fused
from fednorms.core.norms import norm_layer
from fednorms.layers.replacement import keep_parameters, place, refuse_single_positions, width


def filter_response(x: Tensor, eps: Tensor | float = 1e-6) -> Tensor:
    """Each channel of a sample divided by sqrt(nu^2 + eps), nu^2 its mean square over positions; no mean is subtracted.

    >>> filter_response(torch.tensor([[[3.0, 3.0, -3.0]]]), eps=0.0)
    tensor([[[ 1.,  1., -1.]]])
    """
    square = widened(x).square().mean(tuple(range(2, x.dim())), keepdim=True)
    return x * torch.rsqrt(square + eps)


@norm_layer()
class FilterResponseNorm(nn.Module):
    """Filter response normalization, with a threshold if it has a `tau`.

    y = gamma x / sqrt(nu^2 + |eps|) + beta, nu^2 the mean square over positions; with `tlu`, z = max(y, tau), tau = 0
    at the start (then a ReLU). `learn_eps` replaces the fixed 1e-6 by a trained |e| + 1e-6 per channel, initially 1e-4
    (for maps of 1x1). Training and evaluation are the same function.

    >>> sorted(FilterResponseNorm(4).state_dict())
    ['bias', 'tau', 'weight']
    >>> FilterResponseNorm(4)(-torch.ones(1, 4, 2, 2)).abs().sum().item()
    0.0
    """

    def __init__(
        self,
        channels: int,
        tlu: bool = True,
        learn_eps: bool = False,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        zeros = torch.zeros(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.ones_like(zeros)) if affine else None
        self.bias = nn.Parameter(zeros.clone()) if affine else None
        self.tau = nn.Parameter(zeros.clone()) if tlu else None
        self.eps = nn.Parameter(torch.full_like(zeros, 1e-4)) if learn_eps else None

    @classmethod
    def like(cls, norm: nn.Module, tlu: bool = False, learn_eps: bool = False, name: str = "") -> nn.Module:
        """Replace a batch normalization layer, keeping its affine parameters; a fused ReLU becomes the threshold.

        `tlu` means that a ReLU follows the layer; the caller removes it.
        """
        refuse_single_positions(norm, "filter response normalization", name)
        act = dict(norm.named_children()).get("act") if is_fused(norm) else None
        rectified = isinstance(act, nn.ReLU)
        new = cls(width(norm, name), tlu or rectified, learn_eps, **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        if act is None:
            return new
        drop = dict(norm.named_children()).get("drop", nn.Identity())
        wrapped = NormAct(new, drop, nn.Identity() if rectified else act)
        wrapped.training = norm.training
        return wrapped

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, positions)."""
        if x.dim() < 3:
            raise BadInput(
                f"Filter response normalization needs maps (N, C, H, W), got an input of shape {tuple(x.shape)}: the "
                "mean square of a single value leaves only its sign. Choose a model that normalizes maps."
            )
        eps = 1e-6 if self.eps is None else per_channel(self.eps.abs() + 1e-6, x)
        y = affine(filter_response(x, eps), self.weight, self.bias).to(x.dtype)
        if self.tau is None:
            return y
        z = torch.maximum(y, per_channel(self.tau, y).to(y.dtype))
        vars(z)["thresholded"] = z._version  # a mark for `ReLUWithoutThreshold`
        return z

    def extra_repr(self) -> str:
        """Width, and whether it thresholds."""
        return f"{self.channels}, tlu={self.tau is not None}"


class ReLUWithoutThreshold(nn.ReLU):
    """The ReLU of a network whose norms have thresholds: it passes on unchanged what comes directly from such a norm.

    A network may use one ReLU module after norms and elsewhere (after an addition, for example); there it stays a ReLU.

    >>> relu, norm = ReLUWithoutThreshold(), FilterResponseNorm(1)
    >>> _ = norm.tau.data.fill_(-0.5)
    >>> x = torch.tensor([[[-2.0, 2.0]]])
    >>> relu(norm(x)).min().item(), relu(x).min().item()
    (-0.5, 0.0)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Max(x, 0), or x if a threshold was just applied."""
        # The version tells whether something was added in place since (torchvision's residual blocks do that).
        return input if vars(input).get("thresholded") == input._version else super().forward(input)
