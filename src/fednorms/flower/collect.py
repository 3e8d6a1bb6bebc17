"""Export a site's own model after a run, from the server's run directory and the state on the site's disk."""

from __future__ import annotations

from pathlib import Path

import torch

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.data import Split
from fednorms.flower.generations import Generations, default_root
from fednorms.flower.settings import fingerprint
from fednorms.runs.use.choose import choose
from fednorms.runs.use.export import Exported, write_model
from fednorms.runs.use.open import open_run


def export_at_site(run: Path, site: str, out: Path, state: Path | None = None) -> Exported:
    """Write a site's model to a directory that `load_model` reads.

    >>> export_at_site(Path("nowhere"), "north", Path("out"))
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    opened = open_run(run, device="cpu")
    if site not in opened.facts.clients:
        raise BadInput(f'This run has no site "{site}": {nearest(site, opened.facts.clients)}')
    accepted = opened.clients.get(site)
    kept = Generations(state or default_root(), fingerprint(opened.recipe), site)
    states = {} if accepted is None else {site: kept.load(accepted.round)}
    shape = opened.facts.shape
    black = Split(torch.zeros(2, *shape, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    found = {name: s for name, s in states.items() if s is not None}
    chosen = choose(opened.task, opened.facts, opened.test_broadcast, found, site, black)
    return write_model(opened, chosen, out, site)
