"""Channel attention: a gate that scales each channel by what all channels see on average.

Paper: Squeeze-and-Excitation Networks. Hu, Shen and Sun. CVPR 2018. https://arxiv.org/abs/1709.01507
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.norms import is_norm
from fednorms.core.surgery import Change, swap
from fednorms.layers.nf_residual import branch_ends
from fednorms.layers.no_norm import no_norm_like
from fednorms.layers.replacement import place, width


class ChannelAttention(nn.Module):
    """Squeeze and excitation: x times gain sigmoid(W2 relu(W1 z)) per channel, z the mean of x over positions.

    W1 has channels / ratio rows, at least one. A vector is its own mean.

    >>> gate, x = ChannelAttention(4, gain=2.0), torch.rand(2, 4, 3, 3)
    >>> _ = nn.init.zeros_(gate.expand.weight)
    >>> torch.equal(gate(x), x)
    True
    """

    def __init__(
        self,
        channels: int,
        ratio: int = 16,
        gain: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.gain = channels, gain
        hidden = max(channels // ratio, 1)
        self.squeeze = nn.Linear(channels, hidden, bias=False, device=device, dtype=dtype)
        self.expand = nn.Linear(hidden, channels, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Scaled channels of (N, C, ...)."""
        z = input.flatten(2).mean(2) if input.dim() > 2 else input
        scale = self.gain * torch.sigmoid(self.expand(torch.relu(self.squeeze(z))))
        return input * scale.view(*scale.shape, *[1] * (input.dim() - 2))


def attend(model: nn.Module, head: Sequence[str], ratio: int = 16, gain: float = 1.0) -> list[Change]:
    """Put a gate in place of the norm that ends each residual branch, and remove all other norms.

    In a network without residual blocks, every norm becomes a gate. The gates' first weights are hashed from their
    names and the classifier's first weights, so runs with other seeds start from other ones.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    >>> [str(change) for change in attend(net, ["3"])]
    ['1: BatchNorm2d(8) -> ChannelAttention(8)']
    """
    ends = branch_ends(model)
    start = model.get_submodule(head[0]).get_parameter("weight").detach().flatten()[:64].tolist()

    def make(norm: nn.Module, name: str) -> nn.Module:
        if ends and not any(norm is end for end in ends):
            return no_norm_like(norm)
        gate = ChannelAttention(width(norm, name), ratio, gain, **place(norm))
        generator = torch.Generator().manual_seed(noise.seed_of("channel attention", name, *start))
        for layer in (gate.squeeze, gate.expand):
            # On the CPU and in float32: every device and dtype must start from the same numbers.
            bound = layer.in_features**-0.5
            drawn = torch.empty(layer.weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                layer.weight.copy_(drawn)
        return gate.train(norm.training)

    return swap(model, is_norm, make)
