"""The six-layer digits network of FedBN and FedWon, for 28-pixel images.

Papers:
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
    https://arxiv.org/abs/2102.07623
    Zhuang, Lyu, FedWon: Triumphing Multi-domain Federated Learning Without Normalization, ICLR 2024,
    https://arxiv.org/abs/2306.05879
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fednorms.models.sizes import require_size


class DigitsCNN(nn.Module):
    """Three 5x5 convolutions with batch normalization and three linear layers.

    conv 64, norm, ReLU, max 2; conv 64, norm, ReLU, max 2; conv 128, norm, ReLU; linear 2048; linear 512;
    linear `classes`. between="dropout" (FedWon, ICLR 2024): Dropout(0.5), linear, ReLU; 14,214,090 parameters
    at 10 classes. between="norm" (FedBN, ICLR 2021): linear, BatchNorm1d, ReLU; 14,219,210 parameters.
    Features are the 512 values before the head.

    >>> import torch
    >>> DigitsCNN(10).features(torch.zeros(2, 3, 28, 28)).shape
    torch.Size([2, 512])
    """

    size = 28
    feature_dim = 512

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        size: int = 28,
        between: Literal["dropout", "norm"] = "dropout",
        p: float = 0.5,
    ) -> None:
        super().__init__()
        require_size("digits-cnn", size, self.size)
        # FedWon's table for its GroupNorm comparison; the paper has no groups for FedBN's two linear layers.
        self.gn_groups = {"norm1": 32, "norm2": 32, "norm3": 64}
        self.stages = {"stage1": 64, "stage2": 64, "stage3": 128}  # ends of the blocks and their channels
        self.conv1 = nn.Conv2d(channels, 64, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(64)
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.norm3 = nn.BatchNorm2d(128)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.stage1, self.stage2, self.stage3 = nn.Identity(), nn.Identity(), nn.Identity()
        dropout = between == "dropout"
        self.drop1: nn.Module = nn.Dropout(p) if dropout else nn.Identity()
        self.fc1 = nn.Linear(128 * 7 * 7, 2048)
        self.norm4: nn.Module = nn.Identity() if dropout else nn.BatchNorm1d(2048)
        self.drop2: nn.Module = nn.Dropout(p) if dropout else nn.Identity()
        self.fc2 = nn.Linear(2048, 512)
        self.norm5: nn.Module = nn.Identity() if dropout else nn.BatchNorm1d(512)
        self.head = nn.Linear(512, classes)

    def features(self, x: Tensor) -> Tensor:
        """The 512 penultimate values of each image."""
        require_size("digits-cnn", x.shape[-2:], self.size)
        x = self.stage1(self.pool(self.relu(self.norm1(self.conv1(x)))))
        x = self.stage2(self.pool(self.relu(self.norm2(self.conv2(x)))))
        x = self.stage3(self.relu(self.norm3(self.conv3(x)))).flatten(1)
        x = self.relu(self.norm4(self.fc1(self.drop1(x))))
        y: Tensor = self.relu(self.norm5(self.fc2(self.drop2(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, 28, 28)."""
        y: Tensor = self.head(self.features(x))
        return y
