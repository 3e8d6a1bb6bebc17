"""Export a site's own model after a run, from the server's run directory and the state on the site's disk."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.option_names import option
from fednorms.data import Split
from fednorms.flower.agreement import known_facts
from fednorms.flower.generations import Generations, default_root
from fednorms.flower.settings import fingerprint
from fednorms.methods.registry import method as read_method
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.choose import choose, known_site
from fednorms.runs.use.export import Exported, write_model
from fednorms.runs.use.open import open_run
from fednorms.runs.use.scored import scored


def export_at_site(run: Path, site: str, out: Path, state: Path | None = None) -> Exported:
    """Write a site's model to a directory that `load_model` reads.

    >>> export_at_site(Path("nowhere"), "north", Path("out"))
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    known_facts(RunDirectory(run))
    opened = open_run(run, device="cpu")
    known_site(opened.facts, site, trained=True)
    accepted = opened.clients.get(site)
    recorded = Recipe.from_toml(opened.directory.read_recipe(), str(opened.directory.recipe))
    kept = _generations(state or default_root(), recorded, site)
    if accepted is not None and not kept.rounds():
        raise BadInput(
            f'No state of site "{site}" of this run in {state or default_root()}. Name the state folder of the site\'s '
            f"node ({option('state')})."
        )
    states = {} if accepted is None else {site: kept.load(accepted.round)}
    shape = opened.facts.shape
    black = Split(torch.zeros(2, *shape, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    found = {name: s for name, s in states.items() if s is not None}
    chosen = choose(opened.task, opened.facts, opened.test_broadcast, found, site, black)
    return write_model(opened, chosen, out, site, scored(opened, chosen, exported=True))


def _generations(root: Path, recorded: Recipe, site: str) -> Generations:
    """The site's states of a run: under the recipe as it was given to the sites, which a run may record completed."""
    found = [Generations(root, fingerprint(recipe), site) for recipe in (recorded, as_given(recorded))]
    return next((kept for kept in found if kept.rounds()), found[0])


def as_given(recorded: Recipe) -> Recipe:
    """A recorded recipe without the options of its method that a run fills in.

    >>> as_given(Recipe(method="scaffold + fedbn").settled()).method
    'scaffold + fedbn'
    """
    method = read_method(recorded.method)
    parts = list(method.parts)
    for k, p in enumerate(parts):
        options: tuple[Field[Any], ...] = fields(p)  # type: ignore[arg-type]
        for f in options:
            if f.default is MISSING or getattr(p, f.name) == f.default:
                continue
            blank = replace(p, **{f.name: f.default})  # type: ignore[type-var]
            if getattr(blank.settled(method, recorded.training), f.name) != f.default:
                p = parts[k] = blank
    return recorded.model_copy(update={"method": str(Method(tuple(parts)))})
