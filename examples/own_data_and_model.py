"""Your own arrays and your own network: two scanners of different brightness, one task.

python examples/own_data_and_model.py [ROUNDS]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

import fednorms as fn


def scans(brightness: float, seed: int, count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Gray images of 16 x 16 pixels as bytes, half of them with a bright spot, and their labels."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 60, (count, 16, 16)), np.arange(count) % 2
    for i in np.flatnonzero(y):
        row, column = rng.integers(0, 10, 2)
        x[i, row : row + 6, column : column + 6] += 150
    return (brightness * x).astype(np.uint8), y


def main(rounds: int) -> None:
    sites = {"berlin": scans(1.0, seed=1), "oslo": scans(0.4, seed=2)}
    federation = fn.from_arrays(sites, classes=["healthy", "ill"], val=0.1, test=0.2)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 2),
    )
    result = fn.run("fedbn", federation, model=net, rounds=rounds, lr=0.1, batch_size=16)
    print(result)
    print(result.model("oslo"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
