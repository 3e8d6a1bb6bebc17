"""Compare what two source trees of fednorms compute, bit for bit.

    python benchmarks/compare_trees.py OLD_TREE NEW_TREE [--only GROUP ...] [--skip GROUP ...]
    python benchmarks/compare_trees.py --list [TREE]

Both trees run the same program, `tree_probes.py` next to this file, on this machine: tiny federations trained with
every method in every engine, data made and divided, models built, keys and hashes computed. The program prints a digest
per probe, and this script compares them name by name. Nothing is stored, because floats differ between machines.

The exit code is 1 if a digest differs, or if one tree lacks a probe. A probe that raises has the exception's type as
its digest, so messages may change. Such probes are counted and named: one that is broken in both trees proves nothing.

The group `words` holds texts for people (help, reports, messages). It runs only on request (`--only words`): use it for
moves that must leave every text as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROBES = Path(__file__).with_name("tree_probes.py")
GROUPS = {
    "methods": "every method: loop, workers, graphs on the CPU, Flower; settings, options, combinations",
    "resume": "runs that are interrupted and resumed",
    "privacy": "epsilon, noise, what leaves a site",
    "data": "partitions, splits, readers, generators, transforms, packs, cohorts",
    "models": "first weights, outputs and heads of every model",
    "keys": "recipes, hashes, seeds, descriptions, tables",
    "after": "evaluate, predict, export, adapt, analyse, compare, reproduce",
    "words": "help, reports and messages (only if asked for)",
}
Digests = dict[str, str]


def start(tree: Path, groups: list[str], folder: Path, listing: bool = False) -> subprocess.Popen[str]:
    """The probe program in a tree, with a folder of its own to work in."""
    here = folder / "work"
    here.mkdir(parents=True)
    settings = {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),  # nothing is written into a tree
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_STATE_HOME": str(folder / "state"),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "COLUMNS": "100",
    }
    command = [sys.executable, "-P", str(PROBES), str(folder / "found.json"), *groups, *(["--list"] * listing)]
    with (folder / "said.txt").open("w") as said:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FEDNORMS_")} | settings
        return subprocess.Popen(command, cwd=here, env=environment, stdout=said, stderr=said, text=True)


def finish(process: subprocess.Popen[str], tree: Path, folder: Path) -> tuple[Digests, dict[str, float]]:
    """The digests that a tree found, and the seconds of each probe."""
    if process.wait():
        tail = (folder / "said.txt").read_text(errors="replace")[-3000:]
        raise SystemExit(f"The probes failed in {tree} (exit code {process.returncode}):\n{tail}")
    found = json.loads((folder / "found.json").read_text())
    return found["digests"], found["seconds"]


def run(trees: list[Path], groups: list[str], in_turn: bool) -> list[tuple[Digests, dict[str, float]]]:
    """What both trees found, side by side unless told otherwise."""
    results, running = [], []
    with tempfile.TemporaryDirectory(prefix="compare-trees-") as root:
        for number, tree in enumerate(trees):
            folder = Path(root, str(number))
            running.append((start(tree, groups, folder), tree, folder))
            if in_turn:
                results.append(finish(*running.pop()))
        try:
            results += [finish(*one) for one in running]
        finally:
            for process, _, _ in running:
                process.kill()
    return results


def compare(old: Digests, new: Digests) -> tuple[list[str], int]:
    """The differences in words, and how many probes are equal."""
    told, same = [], 0
    for name in dict.fromkeys([*old, *new]):
        if name not in new or name not in old:
            told.append(f"only in {'OLD' if name in old else 'NEW'}: {name}")
        elif old[name] != new[name]:
            told.append(f"differs: {name}  ({_short(old[name])} -> {_short(new[name])})")
        else:
            same += 1
    return told, same


def _short(digest: str) -> str:
    return digest if digest.startswith("raised ") else digest[:10]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="OLD_TREE and NEW_TREE")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--skip", nargs="+", choices=GROUPS, default=[], metavar="GROUP", help="leave these groups out")
    parser.add_argument("--list", action="store_true", help="list the groups; with one TREE, every probe in it")
    parser.add_argument("--in-turn", action="store_true", help="run one tree after the other instead of both at once")
    parser.add_argument("--times", action="store_true", help="show the slowest probes")
    given = parser.parse_args()
    trees = [tree.resolve() for tree in given.trees]
    groups = [g for g in given.only or [g for g in GROUPS if g != "words"] if g not in given.skip]
    for tree in trees:
        if not (tree / "src" / "fednorms").is_dir():
            parser.error(f"{tree} has no src/fednorms")
    if given.list:
        print("\n".join(f"{name:<9} {what}" for name, what in GROUPS.items()))
        for tree in trees[:1]:
            with tempfile.TemporaryDirectory(prefix="compare-trees-") as root:
                names, _ = finish(start(tree, groups, Path(root), listing=True), tree, Path(root))
                print(*names, sep="\n")
        return 0
    if len(trees) != 2:
        parser.error("give two trees: OLD_TREE NEW_TREE")

    began = time.monotonic()
    (old, seconds), (new, _) = run(trees, groups, given.in_turn)
    told, same = compare(old, new)
    raised = [name for name, digest in old.items() if digest.startswith("raised ")]
    for line in told:
        print(line)
    if given.times:
        for name, took in sorted(seconds.items(), key=lambda item: -item[1])[:20]:
            print(f"{took:7.2f} s  {name}")
    by_group = {g: sum(name.startswith(f"{g}/") for name in old) for g in groups}
    print(", ".join(f"{g}: {n}" for g, n in by_group.items()))
    unexpected = [name for name in raised if "(refused)" not in name]
    print(f"{len(raised)} probes raise in OLD, {len(raised) - len(unexpected)} of them as they should")
    for name in unexpected:
        print(f"  {name}: {old[name]}")
    print(f"{same} equal, {len(told)} different, in {time.monotonic() - began:.0f} s")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
