"""`fednorms analyse`: what the papers' figures measure, in a run of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fednorms.analysis.analyse import analyse as measured
from fednorms.analysis.analyse import analysis_named
from fednorms.cli.output import grid, print_json, stderr, stdout
from fednorms.cli.parsing import parse
from fednorms.runs.atomic import clear_errors, write_atomic
from fednorms.tables.report import NO_PICTURE


@dataclass
class Analyse:
    """Measure in a run what a figure of the papers shows; `fednorms list analyses` names all.

    The run is left as it is. Its data must be there. Analyses by round need the rounds, so a run with
    keep_checkpoints="all".
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    names: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="ANALYSIS [ANALYSIS ...]")]
    """What to measure, as "four-factors" or "embedding"."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: numbers only)")] = None
    """Write everything that was found (JSON), and a picture, here."""
    device: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: a GPU if there is one)")] = None
    """Where models run."""
    json: bool = False
    """Print one JSON object and nothing else."""


def analyse(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Analyse, "analyse", args)
    chosen = [analysis_named(name) for name in dict.fromkeys(given.names)]
    found = {a.name: measured(given.run, a.name, device=given.device) for a in chosen}
    if given.json:
        print_json({"run": str(given.run), "analyses": {name: f.plain() for name, f in found.items()}})
    else:
        rows = [[name, what, f"{value:.4g}"] for name, f in found.items() for what, value in f.scalars.items()]
        if rows:
            stdout().print(grid(["analysis", "what", "value"], rows, numbers_from=2))
    if given.out is None:
        return 0
    with clear_errors(given.out):
        given.out.mkdir(parents=True, exist_ok=True)
    files = []
    for analysis in chosen:
        files.append(given.out / f"{analysis.name}.json")
        write_atomic(files[-1], (json.dumps(found[analysis.name].plain()) + "\n").encode())
        try:
            from fednorms.analysis.picture import png

            image = png(analysis, {given.run.name: [found[analysis.name]]}, given.run.name)
        except ImportError:
            stderr().print(NO_PICTURE, markup=False)
            continue
        files.append(given.out / f"{analysis.name}.png")
        write_atomic(files[-1], image)
    if not given.json:
        stdout().print("written: " + ", ".join(map(str, files)), markup=False, soft_wrap=True)
    return 0
