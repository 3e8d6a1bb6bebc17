"""Image transforms on whole batches, where the batch is: pure functions of images and one parameter per image.

Each transform comes with a drawer that turns uniform numbers into its parameters; nothing reads a value on the host, so
that a captured graph may hold them. `chains` has the augmentations of the papers, which `augment` applies in training.
"""

from __future__ import annotations

from fednorms.transforms.chains import CHAINS
from fednorms.transforms.colour import adjust, colour_constancy, draw_tone, normalise
from fednorms.transforms.crop import centre_crop, crop, draw_crop
from fednorms.transforms.cutout import cutout, draw_centre
from fednorms.transforms.flip import draw_choice, flip
from fednorms.transforms.warp import affine, between, rotate

__all__ = [
    "CHAINS",
    "adjust",
    "affine",
    "between",
    "centre_crop",
    "colour_constancy",
    "crop",
    "cutout",
    "draw_centre",
    "draw_choice",
    "draw_crop",
    "draw_tone",
    "flip",
    "normalise",
    "rotate",
]
