"""A judgement as text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

from fednorms.core.counted import counted
from fednorms.core.markup import html_page, html_table, markdown_table
from fednorms.evaluation.intervals import Interval
from fednorms.evaluation.judgement import PER_CLASS, Judgement, SiteJudgement

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


def class_table(judgement: Judgement, most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a line per class over all sites; of more than `most`, those with the lowest recall."""
    header = ["class", "images", "recall", "specificity", "precision"]
    classes = list(judgement.pooled.classes.items())
    if most is not None and len(classes) > most:
        known = [item for item in classes if item[1].recall.defined]
        classes = sorted(known, key=lambda item: item[1].recall.value)[:most]
        header[0] = f"worst {len(classes)} of {len(judgement.classes)}"
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
    for header, rows in (site_table(judgement), class_table(judgement, _MOST)):
        left = max(0, len(rows) - _MOST)
        kept = rows if not left else [*rows[: _MOST - 1], rows[-1]]
        blocks.append("\n".join(_aligned([header, *kept]) + ([f"... and {left} more"] if left else [])))
    below = [*findings(judgement), legend(judgement)]
    return "\n\n".join([*blocks, "\n".join(fill(line, 80, subsequent_indent="  ") for line in below)])


def _aligned(cells: list[list[str]]) -> list[str]:
    short = [
        [c if len(c) <= _NAME or j or not i else f"{c[:6]}…{c[7 - _NAME :]}" for j, c in enumerate(row)]
        for i, row in enumerate(cells)
    ]
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


def full_tables(judgement: Judgement) -> dict[str, tuple[list[str], list[list[str]]]]:
    """All metrics by title: of all sites, of every class at every site, and the confusion matrices."""
    every = {**judgement.sites, "pooled": judgement.pooled} if len(judgement.sites) > 1 else dict(judgement.sites)
    header = ["site", "images", "accuracy", "balanced", "F1", "AUROC", "AUPRC", "ECE", "Brier", "cross-entropy"]
    shares = ("accuracy", "balanced_accuracy", "f1", "auroc", "auprc", "ece")
    rows = [
        [name, f"{s.n:,}", *(str(getattr(s, k)) for k in shares), decimal(s.brier), decimal(s.cross_entropy)]
        for name, s in every.items()
    ]
    tables = {"sites": (header, rows)}
    if judgement.pooled.operating_point:
        tables["at the threshold"] = _operating_table(every)
    columns = ["class", "images", "recall", "specificity", "precision", "F1", "AUROC", "AUPRC"]
    for name, s in every.items():
        tables[f"classes: {name}"] = (
            columns,
            [[c, f"{j.n:,}", *(str(getattr(j, k)) for k in PER_CLASS)] for c, j in s.classes.items()],
        )
        tables[f"confusion matrix: {name} (rows are true classes, columns predicted ones)"] = (
            ["", *judgement.classes],
            [[c, *map(str, row)] for c, row in zip(judgement.classes, s.confusion, strict=True)],
        )
    return tables


def _operating_table(every: Mapping[str, SiteJudgement]) -> tuple[list[str], list[list[str]]]:
    names = ("sensitivity", "specificity", "precision", "negative_predictive_value", "accuracy")
    header = ["site", "sensitivity", "specificity", "precision", "negative predictive value", "accuracy"]
    points = {site: s.operating_point for site, s in every.items()}
    return header, [[site, *(str(getattr(p, k)) for k in names)] for site, p in points.items() if p is not None]
