"""The federations of `benchmarks/advise.py`: kind of shift x strength x size x model, from digits or real images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fednorms as fn
from fednorms.data.changes import with_validation
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
    """A federation to advise on: the data set it is made of (priors leave that out), a name, the model, and rounds."""

    data: str
    name: str
    model: str
    make: Callable[[], fn.Federation]
    rounds: int = 9
    batch: int = 16
    device: str = "cpu"

    @property
    def key(self) -> str:
        return f"{self.data}, {self.name}, {self.model}"

    def network(self) -> str | nn.Module:
        if self.model != "narrow":
            return self.model
        torch.manual_seed(0)
        return Narrow()


def thinned(federation: fn.Federation, train: int, val: int | None = None, test: int | None = None) -> fn.Federation:
    """The same federation with at most so many images per site and split, of every class alike."""
    most = {"train": train, "val": val, "test": test}
    sites = []
    for site in federation.sites:
        for name, part in site.splits.items():
            limit = most[name]
            if limit is not None and len(part) > limit:
                rows = split(part.y, {"kept": limit / len(part)}, 0, site.name)["kept"]
                site = replace(site, **{name: part.subset(rows)})
        sites.append(site)
    return replace(federation, sites=sites)


def handwritten(clients: int, label: float, feature: float, images: int, seed: int = 0) -> fn.Federation:
    """The dials for label shift and feature shift."""
    spec = f"digits-dials(clients={clients}, label={label}, feature={feature})"
    return thinned(fn.federation(spec, size=8, val=0.2, test=0.5, seed=seed), images)


def uneven(feature: float) -> fn.Federation:
    """Four sites of 15, 30, 60 and 120 training images."""
    made = handwritten(4, 0.3, feature, 120, HELD_OUT_SEED)
    sites = [thinned(replace(made, sites=[s]), 15 * 2**i).sites[0] for i, s in enumerate(made.sites)]
    return replace(made, sites=sites)


def divided(name: str, size: int, images: int, skewed: bool, *, beta: float = 0.5, seed: int = 0) -> fn.Federation:
    """A federation of different looks; skewed: every site becomes two with different labels."""
    made = fn.federation(name, size=size, val=0.2, test=0.4, seed=seed)
    rule = f"dirichlet(beta={beta}, clients=2, within=domain)"
    return thinned(fn.partition(made, rule) if skewed else made, images)


CORRUPTIONS = {
    "noise and blur": ("gaussian_noise", "impulse_noise", "defocus_blur", "elastic_transform"),
    "weather and color": ("snow", "fog", "contrast", "saturate"),
    "blur": ("glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    "compression and light": ("jpeg_compression", "pixelate", "brightness", "spatter"),
}
HELD_OUT_SEED = 7  # of the data; those of `generated` have 0


def corrupted(kind: str, severity: int, images: int, seed: int = 0) -> fn.Federation:
    """Sites with one corruption each."""
    made = fn.federation(f"digits-corrupted(severity={severity})", size=8, val=0.1, test=0.25, seed=seed)
    return thinned(made.without(*(s.name for s in made.sites if s.name not in CORRUPTIONS[kind])), images)


Made = tuple[str, str, Callable[[], fn.Federation]]


def generated() -> list[Case]:
    """The federations from which the tournament's shape and the priors come."""
    kinds: list[list[Made]] = [
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
            for kind in ("noise and blur", "weather and color")
            for s in (2, 5)
            for n in (30, 90)
        ],
        [
            ("handwritten", f"4 sites, 40 images, label {a:g}, feature {b:g}", partial(handwritten, 4, a, b, 40))
            for a in (0.0, 0.7)
            for b in (0.0, 0.7)
        ],
    ]
    return in_turn(kinds)


