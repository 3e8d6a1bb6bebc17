"""Write the tables of docs/results/index.md from the stored runs in recipes/results.

python docs/make_results_page.py          # the page
python docs/make_results_page.py --all    # also the report of every table with stored runs
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fednorms.papers.tables.catalog import Listed, listing, open_table
from fednorms.papers.tables.report import write
from fednorms.papers.tables.sources import needs
from fednorms.papers.tables.stored_summary import stored_summary
from fednorms.papers.tables.summary import Summary

PAGE = Path(__file__).with_name("results") / "index.md"
OURS = "beyond"  # tables that no paper has


def summary(name: str) -> Summary:
    """A table with its stored runs."""
    table = open_table(name)
    assert table.results is not None
    return stored_summary(table, table.results)


def reproduced(tables: Sequence[Listed]) -> str:
    """The table over all tables that have run."""
    lines = [
        "| table | within tolerance | difference: mean, largest | order of rows | tau | swapped | runs | not run |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for entry in sorted((entry for entry in tables if stored(entry)), key=lambda entry: entry.name.startswith(OURS)):
        found = summary(entry.name)
        report = f"[{found.table.label}](../../recipes/results/{entry.name}/RESULTS.md)"
        title = report if entry.name.startswith(OURS) else f"{entry.paper} {report}"
        runs = f"{entry.done} of {entry.runs}"
        row = [title, _score(found), _difference(found), *_order(found), runs, _left(found)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def missing(tables: Sequence[Listed]) -> str:
    """The table of papers and of the data sets that tables without any run need."""
    lines = ["| paper | tables and figures without a run | data sets that they need |", "| --- | ---: | --- |"]
    for paper in dict.fromkeys(entry.paper for entry in tables):
        mine = [entry for entry in tables if entry.paper == paper]
        if left := [entry for entry in mine if not stored(entry)]:
            data = sorted({name for entry in left for name in entry.data if name != "none"})
            lines.append(f"| {paper} | {len(left)} of {len(mine)} | {', '.join(data)} |")
    return "\n".join(lines)


def stored(entry: Listed) -> bool:
    """Whether the repository has runs of a table."""
    return entry.where == "recipes"


def page(text: str) -> str:
    r"""The text of the page with its tables made anew.

    >>> page("a <!-- missing --> old <!-- end --> b").partition("| paper |")[0]
    'a <!-- missing -->\n'
    """
    tables = listing()
    for name, make in (("reproduced", reproduced), ("missing", missing)):
        before, mark, rest = text.partition(f"<!-- {name} -->")
        if mark:
            text = f"{before}{mark}\n{make(tables)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def _score(found: Summary) -> str:
    good, judged = found.score
    return f"{good} of {judged}" if judged else "not judged"


def _difference(found: Summary) -> str:
    """The mean and the largest difference from the paper."""
    return f"{d.mean:+.1f}, {d.largest:+.1f}" if (d := found.differences) else ""


def _order(found: Summary) -> list[str]:
    """Pairs of rows in the published order, the mean rank correlation, and swaps outside noise, over all settings."""
    orders = [section.order for section in found.sections if section.order]
    if not orders:
        return ["", "", ""]
    pairs = f"{sum(o.same for o in orders)} of {sum(o.pairs for o in orders)}"
    taus = [o.tau for o in orders if not math.isnan(o.tau)]
    return [pairs, f"{fmean(taus):.2f}" if taus else "", str(sum(len(o.swapped) for o in orders))]


def _left(found: Summary) -> str:
    """The data sets of the settings that have not run."""
    data = [needs(section.setting, found.table) for section in found.sections if not section.shown]
    return ", ".join(dict.fromkeys(name for name in data if name))


def reports(tables: Sequence[Listed]) -> None:
    """Write the report of every table with stored runs again."""
    for entry in tables:
        if stored(entry):
            found = summary(entry.name)
            assert found.table.results is not None
            write(found, found.table.results)


if __name__ == "__main__":
    if "--all" in sys.argv[1:]:
        reports(listing())
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
