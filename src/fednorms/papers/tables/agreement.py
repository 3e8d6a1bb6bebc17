"""How well a table agrees with the paper: two-sided differences, and the order of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from fednorms.papers.tables.cell import TableCell
from fednorms.papers.tables.selectors import Selector

_NOISE = 2.0  # standard errors of a difference of two means that seeds explain


@dataclass(frozen=True)
class Differences:
    """Our results minus the published ones, over all cells that are judged."""

    cells: int
    mean: float
    mean_size: float
    largest: float
    where: str

    @classmethod
    def of(cls, cells: Iterable[tuple[str, TableCell]]) -> Differences | None:
        """From named cells; None if none has both numbers.

        >>> from fednorms.papers.tables.table import Published
        >>> cells = [(n, TableCell(ours, None, 1, Published(80.0), "within")) for n, ours in (("a", 81.0), ("b", 77.0))]
        >>> Differences.of(cells)
        Differences(cells=2, mean=-1.0, mean_size=2.0, largest=-3.0, where='b')
        """
        found = [(name, cell.difference) for name, cell in cells if cell.judged and cell.difference is not None]
        if not found:
            return None
        where, largest = max(found, key=lambda one: abs(one[1]))
        values = [value for _, value in found]
        return cls(len(values), fmean(values), fmean(map(abs, values)), largest, where)

    def sentence(self) -> str:
        """In words."""
        return (
            f"Differences from the paper, in both directions: {self.mean:+.1f} points on average, {self.mean_size:.1f} "
            f"in size, at most {self.largest:+.1f} ({self.where})."
        )


@dataclass(frozen=True)
class Order:
    """Pairs of rows in the published order, Kendall's rank correlation, and swapped pairs that seeds do not explain.

    A swapped pair lists the row that is published as the better one first.
    """

    same: int
    pairs: int
    tau: float
    swapped: list[tuple[str, str]]

    @classmethod
    def of(cls, rows: Mapping[str, Mapping[str, TableCell]], column: str, selector: Selector) -> Order | None:
        """The order of rows in a column; None without two different published values.

        Rows with equal published values are not a pair. A row that diverged comes last. A swapped pair is outside noise
        if the means differ by more than two standard errors over seeds, or if a row diverged.
        """
        sign = -1.0 if selector.less_is_better else 1.0
        both = {
            name: (sign * cell.published.mean, -math.inf if cell.ours is None else sign * cell.ours, cell)
            for name, row in rows.items()
            if (cell := row[column]).published and (cell.ours is not None or cell.diverged)
        }
        pairs = [(a, b) if both[a][0] > both[b][0] else (b, a) for a, b in combinations(both, 2)]
        pairs = [(a, b) for a, b in pairs if both[a][0] != both[b][0]]
        if not pairs:
            return None
        same = sum(both[a][1] > both[b][1] for a, b in pairs)
        swapped = [(a, b) for a, b in pairs if both[a][1] < both[b][1] and _outside(both[a][2], both[b][2])]
        return cls(same, len(pairs), _tau([v[0] for v in both.values()], [v[1] for v in both.values()]), swapped)

    def sentence(self, column: str) -> str:
        """In words."""
        text = f'Order of rows in "{column}": {self.same} of {self.pairs} pairs as published'
        text += "" if math.isnan(self.tau) else f" (Kendall's tau {self.tau:.2f})"
        if self.same == self.pairs:
            return f"{text}."
        if not self.swapped:
            return f"{text}; the seeds explain every swapped pair."
        named = ", ".join(f"{a} below {b}" for a, b in self.swapped[:4])
        more = f" and {len(self.swapped) - 4} more" if self.swapped[4:] else ""
        return f"{text}; swapped by more than the seeds explain: {named}{more}."

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        tau = None if math.isnan(self.tau) else self.tau
        return {"same": self.same, "pairs": self.pairs, "tau": tau, "swapped": [list(pair) for pair in self.swapped]}


def _outside(a: TableCell, b: TableCell) -> bool:
    """Whether two results differ by more than the seeds explain; with one seed, that is not known."""
    if a.ours is None or b.ours is None:
        return True
    if a.std is None or b.std is None:
        return False
    return abs(a.ours - b.ours) > _NOISE * math.sqrt(a.std**2 / a.seeds + b.std**2 / b.seeds)


def _tau(published: list[float], ours: list[float]) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau(published, ours).statistic)
