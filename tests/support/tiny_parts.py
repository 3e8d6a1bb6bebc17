"""Deterministic parts for tests of what reaches the data and the objective of other computations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fednorms.core.part import REGISTRY, Part, part


@contextmanager
def negating_and_doubling() -> Iterator[tuple[Part, Part]]:
    """Two parts while they are registered: x -> 1 - x in training, and twice the base loss."""

    @part("test_negate")
    class Negate(Part):
        def batch(self, x, y, s):
            return (x if s.testing else 1 - x), y

    @part("test_double")
    class Double(Part):
        def objective(self, s):
            return 2 * s.base(s.logits, s.y)

    try:
        yield Negate(), Double()
    finally:
        del REGISTRY["test_negate"], REGISTRY["test_double"]
