"""The picture of one run: accuracy per domain and training loss, over rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fednorms.core.optional import new_figure
from fednorms.evaluation.scores import Scores
from fednorms.runs.comparison_files import line_style
from fednorms.runs.run_names import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fednorms.runs.result import Result

_MOST = 8  # domains that get their own line


def result_figure(result: Result) -> Figure:
    """Draw a result; of more than eight domains, those that end worst."""
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    _accuracy(left, result)
    losses = [(row["round"], row["train_loss"]) for row in result.history if row["train_loss"] is not None]
    right.plot([t for t, _ in losses], [loss for _, loss in losses], color="black", marker="o", markersize=3)
    right.set_title("Training loss", fontsize=11, fontweight="bold")
    for axis in (left, right):
        axis.set_xlabel("round")
        axis.locator_params(axis="x", integer=True)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result.method} on {short(result.recipe.federation)}", fontsize=11)
    return figure


def _accuracy(axis: Axes, result: Result) -> None:
    shown = [name for row in result.history for name in row["scores"]]
    name = f"{result.headline}/test" if f"{result.headline}/test" in shown else f"{result.headline}/val"
    tested = {
        row["round"]: Scores.from_dict(row["scores"][name], result.domain_of)
        for row in result.history
        if name in row["scores"]
    }
    if tested:
        last = list(tested.values())[-1].domains
        for number, domain in enumerate(sorted(last, key=lambda d: last[d])[:_MOST], 1):
            points = {t: s.domains[domain] for t, s in tested.items() if domain in s.domains}
            style: dict[str, Any] = line_style(number)
            axis.plot(
                list(points), [100 * a for a in points.values()], label=domain, linewidth=1, markersize=3, **style
            )
        mean = [100 * s.mean for s in tested.values()]
        axis.plot(list(tested), mean, label="mean over sites", color="black", linewidth=2.5)
        axis.legend(frameon=False, fontsize=8)
    axis.set_ylim(0, 100)
    split = "Test" if name.endswith("/test") else "Validation"
    axis.set_title(f"{split} accuracy (%), {result.headline}", fontsize=11, fontweight="bold")
