"""The LeNet of FedDyn, FedDC and FedNN, for 32-pixel images.

Papers:
    LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proceedings of the IEEE 86(11) 1998,
    https://doi.org/10.1109/5.726791
    Acar et al., Federated Learning Based on Dynamic Regularization (FedDyn), ICLR 2021,
    https://arxiv.org/abs/2111.04263
    Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, CVPR 2022,
    https://arxiv.org/abs/2203.11751
    Kang et al., FedNN: Federated learning on concept drift data using weight and adaptive group normalizations,
    Pattern Recognition 149 (2024), 110230, https://doi.org/10.1016/j.patcog.2023.110230
"""

from __future__ import annotations

from torch import Tensor, nn

from fednorms.models.sizes import require_size


class LeNet(nn.Module):
    """Two 5x5 convolutions with batch normalization, three linear layers; 798,218 parameters at 10 classes.

    conv 64, norm, ReLU, max 2; conv 64, norm, ReLU, max 2; linear 384, ReLU; linear 192, ReLU; linear
    `classes`. FedNN (Pattern Recognition 2024). Features are the 192 values before the head.

    >>> import torch
    >>> LeNet(10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    size = 32
    feature_dim = 192

    def __init__(self, classes: int, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        require_size("lenet", size, self.size)
        # Group counts of the paper's GroupNorm variant.
        self.gn_groups = {"norm1": 2, "norm2": 2}
        self.stages = {"stage1": 64, "stage2": 64}  # ends of the blocks and their channels
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.norm1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.norm2 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.stage1, self.stage2 = nn.Identity(), nn.Identity()
        self.fc1 = nn.Linear(64 * 5 * 5, 384)
        self.fc2 = nn.Linear(384, 192)
        self.head = nn.Linear(192, classes)

    def features(self, x: Tensor) -> Tensor:
        """The 192 penultimate values of each image."""
        require_size("lenet", x.shape[-2:], self.size)
        x = self.stage1(self.pool(self.relu(self.norm1(self.conv1(x)))))
        x = self.stage2(self.pool(self.relu(self.norm2(self.conv2(x)))))
        x = self.relu(self.fc1(x.flatten(1)))
        y: Tensor = self.relu(self.fc2(x))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, 32, 32)."""
        y: Tensor = self.head(self.features(x))
        return y
