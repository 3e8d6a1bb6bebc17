"""A small network for small images, the default for the embedded digits. Not published; it trains in seconds."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with batch normalization and one linear layer; 15,786 parameters at 10 classes.

    conv 16, norm, ReLU, max 2; conv 32, norm, ReLU, max 2; conv 32, norm, ReLU; mean over a 2x2 grid; linear.
    Takes images of any size from 8 pixels on.

    >>> import torch
    >>> SmallCNN(10, channels=1)(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """

    size = 16
    feature_dim = 128

    def __init__(self, classes: int, channels: int = 3, size: int = 16) -> None:
        super().__init__()
        if size < 8:
            raise BadInput(f'Model "cnn-small" takes images of at least 8 pixels, got {size}. Resize them.')
        self.gn_groups = {"norm1": 8, "norm2": 8, "norm3": 8}
        self.stages = {"stage1": 16, "stage2": 32, "stage3": 32}  # ends of the blocks and their channels
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.stage1, self.stage2, self.stage3 = nn.Identity(), nn.Identity(), nn.Identity()
        self.head = nn.Linear(self.feature_dim, classes)

    def features(self, x: Tensor) -> Tensor:
        """The 128 penultimate values of each image."""
        height, width = x.shape[-2:]
        if min(height, width) < 8:
            raise BadInput(f'Model "cnn-small" takes images of at least 8 pixels, got {height}x{width}. Resize them.')
        x = self.stage1(self.pool(self.relu(self.norm1(self.conv1(x)))))
        x = self.stage2(self.pool(self.relu(self.norm2(self.conv2(x)))))
        x = self.stage3(self.relu(self.norm3(self.conv3(x))))
        # Windows that always give 2x2 positions: adaptive pooling has no deterministic gradient on a GPU.
        h, w = x.shape[-2:]
        x = F.avg_pool2d(x, (h - h // 2, w - w // 2), stride=(h // 2, w // 2))
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, H, W)."""
        y: Tensor = self.head(self.features(x))
        return y
