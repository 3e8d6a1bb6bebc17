"""Dropout and stochastic depth with masks from `fednorms.core.noise`: every engine drops the same units.

Paper: Dropout: A Simple Way to Prevent Neural Networks from Overfitting. Srivastava et al. JMLR 15, 2014.
https://jmlr.org/papers/v15/srivastava14a.html
Paper: Efficient Object Localization Using Convolutional Networks. Tompson et al. CVPR 2015.
https://arxiv.org/abs/1411.4280
Paper: Deep Networks with Stochastic Depth. Huang et al. ECCV 2016. https://arxiv.org/abs/1603.09382
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.errors import BadInput


def keyed_dropout(x: Tensor, p: float, stream: int, shape: Sequence[int], scale: bool = True) -> Tensor:
    """`x` times a mask of the given (broadcastable) shape: 0 with probability p, otherwise 1 / (1 - p).

    `scale=False` leaves kept values as they are.

    >>> x = torch.ones(1000)
    >>> sorted(set(keyed_dropout(x, 0.5, 3, x.shape).tolist()))
    [0.0, 2.0]
    """
    # float32 whatever the dtype of x: 24 random bits do not fit a 16-bit float, and the mask must not depend
    # on dtype.
    keep = noise.uniform(shape, stream, x.new_empty(0, dtype=torch.float32)) >= p
    factor = 1 / (1 - p) if scale and p < 1 else 1.0
    return x * (keep.to(x.dtype) * factor)


def _checked(p: float) -> float:
    if not 0 <= p <= 1:
        raise BadInput(f"Dropout: the probability must be between 0 and 1, got {p}.")
    return p


class KeyedDropout(nn.Module):
    """Element-wise dropout with keyed masks: y = x * m / (1 - p), m ~ Bernoulli(1 - p); identity in evaluation.

    >>> KeyedDropout(0.5, stream=1).eval()(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, p: float = 0.5, stream: int = 0) -> None:
        super().__init__()
        self.p, self.stream = _checked(p), stream

    def mask_shape(self, x: Tensor) -> Sequence[int]:
        """The shape of the mask for an input."""
        return x.shape

    def forward(self, x: Tensor) -> Tensor:
        """Drop while training."""
        if not self.training or self.p == 0:
            return x
        return keyed_dropout(x, self.p, self.stream, self.mask_shape(x))

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


class KeyedDropout2d(KeyedDropout):
    """Dropout of whole channels of (N, C, ...) with keyed masks; also replaces Dropout1d and Dropout3d.

    >>> y = KeyedDropout2d(0.5, stream=1)(torch.ones(4, 8, 3, 3))
    >>> bool((y == y[:, :, :1, :1]).all())
    True
    """

    def mask_shape(self, x: Tensor) -> Sequence[int]:
        """One number per sample and channel."""
        return (*x.shape[:2], *[1] * (x.dim() - 2))


class KeyedStochasticDepth(nn.Module):
    """Drop a residual branch per sample ("row") or for the whole batch ("batch") with keyed masks.

    y = x * m / (1 - p).

    >>> y = KeyedStochasticDepth(0.5, stream=1)(torch.ones(4, 8, 3, 3))
    >>> bool((y == y[:, :1, :1, :1]).all())
    True
    """

    def __init__(self, p: float, stream: int = 0, mode: Literal["row", "batch"] = "row", scale: bool = True) -> None:
        super().__init__()
        self.p, self.stream, self.mode, self.scale = _checked(p), stream, mode, scale

    def forward(self, x: Tensor) -> Tensor:
        """Drop while training."""
        if not self.training or self.p == 0:
            return x
        rows = x.shape[0] if self.mode == "row" else 1
        return keyed_dropout(x, self.p, self.stream, (rows, *[1] * (x.dim() - 1)), self.scale)

    def extra_repr(self) -> str:
        """Probability and mode."""
        return f"p={self.p}, mode={self.mode!r}"
