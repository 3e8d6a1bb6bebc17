"""Charts as SVG: lines, bars with intervals, confusion matrices, reliability diagrams, small bars.

Pure functions of numbers. Shares are fractions and shown in percent. Colors are Okabe and Ito's, as in the pictures
of a comparison; marks carry a text that a pointer shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fednorms.evaluation.calibration import Bin
from fednorms.evaluation.intervals import Interval
from fednorms.reports.elements import Child, Html, tag
from fednorms.reports.svg import (
    WIDTH,
    chart,
    cut,
    path,
    shade,
    short,
    spread,
    steps,
    tip,
    turned,
    whole_steps,
    wide,
    words,
)
from fednorms.runs.comparison_files import COLORS

BLUE, RED, GRAY = "#0072B2", "#D55E00", "#9aa3ab"
SPLIT_COLORS = {"train": "#0072B2", "val": "#E69F00", "test": "#009E73"}
_DASHES = (None, "7 4", "2 3", "8 3 2 3")
_MOST_POINTS = 100  # of a line; more cannot be told apart
_MARKED = 25  # points of a line that get a dot


@dataclass(frozen=True)
class Line:
    """A line of a chart: points (x, y), and low and high at each point if there is a band."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Bar:
    """A bar: a share with its interval, its color (a number), and a note next to its value."""

    name: str
    share: Interval
    color: int = 1
    note: str = ""

    @property
    def ends(self) -> tuple[float, float] | None:
        """The ends of the interval, if it has any."""
        return None if math.isnan(self.share.low) else (self.share.low, self.share.high)

    @property
    def interval(self) -> str:
        """The interval in words: " 78.1 to 84.0"."""
        return "" if self.ends is None else f" {100 * self.ends[0]:.1f} to {100 * self.ends[1]:.1f}"


def color_of(i: int) -> str:
    """The color of the i-th method or mode, the same in all charts of a page."""
    return COLORS[i % len(COLORS)]


def line_chart(
    lines: Sequence[Line], title: str, *, x: str = "round", scale: float = 100.0, height: float = 300.0
) -> Html:
    """Lines over rounds, each labeled at its end with its last value.

    >>> "40.0" in line_chart([Line("fedavg", [(1, 0.2), (2, 0.4)])], "Accuracy")
    True
    """
    lines = [_thinned(line) for line in lines if line.points]
    if not lines:
        return Html("")
    left, top, bottom = 44.0, 10.0, height - 42
    right = WIDTH - 66 - max(wide(cut(line.name, 22)) for line in lines)
    shown = [
        scale * v for line in lines for v in (*(p[1] for p in line.points), *(e for ends in line.band for e in ends))
    ]
    levels = steps(min(shown), max(shown), lowest=0, highest=100 if scale == 100 else math.inf)
    xs = [p[0] for line in lines for p in line.points]
    first, last = min(xs), max(xs)

    def at(x: float, y: float) -> tuple[float, float]:
        level = (scale * y - levels[0]) / (levels[-1] - levels[0])
        across = (x - first) / (last - first) if last > first else 0.5
        return left + 6 + across * (right - left - 12), bottom - level * (bottom - top)

    marks: list[Child] = []
    for level in levels:
        y = at(first, level / scale)[1]
        marks.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        marks.append(words(left - 8, y + 4, f"{level:g}", anchor="end"))
    marks += [words(at(n, 0)[0], bottom + 18, str(n), anchor="middle") for n in whole_steps(first, last)]
    marks.append(words((left + right) / 2, bottom + 36, x, anchor="middle", class_="axis"))
    ends = spread([at(*line.points[-1])[1] for line in lines], 15, top, bottom)
    marks += [_line(i, line, at, right, end, scale) for i, (line, end) in enumerate(zip(lines, ends, strict=True))]
    said = "; ".join(f"{line.name} ends at {scale * line.points[-1][1]:.3g}" for line in lines)
    return chart(title, f"By {x}: {said}.", height, marks)


