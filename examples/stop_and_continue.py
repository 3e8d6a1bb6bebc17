"""Train longer than planned, and stop when validation no longer improves.

    python examples/stop_and_continue.py [ROUNDS]

Writes into runs/stop-and-continue.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

import fednorms as fn


def main(rounds: int) -> None:
    out = Path("runs/stop-and-continue")
    shutil.rmtree(out, ignore_errors=True)
    short = fn.run("gn", "digits-shift", rounds=rounds, lr=0.2, batch_size=32, out=out / "short")
    print(short)
    longer = fn.resume(out / "short", rounds=2 * rounds)
    at_once = fn.run("gn", "digits-shift", rounds=2 * rounds, lr=0.2, batch_size=32)
    ours, theirs = longer.model().state_dict(), at_once.model().state_dict()
    equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"continued to round {longer.rounds}; equal to a run of {at_once.rounds} rounds, bit for bit: {equal}")

    stop = fn.EarlyStopping(patience=3)  # looks at validation images only
    stopped = fn.run("gn", "digits-shift", rounds=6 * rounds, lr=0.4, batch_size=32, stop=stop)
    print(f"stopped after {stopped.rounds} of at most {6 * rounds} rounds:\n{stopped}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
