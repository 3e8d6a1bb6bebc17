"""Two processes write the same run at the same time: one wins or both in turn, and the bits are those of one."""

from __future__ import annotations

import os
import shutil

from tests.campaign.kills import RUN
from tests.campaign.scene import Budget, Outcome, command, content, options, scene


def campaign(seconds: float, seed: int) -> Outcome:
    found = Outcome("two writers")
    with scene() as root:
        command(root, "run", *options(root, *RUN), "--out", root / "whole")
        expected, out = content(root / "whole"), root / "shared"
        for number in Budget(seconds):
            shutil.rmtree(out, ignore_errors=True)
            start = ("run", *options(root, *RUN), "--out", out)
            ended = []
            second = os.fork()
            if second == 0:
                (root / "second").mkdir(exist_ok=True)
                done = command(root / "second", *start)
                os._exit(3 if done.crashed else done.code)
            ended.append(command(root, *start))
            code = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
            refused = "Another process" in ended[0].said
            found.tries += 1
            if ended[0].crashed or code not in (0, 1) or (ended[0].code and not refused) or (code and ended[0].code):
                found.bad.append(f"try {number}: {ended[0].code} {ended[0].said}, the other {code}")
            elif content(out) != expected:
                found.bad.append(f"try {number}: other bits")
    return found
