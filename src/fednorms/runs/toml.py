"""Write TOML, which the standard library only reads; and read it with bounds on what a text may cost."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fednorms.core.errors import BadInput

_LONGEST = 2**20  # characters
_WORD = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"{_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{64}}")  # the standard parser's time is quadratic in them


def loads(text: str, where: str) -> dict[str, Any]:
    """Read TOML; a text that is not valid, too long or nested too deeply is an error that names `where`.

    >>> loads("rounds = 3", "the recipe")
    {'rounds': 3}
    >>> loads("rounds = ", "the recipe")
    Traceback (most recent call last):
    fednorms.BadInput: the recipe is not valid TOML: Invalid value (at end of document).
    """
    if len(text) > _LONGEST:
        raise BadInput(f"{where} has {len(text):,} characters; at most {_LONGEST:,} are read.")
    try:
        if found := _DEEP_KEY.search(text):
            raise BadInput(f'{where} has a key of more than 64 parts, "{found[0][:30]}...". Shorten it.')
        return tomllib.loads(text)
    except BadInput:
        raise
    except RecursionError:
        raise BadInput(f"{where} is nested too deeply.") from None
    except ValueError as error:  # not TOML, or a number with thousands of digits
        raise BadInput(f"{where} is not valid TOML: {str(error).partition(';')[0]}.") from None


def dumps(table: Mapping[str, object]) -> str:
    """Write a mapping as TOML text, scalars first; entries that are None are left out.

    >>> print(dumps({"name": "a, b", "n": 3, "inner": {"rate": 0.5, "list": [1, 2], "off": None}}))
    name = "a, b"
    n = 3
    <BLANKLINE>
    [inner]
    rate = 0.5
    list = [1, 2]
    <BLANKLINE>
    """
    return _table(table, ())


def _table(table: Mapping[str, object], path: tuple[str, ...]) -> str:
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, Mapping)]
    text = "\n".join(lines) + "\n" if lines else ""
    for key, inner in table.items():
        if isinstance(inner, Mapping):
            here = (*path, key)
            text += f"\n[{'.'.join(map(_key, here))}]\n{_table(inner, here)}"
    return text


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain and key else json.dumps(key, ensure_ascii=False)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        if math.isnan(value) or math.isinf(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        text = repr(value)
        return text if any(c in text for c in ".e") else text + ".0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"cannot write {type(value).__name__} as TOML")
