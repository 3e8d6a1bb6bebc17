"""What every chart is made of: the SVG itself, text, tips for a pointer, paths, steps of axes, shades."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fednorms.reports.elements import Child, Html, tag

WIDTH = 840.0


def chart(
    title: str, description: str, height: float, marks: Sequence[Child], *, width: float = WIDTH, class_: str = "chart"
) -> Html:
    """The SVG of a chart, at most as wide as it was drawn; title and description are for screen readers.

    >>> print(chart("Accuracy", "fedavg ends at 60.", 10, []))
    <svg viewBox="0 0 840 10" width="840" height="10" role="img" aria-label="Accuracy" class="chart"><title>Accuracy...
    """
    size = {"viewBox": f"0 0 {short(width)} {short(height)}", "width": width, "height": height}
    about = [tag("title", title), tag("desc", description)]
    return tag("svg", about, marks, **size, role="img", aria_label=title, class_=class_)


def words(x: float, y: float, text: str, *, anchor: str | None = None, **more: object) -> Html:
    """A text at a place."""
    return tag("text", text, x=x, y=y, text_anchor=anchor, **more)


def turned(x: float, y: float, degrees: int, text: str, *, anchor: str = "middle", class_: str | None = None) -> Html:
    """A text that is rotated around its place."""
    turn = f"translate({short(x)} {short(y)}) rotate({degrees})"
    return tag("text", text, transform=turn, text_anchor=anchor, class_=class_)


def tip(text: str) -> Html:
    """What a pointer shows at the mark that contains this."""
    return tag("title", text)


def path(points: Sequence[tuple[float, float]]) -> str:
    """Straight lines through points.

    >>> path([(0, 1), (2.5, 3)])
    'M0 1L2.5 3'
    """
    return "M" + "L".join(f"{short(x)} {short(y)}" for x, y in points)


def short(value: float) -> str:
    """A coordinate.

    >>> short(3.14159), short(2.0), short(-0.001)
    ('3.1', '2', '0')
    """
    return f"{round(value, 1) + 0.0:g}"


def wide(text: str) -> float:
    """About how many pixels a text takes, in the widest of the usual fonts.

    >>> wide("ill") < wide("abc") < wide("WWW")
    True
    """
    narrow, broad = " .,:;'|!iIjl()[]", "mwMW@%"
    widths = (
        12.5 if ord(c) > 0x1100 else 4.5 if c in narrow else 11.8 if c in broad else 9 if c.isupper() else 7.7
        for c in text
    )
    return sum(widths)


def cut(text: str, most: int = 30) -> str:
    """A text that fits; the full one belongs into a tip or a table.

    >>> cut("a very long name", 8)
    'a very …'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def steps(low: float, high: float, *, lowest: float = -math.inf, highest: float = math.inf) -> list[float]:
    """Round numbers for an axis that covers `low` to `high`, between the limits.

    >>> steps(13, 88, lowest=0, highest=100), steps(0.42, 0.58)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.4, 0.45, 0.5, 0.55, 0.6])
    """
    span = max(high - low, 1e-9 + 0.02 * abs(high))
    size = 10.0 ** math.floor(math.log10(span / 4))
    size *= next(m for m in (1, 2, 5, 10) if span / (size * m) <= 5)
    first, last = max(math.floor(low / size), lowest / size), min(math.ceil(high / size), highest / size)
    first, last = math.ceil(first - 1e-9), math.floor(last + 1e-9)
    return [round(size * i, 10) for i in range(first, max(last, first + 1) + 1)]


def whole_steps(first: float, last: float, most: int = 8) -> list[int]:
    """Whole numbers for an axis of rounds, with both ends.

    >>> whole_steps(1, 4), whole_steps(1, 100)
    ([1, 2, 3, 4], [1, 20, 40, 60, 80, 100])
    """
    span = last - first
    size = next(s * 10**e for e in range(9) for s in (1, 2, 5) if span / (s * 10**e) <= most)
    inner = [n for n in range(0, int(last) + 1, size) if first + 0.4 * size <= n <= last - 0.6 * size]
    return sorted({int(first), *inner, int(last)})


def spread(places: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Move labels apart until none is nearer than `gap` to the next, within the limits where they fit.

    >>> spread([10, 12, 40], 15, 0, 100)
    [3.5, 18.5, 40.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    blocks: list[tuple[float, list[int]]] = []  # center and labels of a block
    for i in order:
        blocks.append((places[i], [i]))
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (len(blocks[-1][1]) + len(blocks[-2][1])) / 2:
            (b, second), (a, first) = blocks.pop(), blocks.pop()
            center = (a * len(first) + b * len(second)) / (len(first) + len(second))
            half = gap * (len(first) + len(second) - 1) / 2
            blocks.append((min(max(center, top + half), max(bottom - half, top + half)), first + second))
    found = {i: c + gap * (n - (len(b) - 1) / 2) for c, b in blocks for n, i in enumerate(b)}
    return [float(found[i]) for i in range(len(places))]


def shade(color: str, share: float) -> str:
    """A color mixed with white.

    >>> shade("#0072B2", 1.0), shade("#0072B2", 0.0)
    ('#0072b2', '#ffffff')
    """
    share = min(max(share, 0.0), 1.0)
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in parts)
