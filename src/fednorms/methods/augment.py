"""Augment: random transforms of the training images, as the papers' data sets have them."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.views import Step
from fednorms.transforms.chains import CHAINS


@part("augment")
class Augment(Part):
    """Transform every training image at random, another way each time it is used; test images stay as they are.

    x' = T(x; theta), theta from keyed uniforms per image. crop_flip: zero-pad 4 and crop, flip (FedBABU, FedFN).
    crop_flip_cutout: and a square of 16 (FedNTD, EasyFL). feddyn: flip; with probability 1/2 pad 4 with the mean colour
    and crop (FedDyn, FedDC; feddyn_cifar100 has its colour). flip_rotate: flip, rotate up to 30 degrees (FedBN's Office
    and DomainNet, GReg). fairface: affine (10 degrees, 0.1, 0.9 to 1.1) and flip, each with probability 1/2. isic:
    FLamby's, with a random crop of the window that the network takes. Acts on the data, on the device. No state. A run
    on a data set whose papers augment has this part by itself (`data.augment`). Divergence: isic resamples once where
    the released code does so three times, and draws the number of covered squares for every image, not once.

    >>> Augment(chain="flip_rotate")
    augment(chain='flip_rotate')
    """

    paper = "He et al. 2016; DeVries and Taylor 2017"

    chain: str = option("crop_flip", choices=tuple(CHAINS))

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        return (x if s.testing else CHAINS[self.chain](x, s.uniform, s.window)), y
