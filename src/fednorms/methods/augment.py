"""Augment: random transforms of the training images, as the papers' data sets have them."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fednorms.part import Part, option, part
from fednorms.transforms.chains import CHAINS, TEST_CHAINS
from fednorms.views import Step


@part("augment")
class Augment(Part):
    """Transform every training image at random, another way each time it is used; test images stay as they are.

    crop_flip: zero-pad 4 and crop, flip (FedBABU, FedFN). crop_flip_cutout: and a square of 16 (FedNTD, EasyFL).
    feddyn: flip; with probability 1/2 pad 4 with the mean colour and crop (FedDyn, FedDC; feddyn_cifar100 has its
    colour). flip_rotate: flip, rotate up to 30 degrees (FedBN's Office and DomainNet, GReg). fairface: affine (10
    degrees, 0.1, 0.9 to 1.1) and flip, each with probability 1/2. isic: FLamby's, with a crop of 200 of 224 pixels,
    from the centre in tests. Acts on the data, on the device; parameters x' = T(x; theta), theta from keyed uniforms
    per image. No state. Divergence: isic resamples once where the released code does so three times.

    >>> Augment(chain="flip_rotate")
    augment(chain='flip_rotate')
    """

    paper = "He et al. 2016; DeVries and Taylor 2017"

    chain: str = option("crop_flip", choices=tuple(CHAINS))

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        if not s.context.evaluating:
            return CHAINS[self.chain](x, s.uniform), y
        return (TEST_CHAINS[self.chain](x, s.uniform) if self.chain in TEST_CHAINS else x), y
