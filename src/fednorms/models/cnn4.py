"""The four-layer network of FedBABU, for 32-pixel images.

Paper:
    Oh, Kim, Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022,
    https://arxiv.org/abs/2106.06042
"""

from __future__ import annotations

from torch import Tensor, nn

from fednorms.models.sizes import require_size


class CNN4(nn.Module):
    """Four times 3x3 convolution of width 64, norm, ReLU, max 2; one linear layer; 115,658 parameters at 10 classes.

    The norms keep no running statistics. Oh et al., FedBABU (ICLR 2022). Features are the 256 values before the head.

    >>> import torch
    >>> CNN4(10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    size = 32
    feature_dim = 256

    def __init__(self, classes: int, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        require_size("cnn4", size, self.size)
        self.body = nn.Sequential()
        for inside in (channels, 64, 64, 64):
            norm = nn.BatchNorm2d(64, track_running_stats=False)
            self.body.append(nn.Sequential(nn.Conv2d(inside, 64, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)))
        self.stages = {f"body.{i}": 64 for i in range(4)}  # ends of the blocks and their channels
        self.head = nn.Linear(self.feature_dim, classes)
        # The paper has no group normalization; 32 groups is FedWon's general rule.
        self.gn_groups = {name: 32 for name, m in self.named_modules() if isinstance(m, nn.BatchNorm2d)}

    def features(self, x: Tensor) -> Tensor:
        """The 256 penultimate values of each image."""
        require_size("cnn4", x.shape[-2:], self.size)
        y: Tensor = self.body(x).flatten(1)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, 32, 32)."""
        y: Tensor = self.head(self.features(x))
        return y
