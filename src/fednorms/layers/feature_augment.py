"""Feature augmentation of FedFA: jitter the mean and deviation of every channel in training.

Paper: FedFA: Federated Feature Augmentation. Zhou and Konukoglu. ICLR 2023. https://arxiv.org/abs/2301.12995
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.moments import instance_moments, rescaled
from fednorms.core.surgery import Change, short
from fednorms.layers.skew_eraser import SkewEraser

EPS = 1e-6


def channel_factors(between: Tensor, eps: float = EPS) -> Tensor:
    """How much more a channel is jittered, from its variance between clients: C h(v) / sum h(v), h(v) = v / (1 + v).

    >>> channel_factors(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([0.8000, 1.2000])
    """
    h = 1 / (1 + 1 / (between + eps))
    return len(h) * h / h.sum()


def instance_pair(x: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """Mean and sqrt(var + eps) over positions of (N, C, H, W), each (N, C); the variance is the unbiased one.

    >>> instance_pair(torch.tensor([[[[0.0, 2.0]]]]), eps=0.0)
    (tensor([[1.]]), tensor([[1.4142]]))
    """
    mean, var = instance_moments(x, unbiased=True)
    return mean, (var + eps).sqrt()


def feature_augment(
    x: Tensor,
    pair: tuple[Tensor, Tensor],
    between: tuple[Tensor, Tensor],
    draws: tuple[Tensor, Tensor],
    fires: Tensor,
) -> Tensor:
    """Give every image new channel statistics where `fires` is true: gamma (x - mu) / sigma + beta.

    beta = mu + n_1 sqrt((1 + g_mu) V_mu), gamma = sigma + n_2 sqrt((1 + g_sigma) V_sigma), V the variance over the
    batch and g the channel factors.

    >>> x = torch.randn(3, 2, 4, 4)
    >>> none, yes = (torch.zeros(3, 2), torch.zeros(3, 2)), torch.tensor(True)
    >>> torch.allclose(feature_augment(x, instance_pair(x), (torch.ones(2), torch.ones(2)), none, yes), x, atol=1e-5)
    True
    """
    new = [
        value + draw * ((1 + channel_factors(v)) * (_variance(value) + EPS)).sqrt()
        for value, v, draw in zip(pair, between, draws, strict=True)
    ]
    (mu, sigma), (beta, gamma) = pair, new
    # Otherwise (x - 0) 1 + 0, which equals x.
    return rescaled(x, *(torch.where(fires, v, idle) for v, idle in ((mu, 0.0), (gamma / sigma, 1.0), (beta, 0.0))))


def _variance(x: Tensor) -> Tensor:
    # The unbiased variance of a single value is not a number; here it is 0.
    return x.var(0) if len(x) > 1 else torch.zeros_like(x.sum(0))


class FeatureAugment(nn.Module):
    """With probability p per forward pass in training, jitter feature statistics; identity in evaluation.

    Buffers: `mean` and `std` follow the mean statistics of the batches that it augments (momentum 0.99 of the old
    value). `between_mean` and `between_std` are the variances between clients that the server sends.

    >>> x = torch.randn(2, 3, 4, 4)
    >>> torch.equal(FeatureAugment(3).eval()(x), x)
    True
    """

    mean: Tensor
    std: Tensor
    between_mean: Tensor
    between_std: Tensor

    def __init__(self, channels: int, p: float = 0.5, momentum: float = 0.99, stream: int = 0) -> None:
        super().__init__()
        self.channels, self.p, self.momentum, self.stream = channels, p, momentum, stream
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.register_buffer("between_mean", torch.ones(channels))
        self.register_buffer("between_std", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Augment features of shape (N, channels, H, W)."""
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise BadInput(
                f"Feature augmentation for {self.channels} channels got features of shape {tuple(x.shape)}. Name "
                "modules that return N x channels x H x W and whose last convolution decides the channels."
            )
        if not self.training or self.p == 0:
            return x
        wide = x if x.dtype == torch.float64 else x.float()
        fires = self._uniform(1) < self.p  # a tensor: nothing waits for it, and both ways have the same shape
        pair = instance_pair(wide)
        self._record(pair, fires)
        draws = self._normal(wide), self._normal(wide)
        return feature_augment(wide, pair, (self.between_mean, self.between_std), draws, fires).to(x.dtype)

    @torch.no_grad()
    def _record(self, pair: tuple[Tensor, Tensor], fires: Tensor) -> None:
        for buffer, value in zip((self.mean, self.std), pair, strict=True):
            new = self.momentum * buffer + (1 - self.momentum) * value.mean(0)
            buffer.copy_(torch.where(fires, new, buffer))

    def _uniform(self, *shape: int) -> Tensor:
        # Always float32: the draws must not depend on the model's dtype.
        return noise.uniform(shape, self.stream, self.mean.new_empty(0, dtype=torch.float32))

    def _normal(self, x: Tensor) -> Tensor:
        """Standard normals (N, C), by the Box-Muller transform of two uniforms."""
        radius = (-2 * self._uniform(*x.shape[:2]).log()).sqrt()
        return (radius * (2 * math.pi * self._uniform(*x.shape[:2])).cos()).to(x.dtype)

    def folded(self, dims: int) -> nn.Module:
        """Nothing: it acts only in training."""
        return nn.Identity()

    def extra_repr(self) -> str:
        """Channels and probability."""
        return f"{self.channels}, p={self.p}"


def stages(model: nn.Module) -> list[str]:
    """The modules after which a network's stages end, if that is known.

    The library's own networks list them (`stages`). ResNets of torchvision and timm: the stem's pooling and the four
    stages. A sequence of layers (AlexNet's `features`): the last layer before the next convolution.

    >>> stages(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2)))
    ['1', '4']
    """
    known = getattr(model, "stages", None)
    if isinstance(known, dict):
        return list(known)
    # By class name, because neither library may be imported here.
    if "ResNet" in (kind.__name__ for kind in type(model).__mro__) and isinstance(
        model._modules.get("layer4"), nn.Module
    ):
        return [n for n in ("maxpool", "layer1", "layer2", "layer3", "layer4") if n in model._modules]
    rows = [("", model), *((f"{n}.", m) for n, m in model.named_children())]
    return [f"{prefix}{n}" for prefix, row in rows if isinstance(row, nn.Sequential) for n in _ends(row)]


def _ends(row: nn.Sequential) -> list[str]:
    """The last parameter-free 4-d layer of each convolution block of a sequence."""
    ends: list[str] = []
    inside = False
    for name, layer in row.named_children():
        if isinstance(layer, nn.Conv2d):
            inside = True
            ends.append("")
        elif isinstance(layer, (nn.Flatten, nn.Linear)):
            inside = False
        elif inside and next(layer.parameters(), None) is None:
            ends[-1] = name
    return [n for n in ends if n]


def insert(model: nn.Module, after: list[str], p: float, momentum: float) -> list[Change]:
    """Put a FeatureAugment after each named module, keeping the names of all tensors.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    >>> [str(c) for c in insert(net, ["1"], p=0.5, momentum=0.99)]
    ['1: ReLU() -> Sequential(ReLU, FeatureAugment)']
    """
    changes = []
    for name in after:
        old = model.get_submodule(name)
        new = FeatureAugment(_channels(model, name), p, momentum, noise.stream(f"{name} augment")).to(_like(model))
        new.train(old.training)
        if isinstance(old, nn.Sequential):
            old.add_module("augment", new)
            changes.append(Change(name, short(old), "with FeatureAugment at its end"))
            continue
        if next(iter(old.state_dict()), None) is not None:
            raise BadInput(
                f'fedfa: "{name}" ({short(old)}) has its own tensors, whose names an insertion would change. '
                "Name the activation or pooling after it, or a Sequential."
            )
        block: nn.Module = new if isinstance(old, nn.Identity) else nn.Sequential(old, new)
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = block
        changes.append(Change(name, short(old), short(block)))
    return changes


def _channels(model: nn.Module, name: str) -> int:
    """The declared channels of a stage, or the width of the last convolution up to the end of a module."""
    known = getattr(model, "stages", None)
    if isinstance(known, dict) and name in known:
        return int(known[name])
    channels, inside, erasing = 0, False, "."
    path = name.split(".")
    for other, m in model.named_modules():
        within = other.split(".")[: len(path)] == path
        if inside and not within:
            break
        inside = inside or within
        if isinstance(m, SkewEraser):
            channels, erasing = m.channels, f"{other}."
        elif isinstance(m, nn.Conv2d) and not other.startswith(erasing):
            channels = m.out_channels
    if not channels:
        raise BadInput(f'fedfa: no convolution comes before "{name}", so its channels are unknown.')
    return channels


def _like(model: nn.Module) -> Tensor:
    return next((t for t in model.parameters() if t.is_floating_point()), torch.zeros(()))
