"""Run the campaigns: `python -m tests.campaign --seconds 600 [NAME ...]`; exit code 1 if anything bad was found."""

from __future__ import annotations

import argparse
import importlib
import os
import time
import warnings

NAMES = ("kills", "operations", "corruption", "fuzz", "leaks", "writers", "full_disk", "messages")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--seconds", type=float, default=600, help="time for all campaigns together (default: 600)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of what is tried (default: the time)")
    given = parser.parse_args()
    names = given.names or list(NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"unknown campaign {unknown[0]}; known: {', '.join(NAMES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # children are forked, which several threads do not survive
    warnings.simplefilter("ignore")  # of libraries, about files that are damaged on purpose
    print(f"seed {given.seed}", flush=True)
    bad = 0
    for name in names:
        found = importlib.import_module(f"tests.campaign.{name}").campaign(given.seconds / len(names), given.seed)
        print(found, *found.bad, sep="\n  ", flush=True)
        bad += len(found.bad)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
