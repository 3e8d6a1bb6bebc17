"""Figures and data frames of packages that may be missing; they are imported at first use."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fednorms.core.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def new_figure(width: float, height: float) -> Figure:
    """An empty matplotlib figure of so many inches. Notebooks show it; elsewhere, save it with `savefig`."""
    try:
        return _figure_class()(figsize=(width, height), layout="constrained", facecolor="white")
    except ImportError:
        raise BadInput("Pictures need matplotlib. Install it with `pip install 'fednorms[report]'`.") from None


@cache
def _figure_class() -> Any:  # noqa: ANN401
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that notebooks show without pyplot, which would keep it in memory."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    return ShownFigure


def new_frame(rows: Sequence[Mapping[str, object]]) -> DataFrame:
    """A pandas DataFrame with one line per mapping."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise BadInput("to_frame() needs pandas. Install it with `pip install 'fednorms[frame]'`.") from None
    return DataFrame(list(rows))
