"""FRAug's two small networks over features: a shared generator, and a private one that makes its features local.

Paper: FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation. Chen et al. ICCV 2023.
https://arxiv.org/abs/2205.14900
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednorms.core import noise
from fednorms.core.surgery import Change
from fednorms.layers.replacement import place

NAME = "fraug"


def two_layers(w: Mapping[str, Tensor], prefix: str, x: Tensor, *, last_relu: bool) -> Tensor:
    """Linear, batch normalization, ReLU, linear, batch normalization (, ReLU), always with batch statistics.

    >>> net = Synthesis(features=4, classes=3, latent=2)
    >>> two_layers(dict(net.named_parameters()), "generator", torch.rand(5, 2 + 3), last_relu=True).shape
    torch.Size([5, 4])
    """

    def layer(x: Tensor, linear: int, norm: int) -> Tensor:
        x = F.linear(x, w[f"{prefix}.{linear}.weight"], w[f"{prefix}.{linear}.bias"])
        return F.batch_norm(x, None, None, w[f"{prefix}.{norm}.weight"], w[f"{prefix}.{norm}.bias"], training=True)

    x = layer(layer(x, 0, 1).relu(), 3, 4)
    return x.relu() if last_relu else x


class Affine(nn.Module):
    """Weight and bias of a batch normalization inside `two_layers`; not a BatchNorm, so no other part exchanges it.

    >>> sorted(Affine(2).state_dict())
    ['bias', 'weight']
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))


class Synthesis(nn.Module):
    """Hold the weights of both networks next to a model; as a layer it is the identity, they act only in training.

    generator: [z, y] of latent + classes -> features -> features; local: [f, y] of features + classes -> latent ->
    features.

    >>> [tuple(p.shape) for n, p in Synthesis(4, 3, 2).named_parameters() if p.dim() == 2]
    [(4, 5), (4, 4), (2, 7), (4, 2)]
    """

    def __init__(self, features: int, classes: int, latent: int) -> None:
        super().__init__()

        def stack(inputs: int, hidden: int) -> nn.Sequential:
            first, last = Affine(hidden), Affine(features)
            return nn.Sequential(nn.Linear(inputs, hidden), first, nn.ReLU(), nn.Linear(hidden, features), last)

        self.generator = stack(latent + classes, features)
        self.local = stack(features + classes, latent)

    def forward(self, x: Tensor) -> Tensor:
        """The input (a Sequential calls everything that it holds)."""
        return x

    @classmethod
    def beside(cls, model: nn.Module, head: nn.Linear, latent: int) -> list[Change]:
        """Add the networks to a model, with weights drawn from a seed hashed from its classifier."""
        seed = noise.seed_of(NAME, *head.weight.detach().flatten()[:64].tolist())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            new = cls(head.in_features, head.out_features, latent)
        # First in order: the classifier stays the last layer of the model.
        model._modules = {NAME: new.to(**place(head)), **model._modules}
        return [Change(NAME, "nothing", f"Synthesis({head.in_features}, {head.out_features}, {latent})")]
