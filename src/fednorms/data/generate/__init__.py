"""Generated data: corrupted images, MNIST-M, rendered digits, and federations with chosen shifts.

`fednorms.federation` opens them as "digits-corrupted", "digits-styles" and "digits-dials".
"""

from __future__ import annotations

from fednorms.data.generate.blended_digits import mnist_m
from fednorms.data.generate.corruptions import APPROXIMATE, CORRUPTIONS, corrupt, corrupted_federation
from fednorms.data.generate.rendered_digits import synth_digits
from fednorms.data.generate.shifts import shift

__all__ = [
    "APPROXIMATE",
    "CORRUPTIONS",
    "corrupt",
    "corrupted_federation",
    "mnist_m",
    "shift",
    "synth_digits",
]
