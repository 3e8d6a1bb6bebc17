"""`fednorms analyze`: measure in any run what the papers' figures show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fednorms.cli.output import grid, print_json, stderr, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.errors import BadInput
from fednorms.runs.store.atomic import check_folder, clear_errors, write_atomic

if TYPE_CHECKING:
    from fednorms.papers.analysis.findings import Findings
    from fednorms.papers.analysis.measures import Analysis


@dataclass
class Analyze:
    """Measure in a run what a figure of the papers shows; `fednorms list analyses` lists all analyses.

    The run is not changed, and its data must be available. Analyses by round have a point per stored round
    (keep_checkpoints="all"); test-gap needs a run that was tested with both kinds of statistics.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    names: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="ANALYSIS [ANALYSIS ...]")]
    """What to measure, such as "four-factors" or "embedding"."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: numbers only)")] = None
    """Folder for all findings (JSON) and a picture."""
    device: str = "auto"
    """cpu, cuda, or auto (the run's own, or the CPU if that is not here)."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def analyze(args: Sequence[str]) -> int:
    """Run the command."""
    given = parse(Analyze, "analyze", args)
    from fednorms.papers.analysis.analyze import analyze as measured
    from fednorms.papers.analysis.measures import ANALYSES, analysis_named

    if not given.names:
        raise BadInput(f"Name what to measure. Known: {', '.join(ANALYSES)}.")
    chosen = [analysis_named(name) for name in dict.fromkeys(given.names)]
    if given.out is not None:
        check_folder(given.out)
    found: dict[str, Findings] = {}
    for analysis in chosen:  # each is shown and written at once
        found[analysis.name] = measured(given.run, analysis.name, device=given.device)
        if not given.json:
            _show(analysis.name, found[analysis.name])
        if given.out is not None:
            files = _write(given.out, analysis, found[analysis.name], given.run.name)
            if not given.json:
                stdout().print("Written: " + ", ".join(map(str, files)), markup=False, soft_wrap=True)
    if given.json:
        print_json({"run": str(given.run), "analyses": {name: f.plain() for name, f in found.items()}})
    return 0


def _show(name: str, found: Findings) -> None:
    if found.scalars:
        rows = [[what, f"{value:.4g}"] for what, value in found.scalars.items()]
        stdout().print(grid([name, "value"], rows, numbers_from=1))
    else:
        stdout().print(f"{name}: no single number. --out DIR writes the findings and a picture.", markup=False)


def _write(out: Path, analysis: Analysis, found: Findings, run: str) -> list[Path]:
    with clear_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{analysis.name}.json"]
    write_atomic(files[0], (json.dumps(found.plain()) + "\n").encode())
    try:
        from fednorms.papers.analysis.picture import png

        image = png(analysis, {run: [found]}, run)
    except ImportError:
        from fednorms.papers.tables.report import NO_PICTURE

        stderr().print(NO_PICTURE, markup=False)
        return files
    files.append(out / f"{analysis.name}.png")
    write_atomic(files[1], image)
    return files
