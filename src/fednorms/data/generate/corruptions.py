"""The nineteen corruptions of CIFAR-10-C at five severities, generated.

Paper: Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
https://arxiv.org/abs/1903.12261
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.generate import blurs, resampling, tones, weather
from fednorms.data.rules import draws
from fednorms.data.splits import split

Constants = tuple[tuple[float, ...], ...]
Corruption = Callable[[Tensor, Sequence[float], blurs.Draws], Tensor]

_CHUNK = 500  # images with one seed for their random numbers


def _each(*values: float) -> Constants:
    return tuple((v,) for v in values)


CORRUPTIONS: dict[str, tuple[Corruption, Constants]] = {
    "gaussian_noise": (tones.gaussian_noise, _each(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (tones.shot_noise, _each(500, 250, 100, 75, 50)),
    "impulse_noise": (tones.impulse_noise, _each(0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (blurs.defocus, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (blurs.glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
    "motion_blur": (blurs.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (blurs.zoom_blur, _each(1.05, 1.10, 1.15, 1.20, 1.25)),
    "snow": (
        weather.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": (weather.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (tones.brightness, _each(0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (tones.contrast, _each(0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (
        resampling.elastic_transform,
        ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    ),
    "pixelate": (resampling.pixelate, _each(0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (resampling.jpeg_compression, _each(80, 65, 58, 50, 40)),
    "speckle_noise": (tones.speckle_noise, _each(0.06, 0.10, 0.12, 0.16, 0.20)),
    "gaussian_blur": (blurs.gaussian_blur, _each(0.4, 0.6, 0.7, 0.8, 1)),
    "spatter": (
        weather.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
    ),
    "saturate": (tones.saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
"""Function and constants per severity, in the order of the published files; constants are for 32-pixel images."""

APPROXIMATE = ("motion_blur", "snow", "frost", "spatter")
"""Corruptions that only resemble the published files, which were made with other tools or unavailable pictures."""


def corrupt(x: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt images (N, 3, H, W, uint8) with a corruption of Hendrycks and Dietterich (ICLR 2019), severity 1 to 5.

    The random numbers depend on name, severity, seed and the position of an image. Frost, snow, spatter and motion blur
    are approximate. No corruption is bit-equal to the published files: prefer those if you have them.

    >>> x = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
    >>> corrupt(x, "brightness", 1).unique().tolist()
    [113]
    """
    if name not in CORRUPTIONS:
        raise BadInput(f'Unknown corruption "{name}": {nearest(name, CORRUPTIONS)}.')
    if severity not in range(1, 6):
        raise BadInput(f'Corruption "{name}": severity must be 1 to 5, got {severity!r}.')
    if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[1] != 3 or min(x.shape[2:]) < 4:
        raise BadInput(
            f'Corruption "{name}": expected RGB images of type uint8 and shape (N, 3, H, W) with at least 4x4 pixels, '
            f"got {x.dtype} of shape {tuple(x.shape)}."
        )
    function, constants = CORRUPTIONS[name]
    done = []
    for start in range(0, len(x), _CHUNK):
        r = draws("corruption", name, severity, seed, start)
        y = function(x[start : start + _CHUNK].float() / 255, constants[severity - 1], r)
        done.append((y.clamp(0, 1) * 255).round().to(torch.uint8))
    return torch.cat(done) if done else x


def corrupted_federation(
    x: Tensor,
    y: Tensor,
    classes: Sequence[str],
    severity: int = 4,
    names: Sequence[str] = tuple(CORRUPTIONS),
    test: int = 500,
    seed: int = 23,
    val: int = 0,
) -> Federation:
    """Make one client per corruption of the same images, as FedNN uses CIFAR-10-C: 19 clients at severity 4.

    The same `test` images (stratified, chosen by seed) are tested at every client, so no client trains on an image
    that another client is tested on; `val` images are held out in the same way.

    >>> x, y = torch.zeros(20, 3, 8, 8, dtype=torch.uint8), torch.arange(20) % 2
    >>> made = corrupted_federation(x, y, ["a", "b"], names=["fog", "frost"], test=4)
    >>> made.clients[1].attributes["generated"], len(made.clients[0].test)
    ('approximate', 4)
    """
    if not 0 < test < len(x) - val or val < 0:
        raise BadInput(
            f"Corrupted federation: test and val must leave images to train on, got {test} and {val} of {len(x)}."
        )
    held = {"val": val / len(x)} if val else {}
    parts = split(y, {**held, "test": test / len(x)}, seed, "cifar-10-c")
    sites = []
    for name in names:
        bad = corrupt(x, name, severity, seed)
        splits = {part: Split(bad[at], y[at]) for part, at in parts.items()}
        kind = "approximate" if name in APPROXIMATE else "yes"
        sites.append(Site(name, name, **splits, attributes={"generated": kind}))
    source = {"spec": "corrupted", "generated": True, "severity": severity, "seed": seed, "test": test}
    source |= {"val": val} if val else {}
    norm = Preprocessing((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    return Federation(f"generated corruptions, severity {severity}", sites, classes, norm, source)
