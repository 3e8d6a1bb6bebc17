"""A comparison of methods: the table of their scores over seeds, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.markup import aligned, html_page, html_table, latex_table
from fednorms.core.optional import new_frame
from fednorms.core.options import nearest
from fednorms.data import Federation
from fednorms.evaluation.intervals import Interval
from fednorms.runs.cells import Outcome
from fednorms.runs.differences import (
    ACCURACY,
    BALANCED,
    FEWEST,
    MEAN,
    OVERALL,
    Column,
    PairedBootstrap,
    Replicated,
    difference,
    within_noise,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

BEST = "* best of the column"  # what a star means where text cannot be bold
ALIKE = "= no difference to the best that these test images and seeds can show (95 % interval, paired bootstrap)"
UNCORRECTED = (
    "  {n} differences were tested, without correction for their number: of equal methods, about 1 in 20 lacks its ="
)
_UNSEEN = " (unseen)"


@dataclass(frozen=True)
class MeanStd:
    """A cell of the table: mean and sample standard deviation over seeds (None with one seed)."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanStd:
        """From the values of the seeds.

        >>> MeanStd.of([0.5, 0.7]).mean, MeanStd.of([0.5]).std
        (0.6, None)
        """
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if self.std is None else f" ± {100 * self.std:.1f}")


@dataclass(frozen=True)
class TableRow:
    """A method in one evaluation mode; no entries if every seed failed."""

    label: str
    mode: str
    lr: float
    entries: dict[str, MeanStd]
    per_seed: dict[int, dict[str, float]]
    failed: dict[int, str]
    unseen: str = ""  # the mode that tests sites without training data


