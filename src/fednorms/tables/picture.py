"""A reproduced table as a picture: a heat map of differences per setting, and learning curves where they are kept."""

from __future__ import annotations

import textwrap
from statistics import fmean
from typing import TYPE_CHECKING

from fednorms.analysis.picture import png_of
from fednorms.runs.report import COLOURS, DASHES, MARKERS
from fednorms.tables.summary import APART, MISS, Section, Summary, ours_of, print_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPAN = 10.0  # points at which colours end


def png(summary: Summary) -> bytes | None:
    """The picture as bytes; None if nothing has run."""
    if not summary.records:
        return None
    return png_of(figure(summary))


def figure(summary: Summary) -> Figure:
    """One panel per setting that has run; beside it the curves, if a setting keeps them."""
    from matplotlib.figure import Figure

    sections = [section for section in summary.sections if section.shown]
    curves = any(_curves(section) for section in sections)
    widest = max(len(section.columns) for section in sections)
    heights = [1.5 + 0.46 * len(section.rows) for section in sections]
    widths = [0.95 * widest + 2.4, *([5.6] if curves else [])]
    fig = Figure(figsize=(max(sum(widths), 6.0), sum(heights) + 0.6), layout="constrained", facecolor="white")
    grid = fig.subplots(len(sections), len(widths), squeeze=False, height_ratios=heights, width_ratios=widths)
    heading = textwrap.fill(summary.table.heading, int(9.5 * fig.get_figwidth()))  # letters to the inch, roughly
    fig.suptitle(heading, fontsize=12, fontweight="bold")
    for section, axes in zip(sections, grid, strict=True):
        _heat_map(axes[0], section)
        if len(widths) > 1:
            _draw_curves(axes[1], section)
    return fig


def _heat_map(axis: Axes, section: Section) -> None:
    """Ours in every cell, the difference to print as colour: purple better, orange worse, white not comparable."""
    columns, rows = section.columns, list(section.rows)
    colours = [[_shade(section.rows[row][c].difference, section, row, c) for c in columns] for row in rows]
    axis.set_facecolor("#eeeeee")
    axis.imshow(colours, cmap="PuOr", vmin=-_SPAN, vmax=_SPAN, aspect="auto")
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            entry, selector = section.rows[row][column], section.selectors[column]
            text = ours_of(entry, selector).partition(" ±")[0]
            if entry.printed is not None:
                text += f"\nprint {print_of(entry.printed, selector)}"
            text += " ✗" if entry.verdict == MISS else " †" if entry.verdict == APART else ""
            dark = abs(colours[i][j]) > 0.7 * _SPAN
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_title(f"{section.title}: ours and print (%), purple better, orange worse", fontsize=9)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _shade(difference: float | None, section: Section, row: str, column: str) -> float:
    selector = section.selectors[column]
    if difference is None or selector.is_cost or section.rows[row][column].verdict == APART:
        return 0.0
    return max(-_SPAN, min(_SPAN, -difference if selector.less_is_better else difference))


def _curves(section: Section) -> dict[str, dict[int, float]]:
    """Mean accuracy over seeds after each tested round, by row, in the method's headline mode."""
    points: dict[str, dict[int, list[float]]] = {}
    for record in section.records:
        for t, mean, *_ in record.get("curve", {}).get(record.get("headline", ""), []):
            if mean is not None:
                points.setdefault(record["row"], {}).setdefault(int(t), []).append(100 * mean)
    return {row: {t: fmean(v) for t, v in sorted(curve.items())} for row, curve in points.items()}


def _draw_curves(axis: Axes, section: Section) -> None:
    curves = _curves(section)
    if not curves:
        axis.set_axis_off()
        return
    for i, (row, curve) in enumerate(curves.items()):
        axis.plot(
            list(curve),
            list(curve.values()),
            color=COLOURS[i % len(COLOURS)],
            linestyle=DASHES[i // len(COLOURS) % len(DASHES)],
            marker=MARKERS[i % len(MARKERS)],
            markevery=max(1, len(curve) // 6),
            markersize=4,
            linewidth=1.6,
            label=row,
        )
    axis.set_xlabel("round", fontsize=8)
    axis.set_ylabel("mean accuracy (%)", fontsize=8)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)
