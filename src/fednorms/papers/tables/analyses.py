"""What the analysis of a figure found in its runs: numbers over seeds, for tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from fednorms.papers.analysis.findings import Findings
from fednorms.papers.tables.record import Values


def stored(name: str, findings: Findings) -> Values:
    """What a result keeps of an analysis."""
    return {"analysis": {"name": name, **findings.plain()}}


def is_analysed(record: Values, name: str) -> bool:
    """Whether a result has all that a figure with this analysis (none: "") shows; a run that diverged has nothing."""
    return not name or record["status"] != "done" or record.get("analysis", {}).get("name") == name


def findings_of(records: Sequence[Values], name: str) -> dict[str, list[Findings]]:
    """By row, what an analysis showed in each seed's run; rows without any are left out."""
    found: dict[str, list[Findings]] = {}
    for record in records:
        if name and record.get("analysis", {}).get("name") == name:
            found.setdefault(record["row"], []).append(Findings.of(record["analysis"]))
    return found


def numbers_of(found: dict[str, list[Findings]]) -> dict[str, dict[str, tuple[float, float | None, int]]]:
    """By row and name of a number: its mean, sample standard deviation and the number of seeds that have one.

    >>> numbers_of({"FedAvg": [Findings({"gap": 1.0}), Findings({"gap": 3.0})]})
    {'FedAvg': {'gap': (2.0, 1.4142135623730951, 2)}}
    """
    return {
        row: {
            name: (fmean(v), stdev(v) if len(v) > 1 else None, len(v))
            for name in dict.fromkeys(n for f in seeds for n in f.scalars)
            if (v := [f.scalars[name] for f in seeds if math.isfinite(f.scalars.get(name, math.nan))])
        }
        for row, seeds in found.items()
    }
