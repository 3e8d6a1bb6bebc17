"""Crafted messages of one of three sites: the server never raises, and the honest sites finish."""

from __future__ import annotations

import logging

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.campaign.scene import Budget, Outcome
from tests.flower.test_fuzz_messages import METHODS, cases, finishes

AT_ONCE = 50


def campaign(seconds: float, seed: int) -> Outcome:
    found = Outcome("messages")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it logs every round

    def work(case: tuple[str, list[object]]) -> None:
        found.tries += 1
        try:
            finishes(case)
        except Exception as error:
            found.bad.append(f"{case[0]}, seed {seed}, try {found.tries}: {type(error).__name__}: {error}"[:300])

    quiet = settings(
        max_examples=AT_ONCE, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for number in Budget(seconds):
        quiet(seeded(seed + number)(given(cases(*METHODS))(work)))()
    return found
