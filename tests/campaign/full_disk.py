"""The disk is full from a random file operation on: one message, and the run continues once there is room."""

from __future__ import annotations

import random
import shutil

from tests.campaign.kills import RUN
from tests.campaign.scene import Budget, Outcome, command, content, options, scene


def campaign(seconds: float, seed: int) -> Outcome:
    found, draw = Outcome("full disk"), random.Random(seed)
    with scene() as root:
        whole = command(root, "run", *options(root, *RUN), "--out", root / "whole")
        expected, out = content(root / "whole"), root / "full"
        for _ in Budget(seconds):
            shutil.rmtree(out, ignore_errors=True)
            start, stop = ("run", *options(root, *RUN), "--out", out), draw.randrange(1, whole.operations + 1)
            first = command(root, *start, stop_at=stop, full=True)
            last = command(root, *(("resume", out, "--quiet") if (out / "recipe.toml").exists() else start))
            found.tries += 1
            if first.crashed or first.code not in (0, 1, 2):
                found.bad.append(f"full at operation {stop}: {first.code} {first.said}")
            if last.code or content(out) != expected:
                found.bad.append(f"full at operation {stop}, then other bits: {last.said}")
    return found
