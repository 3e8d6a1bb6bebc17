"""A judgement as text, Markdown and HTML."""

from __future__ import annotations

from textwrap import fill

from fednorms.core.counted import counted
from fednorms.core.markup import html_page, html_table, markdown_table
from fednorms.evaluation.intervals import Interval
from fednorms.evaluation.judgement import Judgement

_NAME = 14  # characters of a name in text, so that a table fits 80 columns
_MOST = 12  # lines of a table in text


def summary(judgement: Judgement) -> str:
    """What was judged: "personal/own on test: 4 sites, 1,224 images"."""
    pooled = judgement.pooled
    patients = f" of {counted(pooled.groups, 'patient')}" if pooled.groups is not None else ""
    where = f"{counted(len(judgement.sites), 'site')}, {counted(pooled.n, 'image')}{patients}"
    return f"{judgement.label} on {judgement.split}: {where}"


def site_table(judgement: Judgement) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a line per site, the pool last."""
    header = ["site", "images", "accuracy", "balanced", "AUROC"]
    every = {**judgement.sites, "pooled": judgement.pooled}
    rows = [[n, f"{s.n:,}", *map(str, (s.accuracy, s.balanced_accuracy, s.auroc))] for n, s in every.items()]
    return header, rows


def class_table(judgement: Judgement) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a line per class over all sites."""
    header = ["class", "images", "recall", "specificity", "precision"]
    classes = judgement.pooled.classes.items()
    rows = [[n, f"{c.n:,}", *map(str, (c.recall, c.specificity, c.precision))] for n, c in classes]
    return header, rows


def findings(judgement: Judgement) -> list[str]:
    """Where the model is worst, how sites differ, calibration, the operating point, and notes."""
    pooled, spread = judgement.pooled, judgement.spread
    what = judgement.metric.replace("_", " ")
    lines = []
    if len(judgement.sites) > 1:
        worst = judgement.sites[judgement.worst_site]
        lines.append(f"worst site: {judgement.worst_site}, {what} {getattr(worst, judgement.metric)}")
        between = f"{100 * spread['lowest']:.1f} to {100 * spread['highest']:.1f}"
        lines.append(f"sites: mean accuracy {judgement.mean}, {what} {between}, std {100 * spread['std']:.1f}")
    if judgement.worst_class is not None:
        lines.append(f"worst class: {judgement.worst_class}, recall {pooled.classes[judgement.worst_class].recall}")
    lines.append(f"calibration error {pooled.ece}, Brier score {decimal(pooled.brier)}")
    if point := pooled.operating_point:
        lines.append(
            f'"{point.positive}" from {point.threshold:.3g} on ({point.rule} on '
            f"{counted(point.chosen_on, 'validation image')}): sensitivity {point.sensitivity}, specificity "
            f"{point.specificity}"
        )
    return lines + [f"note: {note}" for note in judgement.notes]


def legend(judgement: Judgement) -> str:
    """What the numbers are."""
    drawn = "patients" if judgement.pooled.groups is not None else "images"
    return f"Percent with 95 % intervals (bootstrap over {drawn})."


def decimal(number: Interval) -> str:
    """A number that is not a share, with its interval.

    >>> decimal(Interval(0.1234, 0.1, 0.2))
    '0.123 [0.100, 0.200]'
    """
    return f"{number.value:.3f} [{number.low:.3f}, {number.high:.3f}]" if number.defined else "-"


def text(judgement: Judgement) -> str:
    """The tables as aligned text of at most 80 columns."""
    blocks = [summary(judgement)]
    for header, rows in (site_table(judgement), class_table(judgement)):
        left = max(0, len(rows) - _MOST)
        kept = rows if not left else [*rows[: _MOST - 1], rows[-1]]
        blocks.append("\n".join(_aligned([header, *kept]) + ([f"... and {left} more"] if left else [])))
    below = [*findings(judgement), legend(judgement)]
    return "\n\n".join([*blocks, "\n".join(fill(line, 80, subsequent_indent="  ") for line in below)])


def _aligned(cells: list[list[str]]) -> list[str]:
    short = [[c if len(c) <= _NAME or j else f"{c[: _NAME - 1]}…" for j, c in enumerate(row)] for row in cells]
    widths = [max(len(row[j]) for row in short) for j in range(len(short[0]))]
    return [
        "  ".join(
            c.ljust(w) if j == 0 else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in short
    ]


def markdown(judgement: Judgement) -> str:
    """The tables as Markdown, and the findings as a list."""
    tables = [markdown_table(*table) for table in (site_table(judgement), class_table(judgement))]
    below = "\n".join(f"- {line}" for line in [*findings(judgement), legend(judgement)])
    return "\n\n".join([f"**{summary(judgement)}**", *tables, below])


def page(judgement: Judgement) -> str:
    """The tables as HTML."""
    tables = [html_table(*table) for table in (site_table(judgement), class_table(judgement))]
    return html_page(summary(judgement), *tables, notes=[*findings(judgement), legend(judgement)])
