"""Federations made of the digits that come with scikit-learn: nothing is downloaded.

Data: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998,
https://doi.org/10.24432/C50P49
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fednorms.core.preprocessing import Preprocessing
from fednorms.data.arrays import from_arrays
from fednorms.data.digits_shift import real_digits
from fednorms.data.federation import Federation
from fednorms.data.generate.blended_digits import mnist_m
from fednorms.data.generate.corruptions import corrupted_federation
from fednorms.data.generate.rendered_digits import synth_digits
from fednorms.data.generate.shifts import shift
from fednorms.data.splits import split

_CLASSES = [str(digit) for digit in range(10)]


def digits_dials(
    size: int = 16,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
    clients: int = 5,
    label: float = 0.0,
    feature: float = 0.0,
) -> Federation:
    """Make the federation "digits-dials": `shift` of the 1,797 digits, with chosen label shift and feature shift.

    >>> len(digits_dials(clients=3).clients)
    3
    """
    x, y = _digits(size)
    made = shift(x, y, _CLASSES, clients, label, feature, val, test, seed)
    return replace(made, preprocessing=Preprocessing.centered(3))


def digits_corrupted(
    size: int = 16, seed: int = 0, val: float = 0.1, test: float = 0.2, severity: int = 4
) -> Federation:
    """Make the federation "digits-corrupted": nineteen clients, each with one corruption of CIFAR-10-C.

    All clients have the same digits; nobody trains on a digit that another client is tested on. The corruptions'
    constants are made for 32 pixels.

    >>> len(digits_corrupted(size=8).clients)
    19
    """
    x, y = _digits(size)
    count = len(x)
    made = corrupted_federation(x, y, _CLASSES, severity, test=round(test * count), seed=seed, val=round(val * count))
    return replace(made, preprocessing=Preprocessing.centered(3))


def digits_styles(size: int = 16, seed: int = 0, val: float = 0.1, test: float = 0.2) -> Federation:
    """Make the federation "digits-styles": handwritten digits, digits blended into photographs, and rendered digits.

    A small counterpart of MNIST, MNIST-M and SynthDigits. The photographs are scikit-learn's two sample images; the
    handwritten and the blended digits are different ones.

    >>> digits_styles()
    Federation 'digits-styles': 3 sites, 10 classes, images 3x16x16
    site         domain       train  val  test  classes
    handwritten  handwritten    629   90   180  10/10
    blended      blended        628   90   180  10/10
    rendered     rendered       629   90   180  10/10
    """
    from sklearn.datasets import load_sample_images  # here, because it takes a second to import

    x, y = _digits(size)
    half = split(y, {"handwritten": 0.5, "blended": 0.5}, seed, "digits-styles")
    pairs = {site: (x[at], y[at]) for site, at in half.items()}
    gray, labels = pairs["blended"]
    pairs["blended"] = (mnist_m(gray[:, 0], load_sample_images().images, seed), labels)
    pairs["rendered"] = synth_digits(len(half["handwritten"]), seed, size)
    made = from_arrays(pairs, _CLASSES, val, test, seed, "NCHW", name="digits-styles")
    return replace(made, source={"spec": "digits-styles", "size": size, "seed": seed, "val": val, "test": test})


def _digits(size: int) -> tuple[Tensor, Tensor]:
    """The digits as uint8 of shape (N, 3, size, size), enlarged from 8x8 pixels (bilinear), and their labels."""
    images, labels = real_digits()
    x = torch.from_numpy(images / 16).float().unsqueeze(1)
    x = functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False).clamp(0, 1)
    return (x * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(labels)
