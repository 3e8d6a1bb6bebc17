"""Run the same methods across machines, with Flower. `pip install 'fednorms[flower]'`.

A Flower project needs two lines: `client = client_app()` and `server = server_app()`; `fednorms deploy init` writes
the rest. See `docs/flower.md`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fednorms.core.errors import BadInput

if TYPE_CHECKING:
    from fednorms.flower.client import client_app
    from fednorms.flower.server import server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the apps on access: the rest of this package works without Flower."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_flower()
    from fednorms.flower import client, server

    return getattr(client if name == "client_app" else server, name)


def require_flower() -> None:
    """Raise BadInput that says what to install if Flower is missing."""
    if find_spec("flwr") is None:
        raise BadInput("Flower is not installed. Install it with: pip install 'fednorms[flower]'")
