"""Adaptive group normalization of FedNN: a learned mixture of batch and group statistics in every layer.

Paper: FedNN: Federated learning on concept drift data using weight and adaptive group normalizations. Kang et al.
Pattern Recognition 149, 2024. https://doi.org/10.1016/j.patcog.2023.110230
Paper: Categorical Reparameterization with Gumbel-Softmax. Jang, Gu and Poole. ICLR 2017.
https://arxiv.org/abs/1611.01144
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.moments import coarser, group_moments, instance_moments, rescaled
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import Statistics, Tensors, norm_layer
from fednorms.layers.replacement import has_trained, keep_parameters, keep_statistics, named, place, width

Variant = Literal["paper", "author"]
EvalMode = Literal["soft", "hard", "sample"]


def mixed_normalize(
    x: Tensor,
    share: Tensor,
    bn: tuple[Tensor, Tensor],
    gn: tuple[Tensor, Tensor],
    variant: Variant = "paper",
    eps: float = 1e-5,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(x - mu) gamma / sigma + beta with mu = s_bn mu_bn + s_gn mu_gn, share = (s_bn, s_gn).

    Moments are (mean, variance): those of bn have shape (C), those of gn (N, C).
    paper: sigma = s_bn sqrt(v_bn + eps) + s_gn sqrt(v_gn + eps).
    author: sigma = sqrt(s_bn v_bn + s_gn v_gn + eps).

    >>> x = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    >>> one = (torch.zeros(2), torch.ones(2))
    >>> torch.equal(mixed_normalize(x, torch.tensor([0.5, 0.5]), one, one, eps=0.0), x)
    True
    """
    s_bn, s_gn = share[0], share[1]
    (m_bn, v_bn), (m_gn, v_gn) = bn, gn
    mean = s_bn * m_bn + s_gn * m_gn  # (N, C)
    if variant == "paper":
        deviation = s_bn * torch.sqrt(v_bn + eps) + s_gn * torch.sqrt(v_gn + eps)
    else:
        deviation = torch.sqrt(s_bn * v_bn + s_gn * v_gn + eps)
    return rescaled(x, mean, 1 / deviation if weight is None else weight / deviation, bias)


def _measure(layer: nn.Module, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, AdaptiveGroupNorm)
    return layer.batch_statistics(x)


