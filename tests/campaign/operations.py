"""Kill -9 at every file operation of a run, each once: the run resumes to the same bits."""

from __future__ import annotations

import random

from tests.campaign.kills import RUN, killed_run
from tests.campaign.scene import Budget, Outcome, command, content, options, scene


def campaign(seconds: float, seed: int) -> Outcome:
    found, draw = Outcome("operations"), random.Random(seed)
    with scene() as root:
        whole = command(root, "run", *options(root, *RUN), "--out", root / "whole")
        assert whole.code == 0, whole.said
        expected = content(root / "whole")
        every = draw.sample(range(1, whole.operations + 1), whole.operations)
        for number in Budget(seconds, most=len(every)):
            found.tries += 1
            if problem := killed_run(root, draw, expected, stop_at=every[number]):
                found.bad.append(f"killed at operation {every[number]} of {len(every)}: {problem}")
        found.whole = len(every)
    return found
