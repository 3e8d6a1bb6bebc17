"""Pictures of the findings of an analysis: settings above each other, with shared scales; rows are methods."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fednorms.core.optional import new_figure
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.registry import Analysis, Drawing
from fednorms.runs.comparison_files import COLORS, DASHES, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Found = Mapping[str, Sequence[Findings]]
"""The findings of each seed, by row."""
_SIZE = 2.6  # inches per panel
_TITLE = 32  # characters in a line over a panel
_MANY = 24  # more ticks than this are not named
_LAYERS = 6  # more layers than this are not drawn, but stored


def png(analysis: Analysis, settings: Mapping[str, Found], title: str) -> bytes:
    """The picture as bytes."""
    return png_of(figure(analysis, settings, title))


def png_of(drawn: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110, metadata={"Software": "fednorms"})
    return buffer.getvalue()


def figure(analysis: Analysis, settings: Mapping[str, Found], title: str) -> Figure:
    """The picture: curves and numbers over all seeds, everything else of the first."""
    draw = {"curves": _Curves, "matrices": _Matrices, "channels": _Channels, "points": _Points, "maps": _Maps}
    panels = [draw[analysis.drawing.kind](analysis.drawing, found) for found in settings.values()]
    every = list(settings.values())
    heights = [_SIZE * p.rows + 0.4 for p in panels]
    legend = 1.8 if analysis.drawing.kind == "curves" else 0.0
    fig = new_figure(max(*(_SIZE * 1.15 * p.columns + legend for p in panels), 4.6), sum(heights) + 0.5)
    parts = np.ravel(np.array(fig.subfigures(len(panels), 1, height_ratios=heights), dtype=object))
    for part, panel, name in zip(parts, panels, settings, strict=True):
        if name and len(settings) > 1:
            part.suptitle(name, fontsize=9, fontstyle="italic")
        panel.draw(part, every)
    head(fig, title if title == analysis.name else f"{title}: {analysis.name}", size=11)
    return fig


def head(fig: Figure, text: str, size: int) -> None:
    """Put a title over a figure, wrapped to its width."""
    lines = textwrap.fill(text, int(9.5 * fig.get_figwidth()))  # characters per inch, roughly
    fig.suptitle(lines, fontsize=size, fontweight="bold")


def over_seeds(series: Sequence[Sequence[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, and mean and sample standard deviation over the seeds that have them.

    >>> rounds, mean, std = over_seeds([[(1, 0.0), (2, 1.0)], [(1, 2.0)]])
    >>> rounds.tolist(), mean.tolist(), std.round(3).tolist()
    ([1, 2], [1.0, 1.0], [1.414, 0.0])
    """
    by_round: dict[int, list[float]] = {}
    for t, value in (point for one in series for point in one):
        by_round.setdefault(t, []).append(value)
    rounds = sorted(by_round)
    mean = [np.mean(by_round[t]) for t in rounds]
    std = [np.std(by_round[t], ddof=1) if len(by_round[t]) > 1 else 0.0 for t in rounds]
    return np.array(rounds), np.array(mean), np.array(std)


class _Panels:
    """One setting's part of the picture: a grid of `rows` x `columns` panels."""

    def __init__(self, drawing: Drawing, found: Found) -> None:
        self.drawing, self.found = drawing, found
        self.rows, self.columns = self.grid()

    def grid(self) -> tuple[int, int]:
        raise NotImplementedError

    def draw(self, fig: SubFigure, every: Sequence[Found]) -> None:
        """Draw into a part of the figure; `every` setting's findings decide the scales."""
        raise NotImplementedError

    def axes(self, fig: SubFigure, **shared: Any) -> list[list[Axes]]:  # noqa: ANN401
        return [list(line) for line in fig.subplots(self.rows, self.columns, squeeze=False, **shared)]

    @property
    def first(self) -> Findings:
        return next(iter(self.found.values()))[0]