@norm_layer(Statistics(measure=_measure, samples=True))
class AdaptiveGroupNorm(nn.Module):
    """Normalize with a learned mixture of batch and group statistics, sampled by Gumbel-softmax in training.

    s = softmax((a + G) / tau), G = -log(-log U); y = gamma * (x - mu) / sigma + beta (see `mixed_normalize`). `logits`
    holds a in the order (bn, gn), readable as `a_bn` and `a_gn`; the public code has the reverse order. Evaluation:
    "soft" is softmax(a / tau), "hard" the larger one, "sample" as in training. The running statistics belong only to
    the batch branch: r <- keep * r + (1 - keep) * batch value. variant="author" mixes variances instead of deviations,
    with the public code's divisors, and running_var starts at 0. Inputs of shape (N, C) count as one position.

    freeze_on_saturation (public code): once a share drawn in training is one-hot in float32, max s - min s >= 1, it is
    stored in the buffer `choice` (until then 0), and the layer uses it from then on: it no longer samples, and its
    logits have no gradient.

    >>> layer = AdaptiveGroupNorm(4, groups=2)
    >>> sorted(layer.state_dict())
    ['bias', 'logits', 'running_mean', 'running_var', 'tau', 'weight']
    >>> layer.eval()(torch.zeros(2, 4, 3, 3)).shape
    torch.Size([2, 4, 3, 3])
    """

    running_mean: Tensor
    running_var: Tensor
    tau: Tensor
    choice: Tensor | None

    def __init__(
        self,
        channels: int,
        groups: int = 2,
        variant: Variant = "paper",
        eval_mode: EvalMode = "soft",
        eps: float = 1e-5,
        keep: float = 0.997,
        tau: float = 5.0,
        stream: int = 0,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "",
        freeze_on_saturation: bool = False,
    ) -> None:
        super().__init__()
        if channels % groups:
            raise BadInput(
                f"{named(name)}: {channels} channels do not divide into {groups} groups. Use groups=1 or another "
                f"divisor of {channels}."
            )
        for what, got, known in (
            ("variant", variant, ("paper", "author")),
            ("eval_mode", eval_mode, ("soft", "hard", "sample")),
        ):
            if got not in known:
                raise BadInput(f'AdaptiveGroupNorm: {what} must be one of {", ".join(known)}, got "{got}".')
        self.channels, self.groups = channels, groups
        self.variant: Variant = variant
        self.eval_mode: EvalMode = eval_mode
        self.eps, self.keep, self.stream = eps, keep, stream
        self.sampling: bool | None = None
        """Whether the share is drawn; None: in training mode. Which statistics normalize is another question: a test
        may use those of the batch, and training (GReg's second pass, FixBN) stored ones.
        """
        ones = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if affine else None
        self.logits = nn.Parameter(torch.ones(2, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones.clone() if variant == "paper" else torch.zeros_like(ones))
        self.register_buffer("tau", torch.tensor(tau, device=device, dtype=dtype))
        choice = torch.zeros(2, device=device, dtype=dtype) if freeze_on_saturation else None
        self.register_buffer("choice", choice)

    @classmethod
    def like(
        cls,
        norm: nn.Module,
        groups: int = 2,
        variant: Variant = "paper",
        eval_mode: EvalMode = "soft",
        eps: float = 1e-5,
        keep: float = 0.997,
        tau: float = 5.0,
        name: str = "",
        freeze_on_saturation: bool = False,
    ) -> nn.Module:
        """Replace a batch or group normalization layer: keep affine and the statistics that it has gathered.

        The stream is from `name`.
        """
        new = cls(
            width(norm, name),
            groups,
            variant,
            eval_mode,
            eps,
            keep,
            tau,
            noise.stream(name),
            freeze_on_saturation=freeze_on_saturation,
            name=name,
            **place(norm),
        )
        keep_parameters(norm, new, "weight", "bias")
        if has_trained(norm):
            keep_statistics(norm, new.running_mean, new.running_var)
        return keep_act(norm, new)

    @property
    def a_bn(self) -> Tensor:
        """The logit of the batch branch."""
        return self.logits[0]

    @property
    def a_gn(self) -> Tensor:
        """The logit of the group branch."""
        return self.logits[1]

    def share(self) -> Tensor:
        """The pair (s_bn, s_gn) that this call uses; it sums to 1."""
        training = self.training if self.sampling is None else self.sampling
        share = self._free_share(training)
        if self.choice is None:
            return share
        # Arithmetic instead of branches: a recorded graph takes the same path before and after the freeze.
        frozen = all_froze(self.choice)
        if training:
            drawn = share.detach().float()
            saturated = drawn.max() - drawn.min() >= 1
            one_hot = (saturated & (drawn == drawn.max())).to(self.choice)
            self.choice.copy_(torch.where(frozen, self.choice, one_hot))
            frozen = frozen | saturated
        return torch.where(frozen, self.choice.clone(), share)

    def _free_share(self, training: bool) -> Tensor:
        if training or self.eval_mode == "sample":
            # Always drawn in float32: the sample must not depend on the layer's dtype.
            u = noise.uniform((2,), self.stream, self.logits.new_empty(0, dtype=torch.float32))
            gumbel = -torch.log(-torch.log(u)).to(self.logits.dtype)
            return torch.softmax((self.logits + gumbel) / self.tau, dim=0)
        if self.eval_mode == "hard":
            bn = (self.a_bn >= self.a_gn).to(self.logits.dtype)
            return torch.stack([bn, 1 - bn])
        return torch.softmax(self.logits / self.tau, dim=0)

    def batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch branch, per channel."""
        return self._batch_from(*instance_moments(x), positions=math.prod(x.shape[2:]))

    def _batch_from(self, mean: Tensor, var: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        if self.variant == "author":
            # The public code averages unbiased per-image variances and adds the spread of the per-image means;
            # where there is one position only, that variance is undefined and taken as 0.
            var = var * _unbiased(positions)
        m, v = coarser(mean, var, axis=0)
        return m[0], v[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (N, C, ...)."""
        positions = math.prod(x.shape[2:])
        mean, var = instance_moments(x)  # the others follow from these
        if self.training:
            bn = self._batch_from(mean, var, positions)
            with torch.no_grad():
                for running, batch in zip((self.running_mean, self.running_var), bn, strict=True):
                    running.mul_(self.keep).add_(batch.detach().to(running.dtype), alpha=1 - self.keep)
        else:
            bn = self.running_mean, self.running_var
        gn = group_moments(mean, var, self.groups)
        if self.variant == "author":
            gn = gn[0], gn[1] * _unbiased(positions * self.channels // self.groups)
        return mixed_normalize(x, self.share(), bn, gn, self.variant, self.eps, self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Width, groups, variant and evaluation mode."""
        return f"{self.channels}, groups={self.groups}, variant={self.variant!r}, eval_mode={self.eval_mode!r}"


def all_froze(choice: Tensor) -> Tensor:
    """Whether a choice, or a mean of several clients' choices, has no share left that samples; up to rounding.

    >>> all_froze(torch.tensor([0.25, 0.75])).item(), all_froze(torch.tensor([0.0, 0.9])).item()
    (True, False)
    """
    return choice.sum() > 1 - 1e-6


def _unbiased(n: int) -> float:
    """What makes a variance of n values with divisor n one with divisor n - 1; that of one value stays 0."""
    return n / max(n - 1, 1)
