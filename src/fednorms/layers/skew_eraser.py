"""A layer in two halves: few filters that all sites share, then a norm and a cheap expansion that remove a site's skew.

Paper: Federated Learning with Domain Shift Eraser. Wang et al. CVPR 2025. https://arxiv.org/abs/2503.13063
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from fednorms.core import noise
from fednorms.core.norms import is_batchnorm
from fednorms.core.surgery import Change, swap
from fednorms.layers.replacement import place, refuse_other_forward, width


class EraserNorm(_BatchNorm):
    """The batch normalization in a skew eraser, of maps or vectors."""

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        pass


class EraserConv2d(nn.Conv2d):
    """The depthwise convolution in a skew eraser."""


class SkewEraser(nn.Module):
    """y = [z, D z] + b, cut to T channels, with z = relu(BN(E x)) of ceil(T / ratio) channels.

    E takes the place of a convolution or linear layer with T outputs and has its first filters. D is a depthwise
    convolution with ratio - 1 filters per channel (of one number each, for vectors). activate=False leaves out relu.

    >>> layer, x = SkewEraser.like(nn.Conv2d(3, 5, 3)), torch.rand(2, 3, 8, 8)
    >>> layer(x).shape, layer.extract.out_channels
    (torch.Size([2, 5, 6, 6]), 3)
    >>> SkewEraser.like(nn.Linear(4, 6))(torch.rand(3, 4)).shape
    torch.Size([3, 6])
    """

    def __init__(self, extract: nn.Conv2d | nn.Linear, channels: int, ratio: int, kernel: int, activate: bool) -> None:
        super().__init__()
        few, where = len(extract.weight), place(extract)
        self.channels, self.activate = channels, activate
        kernel = kernel if isinstance(extract, nn.Conv2d) else 1
        self.extract = extract
        self.norm = EraserNorm(few, **where)
        sizes = {"padding": kernel // 2, "groups": few, "bias": False}
        self.expand = EraserConv2d(few, few * (ratio - 1), kernel, **sizes, **where)  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.zeros(channels, **where))

    @classmethod
    def like(
        cls, old: nn.Conv2d | nn.Linear, name: str = "", ratio: int = 2, kernel: int = 3, activate: bool = True
    ) -> SkewEraser:
        """Take the first filters of a layer; draw the expansion's first weights, with a seed hashed from these filters.

        Runs with other seeds therefore start from other weights.
        """
        channels = len(old.weight)
        few = math.ceil(channels / ratio)
        extract: nn.Conv2d | nn.Linear
        if isinstance(old, nn.Conv2d):
            refuse_other_forward(old, nn.Conv2d, name)
            sizes = (old.kernel_size, old.stride, old.padding, old.dilation)
            extract = nn.Conv2d(
                old.in_channels,
                few,
                *sizes,  # type: ignore[arg-type]
                bias=old.bias is not None,
                padding_mode=old.padding_mode,  # type: ignore[arg-type]
                **place(old),
            )
        else:
            refuse_other_forward(old, nn.Linear, name)
            extract = nn.Linear(old.in_features, few, bias=old.bias is not None, **place(old))
        new = cls(extract, channels, ratio, kernel, activate)
        generator = torch.Generator().manual_seed(
            noise.seed_of("skew eraser", name, *old.weight.detach().flatten()[:64].tolist())
        )
        bound = 1 / new.expand.kernel_size[0]  # what torch draws from
        # On the CPU and in float32: every device and dtype must start from the same numbers.
        drawn = torch.empty(new.expand.weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            new.expand.weight.copy_(drawn)
            extract.weight.copy_(old.weight[:few])
            if old.bias is not None and extract.bias is not None:
                extract.bias.copy_(old.bias[:few])
        return new.requires_grad_(old.weight.requires_grad).train(old.training)

    def forward(self, input: Tensor) -> Tensor:
        """The channels of (N, C) or (N, C, H, W) without the site's skew."""
        z = self.norm(self.extract(input))
        if self.activate:
            z = torch.relu(z)
        wide = self.expand(z) if z.dim() == 4 else self.expand(z[..., None, None]).flatten(1)
        y = torch.cat([z, wide], 1)[:, : self.channels]
        return y + self.bias.view(-1, *[1] * (y.dim() - 2))

    def extra_repr(self) -> str:
        """The number of outputs, and whether there is a relu."""
        return f"{self.channels}, activate={self.activate}"


def erase_skew(model: nn.Module, head: Sequence[str], ratio: int, kernel: int, activate: bool) -> list[Change]:
    """Replace the convolutions and linear layers that a BatchNorm follows in the order of modules.

    Classifiers (`head`) and convolutions with groups are kept.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    >>> [str(change) for change in erase_skew(net, [], ratio=2, kernel=3, activate=True)]
    ['0: Conv2d(3, 4, 3x3) -> SkewEraser(4)']
    """
    heads = [model.get_submodule(name) for name in head]
    chosen: set[nn.Module] = set()
    before: nn.Module | None = None
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            splits = getattr(module, "groups", 1) == 1 and not any(module is h for h in heads)
            before = module if splits else None
        elif before is not None and is_batchnorm(module):
            if width(module) == len(before.get_parameter("weight")):
                chosen.add(before)
            before = None

    def make(old: nn.Module, name: str) -> nn.Module:
        assert isinstance(old, (nn.Conv2d, nn.Linear))
        return SkewEraser.like(old, name, ratio, kernel, activate)

    return swap(model, lambda m: m in chosen, make)