class _Curves(_Panels):
    """Curves by round: a line per row; series that share a panel differ in dashes."""

    def grid(self) -> tuple[int, int]:
        columns = min(4, len(self.panels()))
        return math.ceil(len(self.panels()) / columns), columns

    def panels(self) -> dict[str, tuple[str, ...]]:
        names = _drawable([self.found])
        asked = {title: tuple(n for n in of if n in names) for title, of in self.drawing.panels.items()}
        asked = {title: of for title, of in asked.items() if of}
        grouped = {name for of in asked.values() for name in of}
        return asked | {name: (name,) for name in names if name not in grouped}

    def draw(self, fig: SubFigure, every: Sequence[Found]) -> None:
        panels = self.panels()
        grouped = any(len(names) > 1 for names in panels.values())
        axes = [axis for line in self.axes(fig) for axis in line]
        rows = list(dict.fromkeys(row for found in every for row in found))  # a row looks the same in all settings
        for axis, (title, names) in zip(axes, panels.items(), strict=False):
            for row, seeds in self.found.items():
                number = rows.index(row)
                for which, name in enumerate(names):
                    label = f"{row}, {_short(name, names)}" if len(names) > 1 else "" if grouped else row
                    dashes = DASHES[which % len(DASHES)] if grouped else ""
                    self._line(axis, line_style(number), dashes, label, [f.series.get(name, []) for f in seeds])
            self._finish(axis, title or names[0], _span(every, names, log=self.drawing.log))
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        handles = {
            label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True) if label
        }
        place: dict[str, Any] = {"loc": "outside right upper", "fontsize": 7, "frameon": False}
        fig.legend(list(handles.values()), list(handles), handlelength=4, **place)  # dashes are seen next to a marker

    def _line(
        self, axis: Axes, style: dict[str, str], dashes: str, label: str, seeds: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        rounds, mean, std = over_seeds(seeds)
        if not len(rounds):
            return
        drawn: dict[str, Any] = style | ({"linestyle": dashes} if dashes else {})
        drawn |= {"linewidth": 1.5, "markersize": 4, "markevery": max(1, len(rounds) // 8)}
        axis.plot(rounds, mean, label=label or None, **drawn)
        axis.fill_between(rounds, mean - std, mean + std, alpha=0.15, color=style["color"], linewidth=0)

    def _finish(self, axis: Axes, title: str, span: tuple[float, float] | None) -> None:
        from matplotlib.ticker import MaxNLocator

        axis.set_title(title, fontsize=8)
        axis.set_xlabel("round", fontsize=7)
        axis.set_ylabel(self.drawing.y, fontsize=7)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        if self.drawing.log:
            axis.set_yscale("log")
        if self.drawing.zero:
            axis.axhline(0, color="#888888", linewidth=0.8, zorder=0)
        if span:
            axis.set_ylim(*span)


def _short(name: str, names: Sequence[str]) -> str:
    """A series' name without the word that all series of its panel start with.

    >>> _short("W seen", ["W seen", "W unseen"]), _short("gap", ["gap", "bound"])
    ('seen', 'gap')
    """
    first = name.partition(" ")[0]
    return name.removeprefix(first).strip() if all(n.startswith(f"{first} ") for n in names) else name


def _drawable(every: Iterable[Found]) -> list[str]:
    """The series with a number that can be drawn."""
    series = [(n, s) for found in every for seeds in found.values() for f in seeds for n, s in f.series.items()]
    return list(dict.fromkeys(name for name, s in series if any(math.isfinite(v) for _, v in s)))


def _span(every: Sequence[Found], names: Sequence[str], *, log: bool) -> tuple[float, float] | None:
    """The y axis that fits these series in all settings; None if matplotlib shall choose."""
    if len(every) < 2:
        return None
    values = [
        v
        for found in every
        for seeds in found.values()
        for f in seeds
        for n in names
        for _, v in f.series.get(n, [])
        if math.isfinite(v) and (v > 0 or not log)
    ]
    if not values:
        return None
    low, high = min(values), max(values)
    if log:
        return low / 1.3, high * 1.3
    room = 0.06 * (high - low or abs(high) or 1.0)
    return low - room, high + room


class _Matrices(_Panels):
    """Matrices and bars, up to four next to each other; the same name has one scale. Rows of one matrix share lines."""

    def grid(self) -> tuple[int, int]:
        each = len(self.first.arrays)
        columns = min(4, each if each > 1 else len(self.found))
        return math.ceil(self._per_row(columns) * len(self.found) / columns), columns

    def _per_row(self, columns: int) -> int:
        each = len(self.first.arrays)
        return columns * math.ceil(each / columns) if each > 1 else 1

    def draw(self, fig: SubFigure, every: Sequence[Found]) -> None:
        panels = [axis for line in self.axes(fig) for axis in line]
        per_row = self._per_row(self.columns)
        for axis in panels[per_row * len(self.found) :]:
            axis.set_axis_off()
        for (row, seeds), start in zip(self.found.items(), range(0, len(panels), per_row), strict=False):
            ticks = list(seeds[0].words.get("ticks", []))
            mine = panels[start : start + per_row]
            for axis, (name, values) in zip(mine, seeds[0].arrays.items(), strict=False):
                low, high = _limits(every, name)
                if values.ndim == 2:
                    drawn = axis.imshow(values, cmap="cividis", vmin=low, vmax=high)
                    scale = fig.colorbar(drawn, ax=axis, shrink=0.8)
                    scale.ax.tick_params(labelsize=6)
                    scale.set_label(self.drawing.y, fontsize=7)
                    _name_ticks(axis, ticks, values.shape, both=True)
                else:
                    axis.bar(range(len(values)), values, color=COLORS[1])
                    axis.set_ylim(1.05 * min(low, 0), 1.05 * max(high, 0) or 1)
                    axis.set_ylabel(self.drawing.y, fontsize=7)
                    _name_ticks(axis, ticks, values.shape, both=False)
                axis.set_title(textwrap.fill(f"{row}: {name}", _TITLE), fontsize=8)
                axis.tick_params(labelsize=6)
            for axis in mine[len(seeds[0].arrays) :]:
                axis.set_axis_off()


def _limits(every: Sequence[Found], name: str) -> tuple[float, float]:
    arrays = [seeds[0].arrays[name] for found in every for seeds in found.values() if name in seeds[0].arrays]
    values = np.concatenate([a.ravel() for a in arrays])
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)


def _name_ticks(axis: Axes, names: Sequence[str], shape: tuple[int, ...], *, both: bool) -> None:
    if len(names) != shape[-1] or len(names) > _MANY:
        return
    axis.set_xticks(range(len(names)), names, rotation=90)
    if both and shape[0] == len(names):
        axis.set_yticks(range(len(names)), names)


def _spread(names: Sequence[str]) -> list[str]:
    """The first, the last and evenly spread names between them, as many as are drawn.

    >>> _spread("abcdefghijk")
    ['a', 'c', 'e', 'g', 'i', 'k']
    """
    if len(names) <= _LAYERS:
        return list(names)
    return [names[round(i * (len(names) - 1) / (_LAYERS - 1))] for i in range(_LAYERS)]


class _Channels(_Panels):
    """A line per model over the channels of a layer: means left, variances right."""

    def grid(self) -> tuple[int, int]:
        return len(self.found) * len(self.layers()), 2

    def layers(self) -> list[str]:
        return _spread(list(dict.fromkeys(name.partition(", ")[2] for name in self.first.arrays)))

    def draw(self, fig: SubFigure, every: Sequence[Found]) -> None:
        panels = [axis for line in self.axes(fig) for axis in line]
        layers = self.layers()
        for (row, seeds), start in zip(self.found.items(), range(0, len(panels), 2 * len(layers)), strict=True):
            models = seeds[0].words["models"]
            names = [name for name in seeds[0].arrays if name.partition(", ")[2] in layers]
            for axis, name in zip(panels[start:], names, strict=False):
                values = seeds[0].arrays[name]
                low, high = _limits(every, name)
                for number, (model, channel) in enumerate(zip(models, values, strict=True), 1):
                    color = COLORS[0] if model == "server" else COLORS[number % len(COLORS)]
                    axis.plot(channel, label=model, linewidth=1, color=color)
                axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low) or 1.0)
                axis.set_title(f"{row}: {name}", fontsize=8)
                axis.set_xlabel("channel", fontsize=7)
                axis.set_ylabel(name.partition(",")[0], fontsize=7)
                axis.tick_params(labelsize=7)
            for axis in panels[start + len(names) : start + 2 * len(layers)]:
                axis.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside right upper", fontsize=7, frameon=False)


