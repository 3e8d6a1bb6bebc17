"""What changes colours and not places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fednorms.transforms.crop import colour_of


def colour_constancy(x: Tensor, power: float = 6.0) -> Tensor:
    """Shades of grey: e_c = (mean of x_c^p)^(1/p), e <- e / |e|, x_c <- x_c / (sqrt(3) e_c), clipped to [0, 1].

    Finlayson and Trezzi 2004, with the power of Fed-ISIC2019. A black image stays black. The released code lets values
    over 255 wrap around; we clip.

    >>> import torch
    >>> grey = torch.full((1, 3, 2, 2), 0.4)
    >>> torch.allclose(colour_constancy(grey), grey)
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


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std per channel.

    >>> import torch
    >>> normalise(torch.ones(1, 2, 1, 1), (0.0, 1.0), (2.0, 2.0)).flatten().tolist()
    [0.5, 0.0]
    """
    return (x - colour_of(mean, x)) / colour_of(std, x)
