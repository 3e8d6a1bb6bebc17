"""What `make demo` runs: seven methods on five sites that see the same task through different cameras.

Takes about two minutes on two CPU cores and downloads nothing. A second call ends at once, because finished runs are
kept in runs/demo.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import fednorms as fn

METHODS = ["fedavg", "fedfn", "fednn", "greg", "fedbn", "gn", "fedwon"]
ROUNDS, SEEDS, CHECKPOINT_EVERY = 30, 3, 10
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
        recipe=fn.Recipe(checkpoint_every=CHECKPOINT_EVERY, evaluate_every=2),
        out=out,
        jobs=min(2, os.cpu_count() or 1),
        progress=True,
    )
    add_batch_statistics(comparison, out, before=ROUNDS - CHECKPOINT_EVERY)
    # Again, with FedNN's row, and with images of every site, which are public here.
    (out / "comparison.md").write_text(comparison.to_markdown(), encoding="utf-8")
    print("\n".join(narrow(comparison)))
    comparison.plot(federation).savefig(out / "curves.png", dpi=150)
    print(f"\nTable with standard deviations: {out / 'comparison.md'}. Picture: {out / 'curves.png'}.")
    return 1 if comparison.failed else 0


def narrow(comparison: fn.Comparison, width: int = 80) -> Iterator[str]:
    """The table for any terminal: means over seeds in percent, the best with *, and below it what was compared."""
    best = {column: comparison.best_in(column) for column in comparison.columns}
    yield " " * 20 + "".join(f"{column:>10}" for column in comparison.columns)
    for row in comparison.rows:
        means = [(row.entries[c].mean, best[c]) if c in row.entries else None for c in comparison.columns]
        cells = ["-" if m is None else f"{100 * m[0]:.1f}{'*' if m[0] == m[1] else ' '}" for m in means]
        tested = "" if row.mode in ("global/global", "personal/own") else f" {row.mode}"
        yield f"{row.label + tested:<20}" + "".join(f"{cell:>10}" for cell in cells)
    for remark in ["", *comparison.remarks()]:
        yield textwrap.fill(remark, width, subsequent_indent="  ")


def add_batch_statistics(comparison: fn.Comparison, out: Path, before: int) -> None:
    """Test FedNN also with the statistics of test batches: one more row, and a sentence on its fall since `before`."""
    falls: dict[str, list[float]] = {"global/global": [], "global/batch": []}
    for number, outcome in enumerate(comparison.outcomes):
        if outcome.label == "fednn" and outcome.status == "done":
            run = out / f"fednn-{outcome.seed}"
            earlier, last = (fn.evaluate_run(run, list(falls), which=which) for which in (before, "last"))
            for mode, found in falls.items():
                found.append(100 * (earlier[f"{mode}/test"].mean - last[f"{mode}/test"].mean))
            tested = {**outcome.last, "global/batch/test": last["global/batch/test"]}
            comparison.outcomes[number] = replace(outcome, last=tested)
    if falls["global/batch"] and fmean(falls["global/global"]) > max(0.0, fmean(falls["global/batch"])):
        by = {mode: f"{fmean(found):.1f} points" for mode, found in falls.items()}
        comparison.notes.append(
            "fednn falls at the end: its gates prefer batch statistics and become hard, while tests use running ones; "
            f"since round {before} it lost {by['global/global']}, with the statistics of test batches (global/batch) "
            f"{by['global/batch']}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except fn.FednormsError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again to continue.", file=sys.stderr)
        sys.exit(130)
