"""Write TOML, which the standard library only reads: the scalars, lists and nested tables of recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping


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
