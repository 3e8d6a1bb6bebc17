"""MNIST-M: digits blended into pieces of photographs.

Paper: Ganin, Lempitsky, Unsupervised Domain Adaptation by Backpropagation, ICML 2015, https://arxiv.org/abs/1409.7495
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.data.rules import draws


def mnist_m(digits: Tensor | np.ndarray, backgrounds: Sequence[np.ndarray], seed: int = 0) -> Tensor:
    """|crop - 255 mask|, mask = (pixel > 0), for a random crop of a random background per digit; uint8 (N, 3, H, W).

    `digits` are uint8 (N, H, W); `backgrounds` are RGB pictures (H, W, 3), such as the 200 training images of BSDS500.
    The result resembles the published set but is not equal to it, because its crops were not seeded.

    >>> mnist_m(np.array([[[0, 9]]], np.uint8), [np.zeros((4, 4, 3), np.uint8)])[0, 0].tolist()
    [[0, 255]]
    """
    pixels = digits.numpy() if isinstance(digits, Tensor) else np.asarray(digits)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise BadInput(f"mnist_m: digits must be uint8 (N, H, W), got {pixels.dtype} of shape {pixels.shape}.")
    n, h, w = pixels.shape
    wrong = [
        i
        for i, b in enumerate(backgrounds)
        if b.dtype != np.uint8 or b.ndim != 3 or b.shape[2] != 3 or b.shape[0] < h or b.shape[1] < w
    ]
    if not len(backgrounds) or wrong:
        which = f"number {wrong[0]} is {backgrounds[wrong[0]].dtype} {backgrounds[wrong[0]].shape}" if wrong else "none"
        raise BadInput(f"mnist_m: backgrounds must be uint8 RGB pictures of at least {h}x{w}, got {which}.")
    r = draws("mnist-m", seed)
    chosen = np.floor(r.uniform(0, len(backgrounds), (n,))).astype(int)
    places = r.random_sample((n, 2))
    out = np.empty((n, h, w, 3), np.uint8)
    for i, (which_one, (down, right)) in enumerate(zip(chosen, places, strict=True)):
        picture = backgrounds[which_one]
        top = int(down * (picture.shape[0] - h + 1))
        left = int(right * (picture.shape[1] - w + 1))
        piece = picture[top : top + h, left : left + w]
        out[i] = np.where(pixels[i, :, :, None] > 0, 255 - piece, piece)
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()
