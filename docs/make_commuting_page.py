"""Write docs/commuting.md: for every pair of methods whether A + B is B + A, found by training both (minutes).

PYTHONPATH=. python docs/make_commuting_page.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.support.pairs import FITTING, Order, known, order_of

PAGE = Path(__file__).with_name("commuting.md")
HEAD = f"""\
# Which pairs commute

Written by `PYTHONPATH=. python docs/make_commuting_page.py`; tests compare it with the code, pair by pair. Two methods
commute if `A + B` and `B + A` give the same tensors and test losses, up to rounding, after two rounds on a tiny network
in double precision. All pairs that are not listed here commute. Options are the defaults, except
`{"`, `".join(FITTING.values())}`.

Tried: {", ".join(known())}.

- **order matters with**: both orders train, and differ. For example, the second of two server steps sees the result of
  the first.
- **only before**: works if listed first; the other order is refused.
- **refused with**: both orders are refused when the method is composed; the error gives the reason.

| method | order matters with | only before | refused with |
| --- | --- | --- | --- |
"""
COLUMNS: dict[str, Order] = {"order matters with": "matters", "only before": "first", "refused with": "refused"}


def orders() -> dict[tuple[str, str], Order]:
    """Every unordered pair, tried."""
    return {pair: order_of(*pair) for pair in itertools.combinations(known(), 2)}


def page(found: dict[tuple[str, str], Order]) -> str:
    """The text of the page."""
    turned: dict[Order, Order] = {"first": "second", "second": "first"}
    both = found | {(b, a): turned.get(order, order) for (a, b), order in found.items()}
    lines = []
    for name in known():
        cells = [
            [b for (a, b), order in sorted(both.items()) if a == name and order == kind] for kind in COLUMNS.values()
        ]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(", ".join(cell) for cell in cells) + " |\n")
    return HEAD + "".join(lines)


def read(text: str) -> dict[tuple[str, str], Order]:
    """What a page says of ordered pairs; those that it does not name commute."""
    found: dict[tuple[str, str], Order] = {}
    for line in text.split("| --- | --- | --- | --- |\n")[1].splitlines():
        name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        for kind, cell in zip(COLUMNS.values(), cells, strict=True):
            for other in filter(None, cell.split(", ")):
                found[name, other] = kind
                if kind == "first":
                    found[other, name] = "second"
    return found


if __name__ == "__main__":
    PAGE.write_text(page(orders()), encoding="utf-8")
