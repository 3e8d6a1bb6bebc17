"""A classifier of random features: every image has a Gaussian, of which training draws one sample and a test many.

Paper: FedSR: A Simple and Effective Domain Generalization Method for Federated Learning. Nguyen, Torr and Lim. NeurIPS
2022. https://openreview.net/forum?id=mrt90D00aQX
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core import noise
from fednorms.layers.replacement import keep_parameters, place, refuse_other_forward


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each image's Gaussian: the first half of its features, and softplus of the second.

    >>> mean, deviation = moments(torch.tensor([[2.0, 0.0]]))
    >>> mean.item(), round(deviation.item(), 4)
    (2.0, 0.6931)
    """
    mean, raw = features.chunk(2, dim=-1)
    return mean, F.softplus(raw)


class GaussianFeatures(nn.Linear):
    """A linear layer that returns mean and raw deviation of `width` features; keeps a reference Gaussian per class.

    >>> layer = GaussianFeatures(8, 4, classes=3)
    >>> layer(torch.zeros(2, 8)).shape, layer.reference_mean.shape, layer.scale.item()
    (torch.Size([2, 8]), torch.Size([3, 4]), 1.0)
    """

    def __init__(self, in_features: int, width: int, classes: int) -> None:
        super().__init__(in_features, 2 * width)
        self.reference_mean = nn.Parameter(torch.zeros(classes, width))
        self.reference_deviation = nn.Parameter(torch.ones(classes, width))  # before softplus
        self.scale = nn.Parameter(torch.ones(()))


class GaussianLinear(nn.Linear):
    """y = W (mean + deviation * e) + b, e ~ N(0, I); in evaluation the log of the mean softmax over `samples` draws.

    The draws of a test are the same for every image and in every run; with samples=0 it uses the mean.

    >>> layer = GaussianLinear(4, 3, samples=5).eval()
    >>> layer(torch.randn(2, 8)).exp().sum(1).allclose(torch.ones(2))
    True
    """

    draws: Tensor

    def __init__(self, width: int, classes: int, samples: int, stream: int = 0, *, bias: bool = True) -> None:
        super().__init__(width, classes, bias)
        self.samples, self.stream = samples, stream
        draws = noise.normals(torch.empty(samples, width), "gaussian draws")
        self.register_buffer("draws", draws.to(torch.get_default_dtype()), persistent=False)

    def sample(self, features: Tensor) -> Tensor:
        """One draw from each image's Gaussian."""
        mean, deviation = moments(features)
        return mean + deviation * self.normal(mean)

    def sample_again(self, features: Tensor) -> Tensor:
        """The draw of the last forward pass in the same step."""
        with noise.one_pass():
            return self.sample(features)

    def forward(self, input: Tensor) -> Tensor:
        """Logits of features of shape (N, 2 width)."""
        if self.training:
            return F.linear(self.sample(input), self.weight, self.bias)
        mean, deviation = moments(input)
        if not self.samples:
            return F.linear(mean, self.weight, self.bias)
        drawn = mean + deviation * self.draws.unsqueeze(1)
        return F.linear(drawn, self.weight, self.bias).log_softmax(-1).logsumexp(0) - math.log(self.samples)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normals by the Box-Muller transform; drawn in float32, so they do not depend on the dtype."""
        narrow = like.new_empty(0, dtype=torch.float32)
        radius = (-2 * noise.uniform(like.shape, self.stream, narrow).log()).sqrt()
        return (radius * (2 * math.pi * noise.uniform(like.shape, self.stream, narrow)).cos()).to(like.dtype)


def with_gaussian(linear: nn.Linear, width: int, samples: int, name: str = "") -> nn.Sequential:
    """GaussianFeatures and a GaussianLinear in place of a classifier, whose weights stay if the width does.

    New weights are drawn from a seed hashed from the old classifier's weights, so equal models stay equal.

    >>> linear = nn.Linear(8, 3)
    >>> block = with_gaussian(linear, 8, samples=2)
    >>> block[1].weight is linear.weight, block(torch.zeros(2, 8)).shape
    (True, torch.Size([2, 3]))
    """
    refuse_other_forward(linear, nn.Linear, name)
    seed = noise.seed_of("gaussian", *linear.weight.detach().flatten()[:64].tolist())
    d, classes = linear.in_features, linear.out_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = GaussianFeatures(d, width, classes)
        head = GaussianLinear(width, classes, samples, noise.stream(f"{name} gaussian"), bias=linear.bias is not None)
    block = nn.Sequential(features, head).to(**place(linear)).train(linear.training)
    if width == d:
        keep_parameters(linear, head, "weight", "bias")
    return block
