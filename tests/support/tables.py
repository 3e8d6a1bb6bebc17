"""Tables for tests: one so small that a test can run it, and made-up results of runs."""

from __future__ import annotations

import json
import shutil

from fednorms.core.errors import RunFailed
from fednorms.papers.tables.plan import Found
from fednorms.runs import cells

MINI = """
paper = "fednorms"
label = "Mini"
title = "A few digits"
tolerance = 3.0
seeds = 1
notes = ["A note of the table."]

[recipe]
rounds = 2
model = "cnn-small"
training = { batch_size = 16 }

[[settings]]
name = "shift"
title = "Digits that look different"
recipe.data = { size = 8, val = 0.1, test = 0.8 }
[settings.columns]
Clean = "domain:clean"
Avg = "mean"
[settings.incomparable]
Clean = "drawn by hand"

[[settings]]
name = "pictures"
recipe.federation = "pacs"
[settings.columns]
Avg = "mean"

[[rows]]
name = "FedAvg"
method = "fedavg"
published.shift = { Clean = 1.0, Avg = [100.0, 0.5] }

[[rows]]
name = "FedBN"
method = "fedbn"
published.shift = { Clean = 2.0, Avg = 0.1 }
"""


def table(folder, text=MINI, **changes):
    """A folder with a table.toml; `changes` replaces pieces of its text, each of which must be there."""
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.toml").write_text(text)
    return folder


def fails_while_running(monkeypatch, method="fedbn"):
    """Make every run of a method fail, which no check can foresee."""

    def execute(recipe, **given):
        if recipe.method == method:
            raise RunFailed("the disk is full")
        return really(recipe, **given)

    really = cells.execute
    monkeypatch.setattr(cells, "execute", execute)


def results(out, file="results.json", key="runs"):
    """The stored runs of a finished table by (setting, row, seed)."""
    found = json.loads((out / file).read_text())
    assert list(found) == [key]
    return {(r["setting"], r["row"], r["recipe"]["seed"]): r for r in found[key]}


def searches(out):
    """The stored searches of a table that is not running, by row."""
    return {row: values for (_, row, _), values in results(out, "searches.json", "searches").items()}


def put(out, *records, file="results.json", key="runs"):
    """Write such a file."""
    out.mkdir(parents=True, exist_ok=True)
    (out / file).write_text(json.dumps({key: list(records)}))


def copy_results(source, out):
    """Copy what is stored, and not the report."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "searches.json"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)


def stored(out):
    """The stored runs without what differs between two runs of the same recipe."""
    found = results(out)
    for values in found.values():
        for key in ("seconds", "date", "jobs"):
            values.pop(key, None)
        values["recipe"].pop("engine")
    return found


def record(setting, row, seed, per_cent, status="done"):
    """What a finished run leaves, with this accuracy."""
    clients = {"accuracy": {"mean": per_cent / 100, "spread": 0.0, "worst": 0.01, "pooled": 0.02}}
    domains = {"d": {"sites": 1, "train": 1, "val": 0, "test": 1}}
    return {
        "setting": setting,
        "row": row,
        "status": status,
        "headline": "global",
        "last": {"global": {"clients": clients, "domains": {}}},
        "recipe": {"seed": seed, "precision": "float32"},
        "seconds": {"total": 1.0, "round": 1.0},
        "data": {
            "federation": "f",
            "layout": "",
            "clients": 1,
            "unseen": 0,
            "shape": [3, 8, 8],
            "classes": 10,
            "domains": domains,
            "fingerprint": "0",
            "notes": [],
        },
        "jobs": 1,
        "date": "2026-11-16",
        "hardware": "h",
        "version": "0",
        "torch": "0",
    }


def found(ours, diverged=()):
    """Results of runs: (setting, row) to percent by seed."""
    return Found(
        done={
            key: [record(*key, s, v, "diverged" if (*key, s) in diverged else "done") for s, v in enumerate(values)]
            for key, values in ours.items()
        }
    )
