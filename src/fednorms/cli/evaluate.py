"""`fednorms evaluate`: test a run again, in any mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import Flag, parse

if TYPE_CHECKING:
    from fednorms.evaluation.scores import SiteScore

Which = Literal["last", "best"]


@dataclass
class Evaluate:
    """Test a run's models in any mode. Needs the run's data."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    modes: Annotated[list[str] | None, tyro.conf.arg(metavar="MODE [MODE ...]", help_behavior_hint="")] = None
    """Models and statistics to test, such as "personal", "global/batch" or "global/batch:32" (default: the recipe's).

    Models: global, personal, after_local, adapted, unseen. Statistics: global, own, batch, re-estimated."""
    which: Which = "last"
    """The last round, or the round with the best validation accuracy."""
    split: Literal["test", "val", "train"] = "test"
    """The split to test on."""
    clients: Flag = False
    """Also show single sites: the 20 worst of each mode (--json has all of them)."""
    device: str = "auto"
    """cpu, cuda, or auto (the run's own, or the CPU if that is not here)."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def evaluate(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Evaluate, "evaluate", args)
    from fednorms.runs.use.evaluate import evaluate_run

    scores = evaluate_run(
        given.run, given.modes, given.which, given.split, device=given.device, progress=False if given.json else None
    )
    if given.json:
        print_json({"run": str(given.run), "which": given.which, "scores": {k: s.to_dict() for k, s in scores.items()}})
        return 0
    domains = list(dict.fromkeys(d for s in scores.values() for d in s.domains))
    rows = []
    for name, s in scores.items():
        per_domain = [f"{100 * s.domains[d]:.1f}" if d in s.domains else "-" for d in domains]
        rest = [100 * s.mean, 100 * s.std, 100 * s.pooled, 100 * s.balanced_accuracy]
        rows.append([name, *per_domain, *(f"{r:.1f}" for r in rest), f"{s.loss:.3f}"])
    header = ["model/statistics/split", *domains, "mean", "std", "pooled", "balanced", "loss"]
    console = stdout()
    console.print(grid(header, rows, numbers_from=1))
    for name, s in scores.items() if given.clients else ():
        worst = sorted(s.sites.items(), key=lambda item: item[1].accuracy)[:_MOST_CLIENTS]
        left = len(s.sites) - len(worst)
        console.print(f"\n{name}" + (f", the worst {len(worst)} of {len(s.sites)} sites" if left else ""), markup=False)
        lines = [_client(site, s.domain_of[site], score) for site, score in worst]
        console.print(grid(_CLIENT_COLUMNS, lines, numbers_from=2))
    legend = "Mean and std are over sites, pooled is over images."
    console.print(f"\nAccuracy in percent, {given.which} round. {legend}", markup=False)
    return 0


_CLIENT_COLUMNS = ("site", "domain", "images", "accuracy", "balanced", "loss")
_MOST_CLIENTS = 20  # as many lines as a terminal shows at once


def _client(name: str, domain: str, score: SiteScore) -> list[str]:
    shares = (f"{100 * share:.1f}" for share in (score.accuracy, score.balanced_accuracy))
    return [name, domain, f"{score.samples:,}", *shares, f"{score.loss:.3f}"]
