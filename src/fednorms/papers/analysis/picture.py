"""Pictures of the findings of an analysis, one per setting of a figure; rows are methods."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.measures import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = Mapping[str, Sequence[Findings]]
"""The findings of each seed, by row."""
_SIZE = 2.6  # inches per panel


def png(analysis: Analysis, found: Found, title: str) -> bytes:
    """The picture as bytes."""
    return png_of(figure(analysis, found, title))


def png_of(drawn: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110, metadata={"Software": "fednorms"})
    return buffer.getvalue()


def figure(analysis: Analysis, found: Found, title: str) -> Figure:
    """The picture: curves and numbers over all seeds, everything else of the first."""
    from matplotlib.figure import Figure

    draw = {"curves": _curves, "matrices": _arrays, "channels": _channels, "points": _points, "maps": _maps}
    fig = Figure(layout="constrained", facecolor="white")
    draw[analysis.picture](fig, found)
    head(fig, f"{title}: {analysis.name}", size=11)
    return fig


def head(fig: Figure, text: str, size: int) -> None:
    """Put a title over a figure, wrapped to its width."""
    lines = textwrap.fill(text, int(9.5 * fig.get_figwidth()))  # characters per inch, roughly
    fig.suptitle(lines, fontsize=size, fontweight="bold")


def _grid(fig: Figure, rows: int, columns: int) -> list[list[Axes]]:
    fig.set_size_inches(max(_SIZE * columns, 4.0), _SIZE * rows + 0.5)
    return [list(line) for line in fig.subplots(rows, columns, squeeze=False)]


def _curves(fig: Figure, found: Found) -> None:
    every = [(name, s) for seeds in found.values() for f in seeds for name, s in f.series.items()]
    names = list(dict.fromkeys(name for name, s in every if any(math.isfinite(v) for _, v in s)))
    wide = min(4, len(names))
    panels = [axis for line in _grid(fig, math.ceil(len(names) / wide), wide) for axis in line]
    for axis, name in zip(panels, names, strict=False):
        for row, seeds in found.items():
            rounds, mean, std = over_seeds([f.series[name] for f in seeds if name in f.series])
            axis.plot(rounds, mean, label=row, linewidth=1.5)
            axis.fill_between(rounds, mean - std, mean + std, alpha=0.2)
        axis.set_title(name, fontsize=8)
        axis.set_xlabel("round", fontsize=7)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=7, frameon=False)
    for axis in panels[len(names) :]:
        axis.set_axis_off()


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


def _arrays(fig: Figure, found: Found) -> None:
    names = list(next(iter(found.values()))[0].arrays)
    for line, (row, seeds) in zip(_grid(fig, len(found), len(names)), found.items(), strict=True):
        for axis, name in zip(line, names, strict=True):
            values = seeds[0].arrays[name]
            if values.ndim == 2:
                fig.colorbar(axis.imshow(values, cmap="viridis"), ax=axis, shrink=0.8)
            else:
                axis.bar(range(len(values)), values)
            axis.set_title(f"{row}: {name}", fontsize=8)
            axis.tick_params(labelsize=7)


def _channels(fig: Figure, found: Found) -> None:
    first = next(iter(found.values()))[0]
    lines = _grid(fig, len(found) * math.ceil(len(first.arrays) / 2), 2)
    panels = [axis for line in lines for axis in line]
    for (row, seeds), start in zip(found.items(), range(0, len(panels), len(first.arrays)), strict=False):
        models = seeds[0].words["models"]
        for axis, (name, values) in zip(panels[start:], seeds[0].arrays.items(), strict=False):
            for model, channel in zip(models, values, strict=True):
                axis.plot(channel, label=model, linewidth=1, color="black" if model == "server" else None)
            axis.set_title(f"{row}: {name}", fontsize=8)
            axis.set_xlabel("channel", fontsize=7)
            axis.tick_params(labelsize=7)
    panels[0].legend(fontsize=7, frameon=False)


def _points(fig: Figure, found: Found) -> None:
    """Several models: coloured by model. One: by site and by class."""
    first = next(iter(found.values()))[0]
    together = len(first.words["models"]) > 1
    for line, (row, seeds) in zip(_grid(fig, len(found), 1 if together else 2), found.items(), strict=True):
        one = seeds[0]
        models, sites = one.words["models"], one.words["sites"]
        clouds = [one.arrays[f"points of {model}"] for model in models]
        if together:
            for model, points in zip(models, clouds, strict=True):
                line[0].scatter(points[:, 0], points[:, 1], s=2, alpha=0.6, label=model)
            line[0].legend(fontsize=7, markerscale=4)
            line[0].set_title(row, fontsize=8)
        else:
            for axis, by, names in ((line[0], "site", sites), (line[1], "class", None)):
                for number in np.unique(one.arrays[by]).astype(int):
                    label = names[number] if names else str(number)
                    some = clouds[0][one.arrays[by] == number]
                    axis.scatter(some[:, 0], some[:, 1], s=2, label=label)
                axis.legend(fontsize=5, markerscale=3)
                axis.set_title(f"{row}, by {by}", fontsize=8)
        for axis in line:
            axis.set_xticks([])
            axis.set_yticks([])


def _maps(fig: Figure, found: Found) -> None:
    """A line per method, model and site: the image, and its maps behind every convolution."""
    every = [(row, seeds[0], model) for row, seeds in found.items() for model in seeds[0].words["lines"]]
    lines = _grid(fig, len(every), 1 + max(len(one.words["layers"]) for _, one, _ in every))
    for line, (row, one, model) in zip(lines, every, strict=True):
        line[0].imshow(one.arrays[f"image, {model}"].astype(np.uint8).squeeze(), cmap="gray")
        line[0].set_title(f"{row}, {model}", fontsize=7)
        for axis, layer in zip(line[1:], one.words["layers"], strict=False):
            axis.imshow(one.arrays[f"{layer}, {model}"], cmap="inferno")
            axis.set_title(layer, fontsize=7)
        for axis in line:
            axis.set_axis_off()
