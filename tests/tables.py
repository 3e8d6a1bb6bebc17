"""A table so small that a test can run it: two methods, a few 8-pixel digits, two rounds."""

from __future__ import annotations

import json

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


def stored(out):
    """The results of an output folder by file, without what differs between two runs of the same recipe."""
    found = {}
    for file in sorted((out / "results").rglob("*.json")):
        values = json.loads(file.read_text())
        for key in ("seconds", "date", "jobs"):
            values.pop(key, None)
        values["recipe"].pop("engine")
        found[str(file.relative_to(out))] = values
    return found
