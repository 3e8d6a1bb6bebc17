"""What `make demo` runs: seven methods on five sites that see the same task through different cameras.

Takes about two minutes on two CPU cores and downloads nothing. A second call ends at once, because finished runs are
kept in runs/demo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fednorms as fn
from fednorms.cli.compare import show
from fednorms.runs import report

METHODS = ["fedavg", "fedfn", "fednn", "greg", "fedbn", "gn", "fedwon"]
ROUNDS, SEEDS = 30, 3
# One learning rate for all, except a larger one for unit-norm features, as in FedFN's paper.
LR = {**dict.fromkeys(METHODS, 0.2), "fedfn": 0.8}


def main() -> int:
    out = Path("runs/demo")
    federation = fn.federation("digits-shift")
    print(federation, end="\n\n", flush=True)
    comparison = fn.compare(
        METHODS,
        rounds=ROUNDS,
        seeds=SEEDS,
        lr=LR,
        batch_size=32,
        recipe=fn.Recipe(checkpoint_every=10, evaluate_every=2),
        out=out,
        jobs=min(2, os.cpu_count() or 1),
        progress=True,
    )
    add_batch_statistics(comparison, out)
    report.write(comparison, out, federation)  # again, now with images of every site, which are public here
    show(comparison)
    return 1 if comparison.failed else 0


def add_batch_statistics(comparison: fn.Comparison, out: Path) -> None:
    """Test FedNN's last models also with the statistics of test batches: one more row, and why it differs."""
    for outcome in comparison.outcomes:
        if outcome.label == "fednn" and outcome.status == "done":
            scores = fn.evaluate_run(out / f"fednn-{outcome.seed}", ["global/batch"])
            outcome.history[-1]["scores"] |= {mode: found.to_dict() for mode, found in scores.items()}
    rows = {row.mode: row.entries["mean"].mean for row in comparison.rows if row.label == "fednn"}
    if rows.get("global/batch", 0.0) > rows.get("global/global", 1.0):
        comparison.notes.append(
            "fednn falls in the last rounds because its gates come to prefer batch statistics, while tests use running "
            "ones, which mix all sites; with the statistics of test batches (global/batch) it keeps its level"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except fn.FednormsError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again to continue.", file=sys.stderr)
        sys.exit(130)
