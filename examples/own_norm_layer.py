"""A custom normalization layer: registered once, and every method that acts on BatchNorm knows it.

python examples/own_norm_layer.py [ROUNDS]
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import fednorms as fn


@fn.norm_layer(fn.Statistics(mean="center", var="spread", batchnorm=True))
class ScaleNorm(nn.Module):
    """Batch normalization without a shift: it centers and scales, and only the scale is learned."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), None
        self.register_buffer("center", torch.zeros(num_features))
        self.register_buffer("spread", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.center, self.spread, self.weight, self.bias
        return nn.functional.batch_norm(x, *kept, self.training, self.momentum, self.eps)


def main(rounds: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        ScaleNorm(16),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    routes = fn.describe("silobn", net, classes=10, shape=(3, 16, 16)).routes
    print("stay at a site:", *[name for name, route in routes.items() if route is fn.Route.LOCAL])
    for method in ("fedavg", "silobn", "fedbn"):
        print(fn.run(method, "digits-shift", model=net, rounds=rounds, lr=0.1, batch_size=32))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
