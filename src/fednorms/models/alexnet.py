"""The AlexNet of FedBN and FedWon, for images of any size from 63 pixels on; torchvision's widths.

Papers:
    Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, arXiv 2014,
    https://arxiv.org/abs/1404.5997 (the widths 64, 192, 384, 256, 256)
    Krizhevsky, Sutskever, Hinton, ImageNet Classification with Deep Convolutional Neural Networks, NIPS 2012,
    https://doi.org/10.1145/3065386
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
    https://arxiv.org/abs/2102.07623
    Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without Normalization, ICLR 2024,
    https://arxiv.org/abs/2306.05879
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput

_SMALLEST = 63  # with fewer pixels, nothing is left for the third pooling


class AlexNet(nn.Module):
    """Five convolutions with batch normalization and three linear layers.

    conv 64 (11x11, stride 4), conv 192 (5x5), conv 384, 256, 256 (3x3), each with norm and ReLU; max 3x3 stride 2 after
    the first, second and last; mean over a 6x6 grid; two linear layers of 4096; linear `classes`. between="dropout"
    (FedWon, ICLR 2024): Dropout(0.5), linear, ReLU; 57,047,114 parameters at 10 classes. between="norm" (FedBN, ICLR
    2021): linear, BatchNorm1d, ReLU; 57,063,498 parameters. Features are the 4096 values before the head.

    >>> with torch.device("meta"):
    ...     AlexNet(10)(torch.zeros(2, 3, 256, 256)).shape
    torch.Size([2, 10])
    """

    size = 256
    feature_dim = 4096

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        size: int = 256,
        between: Literal["dropout", "norm"] = "dropout",
        p: float = 0.5,
    ) -> None:
        super().__init__()
        _require(size, size)
        # FedWon's table for its GroupNorm comparison.
        self.gn_groups = {"norm1": 32, "norm2": 32, "norm3": 64, "norm4": 64, "norm5": 64}
        self.conv1 = nn.Conv2d(channels, 64, 11, stride=4, padding=2)
        self.norm1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(192)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(384)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.norm4 = nn.BatchNorm2d(256)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.norm5 = nn.BatchNorm2d(256)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2)
        self.stages = {"stage1": 64, "stage2": 192, "stage3": 384, "stage4": 256, "stage5": 256}  # ends of the blocks
        self.stage1, self.stage2, self.stage3 = nn.Identity(), nn.Identity(), nn.Identity()
        self.stage4, self.stage5 = nn.Identity(), nn.Identity()
        dropout = between == "dropout"
        self.drop1: nn.Module = nn.Dropout(p) if dropout else nn.Identity()
        self.fc1 = nn.Linear(256 * 6 * 6, 4096)
        self.norm6: nn.Module = nn.Identity() if dropout else nn.BatchNorm1d(4096)
        self.drop2: nn.Module = nn.Dropout(p) if dropout else nn.Identity()
        self.fc2 = nn.Linear(4096, 4096)
        self.norm7: nn.Module = nn.Identity() if dropout else nn.BatchNorm1d(4096)
        self.head = nn.Linear(4096, classes)

    def features(self, x: Tensor) -> Tensor:
        """The 4096 penultimate values of each image."""
        _require(*x.shape[-2:])
        x = self.stage1(self.pool(self.relu(self.norm1(self.conv1(x)))))
        x = self.stage2(self.pool(self.relu(self.norm2(self.conv2(x)))))
        x = self.stage3(self.relu(self.norm3(self.conv3(x))))
        x = self.stage4(self.relu(self.norm4(self.conv4(x))))
        x = self.stage5(self.pool(self.relu(self.norm5(self.conv5(x)))))
        x = six_by_six(x).flatten(1)
        x = self.relu(self.norm6(self.fc1(self.drop1(x))))
        y: Tensor = self.relu(self.norm7(self.fc2(self.drop2(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, H, W)."""
        y: Tensor = self.head(self.features(x))
        return y


def six_by_six(x: Tensor) -> Tensor:
    """Adaptive averages over a 6x6 grid, made of slices: adaptive pooling has no deterministic gradient on a GPU.

    Cell i spans rows floor(i h / 6) to ceil((i + 1) h / 6), as in torch.

    >>> x = torch.randn(1, 2, 7, 5)
    >>> torch.allclose(six_by_six(x), F.adaptive_avg_pool2d(x, 6), atol=1e-6)
    True
    """
    height, width = x.shape[-2:]
    if height % 6 == 0 and width % 6 == 0:
        return F.avg_pool2d(x, (height // 6, width // 6))
    return _averages(_averages(x, 2), 3)


def _averages(x: Tensor, axis: int) -> Tensor:
    n = x.shape[axis]
    spans = [(i * n // 6, -(-(i + 1) * n // 6)) for i in range(6)]
    return torch.stack([x.narrow(axis, a, b - a).mean(axis) for a, b in spans], axis)


def _require(height: int, width: int) -> None:
    if min(height, width) < _SMALLEST:
        raise BadInput(
            f'Model "alexnet" takes images of at least {_SMALLEST} pixels, got {height}x{width}. Resize them.'
        )