def _line(
    i: int, line: Line, at: Callable[[float, float], tuple[float, float]], right: float, end: float, scale: float
) -> Html:
    color, places = color_of(i), [at(*point) for point in line.points]
    marks: list[Child] = []
    if line.band:
        upper = [at(p[0], high) for p, (_, high) in zip(line.points, line.band, strict=True)]
        lower = [at(p[0], low) for p, (low, _) in zip(line.points, line.band, strict=True)]
        marks.append(tag("path", d=path([*upper, *reversed(lower)]) + "Z", fill=color, class_="band"))
    dashes = _DASHES[i // len(COLORS) % len(_DASHES)]
    marks.append(tag("path", d=path(places), stroke=color, stroke_dasharray=dashes, class_="line"))
    for n, ((x, y), point) in enumerate(zip(places, line.points, strict=True)):
        if len(places) <= _MARKED:
            marks.append(tag("circle", cx=x, cy=y, r=2.5, fill=color))
        around = f" ({scale * line.band[n][0]:.3g} to {scale * line.band[n][1]:.3g})" if line.band else ""
        said = f"{line.name}, {point[0]:g}: {scale * point[1]:.3g}{around}"
        marks.append(tag("circle", tip(said), cx=x, cy=y, r=7, class_="hit"))
    (x, y), last = places[-1], line.points[-1][1]
    marks.append(tag("path", d=path([(x + 5, y), (right + 5, end), (right + 9, end)]), stroke=color, class_="lead"))
    value = tag("tspan", f"{scale * last:.1f}" if scale == 100 else f"{last:.3g}", class_="value")
    marks.append(tag("text", value, f"  {cut(line.name, 22)}", x=right + 13, y=end + 4, fill=color))
    return tag("g", marks, class_="series")


def _thinned(line: Line) -> Line:
    """A line with fewer points; the last one stays."""
    every = math.ceil(len(line.points) / _MOST_POINTS)
    kept = [n for n in range(len(line.points)) if (len(line.points) - 1 - n) % every == 0]
    band = [line.band[n] for n in kept] if line.band else ()
    return replace(line, points=[line.points[n] for n in kept], band=band)


def bar_chart(groups: Mapping[str, Sequence[Bar]], title: str) -> Html:
    """Horizontal bars from 0 to 100 % with intervals, in groups with headings; the heading "" is left out.

    >>> "44.0" in bar_chart({"": [Bar("foggy", Interval(0.44, 0.4, 0.5))]}, "Accuracy per site")
    True
    """
    bars = [bar for group in groups.values() for bar in group]
    if not bars:
        return Html("")
    left = max(wide(cut(bar.name)) for bar in bars) + 14
    right = WIDTH - 74 - max(wide(bar.interval + bar.note) for bar in bars)

    def at(share: float) -> float:
        return left + share * (right - left)

    y, marks = 6.0, list[Child]()
    for name, group in groups.items():
        if name:
            marks.append(words(0, y + 13, cut(name, 80), class_="group"))
            y += 20
        for bar in group:
            marks.append(_bar(bar, y, left, right, at))
            y += 19
        y += 9 if name else 0
    grid: list[Child] = []
    for step in range(0, 101, 20):
        x = at(step / 100)
        grid.append(tag("line", x1=x, x2=x, y1=2, y2=y, class_="grid"))
        grid.append(words(x, y + 16, f"{step} %" if step == 100 else str(step), anchor="middle"))
    said = "; ".join(f"{bar.name} {100 * bar.share.value:.1f}{bar.interval}" for bar in bars)
    return chart(title, f"In percent: {said}.", y + 22, [*grid, *marks])


def _bar(bar: Bar, y: float, left: float, right: float, at: Callable[[float], float]) -> Html:
    middle, marks = y + 9, list[Child]()
    marks.append(words(left - 8, middle + 4, cut(bar.name), anchor="end"))
    long = max(at(bar.share.value) - left, 0.5)
    marks.append(tag("rect", x=left, y=y + 2, width=long, height=14, fill=color_of(bar.color), class_="bar"))
    if bar.ends is not None:
        low, high = (short(at(end)) for end in bar.ends)
        ends = f"M{low} {short(middle)}H{high}M{low} {short(middle - 4)}v8M{high} {short(middle - 4)}v8"
        marks += [tag("path", d=ends, class_="halo"), tag("path", d=ends, class_="whisker")]
    quiet = f" {bar.interval}" + (f"   {bar.note}" if bar.note else "")
    value = tag("tspan", f"{100 * bar.share.value:.1f}", class_="value")
    marks.append(tag("text", value, tag("tspan", quiet, class_="quiet"), x=right + 18, y=middle + 4))
    note = f", {bar.note}" if bar.note else ""
    said = f"{bar.name}: {100 * bar.share.value:.1f} %{f' (interval{bar.interval})' if bar.interval else ''}{note}"
    marks.append(tag("rect", tip(said), x=0, y=y, width=WIDTH, height=18, class_="hit"))
    return tag("g", marks, class_="series")


def confusion_matrix(
    counts: Sequence[Sequence[int]], classes: Sequence[str], title: str, *, size: float = 400.0
) -> Html:
    """True classes as rows, predicted ones as columns; shades are shares of a row: correct in blue, errors in orange.

    >>> confusion_matrix([[8, 2], [1, 9]], ["cat", "dog"], "Confusion").count("<rect")
    4
    """
    k, names = len(classes), [cut(c, 14) for c in classes]
    cell = max(size / k, 4.0) if k > 8 else min(size / k, 48.0)
    longest = max(map(wide, names))
    slanted = longest > cell - 2
    left, top = longest + 30, 22 + (longest * 0.72 + 10 if slanted else 16)
    every = math.ceil(12 / cell)  # labels that do not overlap
    marks: list[Child] = [
        words(left + k * cell / 2, 11, "predicted", anchor="middle", class_="axis"),
        turned(11, top + k * cell / 2, -90, "true", class_="axis"),
    ]
    for i, row in enumerate(counts):
        y, total = top + i * cell, sum(row)
        if i % every == 0:
            marks.append(words(left - 6, y + cell / 2 + 4, names[i], anchor="end"))
            x = left + (i + 0.5) * cell
            marks.append(
                turned(x, top - 6, -45, names[i], anchor="start")
                if slanted
                else words(x, top - 6, names[i], anchor="middle")
            )
        marks += [_cell(i, j, count, total, classes, left + j * cell, y, cell) for j, count in enumerate(row) if count]
    frame = f"M{short(left - 0.5)} {short(top - 0.5)}h{short(k * cell)}v{short(k * cell)}h{short(-k * cell)}z"
    marks.append(tag("path", d=frame, class_="frame"))
    right, every_image = sum(row[i] for i, row in enumerate(counts)), sum(map(sum, counts))
    width = left + k * cell + (longest * 0.72 if slanted else 0) + 6
    return chart(
        title, f"{right:,} of {every_image:,} images are classified correctly.", top + k * cell + 6, marks, width=width
    )


def _cell(i: int, j: int, count: int, total: int, classes: Sequence[str], x: float, y: float, cell: float) -> Html:
    share = count / total
    said = f"{classes[i]} predicted as {classes[j]}: {count:,} of {total:,} ({100 * share:.1f} %)"
    color = shade(BLUE, 0.08 + 0.92 * share) if i == j else shade(RED, min(1.0, 0.08 + 1.4 * share))
    square = tag("rect", tip(said), x=x, y=y, width=cell - 1, height=cell - 1, fill=color)
    if cell < 17 or len(str(count)) * 6.2 > cell:
        return square
    dark = share > (0.5 if i == j else 0.35)
    number = words(
        x + cell / 2 - 0.5, y + cell / 2 + 3.6, str(count), anchor="middle", class_="in dark" if dark else "in"
    )
    return tag("g", square, number)


def reliability_diagram(bins: Sequence[Bin], title: str, *, size: float = 290.0) -> Html:
    """How often predictions of each confidence are correct, and below it how many predictions there are.

    >>> reliability_diagram([Bin(0.8, 1.0, 3, 0.9, 0.67)], "Calibration").count("<circle")
    1
    """
    shown = [b for b in bins if b.n]
    if not shown:
        return Html("")
    left, top, right, bottom, floor = 44.0, 8.0, size - 10, size - 30, size + 44

    def at(confidence: float, accuracy: float) -> tuple[float, float]:
        return left + confidence * (right - left), bottom - accuracy * (bottom - top)

    marks: list[Child] = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(share, share)
        marks.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        marks.append(words(left - 6, y + 4, f"{100 * share:g}", anchor="end"))
        marks.append(words(x, floor + 16, f"{100 * share:g}", anchor="middle"))
    marks.append(tag("path", d=path([at(0, 0), at(1, 1)]), class_="ideal"))
    gaps = [path([at(b.confidence, b.confidence), at(b.confidence, b.accuracy)]) for b in shown]
    marks += [tag("path", d=gap, class_="gap") for gap in gaps]
    most = max(b.n for b in shown)
    for b in shown:
        said = f"Confidence {100 * b.confidence:.0f} %: {100 * b.accuracy:.0f} % correct of {b.n:,} predictions"
        (x, y), tall = at(b.confidence, b.accuracy), max(36 * b.n / most, 1)
        marks.append(tag("circle", tip(said), cx=x, cy=y, r=2 + 4 * math.sqrt(b.n / most), fill=BLUE))
        marks.append(tag("rect", tip(said), x=x - 5, y=floor - tall, width=10, height=tall, fill=GRAY))
    marks += [
        turned(10, (top + bottom) / 2, -90, "correct (%)", class_="axis"),
        words(left, bottom + 22, f"images per bin, at most {most:,}", class_="axis"),
        words((left + right) / 2, floor + 34, "confidence (%)", anchor="middle", class_="axis"),
    ]
    said = "; ".join(f"at {100 * b.confidence:.0f} % confidence {100 * b.accuracy:.0f} % correct" for b in shown)
    return chart(title, f"Calibration: {said}.", floor + 40, marks, width=size)


def class_bars(images: Mapping[str, Sequence[int]], classes: Sequence[str], title: str) -> Html:
    """A site's images per class as small bars, splits stacked; heights are relative to its largest class.

    >>> class_bars({"train": [3, 0]}, ["cat", "dog"], "a").count("<path")
    1
    """
    k, height, width = len(classes), 36.0, 240.0
    step, totals = min(width / k, 40.0), [sum(counts[c] for counts in images.values()) for c in range(k)]
    broad = step - min(3.0, 0.2 * step)
    most, base, marks = max(totals, default=0) or 1, [0.0] * k, list[Child]()
    for split, counts in images.items():
        shape = ""
        for c, count in enumerate(counts):
            tall = height * count / most
            box = f"v{short(-tall)}h{short(broad)}v{short(tall)}z"
            shape += f"M{short(c * step)} {short(height - base[c])}{box}" if count else ""
            base[c] += tall
        marks.append(tag("path", d=shape, fill=SPLIT_COLORS.get(split, GRAY)) if shape else None)
    for c, name in enumerate(classes if k <= 30 else ()):
        said = f"{name}: " + ", ".join(f"{counts[c]:,} {split}" for split, counts in images.items())
        marks.append(tag("rect", tip(said), x=c * step, y=0, width=step, height=height, class_="hit"))
    marks.append(tag("line", x1=0, x2=k * step, y1=height + 0.5, y2=height + 0.5, class_="base"))
    said = ", ".join(f"{name} {total:,}" for name, total in list(zip(classes, totals, strict=True))[:40])
    return chart(title, f"Images per class: {said}.", height + 1, marks, width=k * step, class_="chart small")
