"""The report of a comparison: Markdown, CSV and JSON, and a picture of accuracies and learning curves."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fednorms.core.optional import new_figure
from fednorms.data import Federation
from fednorms.runs.comparison import Comparison
from fednorms.runs.store.atomic import clear_errors, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NO_PICTURE = "no picture: matplotlib is missing; install it with `pip install 'fednorms[report]'` and compare again"

# Okabe and Ito's colors, distinct for every kind of color vision; lines also differ in dashes and markers.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c8c8c")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"


def line_style(i: int) -> dict[str, str]:
    """How the i-th line of a picture looks."""
    dashes = DASHES[i // len(COLORS) % len(DASHES)]
    return {"color": COLORS[i % len(COLORS)], "linestyle": dashes, "marker": MARKERS[i % len(MARKERS)]}


def markdown(comparison: Comparison) -> str:
    """The table as Markdown, with the best of each column in bold, and below it what was compared.

    >>> from fednorms.runs.compare import compare
    >>> print(markdown(compare(["fedavg"], rounds=1, seeds=1)).splitlines()[0])
    | method | model/statistics | clean | faint | foggy | negative | poster | mean |
    """
    header, *rows = comparison.cells()
    fixed = len(header) - len(comparison.columns)
    lines = [header, ["---"] * fixed + ["---:"] * len(comparison.columns)]
    lines += [[_cell(c) for c in row] for row in rows]
    notes = [f"- {_escape(remark)}" for remark in [*comparison.legend()[1:], *comparison.remarks()]]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", *notes]) + "\n"


def _cell(text: str) -> str:
    return f"**{text.removesuffix(' *')}** \\*" if text.endswith(" *") else _escape(text)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def csv_table(comparison: Comparison) -> str:
    """The table as CSV, accuracies in percent: one line per method and mode, mean and std of every column.

    >>> from fednorms.runs.compare import compare
    >>> csv_table(compare(["fedavg"], rounds=1, seeds=1)).splitlines()[0]
    'method,mode,lr,seeds,failed,clean,clean_std,...,mean,mean_std'
    """
    text = io.StringIO()
    rows = records(comparison)
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        shares = {k: "" if v is None else f"{100 * v:.2f}" for k, v in row.items() if k not in ABOUT}
        writer.writerow(row | {"lr": f"{row['lr']:g}"} | shares)
    return text.getvalue()


ABOUT = ("method", "mode", "lr", "seeds", "failed")


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """The rows of the table with plain names: of every column the mean and, as NAME_std, its standard deviation."""
    rows = []
    for row in comparison.rows:
        seeds, failed = (" ".join(map(str, numbers)) for numbers in (row.per_seed, row.failed))
        plain: dict[str, Any] = dict(zip(ABOUT, (row.label, row.mode, row.lr, seeds, failed), strict=True))
        for column in comparison.columns:
            entry, name = row.entries.get(column), plain_name(column)
            plain[name] = None if entry is None else entry.mean
            plain[f"{name}_std"] = None if entry is None else entry.std
        rows.append(plain)
    return rows


def plain_name(column: str) -> str:
    """A column's name in files and data frames; a domain never hides another column.

    >>> plain_name("clean"), plain_name("clean (unseen)"), plain_name("seed")
    ('clean', 'clean_unseen', 'seed_accuracy')
    """
    return f"{column}_accuracy" if column in (*ABOUT, "seed") else column.replace(" (unseen)", "_unseen")


def write(comparison: Comparison, folder: Path, federation: Federation | None = None) -> None:
    """Write comparison.md, .csv and .json and curves.png to a folder; without matplotlib, say how to install it.

    With `federation`, the picture starts with images of every site. Leave it out if images are private.
    """
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    names = ["comparison.md", "comparison.csv", "curves.png", "comparison.json"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        names.remove("curves.png")
        comparison.notes = [*(n for n in comparison.notes if n != NO_PICTURE), NO_PICTURE]
    comparison.path, comparison.files = folder, [folder / name for name in names]
    write_atomic(folder / "comparison.md", markdown(comparison).encode())
    write_atomic(folder / "comparison.csv", csv_table(comparison).encode())
    write_atomic(folder / "comparison.json", (json.dumps(comparison.to_dict(), indent=2) + "\n").encode())
    if "curves.png" in names:
        buffer = io.BytesIO()
        figure(comparison, federation).savefig(buffer, format="png", dpi=150)
        write_atomic(folder / "curves.png", buffer.getvalue())


def figure(comparison: Comparison, federation: Federation | None = None) -> Figure:
    """The comparison as a matplotlib figure: sample images (if a federation is given), heat map, learning curves."""
    rows, columns = len(comparison.rows), len(comparison.columns)
    widths = [0.55 * columns + 2.6, 5.6]
    if federation is not None:
        widths = [2.0, *widths]
    height = max(4.4, 1.6 + 0.42 * rows)
    fig = new_figure(sum(widths), height)
    panels: list[Any] = list(np.ravel(fig.subfigures(1, len(widths), width_ratios=widths, wspace=0.03)))  # type: ignore[arg-type]
    if federation is not None:
        _samples(panels.pop(0), federation)
    _heat_map(panels[0].subplots(), comparison)
    _curves(panels[1].subplots(), comparison)
    return fig


def _samples(panel: SubFigure, federation: Federation, most: int = 8) -> None:
    sites = (*federation.clients, *federation.unseen)[:most]  # in the order of the table
    grid = panel.subplots(len(sites), 2, squeeze=False)
    panel.suptitle("What each site sees", fontsize=11, fontweight="bold")
    for site, axes in zip(sites, grid, strict=True):
        split = next(iter(site.splits.values()))
        # The same classes at every site, so only the appearance differs.
        for axis, wanted in zip(axes, (3, 5), strict=True):
            at = (split.y == wanted % federation.num_classes).nonzero().flatten()
            x, _ = split.batch(at[:1] if len(at) else [0])
            image = federation.preprocessing.unit(x)[0].movedim(0, -1).clamp(0, 1).numpy()
            axis.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0].set_ylabel(site.name, rotation=0, ha="right", va="center", fontsize=10)


def _heat_map(axis: Axes, comparison: Comparison) -> None:
    rows, columns = comparison.rows, comparison.columns
    values = [[100 * row.entries[c].mean if c in row.entries else float("nan") for c in columns] for row in rows]
    axis.set_facecolor("#e6e6e6")  # shows where a run failed
    axis.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    best = {c: comparison.best_in(c) for c in columns}
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            entry = row.entries.get(column)
            if entry is None:
                axis.text(j, i, "-" if row.entries else "failed", ha="center", va="center", fontsize=8)
                continue
            first = entry.mean == best[column]
            axis.text(
                j,
                i,
                f"{100 * entry.mean:.1f}" + ("*" if first else ""),
                ha="center",
                va="center",
                color="black" if entry.mean > 0.55 else "white",
                fontweight="bold" if first else "normal",
                fontsize=9,
            )
    axis.axvline(columns.index(comparison.judged_by) - 0.5, color="white", linewidth=4)
    axis.set_xticks(range(len(columns)), columns, rotation=35, ha="right", rotation_mode="anchor")
    modes = len({row.label for row in rows}) < len(rows)
    axis.set_yticks(range(len(rows)), [f"{r.label}\n({r.mode})" if modes else r.label for r in rows])
    axis.set_title(f"{comparison.measure.capitalize()} per domain (%), last round", fontsize=11, fontweight="bold")
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def _curves(axis: Axes, comparison: Comparison) -> None:
    curves = {label: comparison.curve(label) for label in comparison.methods}
    ends = {label: list(curve.values())[-1].mean for label, curve in curves.items() if curve}
    for number, (label, curve) in enumerate(curves.items()):
        if not curve:
            continue
        style: dict[str, Any] = line_style(number)
        t, mean = list(curve), [100 * e.mean for e in curve.values()]
        style |= {"linewidth": 2, "markersize": 5, "markevery": max(1, len(t) // 6)}
        axis.plot(t, mean, label=f"{label}  {100 * ends[label]:.0f} %", **style)
        low = [100 * (e.mean - (e.std or 0)) for e in curve.values()]
        high = [100 * (e.mean + (e.std or 0)) for e in curve.values()]
        axis.fill_between(t, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axis.set_xlabel("round")
    axis.locator_params(axis="x", integer=True)
    axis.set_ylabel("mean accuracy over domains (%)")
    spread = "mean ± std over seeds" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    axis.set_title(f"Learning curves ({spread})", fontsize=11, fontweight="bold")
    axis.set_ylim(0, 100)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -ends[labels[i].rsplit("  ", 1)[0]])
    if order:
        axis.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            frameon=False,
            fontsize=10,
        )
