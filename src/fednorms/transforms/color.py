"""Transforms of color.

Paper of color constancy: Finlayson, Trezzi, Shades of Gray and Colour Constancy, Color and Imaging Conference 12(1)
2004, 37-41, https://doi.org/10.2352/CIC.2004.12.1.art00008
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fednorms.transforms.crop import color_of


def color_constancy(x: Tensor, power: float = 6.0) -> Tensor:
    """Shades of gray: e_c = (mean of x_c^p)^(1/p), e <- e / |e|, x_c <- x_c / (sqrt(3) e_c), clipped to [0, 1].

    The power is that of Fed-ISIC2019. A black image stays black. FLamby's code lets values above 255 wrap around; here
    they are clipped.

    >>> import torch
    >>> gray = torch.full((1, 3, 2, 2), 0.4)
    >>> torch.allclose(color_constancy(gray), gray)
    True
    """
    light = x.clamp(min=0).pow(power).mean((2, 3), keepdim=True).pow(1 / power)
    norm = light.square().sum(1, keepdim=True).sqrt()
    gain = norm / (x.shape[1] ** 0.5 * light.clamp(min=1e-6))
    return (x * gain).clamp(0, 1)


def adjust(x: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """(1 + contrast) x + brightness, clipped to [0, 1]; one pair per image.

    >>> import torch
    >>> adjust(torch.full((1, 1, 1, 1), 0.5), torch.tensor([0.1]), torch.tensor([0.2])).item()
    0.7...
    """
    return ((1 + contrast.view(-1, 1, 1, 1)) * x + brightness.view(-1, 1, 1, 1)).clamp(0, 1)


def draw_tone(u: Tensor, brightness: float, contrast: float, p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Brightness and contrast, uniform up to +-, both 0 with probability 1 - p; u has shape (N, 3).

    >>> import torch
    >>> [t.item() for t in draw_tone(torch.tensor([[1.0, 0.0, 0.9]]), 0.25, 0.5, p=0.95)]
    [0.25, -0.5]
    """
    on = (u[:, 2] < p).to(u.dtype)
    return (2 * u[:, 0] - 1) * brightness * on, (2 * u[:, 1] - 1) * contrast * on


def normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std per channel.

    >>> import torch
    >>> normalize(torch.ones(1, 2, 1, 1), (0.0, 1.0), (2.0, 2.0)).flatten().tolist()
    [0.5, 0.0]
    """
    return (x - color_of(mean, x)) / color_of(std, x)
