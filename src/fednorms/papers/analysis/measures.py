"""All analyses of the papers' figures, by name."""

from __future__ import annotations

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.papers.analysis import of_features, of_filters, of_losses, of_statistics
from fednorms.papers.analysis.registry import ANALYSES as ANALYSES
from fednorms.papers.analysis.registry import Analysis as Analysis

__all__ = ["ANALYSES", "Analysis", "analysis_named", "of_features", "of_filters", "of_losses", "of_statistics"]


def analysis_named(name: str) -> Analysis:
    """An analysis by its name.

    >>> analysis_named("norm")
    Traceback (most recent call last):
    fednorms.BadInput: No analysis "norm": did you mean "norms"? ...
    """
    if name not in ANALYSES:
        raise BadInput(f'No analysis "{name}": {nearest(name, ANALYSES)}')
    return ANALYSES[name]
