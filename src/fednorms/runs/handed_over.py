"""How a recipe names the federation that `run` or `compare` is given: a name, a folder, or an object."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.data import Federation
from fednorms.data.registry import federation as make
from fednorms.runs.recipe import Data

_MADE_BY = Data.model_fields.keys() & signature(make).parameters.keys()


def federation_keys(given: str | Path | Federation | None, data: Data) -> dict[str, Any]:
    """The recipe's `federation` and `data`; an object is named as it was asked for, or custom:NAME if it was changed.

    `data` are the recipe's settings so far: an object has its own of what makes a federation; the others, augment,
    hold.

    >>> from fednorms.data.registry import federation
    >>> keys = federation_keys(federation("digits-shift", size=8), Data(size=32))
    >>> keys["federation"], keys["data"]["size"]
    ('digits-shift', 8)
    >>> federation_keys(federation("digits-shift").hold_out("faint"), Data())
    {'federation': 'custom:digits-shift'}
    """
    if not isinstance(given, Federation):
        return {"federation": str(given)} if given else {}
    for key, call in (("hold_out", "federation.hold_out(...)"), ("partition", "fednorms.partition(federation, ...)")):
        if value := getattr(data, key):
            raise BadInput(
                f"The recipe has data.{key} = {value!r}, which is for a federation that it names. Yours is divided "
                f"before the run, with {call}: leave data.{key} out."
            )
    if given.asked_for is None:
        return {"federation": f"custom:{given.name}"}
    name, options = given.asked_for
    own = {option: str(value) if option == "root" else value for option, value in options.items()}
    return {"federation": name, "data": {k: v for k, v in data.model_dump().items() if k not in _MADE_BY} | own}
