"""A classifier with a personal one on top, which is used in tests only.

Paper: On Bridging Generic and Personalized Federated Learning for Image Classification. Chen and Chao. ICLR 2022.
https://arxiv.org/abs/2107.00778
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.layers.replacement import keep_parameters, place, refuse_other_forward


class PersonalLinear(nn.Linear):
    """y = W x + b in training, and (W + P) x + b + p in evaluation; P and p start at 0.

    >>> layer = PersonalLinear(nn.Linear(3, 2))
    >>> sorted(layer.state_dict())
    ['bias', 'personal_bias', 'personal_weight', 'weight']
    """

    def __init__(self, linear: nn.Linear, name: str = "") -> None:
        refuse_other_forward(linear, nn.Linear, name)
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        keep_parameters(linear, self, "weight", "bias")
        self.personal_weight = nn.Parameter(torch.zeros_like(linear.weight))
        self.personal_bias = None if linear.bias is None else nn.Parameter(torch.zeros_like(linear.bias))

    def forward(self, input: Tensor) -> Tensor:
        """Logits of features of shape (N, d)."""
        generic = F.linear(input, self.weight, self.bias)
        return generic if self.training else generic + F.linear(input, self.personal_weight, self.personal_bias)

    def folded(self, dims: int) -> nn.Module:
        """The linear layer of both together."""
        new = nn.Linear(self.in_features, self.out_features, self.bias is not None, **place(self))
        with torch.no_grad():
            new.weight.copy_(self.weight + self.personal_weight)
            if self.bias is not None and self.personal_bias is not None:
                new.bias.copy_(self.bias + self.personal_bias)
        return new.eval()
