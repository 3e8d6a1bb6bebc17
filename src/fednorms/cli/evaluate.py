"""`fednorms evaluate`: judge a run's models, in any mode, on its own data or on other labelled images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from fednorms.cli.output import grid, plain, print_json, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.errors import BadInput

if TYPE_CHECKING:
    from fednorms.evaluation.judgement import Judgement
    from fednorms.evaluation.scores import Scores, SiteScore

Which = Literal["last", "best"]


@dataclass
class Evaluate:
    """Judge a run's models: accuracy per site, recall per class, AUROC and calibration, with 95 % intervals.

    For example:
      fednorms evaluate runs/clinics --modes personal averaged
      fednorms evaluate runs/clinics --data new-hospital/ --full
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: the run's own)")] = None
    """Other labelled images: a folder of class/image or site/class/image, a federation's name, or a pack."""
    modes: Annotated[list[str] | None, tyro.conf.arg(metavar="MODE [MODE ...]", help_behavior_hint="")] = None
    """Models and statistics to test, such as "personal", "global/batch" or "global/batch:32" (default: the recipe's).
    Models: global, personal, after_local, adapted, unseen, averaged (the mean of personal models).
    Statistics: global, own, batch, re-estimated, test-time (the method adapts to unlabeled test images)."""
    which: Which = "last"
    """The last round, or the round with the best validation accuracy."""
    split: Literal["test", "val", "train"] = "test"
    """The split to test on."""
    site: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Test the personal model of this site on all of --data."""
    group: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: as in the run; '' for none)")] = None
    """A regular expression that finds the patient in a file name of --data; intervals then draw whole patients."""
    skip_broken: Flag = False
    """Leave out files of --data that cannot be read, and name them, instead of stopping."""
    sensitivity: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: Youden's J)")] = None
    """For two classes: choose the threshold that reaches this sensitivity on validation images."""
    positive: Annotated[str | None, tyro.conf.arg(metavar="CLASS", help_behavior_hint="(default: the last)")] = None
    """For two classes: the class that the threshold is for."""
    clients: Flag = False
    """Also show single sites: the 20 worst of each mode (--json has all of them)."""
    full: Flag = False
    """Also show every site and class with all metrics, and the confusion matrices."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """Also write everything to this file."""
    device: str = "auto"
    """cpu, cuda, or auto (the run's own, or the CPU if that is not here)."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def evaluate(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Evaluate, "evaluate", args)
    if given.out and not given.out.absolute().parent.is_dir():
        raise BadInput(f"--out {given.out}: the folder {given.out.parent} does not exist. Create it first.")
    from fednorms.runs.use.judge import Operating, judge_run

    found = judge_run(
        given.run,
        given.data,
        given.modes,
        given.which,
        given.split,
        given.site,
        given.group,
        given.skip_broken,
        Operating(given.sensitivity, given.positive),
        device=given.device,
        progress=False if given.json else None,
    )
    everything = {
        "run": str(given.run),
        "which": given.which,
        "data": given.data,
        "scores": {k: s.to_dict() for k, s in found.scores.items()},
        "judgements": {k: j.to_dict() for k, j in found.judgements.items()},
    }
    if given.out:
        _write(given.out, everything)
    if given.json:
        print_json(everything)
        return 0
    console = stdout()
    _show_scores(console, found.scores, found.metric, given)
    for judgement in found.judgements.values():
        _show_judgement(console, judgement, full=given.full)
    if given.out:
        console.print(f"\nwritten: {given.out}", markup=False, soft_wrap=True)
    return 0


def _write(path: Path, everything: dict[str, Any]) -> None:
    from fednorms.core.errors import writing
    from fednorms.runs.store.atomic import replace_bytes

    with writing(path):
        replace_bytes(path, (json.dumps(plain(everything), indent=1, ensure_ascii=False) + "\n").encode())


def _show_scores(console: Console, scores: dict[str, Scores], metric: str, given: Evaluate) -> None:
    """The short table: a line per mode, a column per domain, in the metric that the run is judged by."""
    balanced = metric == "balanced_accuracy"
    domains = list(dict.fromkeys(d for s in scores.values() for d in s.domains))
    rows = []
    for name, s in scores.items():
        judged = s.judged_domains(metric)
        per_domain = [f"{100 * judged[d]:.1f}" if d in judged else "-" for d in domains]
        rest = [s.balanced_accuracy, s.mean] if balanced else [s.mean, s.std, s.pooled, s.balanced_accuracy]
        rows.append([name, *per_domain, *(f"{100 * r:.1f}" for r in rest), f"{s.loss:.3f}"])
    over_sites = ["mean", "accuracy"] if balanced else ["mean", "std", "pooled", "balanced"]
    console.print(grid(["model/statistics/split", *domains, *over_sites, "loss"], rows, numbers_from=1))
    for name, s in scores.items() if given.clients else ():
        by = "balanced_accuracy" if balanced else "accuracy"
        worst = sorted(s.sites.items(), key=lambda item: getattr(item[1], by))[:_MOST_CLIENTS]
        left = len(s.sites) - len(worst)
        console.print(f"\n{name}" + (f", the worst {len(worst)} of {len(s.sites)} sites" if left else ""), markup=False)
        lines = [_client(site, s.domain_of[site], score) for site, score in worst]
        console.print(grid(_CLIENT_COLUMNS, lines, numbers_from=2))
    legend = "Mean and std are over sites, pooled is over images."
    if balanced:
        legend = "Mean and accuracy are over sites."
    what = "Balanced accuracy" if balanced else "Accuracy"
    console.print(f"\n{what} in percent, {given.which} round. {legend}", markup=False)


_CLIENT_COLUMNS = ("site", "domain", "images", "accuracy", "balanced", "loss")
_MOST_CLIENTS = 20  # as many lines as a terminal shows at once


def _client(name: str, domain: str, score: SiteScore) -> list[str]:
    shares = (f"{100 * share:.1f}" for share in (score.accuracy, score.balanced_accuracy))
    return [name, domain, f"{score.samples:,}", *shares, f"{score.loss:.3f}"]


def _show_judgement(console: Console, judgement: Judgement, *, full: bool) -> None:
    """The classes and what is worst; with `full`, all metrics of all sites."""
    from fednorms.evaluation.shown import class_table, findings, full_tables, legend, summary

    console.print(f"\n{summary(judgement)}", markup=False, style="bold")
    tables = full_tables(judgement) if full else {"": class_table(judgement, _MOST_CLIENTS)}
    for title, (header, rows) in tables.items():
        if title:
            console.print(f"\n{title}", markup=False)
        console.print(grid(header, rows, numbers_from=1))
    for line in [*findings(judgement), legend(judgement)]:
        console.print(line, markup=False)
