"""Residual networks for small images: ResNet-20 (options A and B) and the ResNet-18 with a 3x3 stem.

Papers:
    He et al., Deep Residual Learning for Image Recognition, CVPR 2016, https://arxiv.org/abs/1512.03385
    Oh, Kim, Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022,
    https://arxiv.org/abs/2106.06042
    Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022,
    https://arxiv.org/abs/2106.03097
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput


class ZeroPadShortcut(nn.Module):
    """Option A of He et al. 2016: every `stride`-th position, and zeros for the new channels.

    >>> import torch
    >>> ZeroPadShortcut(2, 16)(torch.ones(1, 16, 4, 4)).shape
    torch.Size([1, 32, 2, 2])
    """

    def __init__(self, stride: int, more: int) -> None:
        super().__init__()
        self.stride, self.before, self.after = stride, more // 2, more - more // 2

    def forward(self, x: Tensor) -> Tensor:
        """The input at the block's new resolution and width."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """ReLU(x' + norm(conv(ReLU(norm(conv(x)))))) with x' the shortcut of x.

    >>> import torch
    >>> Block(4, 8, 2, "B", True)(torch.ones(2, 4, 8, 8)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, inside: int, out: int, stride: int, option: str, tracked: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out, track_running_stats=tracked)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out, track_running_stats=tracked)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if inside != out or stride != 1:
            self.shortcut = (
                ZeroPadShortcut(stride, out - inside)
                if option == "A"
                else nn.Sequential(
                    nn.Conv2d(inside, out, 1, stride, bias=False),
                    nn.BatchNorm2d(out, track_running_stats=tracked),
                )
            )
        self.end = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y: Tensor = self.end(self.relu(inner + self.shortcut(x)))
        return y


class CifarResNet(nn.Module):
    """conv 3x3, stages of blocks that halve the grid from the second on, mean, linear; any size from 8 pixels on.

    ResNet-20: widths 16, 32, 64 with three blocks each; 269,722 parameters with option A, 272,474 with option B, at 10
    classes. ResNet-18: widths 64, 128, 256, 512 with two blocks each, option B; 11,173,962. tracked=False keeps no
    running statistics (FedNTD; FedBABU's tracks them). He et al., 2016.

    >>> import torch
    >>> CifarResNet(10, widths=(4, 8), blocks=1)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    size = 32

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        size: int = 32,
        widths: Sequence[int] = (16, 32, 64),
        blocks: int = 3,
        option: Literal["A", "B"] = "A",
        tracked: bool = True,
    ) -> None:
        super().__init__()
        _require(size, size)
        self.feature_dim = widths[-1]
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0], track_running_stats=tracked)
        self.relu = nn.ReLU()
        self.stem = nn.Identity()
        layers, before = [], widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks):
                layers.append(Block(before, width, 2 if stage and not number else 1, option, tracked))
                before = width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(self.feature_dim, classes)
        ends = {f"blocks.{blocks * (stage + 1) - 1}.end": width for stage, width in enumerate(widths)}
        self.stages = {"stem": widths[0], **ends}  # ends of the stages and their channels
        # FedNN, after FedDyn's ResNet-18: two groups everywhere.
        self.gn_groups = {name: 2 for name, m in self.named_modules() if isinstance(m, nn.BatchNorm2d)}

    def features(self, x: Tensor) -> Tensor:
        """The means of the last stage's channels for each image."""
        _require(*x.shape[-2:])
        y: Tensor = self.blocks(self.stem(self.relu(self.norm(self.conv(x))))).mean((2, 3))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, H, W)."""
        y: Tensor = self.head(self.features(x))
        return y


def _require(height: int, width: int) -> None:
    if min(height, width) < 8:
        raise BadInput(f"A CIFAR ResNet takes images of at least 8 pixels, got {height}x{width}. Resize them.")
