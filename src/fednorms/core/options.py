"""Options with their legal range, validated when an object is made; and "did you mean" for every mistyped name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any, ClassVar, Protocol, TypeVar, cast, dataclass_transform

from fednorms.core.errors import BadInput

_HUGE = 2**63  # no option counts that far, and torch's integers end here


class Named(Protocol):
    """Anything with a name for messages."""

    name: ClassVar[str]


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
    elif f.default is None and (value is None or not any(v is not None for k, v in limit.items() if k != "choices")):
        return None
    elif kind in (int, float) or f.default is None:
        kind = int if kind is int else float
        if kind is float and type(value) is int and abs(value) < _HUGE:
            object.__setattr__(part, f.name, value := float(value))
        low, over, high = limit.get("at_least"), limit.get("above"), limit.get("at_most")
        bounds = [f">= {low}"] * (low is not None) + [f"> {over}"] * (over is not None)
        bounds += [f"<= {high}"] * (high is not None)
        want = f"{'an integer' if kind is int else 'a number'} {' and '.join(bounds)}".rstrip()
        fine = type(value) is kind and value == value and (kind is float or abs(value) < _HUGE)
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
    return f"{part.name}: {f.name} must be {want} (default {f.default!r}), got {shortened(repr(value))}"


C = TypeVar("C", bound=type[Any])


@dataclass_transform(frozen_default=True, field_specifiers=(field, option))
def with_options(name: str, cls: C) -> C:
    """Make a class a frozen dataclass whose options are validated, known by `name`, with its text form as repr."""
    cls.name = name
    cls.__post_init__ = validate
    made = dataclass(frozen=True, repr=False)(cls)
    made.__repr__ = made.__str__
    return cast(C, made)


def text_of(thing: Named, always: tuple[str, ...] = ()) -> str:
    """The text form of an object with options: its name and the options that differ from their defaults."""
    changed = [
        f"{f.name}={getattr(thing, f.name)!r}"
        for f in dataclasses.fields(thing)  # type: ignore[arg-type]
        if getattr(thing, f.name) != f.default or f.name in always
    ]
    return f"{thing.name}({', '.join(changed)})" if changed else thing.name


def validate(part: Named) -> None:
    """Check every hyper-parameter of a part against its range; all problems are reported at once."""
    problems = [m for f in dataclasses.fields(part) if (m := _illegal(part, f))]  # type: ignore[arg-type]
    if problems:
        raise BadInput("; ".join(problems) + ".")


def did_you_mean(name: str, names: Iterable[str], *, prefix: str = "", alike: float = 0.5) -> str:
    """The question for an error message, followed by a space; empty if no name is near.

    Names that are equally near are all listed, each with `prefix`. `alike` is how near a name must be, from 0 to 1; use
    more than the default if the name need not be a mistake.

    >>> did_you_mean("fedprocs", ["fedprox", "fedbn"]), did_you_mean("fedbnn", ["fedprox", "fedbn", "fednn"])
    ('did you mean "fedprox"? ', 'did you mean "fednn" or "fedbn"? ')
    >>> did_you_mean("resnet", ["resnet18", "vgg11"], prefix="torchvision:"), did_you_mean("xyz", ["fedbn"])
    ('did you mean "torchvision:resnet18"? ', '')
    """
    close = get_close_matches(name, sorted(set(names)), n=3, cutoff=alike)
    ratios = [SequenceMatcher(a=other, b=name).ratio() for other in close]
    level = [f'"{prefix}{other}"' for other, ratio in zip(close, ratios, strict=True) if ratio == ratios[0]]
    return f"did you mean {' or '.join(level)}? " if level else ""


def shortened(text: str, most: int = 200) -> str:
    """A text for a message, without its middle if it is very long.

    >>> shortened("fedavg"), shortened("9" * 400, 10)
    ('fedavg', '99999...(400 characters)...99999')
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...({len(text):,} characters)...{text[-half:]}"


def quoted(value: object) -> str:
    """A value for a message, on one line: text in double quotes, other values as Python writes them.

    >>> print(quoted("ten"), quoted([0.1, 0.2]), quoted(None))
    "ten" [0.1, 0.2] None
    """
    return f'"{shortened(value)}"' if isinstance(value, str) else shortened(" ".join(repr(value).split()), 80)


def nearest(name: str, names: Iterable[str]) -> str:
    """A "did you mean" for error messages, with all known names.

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
