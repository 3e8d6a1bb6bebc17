"""The picture of a table: lines over an axis, heat maps of differences, learning curves and rankings."""

from __future__ import annotations

import textwrap
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fednorms.papers.analysis.picture import head, png_of
from fednorms.papers.tables.cell import NOT_COMPARABLE, TableCell, mark, ours_text, published_text
from fednorms.papers.tables.summary import Section, Summary, axis_lines, axis_steps
from fednorms.runs.comparison_files import COLORS, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPAN = 10.0  # points at which the color scale ends


def png(summary: Summary) -> bytes | None:
    """The picture as bytes; None if nothing has run."""
    if not summary.records:
        return None
    return png_of(figure(summary))


def figure(summary: Summary) -> Figure:
    """The lines over the axis, if the table has one, then one panel per setting, with its curves or its ranking.

    Settings that are steps of the axis get a panel only if the paper has numbers for them.
    """
    from matplotlib.figure import Figure

    axis = summary.table.ladder
    drawn = axis is not None and len(axis_steps(summary)) > 1
    on_it = (set(axis.settings) or {s.name for s in summary.table.settings}) if axis and drawn else set()
    shown = [section for section in summary.sections if section.shown]
    curves = {s.setting.name: _curves(s) for s in shown}
    with_curves = {s.setting.name for s in shown if curves[s.setting.name] or s.setting.ranked}
    sections = [s for s in shown if s.setting.name not in on_it or s.has_published or s.setting.name in with_curves]
    lines = list(dict.fromkeys(row for section in sections for row in curves[section.setting.name]))
    widest = max((len(section.columns) for section in sections), default=4)
    heights = [3.4] * bool(on_it) + [1.5 + 0.46 * len(section.rows) for section in sections]
    widths = [0.95 * widest + 2.4, *([5.6] if with_curves else [])]
    fig = Figure(figsize=(max(sum(widths), 6.0), sum(heights) + 0.6), layout="constrained", facecolor="white")
    grid = fig.add_gridspec(len(heights), len(widths), height_ratios=heights, width_ratios=widths)
    head(fig, summary.table.heading, size=12)
    if on_it:
        _draw_axis(fig.add_subplot(grid[0, :]), summary)
    for i, section in enumerate(sections, start=bool(on_it)):
        _heat_map(fig.add_subplot(grid[i, 0]), section)
        if found := curves[section.setting.name]:
            _draw_curves(fig.add_subplot(grid[i, 1]), found, lines)
        elif section.setting.ranked:
            _draw_ranking(fig.add_subplot(grid[i, 1]), section)
    return fig


def _style(i: int) -> dict[str, Any]:
    """How the i-th line looks."""
    return {**line_style(i), "markersize": 4, "linewidth": 1.6}


def _draw_axis(plot: Axes, summary: Summary) -> None:
    """One line per row (or setting) over all steps, with the deviation over seeds; published values as hollow marks."""
    axis = summary.table.ladder
    assert axis is not None
    steps = list((axis.settings or axis.rows).values())
    for i, (name, line) in enumerate(axis_lines(summary).items()):
        ours = [(at, e.ours, e.std or 0.0) for at, s in enumerate(steps) if (e := line.get(s)) and e.ours is not None]
        where, means, deviations = zip(*ours, strict=True)
        plot.errorbar(where, means, deviations, capsize=2, label=name, **_style(i))
        theirs = {at: mean for at, s in enumerate(steps) if s in line and (mean := _published(line[s])) is not None}
        if theirs:
            hollow = _style(i) | {"linestyle": "", "markersize": 7, "markerfacecolor": "none"}
            plot.plot(list(theirs), list(theirs.values()), label=f"{name}, published", **hollow)
    plot.set_xticks(range(len(steps)), steps, fontsize=8)
    plot.set_xlabel(axis.label, fontsize=8)
    _finish(plot, f"{axis.column} (%)")


def _published(cell: TableCell) -> float | None:
    """The published value, if it can be drawn."""
    return None if cell.published is None or cell.published.failed else cell.published.mean


def _draw_ranking(axis: Axes, section: Section) -> None:
    """The ranked column as points with the deviation over seeds, the best on top; published values as rings."""
    column = section.setting.ranked
    rows = list(section.rows)
    for place, row in enumerate(rows):
        cell = section.rows[row][column]
        if cell.ours is not None:
            point = "x" if cell.diverged else "o"  # the mean of the seeds that ended
            axis.errorbar(cell.ours, place, xerr=cell.std or 0.0, fmt=point, markersize=4, capsize=2, color=COLORS[0])
        if (mean := _published(cell)) is not None:
            axis.plot(mean, place, "o", markersize=7, markerfacecolor="none", color=COLORS[1])
    axis.set_ylim(len(rows) - 0.5, -0.5)  # the order of the heat map
    axis.set_yticks(range(len(rows)), [""] * len(rows))
    axis.set_title(f"{column} (%): ours{', published as rings' if section.has_published else ''}", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def _heat_map(axis: Axes, section: Section) -> None:
    """Our result in every cell, the difference from the paper as color: purple better, orange worse."""
    columns, rows = section.columns, list(section.rows)
    shades = [[_shade(section.rows[row][c].difference, section, row, c) for c in columns] for row in rows]
    axis.set_facecolor("#eeeeee")
    axis.imshow(shades, cmap="PuOr", vmin=-_SPAN, vmax=_SPAN, aspect="auto")
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            cell, selector = section.rows[row][column], section.selectors[column]
            text = ours_text(cell, selector).partition(" ±")[0]
            text += f"\n{cell.diverged} diverged" if cell.diverged and cell.ours is not None else ""
            if cell.published is not None:
                text += f"\npaper {published_text(cell.published, selector)}"
            text += mark(cell)
            dark = abs(shades[i][j]) > 0.7 * _SPAN
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.set_xticks(range(len(columns)), [textwrap.fill(c, 15) for c in columns], fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    what = "ours and the paper's (%)" if section.has_published else "ours (%)"
    what += ", purple better, orange worse" if any(map(any, shades)) else ""
    wide = max(40, 12 * len(columns))  # characters, roughly
    axis.set_title(textwrap.fill(f"{section.title}: {what}", wide), fontsize=9)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _shade(difference: float | None, section: Section, row: str, column: str) -> float:
    selector = section.selectors[column]
    if difference is None or selector.is_cost or section.rows[row][column].verdict == NOT_COMPARABLE:
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


def _draw_curves(axis: Axes, curves: dict[str, dict[int, float]], lines: list[str]) -> None:
    """A line per row; a row looks the same in all settings, by its place in `lines`."""
    for row, curve in curves.items():
        marks = max(1, len(curve) // 6)
        axis.plot(list(curve), list(curve.values()), label=row, markevery=marks, **_style(lines.index(row)))
    axis.set_xlabel("round", fontsize=8)
    _finish(axis, "mean accuracy (%)")


def _finish(axis: Axes, label: str) -> None:
    axis.set_ylabel(label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    where: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}  # covers no point
    axis.legend(fontsize=7, frameon=False, handlelength=3, **where)  # long enough to show dashes
