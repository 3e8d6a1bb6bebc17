"""Time for servers that run inside a test."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


class Clock:
    """Time that passes only while somebody sleeps; nobody has to wait for it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """A Desk answers at once or never: a deadline passes if and only if an answer is missing, on a busy machine, too.

    Servers that are processes of their own keep the real time.
    """
    if find_spec("flwr") is not None:
        monkeypatch.setattr("fednorms.flower.roster.time", Clock())
