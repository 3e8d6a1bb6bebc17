"""The federations of `benchmarks/advise.py`: kind of shift x strength x size x model, from the embedded digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import fednorms as fn
from fednorms.data.splits import split


class Narrow(nn.Module):
    """Two convolutions with batch normalization: half as many channels as cnn-small and one block less."""

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.last = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(96, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images."""
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        y: Tensor = self.head(self.last(self.relu(self.norm2(self.conv2(x)))).flatten(1))
        return y


@dataclass(frozen=True)
class Case:
    """A federation to advise on: the data set it is made of (priors leave that out), a name, and the model."""

    data: str
    name: str
    model: str
    make: Callable[[], fn.Federation]

    @property
    def key(self) -> str:
        return f"{self.data}, {self.name}, {self.model}"

    def network(self) -> str | nn.Module:
        if self.model != "narrow":
            return self.model
        torch.manual_seed(0)
        return Narrow()


def thinned(federation: fn.Federation, images: int) -> fn.Federation:
    """The same federation with at most so many training images per site, of every class alike."""
    sites = []
    for site in federation.sites:
        if site.train is not None and len(site.train) > images:
            rows = split(site.train.y, {"kept": images / len(site.train)}, 0, site.name)["kept"]
            site = replace(site, train=site.train.subset(rows))
        sites.append(site)
    return replace(federation, sites=sites)


def handwritten(clients: int, label: float, feature: float, images: int) -> fn.Federation:
    """The dials for label shift and feature shift."""
    spec = f"digits-dials(clients={clients}, label={label}, feature={feature})"
    return thinned(fn.federation(spec, size=8, val=0.2, test=0.5), images)


def divided(name: str, size: int, images: int, skewed: bool) -> fn.Federation:
    """A federation of different looks; skewed: every site becomes two with different labels."""
    made = fn.federation(name, size=size, val=0.2, test=0.4)
    return thinned(fn.partition(made, "dirichlet(beta=0.5, clients=2, within=domain)") if skewed else made, images)


CORRUPTIONS = {
    "noise and blur": ("gaussian_noise", "impulse_noise", "defocus_blur", "elastic_transform"),
    "weather and color": ("snow", "fog", "contrast", "saturate"),
}


def corrupted(kind: str, severity: int, images: int) -> fn.Federation:
    """Sites with one corruption each."""
    made = fn.federation(f"digits-corrupted(severity={severity})", size=8, val=0.1, test=0.25)
    return thinned(made.without(*(s.name for s in made.sites if s.name not in CORRUPTIONS[kind])), images)


def cases() -> list[Case]:
    """All federations, the kinds of shift in turn, so that the first results already cover all of them."""
    kinds: list[list[tuple[str, str, Callable[[], fn.Federation]]]] = [
        [
            (
                "handwritten",
                f"{k} sites, {n} images, label {a:g}, feature {b:g}",
                partial(handwritten, k, a, b, n),
            )
            for k, n in ((3, 90), (6, 50))
            for a in (0.0, 0.5, 0.9)
            for b in (0.0, 0.5, 1.0)
        ],
        [
            ("cameras", f"{n} images{', skewed' * skewed}", partial(divided, "digits-shift", 8, n, skewed))
            for n in (30, 60, 100)
            for skewed in (False, True)
        ],
        [
            ("styles", f"{n} images{', skewed' * skewed}", partial(divided, "digits-styles", 12, n, skewed))
            for n in (40, 80, 120)
            for skewed in (False, True)
        ],
        [
            ("corrupted", f"{kind}, severity {s}, {n} images", partial(corrupted, kind, s, n))
            for kind in CORRUPTIONS
            for s in (2, 5)
            for n in (30, 90)
        ],
        [
            ("handwritten", f"4 sites, 40 images, label {a:g}, feature {b:g}", partial(handwritten, 4, a, b, 40))
            for a in (0.0, 0.7)
            for b in (0.0, 0.7)
        ],
    ]
    spread = []
    for k, kind in enumerate(kinds):
        for i, (data, name, make) in enumerate(kind):
            spread.append((i / len(kind), k, Case(data, name, ("cnn-small", "narrow")[(i + k) % 2], make)))
    return [case for _, _, case in sorted(spread, key=lambda item: item[:2])]
