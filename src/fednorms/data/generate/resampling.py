"""Pixelation, JPEG and elastic deformation of images (N, 3, H, W) in [0, 1].

Paper: Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
https://arxiv.org/abs/1903.12261
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fednorms.data.generate.blurs import Draws, reflected, tensor


def box_matrix(inside: int, out: int) -> Tensor:
    """The weights (out x inside) of Pillow's box resize: each output is the mean of the pixels in its span.

    >>> box_matrix(4, 2)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    scale = inside / out
    reach = max(scale, 1.0) / 2
    matrix = torch.zeros(out, inside)
    for i in range(out):
        center = (i + 0.5) * scale
        for j in range(max(0, int(center - reach + 0.5)), min(inside, int(center + reach + 0.5))):
            if -0.5 < (j - center + 0.5) / max(scale, 1.0) <= 0.5:
                matrix[i, j] = 1
    return matrix / matrix.sum(1, keepdim=True)


def pixelate(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Box resize to int(c0 size) and back."""
    sides = []
    for n in x.shape[-2:]:
        small = int(n * c[0])
        sides.append((box_matrix(small, n) @ box_matrix(n, small)).to(x.dtype))
    return sides[0] @ x @ sides[1].T


def jpeg_compression(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Compress with quality c0 (Pillow's encoder) and read back."""
    pixels = (x.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy()
    out = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=int(c[0]))
        with Image.open(stream) as read:
            out.append(np.asarray(read.convert("RGB")))
    return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2).to(x.dtype) / 255


def elastic_transform(x: Tensor, c: Sequence[float], r: Draws) -> Tensor:
    """Move three points by up to c2 pixels and the image with them, then each pixel by c0 blur(U(-1, 1), c1)."""
    alpha, sigma, reach = c
    n, _, h, w = x.shape
    center, arm = np.array([h // 2, w // 2], float), min(h, w) // 3
    before = center + arm * np.array([(1, 1), (1, -1), (-1, -1)])  # (3, 2)
    after = before + r.uniform(-reach, reach, (n, 3, 2))
    # The output at p is the input at A p + b, where A and b map the moved points back.
    ones = np.ones((n, 3, 1))
    back = np.linalg.solve(np.concatenate([after, ones], 2), np.broadcast_to(before, (n, 3, 2)))  # (n, 3, 2)
    ys, xs = (v.to(x.dtype) for v in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
    places = torch.stack([ys, xs, torch.ones_like(ys)], 2).view(1, h * w, 3) @ tensor(back, x)
    x = sample(x, places.view(n, h, w, 2))
    if alpha == 0:
        return x
    field = tensor(r.uniform(-1, 1, (n, 2, h, w)), x)
    moved = alpha * reflected(field, sigma)
    return sample(x, torch.stack([ys, xs], 2) + moved.permute(0, 2, 3, 1))


def sample(x: Tensor, places: Tensor) -> Tensor:
    """Bilinear values at (row, column) places (N, H, W, 2), mirrored at the border.

    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> sample(x, torch.tensor([[[[0.5, 0.5]]]])).item()
    1.5
    """
    h, w = x.shape[-2:]
    scale = torch.tensor([2 / max(h - 1, 1), 2 / max(w - 1, 1)], dtype=x.dtype)
    grid = (places * scale - 1).flip(-1)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)