@dataclass
class Comparison:
    """Methods, seeds and how each did in the last round; the repr is the table.

    Every row names its evaluation mode (model/statistics). `mean` is over the domains that trained; the others have
    separate columns. Accuracy is that after the last round, never the best on test data. If the recipe's metric is
    balanced accuracy, all columns have that, `balanced` decides which method is the best, and `accuracy` is plain.

    The best of a column ends with *, and = marks what is within noise of it: the 95 % interval of the difference, by a
    paired bootstrap over test images and seeds, holds 0. Several comparisons are not corrected for.

    >>> from fednorms.runs.compare import compare
    >>> comparison = compare(["fedavg", "fedbn"], rounds=1, seeds=1, evaluate=["personal"])
    >>> [row.label for row in comparison.rows], comparison.best in ("fedavg", "fedbn")
    (['fedavg', 'fedbn'], True)
    """

    methods: dict[str, str]  # as the user wrote it, and in full
    seeds: list[int]
    outcomes: list[Outcome]
    about: dict[str, str] = field(default_factory=dict)
    path: Path | None = None
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metric: str = "accuracy"

    @property
    def judged_by(self) -> str:
        """The column that decides which method is the best."""
        return BALANCED if self.metric == "balanced_accuracy" else MEAN

    @property
    def measure(self) -> str:
        """What its columns have, in words."""
        return self.metric.replace("_", " ")

    @property
    def rows(self) -> list[TableRow]:
        """The table's rows, methods in the order given; one per evaluation mode."""
        rows = []
        for label in self.methods:
            mine = [o for o in self.outcomes if o.label == label]
            failed = {o.seed: o.error for o in mine if o.error}
            modes = dict.fromkeys(m for o in mine for m in o.scores if not m.startswith("unseen"))
            rows += [self._row(label, mode, mine, failed) for mode in modes or ["-"]]
        return rows

    def _row(self, label: str, mode: str, mine: list[Outcome], failed: dict[int, str]) -> TableRow:
        per_seed: dict[int, dict[str, float]] = {}
        modes: set[str] = set()
        for outcome in mine:
            if mode not in outcome.scores:
                continue
            scores = outcome.scores[mode]
            unseen = [s for s in outcome.scores.values() if s.mode == "unseen"]
            per_seed[outcome.seed] = {
                **scores.judged_domains(self.metric),
                **({BALANCED: scores.balanced_accuracy} if self.judged_by == BALANCED else {}),
                (ACCURACY if self.judged_by == BALANCED else MEAN): scores.domain_mean,
                **{f"{d}{_UNSEEN}": a for s in unseen[:1] for d, a in s.judged_domains(self.metric).items()},
            }
            modes |= {s.label for s in unseen[:1]}
        columns = dict.fromkeys(c for values in per_seed.values() for c in values)
        entries = {c: MeanStd.of([v[c] for v in per_seed.values() if c in v]) for c in columns}
        return TableRow(label, mode, mine[0].lr, entries, per_seed, failed, " ".join(sorted(modes)))

    @property
    def columns(self) -> list[str]:
        """The domains that trained, those that did not, and the mean over the former."""
        last = [BALANCED, ACCURACY] if self.judged_by == BALANCED else [MEAN]
        found = list(dict.fromkeys(c for row in self.rows for c in row.entries if c not in last))
        return [*sorted(found, key=lambda c: c.endswith(_UNSEEN)), *last]

    def best_in(self, column: str) -> float | None:
        """The highest mean accuracy in a column."""
        return max((row.entries[column].mean for row in self.rows if column in row.entries), default=None)

    @property
    def best(self) -> str | None:
        """The method with the highest mean over domains (or balanced accuracy); None if all failed."""
        whole = [row for row in self.rows if self.judged_by in row.entries]
        return max(whole, key=lambda row: row.entries[self.judged_by].mean).label if whole else None

    @property
    def failed(self) -> list[Outcome]:
        """The cells that failed."""
        return [o for o in self.outcomes if o.error]

    # -- differences --------------------------------------------------------------------------------------------
    @cached_property
    def _replicated(self) -> dict[tuple[str, str], dict[str, Replicated]]:
        """Replicates of every row and column; rows without kept predictions are missing."""
        scores = [s for o in self.outcomes for s in o.scores.values()]
        bootstrap = PairedBootstrap({k: v for s in scores for k, v in s.domain_of.items()})
        balanced = self.judged_by == BALANCED
        found: dict[tuple[str, str], dict[str, Replicated]] = {}
        for row in self.rows:
            each: dict[str, dict[int, Column]] = {}
            for o in self.outcomes:
                if o.label != row.label or row.mode not in o.answers:
                    continue
                columns = bootstrap.columns(o.answers[row.mode], balanced=balanced)
                if row.unseen in o.answers:
                    new = bootstrap.columns(o.answers[row.unseen], balanced=balanced)
                    columns |= {f"{c}{_UNSEEN}": v for c, v in new.items() if c not in OVERALL}
                for c, value in columns.items():
                    each.setdefault(c, {})[o.seed] = value
            found[row.label, row.mode] = {c: Replicated(by_seed) for c, by_seed in each.items()}
        return found

    @cached_property
    def to_best(self) -> dict[tuple[str, str], dict[str, Interval]]:
        """For each row (method and mode) and column, the best row's accuracy minus this one's, with its interval."""
        found: dict[tuple[str, str], dict[str, Interval]] = {}
        for column in self.columns:
            there = {key: r[column] for key, r in self._replicated.items() if column in r}
            whole = [row for row in self.rows if column in row.entries]
            if not whole:
                continue
            best = max(whole, key=lambda row: row.entries[column].mean)
            first = there.get((best.label, best.mode))
            for key, replicated in there.items():
                if first is not None and first is not replicated:
                    found.setdefault(key, {})[column] = difference(first, replicated)
        return found

    def difference(self, a: str | tuple[str, str], b: str | tuple[str, str], column: str | None = None) -> Interval:
        """The accuracy of method `a` minus that of `b`, with its 95 % interval over test images and seeds.

        A row is named by its method, or by method and mode: ("fedbn", "personal/own"). The column is by default the one
        that decides which method is the best.
        """
        keys = [self._key(row) for row in (a, b)]
        wanted = column or self.judged_by
        missing = [key for key in keys if wanted not in self._replicated[key]]
        if missing:
            known = list(dict.fromkeys(c for r in self._replicated.values() for c in r))
            raise BadInput(
                f'There is no "{wanted}" of {missing[0][0]} to compare: '
                + (nearest(wanted, known) if known else "these runs kept no test predictions (keep_predictions).")
            )
        return difference(self._replicated[keys[0]][wanted], self._replicated[keys[1]][wanted])

    def _key(self, row: str | tuple[str, str]) -> tuple[str, str]:
        keys = list(self._replicated)
        found = [key for key in keys if row in (key, key[0])]
        if not found:
            name = row if isinstance(row, str) else " ".join(row)
            raise BadInput(f'No row "{name}" in this comparison: {nearest(name, [key[0] for key in keys])}')
        return found[0]

    def _alike(self, row: TableRow, column: str) -> bool:
        gap = self.to_best.get((row.label, row.mode), {}).get(column)
        return gap is not None and within_noise(gap)

    def legend(self) -> list[str]:
        """What the marks of the table mean."""
        gaps = [gap for of_row in self.to_best.values() for gap in of_row.values() if gap.defined]
        several = [UNCORRECTED.format(n=len(gaps))] if len(gaps) > 1 else []
        return [BEST, *([ALIKE, *several] if any(map(within_noise, gaps)) else [])]

    def curve(self, label: str) -> dict[int, MeanStd]:
        """Mean accuracy over domains after each round that all seeds have tested, in the method's headline mode."""
        values: dict[int, list[float]] = {}
        for outcome in (o for o in self.outcomes if o.label == label):
            for t in outcome.rounds:
                if averages := t.tests.get(f"{outcome.headline}/test"):
                    values.setdefault(t.number, []).append(averages.domain_mean)
        seeds = max(map(len, values.values()), default=0)
        return {t: MeanStd.of(v) for t, v in sorted(values.items()) if len(v) == seeds}

    def cells(self) -> list[list[str]]:
        """The table as text, the header first; the best of each column ends with *, what is within noise of it with =.

        The column of an unseen site names its mode, if that is the same in all rows.
        """
        rows, columns = self.rows, self.columns
        rates = len({row.lr for row in rows}) > 1
        best = {c: self.best_in(c) for c in columns}
        table = [["method", "model/statistics", *(["lr"] if rates else []), *map(self._title, columns)]]
        for row in rows:
            line = [row.label, row.mode, *([f"{row.lr:g}"] if rates else [])]
            for c in columns:
                entry = row.entries.get(c)
                empty = "failed" if row.failed and not row.entries else "-"
                mark = "" if entry is None else " *" if entry.mean == best[c] else " =" if self._alike(row, c) else ""
                line.append(empty if entry is None else f"{entry}{mark}")
            table.append(line)
        return table

    def _title(self, column: str) -> str:
        modes = {row.unseen for row in self.rows if row.unseen}
        if not column.endswith(_UNSEEN) or len(modes) != 1:
            return column
        return f"{column.removesuffix(_UNSEEN)} ({modes.pop()})"

    def remarks(self) -> list[str]:
        """The lines below the table: failures first, then what was compared and how."""
        lines = []
        for label in self.methods:
            failed = {o.seed: o.error for o in self.outcomes if o.label == label and o.error}
            lines += [f"{label}, seed {seed} failed: {reason}" for seed, reason in failed.items()]
        if not any(row.entries or row.failed for row in self.rows):
            lines.append("not tested: there are no test images")
        unseen = {row.label: row.unseen for row in self.rows if row.unseen}
        if len(set(unseen.values())) > 1:
            lines.append("unseen sites: " + ", ".join(f"{label} {mode}" for label, mode in unseen.items()))
        lines += self._too_little_to_tell()
        return lines + [f"{key}: {value}" for key, value in self.about.items()] + self.notes

    def _too_little_to_tell(self) -> list[str]:
        """Columns with too few patients or images for any difference, and sites with one class."""
        units: dict[str, int] = {}
        for column, replicated in ((c, r) for of_row in self._replicated.values() for c, r in of_row.items()):
            units[column] = max(units.get(column, 0), *(c.units for c in replicated.by_seed.values()))
        few = [f'"{column}" ({n})' for column, n in units.items() if n < FEWEST]
        said = [answers for o in self.outcomes for tested in o.answers.values() for answers in tested.items()]
        several = {site for site, answers in said if len(np.unique(answers.labels)) > 1}
        single = dict.fromkeys(site for site, _ in said if site not in several) if several else {}
        lines = (
            [f"too few test images (or patients, where known) to show a difference: {', '.join(few)}"] if few else []
        )
        if single:
            named = ", ".join(f'"{site}"' for site in single)
            lines.append(f"test images of one class only, so a higher accuracy may be a bias toward it: {named}")
        return lines

    def table(self) -> str:
        """The table as aligned text."""
        return "\n".join(aligned(self.cells()))

    def __repr__(self) -> str:
        return "\n".join([self.table(), *self.legend(), "", *self.remarks()])

    def _repr_html_(self) -> str:
        header, rows, numbers_from, best = self._marked()
        title = f"{len(self.methods)} method{'s' * (len(self.methods) != 1)}, {self.measure} in percent (best in bold)"
        notes = [*self.legend()[1:], *self.remarks()]
        return html_page(title, html_table(header, rows, numbers_from=numbers_from, bold=best), notes=notes)

    def plot(self, federation: Federation | None = None) -> Figure:
        """The comparison as a matplotlib figure: accuracies as a heat map, and learning curves.

        With `federation`, images of every site come first. A notebook shows the figure; elsewhere,
        `comparison.plot().savefig("methods.png")`. Needs the extra "report".
        """
        from fednorms.runs.comparison_files import figure

        return figure(self, federation)

    def to_frame(self, by: Literal["method", "seed"] = "method") -> DataFrame:
        """The table as a pandas DataFrame: one line per method and mode, or also per seed.

        Accuracies are fractions. Columns are those of comparison.csv. Needs the extra "frame".
        """
        from fednorms.runs.comparison_files import plain_name, records

        if by not in ("method", "seed"):
            raise BadInput(f'to_frame: by= must be "method" or "seed", got "{by}".')
        if by == "method":
            return new_frame(records(self))
        return new_frame(
            [
                {"method": row.label, "mode": row.mode, "lr": row.lr, "seed": seed}
                | {plain_name(c): values.get(c) for c in self.columns}
                for row in self.rows
                for seed, values in row.per_seed.items()
            ]
        )

    def to_markdown(self) -> str:
        """The table as Markdown, with the best of each column in bold, and below it what was compared."""
        from fednorms.runs.comparison_files import markdown

        return markdown(self)

    def to_latex(self) -> str:
        """The table as a LaTeX tabular, with the best of each column in bold; it needs the package booktabs."""
        header, rows, numbers_from, best = self._marked()
        return latex_table(header, rows, numbers_from=numbers_from, bold=best)

    def _marked(self) -> tuple[list[str], list[list[str]], int, set[tuple[int, int]]]:
        """The table's cells, the first column of numbers, and where the best of each column are."""
        header, *cells = self.cells()
        best = {(i, j) for i, row in enumerate(cells) for j, cell in enumerate(row) if cell.endswith(" *")}
        rows = [[cell.removesuffix(" *") for cell in row] for row in cells]
        return header, rows, len(header) - len(self.columns), best

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, accuracies as fractions."""
        return {
            "methods": self.methods,
            "seeds": self.seeds,
            "columns": self.columns,
            "best": self.best,
            "rows": [
                {
                    "method": row.label,
                    "mode": row.mode,
                    "lr": row.lr,
                    "accuracy": {c: {"mean": e.mean, "std": e.std} for c, e in row.entries.items()},
                    "seeds": {str(seed): values for seed, values in row.per_seed.items()},
                    "failed": {str(seed): reason for seed, reason in row.failed.items()},
                    "unseen": row.unseen,
                    "to_best": {
                        c: gap.to_dict() | {"within_noise": within_noise(gap)}
                        for c, gap in self.to_best.get((row.label, row.mode), {}).items()
                    },
                }
                for row in self.rows
            ],
            "curves": {
                label: [{"round": t, "mean": e.mean, "std": e.std} for t, e in self.curve(label).items()]
                for label in self.methods
            },
            "about": self.about,
            "notes": self.notes,
            "path": None if self.path is None else str(self.path),
            "files": [str(f) for f in self.files],
        }
