"""Augment: random transforms of the training images, as in the papers that use a data set."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.views import Step
from fednorms.transforms.chains import CHAINS


@part("augment")
class Augment(Part):
    """Transform every training image at random each time it is used; test images stay as they are.

    Paper: Deep Residual Learning for Image Recognition. He et al. CVPR 2016. https://arxiv.org/abs/1512.03385
    Paper: Improved Regularization of Convolutional Neural Networks with Cutout. DeVries and Taylor. arXiv 2017.
    https://arxiv.org/abs/1708.04552

    x' = T(x; theta), theta from keyed uniforms per image. The chains:
    - crop_flip: pad 4 with zeros and crop, flip (FedBABU, FedFN).
    - crop_flip_cutout: also a square of 16 (FedNTD, EasyFL).
    - feddyn: flip; with probability 1/2 pad 4 with the mean color and crop (FedDyn, FedDC); feddyn_cifar100 has the
      mean color of CIFAR-100.
    - flip_rotate: flip, rotate up to 30 degrees (FedBN's Office and DomainNet, GReg).
    - fairface: affine (10 degrees, 0.1, 0.9 to 1.1) and flip, each with probability 1/2.
    - isic: FLamby's chain, with a random crop of the size that the network takes.

    Acts on the data, on the device. No state. A run on a data set whose papers augment adds this part automatically
    (`data.augment`).
    Divergence: isic resamples once where the released code resamples three times, and draws the number of covered
    squares for every image, not once.

    >>> Augment(chain="flip_rotate")
    augment(chain='flip_rotate')
    """

    paper = "He et al. 2016; DeVries and Taylor 2017"

    chain: str = option("crop_flip", choices=tuple(CHAINS))

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        return (x if s.testing else CHAINS[self.chain](x, s.uniform, s.window)), y
