"""Hyper-parameters with their legal range, validated when a part is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any, Protocol

from fednorms.errors import BadInput
from fednorms.near import did_you_mean


class Named(Protocol):
    """Anything with a name for messages."""

    name: str


def option(
    default: Any,  # noqa: ANN401
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Iterable[Any] | None = None,
) -> Any:  # noqa: ANN401
    """A hyper-parameter with its legal range; `default` is the paper's value and appears in error messages."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "choices": tuple(choices or ())}
    return field(default=default, metadata=limits)


def _illegal(part: Named, f: dataclasses.Field[Any]) -> str | None:
    value, kind, limit = getattr(part, f.name), type(f.default), f.metadata
    if limit.get("choices"):
        fine, want = value in limit["choices"], "one of " + ", ".join(map(repr, limit["choices"]))
    elif f.default is None:
        return None
    elif kind in (int, float):
        if kind is float and type(value) is int:
            object.__setattr__(part, f.name, value := float(value))
        low, over, high = limit.get("at_least"), limit.get("above"), limit.get("at_most")
        bounds = [f">= {low}"] * (low is not None) + [f"> {over}"] * (over is not None)
        bounds += [f"<= {high}"] * (high is not None)
        want = f"{'an integer' if kind is int else 'a number'} {' and '.join(bounds)}".rstrip()
        fine = type(value) is kind and value == value
        fine = (
            fine
            and (low is None or value >= low)
            and (over is None or value > over)
            and (high is None or value <= high)
        )
    else:
        fine, want = type(value) is kind, f"a {kind.__name__}"
    if fine:
        return None
    return f"{part.name}: {f.name} must be {want} (default {f.default!r}), got {value!r}"


def validate(part: Named) -> None:
    """Check every hyper-parameter of a part against its range; all problems are reported at once."""
    problems = [m for f in dataclasses.fields(part) if (m := _illegal(part, f))]  # type: ignore[arg-type]
    if problems:
        raise BadInput("; ".join(problems) + ".")


def nearest(name: str, names: Iterable[str]) -> str:
    """A "did you mean" for error messages, with all that is known.

    >>> nearest("fedprocs", ["fedprox", "fedbn"])
    'did you mean "fedprox"? Known: fedbn, fedprox'
    """
    known = sorted(names)
    shown = [f'"{other}"' if "," in other else other for other in known]
    return f"{did_you_mean(name, known)}Known: {', '.join(shown)}"


def few(names: Sequence[str]) -> str:
    """The first three of some names.

    >>> few(["a", "b", "c", "d"]), few(["a"])
    ('a, b, c, ...', 'a')
    """
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
