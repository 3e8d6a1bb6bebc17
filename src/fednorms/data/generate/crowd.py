"""A crowd of any size that photographs scikit-learn's digits: each client is made when it takes part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fednorms.core.errors import BadInput
from fednorms.core.noise import permutation, seed_of
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.digits_shift import cameras, photographed, real_digits
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.on_demand import OnDemand
from fednorms.data.splits import split


def digits_crowd(
    size: int = 16,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
    clients: int = 1000,
    images: int = 20,
    tested: int = 100,
) -> Federation:
    """Make the federation "digits-crowd": any number of clients, each with a few digits and one of five cameras.

    A client draws `images` of the 1,797 digits and its camera, hashed from `seed` and its name; many clients have the
    same digits, seen by different cameras. Nobody trains on a digit that is tested. The first `tested` clients are
    tested; they draw their share of validation and test digits as well.

    >>> digits_crowd(clients=1_000_000).clients[777_777]
    Site('client-777777', domain='foggy', train=20)
    """
    if not 8 <= size <= 512:
        raise BadInput(f'Federation "digits-crowd": size must be 8 to 512 pixels, got {size}.')
    if min(val, test) < 0 or val + test >= 1:
        raise BadInput(f'Federation "digits-crowd": val and test must leave images to train on, got {val} and {test}.')
    make = Crowd(size, seed, val, test, images)
    if not 1 <= images <= (most := len(make.pools["train"])):
        raise BadInput(f'Federation "digits-crowd": images must be 1 to {most}, the digits to train on, got {images}.')
    options = {"clients": clients, "images": images, "tested": tested}
    return Federation(
        "digits-crowd",
        OnDemand(make, clients, images, min(tested, clients)),
        [str(c) for c in range(10)],
        Preprocessing.centered(3),
        {"spec": "digits-crowd", "size": size, "seed": seed, "val": val, "test": test, **options},
    )


@dataclass(frozen=True)
class Crowd:
    """The rule that makes a client of the crowd."""

    size: int
    seed: int
    val: float
    test: float
    images: int

    @cached_property
    def digits(self) -> tuple[Tensor, Tensor]:
        """All digits, enlarged, in [0, 1], and their labels."""
        images, labels = real_digits()
        small = torch.from_numpy(images / 16).unsqueeze(1)
        large = functional.interpolate(small, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return large, torch.from_numpy(labels)

    @cached_property
    def pools(self) -> dict[str, np.ndarray]:
        """The digits of each split, which all clients share."""
        return split(self.digits[1], {"val": self.val, "test": self.test}, self.seed, "digits-crowd")

    def __call__(self, name: str, number: int) -> Site:
        """The client of this name."""
        camera = cameras()[seed_of("digits-crowd", "camera", self.seed, name) % len(cameras())]
        x, y = self.digits
        train = self.images / (1 - self.val - self.test)
        sizes = {"train": self.images, "val": round(train * self.val), "test": round(train * self.test)}
        splits = {}
        for part, pool in self.pools.items():
            at = pool[permutation(len(pool), "digits-crowd", part, self.seed, name)[: sizes[part]].numpy()]
            splits[part] = Split(photographed(x[at], camera, self.seed, name, part), y[at])
        return Site(name, camera, splits["train"], splits.get("val"), splits.get("test"))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
