"""Batch normalization mixed with statistics that the server sent: the four alternatives that GReg is compared with.

Paper: Improving Batch Normalization in Federated Learning with Non-IID Features. Anonymous authors. Submission 17440 to
ICLR 2026. https://openreview.net/forum?id=225qfh0CoD
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.core.moments import affine, batch_moments, per_channel
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, Tensors, norm_layer
from fednorms.layers.folding import plain_batchnorm
from fednorms.layers.replacement import finite_momentum, keep_parameters, keep_statistics, place, width

Kind = Literal["global", "fixed", "learned", "ensemble"]
KINDS = ("global", "fixed", "learned", "ensemble")


def _normalize(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (x - per_channel(mean, x)) * per_channel(torch.rsqrt(var + eps), x)


def mixed_statistics(x: Tensor, mean: Tensor, var: Tensor, lam: Tensor | float, eps: float = 1e-5) -> Tensor:
    """Normalize with mu = (1 - lam) mu_b + lam mu_g and v = (1 - lam) v_b + lam v_g, without affine.

    Appendix E.3 of the paper. lam = 0 is batch normalization, lam = 1 uses only the given statistics.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> mixed_statistics(x, torch.zeros(1), torch.ones(1), lam=1.0, eps=0.0).flatten().tolist()
    [1.0, 3.0]
    """
    batch_mean, batch_var = batch_moments(x)
    return _normalize(x, (1 - lam) * batch_mean + lam * mean, (1 - lam) * batch_var + lam * var, eps)


def _batch_only(layer: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    return {"active": torch.zeros_like(tensors["active"])}


@norm_layer(Statistics(batch_only=_batch_only))
class MixedNorm(nn.Module):
    """Batch normalization that, while `active`, mixes in the statistics sent by the server in training.

    Normalization in training by kind (mu_b, v_b of the batch, mu_g, v_g as sent): "global": (mu_g, v_g); "fixed": (1 -
    lam) batch + lam sent; "learned": the same with lam = sigmoid(mix), mix initially 0; "ensemble": the mean of the two
    normalized activations. Then gamma, beta. Appendix E.3 of the paper. The running estimates always follow the batch
    statistics as in BatchNorm, and evaluation uses them. With active = 0 the layer is BatchNorm bit for bit. The owner
    of `sent_mean`, `sent_var` and `active` writes them.

    >>> layer = MixedNorm(2, kind="learned")
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> torch.equal(layer(x), nn.BatchNorm1d(2)(x))
    True
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    sent_mean: Tensor
    sent_var: Tensor
    active: Tensor

    def __init__(
        self,
        channels: int,
        kind: Kind = "fixed",
        lam: float = 0.5,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise BadInput(f'MixedNorm: kind must be one of {", ".join(KINDS)}, got "{kind}".')
        if not 0 <= lam <= 1:
            raise BadInput(f"MixedNorm: lam must be between 0 and 1, got {lam}.")
        self.channels, self.lam, self.eps, self.momentum = channels, lam, eps, momentum
        self.kind: Kind = kind
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if affine else None
        self.mix = nn.Parameter(torch.zeros((), device=device, dtype=dtype)) if kind == "learned" else None
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones.clone())
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))
        self.register_buffer("sent_mean", torch.zeros_like(ones))
        self.register_buffer("sent_var", ones.clone())
        self.register_buffer("active", torch.zeros((), device=device, dtype=dtype))

    @classmethod
    def like(cls, norm: nn.Module, kind: Kind = "fixed", lam: float = 0.5, name: str = "") -> nn.Module:
        """Replace a batch normalization layer: keep affine, running statistics, momentum and eps."""
        momentum = finite_momentum(norm, name)
        new = cls(width(norm, name), kind, lam, float(getattr(norm, "eps", 1e-5)), momentum, **place(norm))
        keep_parameters(norm, new, "weight", "bias")
        keep_statistics(norm, new.running_mean, new.running_var, new.num_batches_tracked)
        new.sent_mean.copy_(new.running_mean)
        new.sent_var.copy_(new.running_var)
        return keep_act(norm, new)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        if self.training:
            self.num_batches_tracked.add_(1)
        plain = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        if not self.training:
            return plain
        # Both are computed and one is selected: a captured graph cannot branch on a tensor.
        mixed = affine(self._mixed(x), self.weight, self.bias).to(plain.dtype)
        return torch.where(self.active > 0, mixed, plain)

    def _mixed(self, x: Tensor) -> Tensor:
        if self.kind == "ensemble":
            sent = _normalize(x, self.sent_mean, self.sent_var, self.eps)
            return (sent + _normalize(x, *batch_moments(x), self.eps)) / 2
        if self.kind == "global":
            return _normalize(x, self.sent_mean, self.sent_var, self.eps)
        lam = self.lam if self.mix is None else torch.sigmoid(self.mix)
        return mixed_statistics(x, self.sent_mean, self.sent_var, lam, self.eps)

    def folded(self, dims: int) -> nn.Module:
        """BatchNorm with the running statistics."""
        found = self.running_mean, self.running_var, self.weight, self.bias
        return plain_batchnorm(dims, *found, self.eps, self.momentum)

    def extra_repr(self) -> str:
        """Width, kind, momentum and eps."""
        return f"{self.channels}, kind={self.kind!r}, lam={self.lam}, momentum={self.momentum}, eps={self.eps}"
