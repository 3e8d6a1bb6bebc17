"""Time for servers that run inside a test."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


class Clock:
    """A clock that advances only when code sleeps, without waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """Sites in this process answer at once or never, so a deadline passes if and only if an answer is missing.

    That holds on a busy machine, too. Servers in their own processes keep the real time.
    """
    if find_spec("flwr") is not None:
        monkeypatch.setattr("fednorms.flower.roster.time", Clock())
