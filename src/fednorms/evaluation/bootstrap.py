"""Bootstrap replicates: how many times each image is drawn, with whole patients drawn where they are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fednorms.core.noise import seed_of

REPLICATES = 1000
_ELEMENTS = 20_000_000  # replicates x images: fewer replicates for very many images
_LEAST = 200


def replicates_for(images: int) -> int:
    """How many replicates so many images get: 1000, and fewer (at least 200) from 20,000 images on.

    >>> replicates_for(500), replicates_for(40_000), replicates_for(10_000_000)
    (1000, 500, 200)
    """
    return max(_LEAST, min(REPLICATES, _ELEMENTS // max(images, 1)))


class Draws:
    """Draws of a site's images with replacement; images of a group are drawn together.

    The numbers follow from the names: the same names give the same draws, however they are cut into chunks. Models that
    are tested on the same images get the same draws, so their differences are paired.
    """

    def __init__(self, images: int, groups: Sequence[str] | np.ndarray | None, *names: object) -> None:
        self.generator = np.random.default_rng(seed_of("bootstrap", *names))
        self.member = None if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
        self.units = images if self.member is None else int(self.member.max(initial=-1)) + 1

    def next(self, replicates: int) -> np.ndarray:
        """How many times each image is drawn: replicates x images."""
        chosen = self.generator.integers(0, self.units, (replicates, self.units))
        chosen += np.arange(replicates)[:, None] * self.units
        drawn = np.bincount(chosen.ravel(), minlength=replicates * self.units).reshape(replicates, self.units)
        drawn = drawn.astype(np.float32)
        return drawn if self.member is None else drawn[:, self.member]