class _Points(_Panels):
    """Points in the plane. Several models: colored by model. One: by site and by class."""

    @property
    def together(self) -> bool:
        return len(self.first.words["models"]) > 1

    def grid(self) -> tuple[int, int]:
        return len(self.found), 1 if self.together else 2

    def draw(self, fig: SubFigure, every: Sequence[Found]) -> None:
        for line, (row, seeds) in zip(self.axes(fig), self.found.items(), strict=True):
            one = seeds[0]
            models, sites = list(one.words["models"]), list(one.words["sites"])
            clouds = [one.arrays[f"points of {model}"] for model in models]
            if self.together:
                for number, (model, points) in enumerate(zip(models, clouds, strict=True)):
                    line[0].scatter(points[:, 0], points[:, 1], s=2, alpha=0.6, label=model, color=COLORS[number])
                line[0].set_title(row, fontsize=8)
            else:
                classes = list(one.words.get("classes", []))  # results of 0.1 have none
                for axis, by, names in ((line[0], "site", sites), (line[1], "class", classes)):
                    for place, number in enumerate(np.unique(one.arrays[by]).astype(int)):
                        some = clouds[0][one.arrays[by] == number]
                        label = names[number] if number < len(names) else str(number)
                        axis.scatter(some[:, 0], some[:, 1], s=2, label=label, color=_color(place))
                    axis.set_title(f"{row}, by {by}", fontsize=8)
            for axis in line:
                axis.set_xticks([])
                axis.set_yticks([])
                axis.legend(fontsize=6, markerscale=4, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _color(place: int) -> Any:  # noqa: ANN401
    """Distinct colors for up to twenty groups."""
    from matplotlib import colormaps

    return COLORS[place] if place < len(COLORS) else colormaps["tab20"](place % 20)


class _Maps(_Panels):
    """Bars of the similarities, then a line per method, model and site: the image and its maps."""

    def grid(self) -> tuple[int, int]:
        return 1 + len(self.lines()), 1 + max(len(_spread(one.words["layers"])) for _, one, _ in self.lines())

    def lines(self) -> list[tuple[str, Findings, str]]:
        return [(row, seeds[0], model) for row, seeds in self.found.items() for model in seeds[0].words["lines"]]

    def draw(self, fig: SubFigure, every: Sequence[Found]) -> None:
        top, rest = np.ravel(np.array(fig.subfigures(2, 1, height_ratios=[1, self.rows - 1]), dtype=object))
        share = min(1.0, (1 + len(self.found)) / self.columns)  # about a panel's width for each method
        self._bars(np.ravel(np.array(top.subfigures(1, 2, width_ratios=[share, 1.001 - share])))[0].subplots())
        lines = rest.subplots(self.rows - 1, self.columns, squeeze=False)
        for line, (row, one, model) in zip(lines, self.lines(), strict=True):
            line[0].imshow(one.arrays[f"image, {model}"].astype(np.uint8).squeeze(), cmap="gray")
            line[0].set_title(f"{row}, {model}", fontsize=7)
            for axis, layer in zip(line[1:], _spread(one.words["layers"]), strict=False):
                axis.imshow(one.arrays[f"{layer}, {model}"], cmap="inferno")
                axis.set_title(layer, fontsize=7)
            for axis in line:
                axis.set_axis_off()

    def _bars(self, axis: Axes) -> None:
        names = list(self.first.scalars)
        for number, name in enumerate(names):
            values = [[f.scalars[name] for f in seeds] for seeds in self.found.values()]
            at = np.arange(len(values)) + 0.4 * (number - (len(names) - 1) / 2)
            std = [float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for v in values]
            axis.bar(at, [float(np.mean(v)) for v in values], 0.36, yerr=std, label=name, color=COLORS[1 + number])
        axis.set_xticks(range(len(self.found)), list(self.found), fontsize=8)
        axis.set_ylabel("cosine of feature maps", fontsize=7)
        axis.set_ylim(0, 1)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
