"""What a convolution computes after two clients moved its filters, with and without weight normalization."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import conv2d

from fednorms.layers.weight_norm import weight_norm

SHIFT, SCALE = 2.0, 3.0


def drifted(weight: Tensor) -> dict[str, Tensor]:
    """The filters of two clients, one shifted and one scaled, and of the server that averages them; FedNN, Figure 3.

    >>> import torch
    >>> {name: w.tolist() for name, w in drifted(torch.tensor([1.0])).items()}
    {'start': [1.0], 'client 1 (shift +2)': [3.0], 'client 2 (scale x3)': [3.0], 'global': [3.0]}
    """
    one, two = weight + SHIFT, weight * SCALE
    return {
        "start": weight,
        f"client 1 (shift +{SHIFT:g})": one,
        f"client 2 (scale x{SCALE:g})": two,
        "global": (one + two) / 2,
    }


def activations(x: Tensor, weight: Tensor, *, normalized: bool) -> Tensor:
    """The convolution of images (N x C x H x W) with the filters, or with the weight-normalized filters.

    >>> import torch
    >>> w = torch.tensor([[[[1.0, 3.0]]]])
    >>> x = torch.tensor([[[[1.0, 2.0]]]])
    >>> [round(float(activations(x, w * s, normalized=True)), 3) for s in (1.0, 3.0)]
    [1.0, 1.0]
    """
    w = weight.double()
    return conv2d(x.double(), weight_norm(w) if normalized else w)


def relative_change(a: Tensor, b: Tensor) -> float:
    """The length of a - b relative to that of a."""
    return float((a - b).norm() / a.norm().clamp_min(1e-300))
