"""A classifier that adds a vector to its features first, and follows their mean.

Paper: Eliminating Domain Bias for Federated Learning in Representation Space. Zhang et al. NeurIPS 2023.
https://arxiv.org/abs/2311.14975
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.layers.replacement import keep_parameters, refuse_other_forward


class ShiftedLinear(nn.Linear):
    """y = W (x + shift) + b; in training, features_mean <- (1 - momentum) features_mean + momentum mean(x).

    >>> layer = ShiftedLinear(nn.Linear(3, 2), momentum=0.5)
    >>> _ = layer(torch.ones(4, 3))
    >>> layer.features_mean
    tensor([0.5000, 0.5000, 0.5000])
    """

    features_mean: Tensor

    def __init__(self, linear: nn.Linear, momentum: float, name: str = "") -> None:
        refuse_other_forward(linear, nn.Linear, name)
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        keep_parameters(linear, self, "weight", "bias")
        self.momentum = momentum
        zeros = linear.weight.new_zeros(linear.in_features)
        self.shift = nn.Parameter(zeros.detach().clone())
        self.register_buffer("features_mean", zeros.detach().clone())

    def forward(self, input: Tensor) -> Tensor:
        """Logits of features of shape (N, d)."""
        if self.training:
            with torch.no_grad():
                self.features_mean.lerp_(input.mean(0).to(self.features_mean), self.momentum)
        return F.linear(input + self.shift, self.weight, self.bias)
