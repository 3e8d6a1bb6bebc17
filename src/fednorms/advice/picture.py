"""The picture of advice: validation curves of all trials, and the scores of the finalists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fednorms.core.optional import new_figure
from fednorms.runs.comparison_files import line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fednorms.advice.advice import Advice


def advice_figure(advice: Advice) -> Figure:
    """Draw advice; curves of one method share a color, and those that did not reach the end are thin."""
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    curves, last = advice.curves(), {f.trial.name for f in advice.finalists}
    names = [arm.name for arm in advice.arms]
    for name, points in curves.items():
        style: dict[str, Any] = line_style(next((i for i, arm in enumerate(names) if name.startswith(f"{arm}, ")), 0))
        strong = {"linewidth": 2.2, "label": name} if name in last else {"linewidth": 0.8, "alpha": 0.5}
        left.plot([t for t, _ in points], [100 * a for _, a in points], markersize=3, **style, **strong)
    left.set_title("Validation accuracy (%)", fontsize=11, fontweight="bold")
    left.set_xlabel("round")
    left.locator_params(axis="x", integer=True)
    if last & set(curves):
        left.legend(frameon=False, fontsize=8)
    for i, f in enumerate(reversed(advice.finalists)):
        right.scatter([100 * s for s in f.scores], [i] * len(f.scores), color="#8c8c8c", s=18, zorder=2)
        right.scatter([100 * f.mean], [i], color="#0072B2", s=60, marker="D", zorder=3)
    right.set_yticks(range(len(advice.finalists)), [f.trial.name for f in reversed(advice.finalists)])
    right.set_title("Finalists: seeds and mean (%)", fontsize=11, fontweight="bold")
    for axis in (left, right):
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    return figure
