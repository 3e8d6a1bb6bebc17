"""The MobileNet of FedBABU and FedFN, for 32-pixel images.

Papers:
    Howard et al., MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications, arXiv 2017,
    https://arxiv.org/abs/1704.04861
    Oh, Kim, Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022,
    https://arxiv.org/abs/2106.06042
    Kim et al., FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning,
    NeurIPS 2023 workshop on federated learning and foundation models, https://arxiv.org/abs/2311.13267
"""

from __future__ import annotations

from torch import Tensor, nn

from fednorms.models.sizes import require_size

_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


class MobileNetV1(nn.Module):
    """Thirteen depthwise separable blocks with batch normalization; 3,217,226 parameters at 10 classes.

    conv 32, then blocks of depthwise 3x3 and pointwise 1x1 convolution, each with norm and ReLU and without bias, up to
    1024 channels on a 2x2 grid; mean; linear `classes`. tracked=False (FedBABU, ICLR 2022; FedFN, 2023): the norms keep
    no running statistics, so test images are normalized by their batch. Features are the 1024 means before the head.

    >>> import torch
    >>> MobileNetV1(10).features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 1024])
    """

    size = 32
    feature_dim = 1024

    def __init__(self, classes: int, channels: int = 3, size: int = 32, tracked: bool = False) -> None:
        super().__init__()
        require_size("mobilenet-v1", size, self.size)
        self.body = nn.Sequential(_unit(channels, 32, 3, 1, 1, tracked))
        width = 32
        self.stages: dict[str, int] = {}  # the ends of the stages and their channels
        for out, stride in _BLOCKS:
            if stride == 2:
                self.stages[f"body.{len(self.body) - 1}"] = width
            self.body.append(_unit(width, width, 3, stride, width, tracked))
            self.body.append(_unit(width, out, 1, 1, 1, tracked))
            width = out
        self.stages[f"body.{len(self.body) - 1}"] = width
        self.head = nn.Linear(width, classes)
        # The papers have no group normalization here; 32 groups is FedWon's general rule.
        self.gn_groups = {name: 32 for name, m in self.named_modules() if isinstance(m, nn.BatchNorm2d)}

    def features(self, x: Tensor) -> Tensor:
        """The 1024 penultimate values of each image."""
        require_size("mobilenet-v1", x.shape[-2:], self.size)
        y: Tensor = self.body(x).mean((2, 3))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (N, channels, 32, 32)."""
        y: Tensor = self.head(self.features(x))
        return y


def _unit(inside: int, out: int, kernel: int, stride: int, groups: int, tracked: bool) -> nn.Sequential:
    convolution = nn.Conv2d(inside, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out, track_running_stats=tracked), nn.ReLU())
