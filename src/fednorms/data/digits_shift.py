"""The embedded federation "digits-shift": handwritten digits, seen by five sites through five different cameras.

Data: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998,
https://doi.org/10.24432/C50P49. The idea follows the digit domains of Li et al., FedBN: Federated Learning on Non-IID
Features via Local Batch Normalization, ICLR 2021, https://arxiv.org/abs/2102.07623
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fednorms.core.errors import BadInput
from fednorms.core.noise import hashed_uniform, seed_of
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.splits import split

DESCRIPTION = "1,797 real 8x8 digits (scikit-learn) over five sites, each with a different camera"


def division(seed: int = 0, val: float = 0.1, test: float = 0.2) -> dict[str, dict[str, np.ndarray]]:
    """Divide the 1,797 digits over the sites: site, then split, then positions in scikit-learn's order.

    No digit is in two sites or two splits, and every site and split has every class in equal shares.

    >>> sizes = {site: sum(map(len, parts.values())) for site, parts in division().items()}
    >>> sum(sizes.values()), max(sizes.values()) - min(sizes.values()) < 10
    (1797, True)
    """
    _, y = real_digits()
    sites = split(y, {site: 1 / len(_CAMERAS) for site in _CAMERAS}, seed, "digits-shift")
    return {
        site: {part: at[chosen] for part, chosen in split(y[at], {"val": val, "test": test}, seed, site).items()}
        for site, at in sites.items()
    }


def digits_shift(
    size: int = 16,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
    preprocessing: Preprocessing | None = None,
) -> Federation:
    """Make the default federation "digits-shift": five sites with one task and five different looks.

    Camera of each site, for a digit d in [0, 1] and uniform noise u in [-1/2, 1/2] per pixel and channel::

        clean     d                       negative  1 - d
        poster    |b - d|                 with b a smooth random pattern of colors, another for every image
        foggy     0.35 + 0.4 blur(d) + 0.5 u
        faint     tint + 0.1 d + 0.08 u   with one tint for all images

    Images are RGB and `size` pixels square (bilinear from 8). `seed` decides the division over the sites, the patterns
    and the noise.

    >>> digits_shift()
    Federation 'digits-shift': 5 sites, 10 classes, images 3x16x16
    site      domain    train  val  test  classes
    clean     clean       252   36    72  10/10
    ...
    """
    if not 8 <= size <= 512:
        raise BadInput(f'Federation "digits-shift": size must be 8 to 512 pixels, got {size}.')
    if min(val, test) < 0 or val + test >= 1:
        raise BadInput(f'Federation "digits-shift": val and test must leave images to train on, got {val} and {test}.')
    images, labels = real_digits()
    small, y = torch.from_numpy(images / 16).unsqueeze(1), torch.from_numpy(labels)  # N x 1 x 8 x 8 in [0, 1]
    sites = []
    for name, parts in division(seed, val, test).items():
        splits = {}
        for part, at in parts.items():
            d = functional.interpolate(small[at], size=(size, size), mode="bilinear", align_corners=False)
            splits[part] = Split(photographed(d, name, seed, name, part), y[at])
        sites.append(Site(name, name, splits["train"], splits["val"], splits["test"]))
    return Federation(
        "digits-shift",
        sites,
        [str(c) for c in range(10)],
        preprocessing or Preprocessing.centered(3),
        {"spec": "digits-shift", "size": size, "seed": seed, "val": val, "test": test},
    )


def cameras() -> list[str]:
    """The names of the five cameras."""
    return list(_CAMERAS)


def photographed(d: Tensor, camera: str, *names: object) -> Tensor:
    """Digits in [0, 1] (N x 1 x H x W, float64) as bytes (N x 3 x H x W) of a camera; noise is hashed from names."""
    return _CAMERAS[camera](d, _Draws(*names)).clamp(0, 1).mul(255).round().to(torch.uint8)


def real_digits() -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's 1,797 handwritten digits: images of 8x8 with values 0 to 16, and labels.

    >>> real_digits()[0].shape
    (1797, 8, 8)
    """
    package = find_spec("sklearn")
    assert package is not None  # one of our dependencies
    assert package.origin is not None
    # The file itself, because importing sklearn.datasets takes a second or more, in every process.
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


class _Draws:
    """Uniform numbers hashed from the seed, site and split; every call is a new stream."""

    def __init__(self, *names: object) -> None:
        word = seed_of("digits-shift", *names)
        self.key = torch.tensor([word >> 32, word & 0xFFFFFFFF])
        self.calls = 0

    def __call__(self, *shape: int) -> Tensor:
        self.calls += 1
        return hashed_uniform(self.key, self.calls, shape, torch.float64)


def _clean(d: Tensor, draws: _Draws) -> Tensor:
    return d.expand(-1, 3, -1, -1)


def _negative(d: Tensor, draws: _Draws) -> Tensor:
    return (1 - d).expand(-1, 3, -1, -1)


def _poster(d: Tensor, draws: _Draws) -> Tensor:
    coarse = draws(len(d), 3, 3, 3)
    background = functional.interpolate(coarse, size=d.shape[-2:], mode="bilinear", align_corners=True)
    return (background - d).abs()


def _foggy(d: Tensor, draws: _Draws) -> Tensor:
    width = d.shape[-1] // 8 * 2 + 1
    blurred = functional.avg_pool2d(d, width, stride=1, padding=width // 2, count_include_pad=False)
    noise = draws(len(d), 3, *d.shape[-2:]) - 0.5
    return 0.35 + 0.4 * blurred + 0.5 * noise


def _faint(d: Tensor, draws: _Draws) -> Tensor:
    tint = torch.tensor([0.75, 0.6, 0.45], dtype=d.dtype).view(1, 3, 1, 1)
    noise = draws(len(d), 3, *d.shape[-2:]) - 0.5
    return tint + 0.1 * d + 0.08 * noise


_CAMERAS: dict[str, Callable[[Tensor, _Draws], Tensor]] = {
    "clean": _clean,
    "negative": _negative,
    "poster": _poster,
    "foggy": _foggy,
    "faint": _faint,
}
