"""Data sets made here: corrupted images, MNIST-M, rendered digits, and federations with dials for their shifts."""

from __future__ import annotations

from fednorms.data.generate.corruptions import APPROXIMATE, CORRUPTIONS, corrupt, corrupted_federation
from fednorms.data.generate.mnist_m import mnist_m
from fednorms.data.generate.shift import shift
from fednorms.data.generate.synth_digits import synth_digits

__all__ = [
    "APPROXIMATE",
    "CORRUPTIONS",
    "corrupt",
    "corrupted_federation",
    "mnist_m",
    "shift",
    "synth_digits",
]
