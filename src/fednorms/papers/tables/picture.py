"""A reproduced table as a picture: lines over a ladder, heat maps of differences, learning curves and rankings."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from fednorms.papers.analysis.picture import head, png_of
from fednorms.papers.tables.ladder import lines_of, steps_of
from fednorms.papers.tables.summary import APART, MISS, Entry, Section, Summary, ours_of, print_of
from fednorms.runs.report import COLORS, DASHES, MARKERS

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
    """The ladder, if the table has one, then one panel per setting; beside it its curves, or its ranking.

    Settings that are steps of the ladder have no panel of their own unless print has numbers for them.
    """
    from matplotlib.figure import Figure

    ladder = summary.table.ladder
    drawn = ladder is not None and len(steps_of(summary)) > 1
    on_it = (set(ladder.settings) or {s.name for s in summary.table.settings}) if ladder and drawn else set()
    shown = [section for section in summary.sections if section.shown]
    curves = {s.setting.name: _curves(s) for s in shown}
    beside = {s.setting.name for s in shown if curves[s.setting.name] or s.setting.ranked}
    sections = [s for s in shown if s.setting.name not in on_it or _in_print(s) or s.setting.name in beside]
    widest = max((len(section.columns) for section in sections), default=4)
    heights = [3.4] * bool(on_it) + [1.5 + 0.46 * len(section.rows) for section in sections]
    widths = [0.95 * widest + 2.4, *([5.6] if beside else [])]
    fig = Figure(figsize=(max(sum(widths), 6.0), sum(heights) + 0.6), layout="constrained", facecolor="white")
    grid = fig.add_gridspec(len(heights), len(widths), height_ratios=heights, width_ratios=widths)
    head(fig, summary.table.heading, size=12)
    if on_it:
        _draw_ladder(fig.add_subplot(grid[0, :]), summary)
    for i, section in enumerate(sections, start=bool(on_it)):
        _heat_map(fig.add_subplot(grid[i, 0]), section)
        if found := curves[section.setting.name]:
            _draw_curves(fig.add_subplot(grid[i, 1]), found)
        elif section.setting.ranked:
            _draw_ranking(fig.add_subplot(grid[i, 1]), section)
    return fig


def _in_print(section: Section) -> bool:
    return any(entry.printed is not None for entry in section.entries)


def _style(i: int) -> dict[str, Any]:
    """How the i-th line looks."""
    return {
        "color": COLORS[i % len(COLORS)],
        "linestyle": DASHES[i // len(COLORS) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.6,
    }


def _draw_ladder(axis: Axes, summary: Summary) -> None:
    """One line per row (or setting) over all steps, with the deviation over seeds; print as hollow marks."""
    ladder = summary.table.ladder
    assert ladder is not None
    steps = list((ladder.settings or ladder.rows).values())
    for i, (name, line) in enumerate(lines_of(summary).items()):
        ours = [(at, e.ours, e.std or 0.0) for at, s in enumerate(steps) if (e := line.get(s)) and e.ours is not None]
        where, means, deviations = zip(*ours, strict=True)
        axis.errorbar(where, means, deviations, capsize=2, label=name, **_style(i))
        in_print = {at: mean for at, s in enumerate(steps) if s in line and (mean := _print(line[s])) is not None}
        if in_print:
            hollow = _style(i) | {"linestyle": "", "markersize": 7, "markerfacecolor": "none"}
            axis.plot(list(in_print), list(in_print.values()), label=f"{name}, print", **hollow)
    axis.set_xticks(range(len(steps)), steps, fontsize=8)
    axis.set_xlabel(ladder.label, fontsize=8)
    _finish(axis, f"{ladder.column} (%)")


def _print(entry: Entry) -> float | None:
    """A printed number that has a place on an axis."""
    return None if entry.printed is None or entry.printed.failed else entry.printed.mean


def _draw_ranking(axis: Axes, section: Section) -> None:
    """The ranked column as points with the deviation over seeds, the best above; print as hollow marks."""
    column = section.setting.ranked
    rows = list(section.rows)
    for place, row in enumerate(rows):
        entry = section.rows[row][column]
        if entry.ours is not None:
            mark = "x" if entry.diverged else "o"  # the mean of the seeds that ended
            axis.errorbar(entry.ours, place, xerr=entry.std or 0.0, fmt=mark, markersize=4, capsize=2, color=COLORS[0])
        if (mean := _print(entry)) is not None:
            axis.plot(mean, place, "o", markersize=7, markerfacecolor="none", color=COLORS[1])
    axis.set_ylim(len(rows) - 0.5, -0.5)  # rows as in the heat map beside it
    axis.set_yticks(range(len(rows)), [""] * len(rows))
    axis.set_title(f"{column} (%): ours{', and print as rings' if _in_print(section) else ''}", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


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
            text += f"\n{entry.diverged} diverged" if entry.diverged and entry.ours is not None else ""
            if entry.printed is not None:
                text += f"\nprint {print_of(entry.printed, selector)}"
            text += " ✗" if entry.verdict == MISS else " †" if entry.verdict == APART else ""
            dark = abs(colours[i][j]) > 0.7 * _SPAN
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    what = "ours and print (%), purple better, orange worse" if _in_print(section) else "ours (%)"
    axis.set_title(f"{section.title}: {what}", fontsize=9)
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


def _draw_curves(axis: Axes, curves: dict[str, dict[int, float]]) -> None:
    for i, (row, curve) in enumerate(curves.items()):
        marks = max(1, len(curve) // 6)
        axis.plot(list(curve), list(curve.values()), label=row, markevery=marks, **_style(i))
    axis.set_xlabel("round", fontsize=8)
    _finish(axis, "mean accuracy (%)")


def _finish(axis: Axes, label: str) -> None:
    axis.set_ylabel(label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)
