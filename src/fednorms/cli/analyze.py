"""`fednorms analyze`: measure in any run what the papers' figures show."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fednorms.cli.output import grid, print_json, stderr, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.errors import BadInput, FednormsError
from fednorms.runs.store.atomic import check_folder, clear_errors, write_atomic

if TYPE_CHECKING:
    from fednorms.papers.analysis.findings import Findings
    from fednorms.papers.analysis.registry import Analysis


@dataclass
class Analyze:
    """Measure in runs what a figure of the papers shows; `fednorms list analyses` lists all analyses.

    For example:
      fednorms analyze runs/fedavg-0 four-factors --out figures
      fednorms analyze runs/fedavg-0 runs/fedfn-0 norms divergence --out figures

    Several runs share a picture; runs of the same method are its seeds. The runs are not changed, and their data must
    be available. Analyses by round have a point per stored round (keep_checkpoints="all").
    """

    words: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="RUN [RUN ...] ANALYSIS [ANALYSIS ...]")]
    """The runs' directories, and what to measure, such as "four-factors" or "embedding"."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: numbers only)")] = None
    """Folder for all findings (JSON) and a picture."""
    round: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: the last, or all for curves)")] = None
    """Look at this round; its checkpoint, or the one before it, must have been kept."""
    client: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: all, or the first by name)")] = None
    """Look at this client's model right after training."""
    dead: float = 1e-3
    """divergence: leave out channels whose variance at a client is below this share of their mean variance."""
    device: str = "auto"
    """cpu, cuda, or auto (the run's own, or the CPU if that is not here)."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def analyze(args: Sequence[str]) -> int:
    """Run the command: exit code 1 if some analysis failed, and 2 if all did."""
    given = parse(Analyze, "analyze", args)
    from fednorms.papers.analysis.analyze import analyze as measured

    runs, chosen = _runs_and_analyses(given.words)
    if given.out is not None:
        check_folder(given.out)
    found: dict[str, dict[str, Findings]] = {}
    problems: list[FednormsError] = []
    for analysis in chosen:  # each is shown and written at once, and one that fails does not end the others
        try:
            of_runs = {
                str(run): measured(
                    run,
                    analysis.name,
                    device=given.device,
                    round=given.round,
                    client=given.client,
                    dead=given.dead,
                )
                for run in runs
            }
        except FednormsError as problem:
            problems.append(problem)
            if len(chosen) > 1:
                stderr().print(f"{analysis.name}: {problem}", markup=False, soft_wrap=True)
            continue
        found[analysis.name] = of_runs
        if not given.json:
            _show(analysis.name, of_runs)
        if given.out is not None:
            files = _write(given.out, analysis, of_runs)
            if not given.json:
                stdout().print("Written: " + ", ".join(map(str, files)), markup=False, soft_wrap=True)
    if problems and not found:
        raise problems[0]
    if given.json:
        print_json(_plain(found, problems))
    return 1 if problems else 0


def _runs_and_analyses(words: Sequence[str]) -> tuple[list[Path], list[Analysis]]:
    """The first word is a run; of the others, those that exist as folders."""
    from fednorms.papers.analysis.measures import ANALYSES, analysis_named

    runs = [Path(word) for at, word in enumerate(words) if at == 0 or Path(word).is_dir()]
    names = [word for at, word in enumerate(words) if at > 0 and not Path(word).is_dir()]
    if not names:
        raise BadInput(f"Name what to measure, after the run. Known: {', '.join(ANALYSES)}.")
    if missing := [name for name in names if "/" in name or os.sep in name]:
        raise BadInput(f'No run "{missing[0]}": there is no such folder.')
    return list(dict.fromkeys(runs)), [analysis_named(name) for name in dict.fromkeys(names)]


def _plain(found: dict[str, dict[str, Findings]], problems: Sequence[FednormsError]) -> dict[str, object]:
    """One run: as a single object; several: by run."""
    runs = list(dict.fromkeys(run for of_runs in found.values() for run in of_runs))
    failed = {"failed": [str(p) for p in problems]} if problems else {}
    by_run = {run: {name: of[run].plain() for name, of in found.items()} for run in runs}
    if len(runs) == 1:
        return {"run": runs[0], "analyses": by_run[runs[0]], **failed}
    return {"runs": by_run, **failed}


def _show(name: str, of_runs: dict[str, Findings]) -> None:
    scalars = list(dict.fromkeys(what for f in of_runs.values() for what in f.scalars))
    if not scalars:
        stdout().print(f"{name}: no single number. --out DIR writes the findings and a picture.", markup=False)
        return
    header = [name, "value"] if len(of_runs) == 1 else [name, *_short(of_runs).values()]
    rows = [[what, *(_number(f, what) for f in of_runs.values())] for what in scalars]
    stdout().print(grid(header, rows, numbers_from=1))
    points = max((len(s) for f in of_runs.values() for s in f.series.values()), default=0)
    if points == 1:
        stdout().print(
            "Curves have only one point, because only one round before the last was kept. Run with --keep-checkpoints "
            "all and --checkpoint-every N to keep more.",
            markup=False,
        )


def _number(found: Findings, what: str) -> str:
    value = found.scalars.get(what, math.nan)
    return "-" if math.isnan(value) else f"{value:.4g}"  # "W unseen" is not a number where every client has every class


def _write(out: Path, analysis: Analysis, of_runs: dict[str, Findings]) -> list[Path]:
    with clear_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    one = len(of_runs) == 1
    names = _short(of_runs)
    plain = {names[run]: f.plain() for run, f in of_runs.items()}
    files = [out / f"{analysis.name}.json"]
    write_atomic(files[0], (json.dumps(next(iter(plain.values())) if one else plain) + "\n").encode())
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        from fednorms.papers.tables.report import NO_PICTURE

        stderr().print(NO_PICTURE, markup=False)
        return files
    from fednorms.papers.analysis.picture import png_of

    first, *others = _labeled(of_runs)
    files.append(out / f"{analysis.name}.png")
    write_atomic(files[1], png_of(first.plot(*others)))
    return files


def _labeled(of_runs: dict[str, Findings]) -> list[Findings]:
    """Findings labeled by method, or by folder where two runs of a method are not only two seeds of it."""
    from fednorms.runs.recipe import Recipe
    from fednorms.runs.store.directory import RunDirectory

    seen: dict[str, set[str]] = {}
    for run in of_runs:
        recipe = Recipe.from_toml(RunDirectory(run).read_recipe(), run)
        rest = recipe.model_copy(update={"seed": 0, "fingerprint": ""}).to_toml()
        seen.setdefault(recipe.method, set()).add(rest)
    names = _short(of_runs)
    return [f if len(seen[f.label]) == 1 else replace(f, label=names[run]) for run, f in of_runs.items()]


def _short(runs: Iterable[str]) -> dict[str, str]:
    """The names of runs' folders, or their paths where two have the same name.

    >>> _short(["a/x", "b/y"]), _short(["a/x", "b/x"])
    ({'a/x': 'x', 'b/y': 'y'}, {'a/x': 'a/x', 'b/x': 'b/x'})
    """
    names = {run: Path(run).name for run in runs}
    return names if len(set(names.values())) == len(names) else {run: run for run in names}
