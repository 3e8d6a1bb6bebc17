"""Methods by their text form: `method("scaffold + greg(alpha=1.0)")`, and all names it understands."""

from __future__ import annotations

from collections.abc import Callable

from fednorms.core import checks, plugins
from fednorms.core.errors import BadInput, refuse_class
from fednorms.core.grammar import make_from, read_sum
from fednorms.core.method import Method, nameless
from fednorms.core.options import did_you_mean, shortened
from fednorms.core.part import REGISTRY, SUMS, Part
from fednorms.core.part import part as part
from fednorms.core.part import sum_of_parts as sum_of_parts

_SPELLINGS = {"centralized": "centralised"}  # recipes and results of all versions have the British spelling


def method(text: str | Method | Part) -> Method:
    """Read a method from its text form: names joined by `+`, options in parentheses.

    >>> method("scaffold + greg(alpha=0.5)").parts[1].alpha
    0.5
    >>> method("centralized")
    method('centralised')
    >>> method("fedprocs")
    Traceback (most recent call last):
    fednorms.BadInput: Unknown method "fedprocs": did you mean "fedprox"? `fednorms list methods` lists all ...
    """
    load_all()
    if isinstance(text, (Method, Part)):
        made = text if isinstance(text, Method) else Method((text,))
        for p in made.parts:
            if "name" not in vars(type(p)):  # only that of the part from which it derives
                raise nameless(p)
            if REGISTRY.get(p.name) is not type(p):
                raise BadInput(f'The name "{p.name}" was redefined after this instance was created; create it again.')
        return made
    if not isinstance(text, str):
        if isinstance(text, type) and issubclass(text, Part):
            refuse_class("method", text)
        if isinstance(text, list | tuple) and text and all(isinstance(one, str | Method | Part) for one in text):
            several = ", ".join(f'"{one}"' for one in text)
            raise BadInput(
                f"method: expected one method, got {len(text)}. To combine them, write "
                f'"{" + ".join(map(str, text))}". To compare them, write fednorms.compare([{several}]).'
            )
        raise BadInput(
            f"method: expected text, a Method or a part, got {checks.kind(text)}. A custom class derives "
            'from fn.Part and has @fn.part("name") above it.'
        )
    parts: list[Part] = []
    for given, options in read_sum(text, "method", "scaffold + greg(alpha=1.0)"):
        name = given if given in {*REGISTRY, *SUMS} else _SPELLINGS.get(given, given)
        make: Callable[..., Part | tuple[Part, ...]] | None
        make = _fedavg if name == "fedavg" else SUMS.get(name) or REGISTRY.get(name)
        if make is None:
            raise BadInput(
                f'Unknown method "{shortened(name)}": {did_you_mean(name, names())}`fednorms list methods` lists all '
                f"{len(names())}. A custom method is found if FEDNORMS_METHODS names the module that defines it "
                "(FEDNORMS_METHODS=mymodule)."
            )
        found = make_from(name, make, options)
        parts += found if isinstance(found, tuple) else (found,)
    return Method(tuple(parts))


def load_all() -> None:
    """Import the modules that FEDNORMS_METHODS names, and those of other packages (entry points "fednorms.methods").

    Each part registers itself, as those of this package do. FEDNORMS_METHODS="mine other" (names separated by spaces)
    is for the command line and for worker processes. A module may be in the working directory.

    >>> load_all(); "fedbn" in REGISTRY
    True
    """
    plugins.load_methods()


def names() -> list[str]:
    """Every name that `method` understands.

    >>> "fedavg" in names() and "fedwon" in names()
    True
    """
    load_all()
    return sorted({*REGISTRY, *SUMS, "fedavg"})


def _fedavg() -> tuple[Part, ...]:
    return ()
