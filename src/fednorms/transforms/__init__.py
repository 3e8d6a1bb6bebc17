"""Image transforms of whole batches on their device: pure functions of images and one parameter per image.

Each transform has a `draw_` function that turns uniform numbers into its parameters. Nothing reads a value on the host,
so a captured graph may contain them. `chains` has the augmentations of the papers, which `augment` applies in training.
"""

from __future__ import annotations

from fednorms.transforms.chains import CHAINS
from fednorms.transforms.color import adjust, color_constancy, draw_tone, normalize
from fednorms.transforms.crop import center_crop, crop, draw_crop
from fednorms.transforms.cutout import cutout, draw_center
from fednorms.transforms.flip import draw_choice, flip
from fednorms.transforms.warp import affine, between, rotate

__all__ = [
    "CHAINS",
    "adjust",
    "affine",
    "between",
    "center_crop",
    "color_constancy",
    "crop",
    "cutout",
    "draw_center",
    "draw_choice",
    "draw_crop",
    "draw_tone",
    "flip",
    "normalize",
    "rotate",
]

# The spellings of version 0.1.
centre_crop, colour_constancy, draw_centre, normalise = center_crop, color_constancy, draw_center, normalize
