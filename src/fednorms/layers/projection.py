"""MOON's projection head: a small network between the features and the classifier.

Paper: Model-Contrastive Federated Learning. Li, He and Song. CVPR 2021. https://arxiv.org/abs/2103.16257
"""

from __future__ import annotations

import torch
from torch import nn

from fednorms.core import noise
from fednorms.layers.replacement import place


def with_projection(linear: nn.Linear, width: int) -> nn.Sequential:
    """A projection d -> d -> `width` with a ReLU in between, then a classifier on its output.

    New weights are drawn from a seed hashed from the old classifier's weights, so equal models stay equal.

    >>> block = with_projection(nn.Linear(8, 3), 4)
    >>> [type(m).__name__ for m in block], block(torch.zeros(2, 8)).shape
    (['Linear', 'ReLU', 'Linear', 'Linear'], torch.Size([2, 3]))
    """
    seed = noise.seed_of("projection", *linear.weight.detach().flatten()[:64].tolist())
    d, classes = linear.in_features, linear.out_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, width), nn.Linear(width, classes))
    return block.to(**place(linear)).train(linear.training)
