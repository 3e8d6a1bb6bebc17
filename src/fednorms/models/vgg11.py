"""The VGG11 without normalization of FedNTD and FedFN, for 32-pixel images.

Papers:
    Simonyan, Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015,
    https://arxiv.org/abs/1409.1556
    Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022,
    https://arxiv.org/abs/2106.03097
    Kim et al., FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning,
    NeurIPS 2023 workshop on federated learning and foundation models, https://arxiv.org/abs/2311.13267
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fednorms.models.sizes import require_size

_WIDTHS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class VGG11(nn.Module):
    """Eight 3x3 convolutions and three linear layers, no normalization; 9,750,922 parameters at 10 classes.

    conv 64, max 2; conv 128, max 2; 2 x conv 256, max 2; 2 x conv 512, max 2; 2 x conv 512, max 2; two linear layers of
    512; linear `classes`; ReLU after each but the last, no dropout. Convolutions start at N(0, 2 / (9 C_out)) with bias
    0. FedNTD (NeurIPS 2022), FedFN (2023). Features are the 512 values before the head.

    >>> import torch
    >>> VGG11(10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    size = 32
    feature_dim = 512

    def __init__(self, classes: int, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        require_size("vgg11", size, self.size)
        self.gn_groups: dict[str, int] = {}
        layers: list[nn.Module] = []
        for width in _WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        self.body = nn.Sequential(*layers)
        for layer in self.body:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, math.sqrt(2 / (9 * layer.out_channels)))
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.fc1 = nn.Linear(512, 512)
        self.fc2 = nn.Linear(512, 512)
        self.relu = nn.ReLU()
        self.head = nn.Linear(512, classes)

    def features(self, x: Tensor) -> Tensor:
        """The 512 penultimate values of each image."""
        require_size("vgg11", x.shape[-2:], self.size)
        x = self.body(x).flatten(1)
        y: Tensor = self.relu(self.fc2(self.relu(self.fc1(x))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, 32, 32)."""
        y: Tensor = self.head(self.features(x))
        return y