def held_out() -> list[Case]:
    """Federations that nobody had looked at when `advise` was finished: other seeds, strengths, sizes, corruptions.

    The plan, fixed before the first run: all methods and rates, one seed, in this order. Every federation on which all
    of them ran counts, and none is exchanged. Tournament, rates and priors are those of `advise` at this commit; priors
    leave out the data set that is judged. The goal is that of the others: a mean regret under one point and at most a
    third of the best fixed choice's, for both questions.
    """
    seed = HELD_OUT_SEED
    kinds: list[list[Made]] = [
        [
            (
                "handwritten",
                f"{k} sites, {n} images, label {a:g}, feature {b:g}, held out",
                partial(handwritten, k, a, b, n, seed),
            )
            for k, n, a, b in (
                (2, 200, 0.3, 0.3),
                (5, 70, 0.3, 0.8),
                (8, 40, 0.8, 0.8),
                (2, 200, 0.8, 0.8),
                (5, 70, 0.8, 0.3),
                (8, 40, 0.3, 0.3),
            )
        ],
        [
            (
                "cameras",
                f"{n} images{', very skewed' * skewed}, held out",
                partial(divided, "digits-shift", 8, n, skewed, beta=0.2, seed=seed),
            )
            for n, skewed in ((45, False), (45, True), (80, True), (80, False))
        ],
        [
            (
                "styles",
                f"{n} images{', very skewed' * skewed}, held out",
                partial(divided, "digits-styles", 14, n, skewed, beta=0.2, seed=seed),
            )
            for n, skewed in ((60, False), (60, True), (100, False))
        ],
        [
            ("corrupted", f"{kind}, severity {s}, {n} images, held out", partial(corrupted, kind, s, n, seed))
            for kind, s, n in (("blur", 3, 60), ("compression and light", 5, 45), ("blur", 5, 45))
        ],
        [
            ("handwritten", f"4 sites, 15 to 120 images, feature {b:g}, held out", partial(uneven, b))
            for b in (0.0, 0.8)
        ],
    ]
    return in_turn(kinds)


REAL = ("digits-five", "pacs", "office", "skin")  # packs, or folders of site/class/image


def real(folder: Path) -> list[Case]:
    """Real images: FOLDER/NAME.fnpack or the folder FOLDER/NAME for every name in `REAL` that is there.

    The plan, fixed before the first run: up to 400 training images per site, with a small and a larger network, two
    sites of skewed labels for each site, and few images. Tournament, rates, priors and goals are those of `held_out`.
    """
    kinds = (
        ("400 images", "cnn-small", False, 400),
        ("200 images, skewed", "cnn-small", True, 200),
        ("100 images", "resnet20", False, 100),
        ("400 images", "resnet20", False, 400),
    )
    paths = [(name, path) for name in REAL for path in (folder / f"{name}.fnpack", folder / name) if path.exists()]
    return [
        Case(name, kind, model, partial(photographed, path, skewed, images), rounds=24, batch=32, device="auto")
        for kind, model, skewed, images in kinds
        for name, path in paths
    ]


def photographed(path: Path, skewed: bool, images: int) -> fn.Federation:
    """A federation of a file or folder, with at most 100 images for validation and 500 for tests at every site."""
    made = fn.federation(str(path)) if path.is_file() else fn.federation(f"folder:{path}", size=48, val=0.15, test=0.3)
    if not any(site.val is not None for site in made.clients):
        made = with_validation(made, 0.2)
    if skewed:
        made = fn.partition(made, "dirichlet(beta=0.3, clients=2, within=domain)")
    return thinned(made, images, val=100, test=500)


def in_turn(kinds: Sequence[Sequence[Made]]) -> list[Case]:
    """The kinds of shift in turn: the first results already cover all of them."""
    spread = []
    for k, kind in enumerate(kinds):
        for i, (data, name, make) in enumerate(kind):
            spread.append((i / len(kind), k, Case(data, name, ("cnn-small", "narrow")[(i + k) % 2], make)))
    return [case for _, _, case in sorted(spread, key=lambda item: item[:2])]
