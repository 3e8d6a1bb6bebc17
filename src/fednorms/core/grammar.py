"""The text form of methods, partition rules and generated federations: `name(option=value) + name(...)`.

Text is parsed, never run. Options are Python literals; a bare word is a string, as in `greg(variant=paper)`.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest, shortened

T = TypeVar("T")
_PYTHON = re.compile(rf"=\s*({'|'.join(w for w in keyword.kwlist if w.islower())})(?=\s*[,)])")
_WORDS = {"inf": float("inf"), "true": True, "false": False, "none": None}

Call = tuple[str, dict[str, object]]
_LONGEST = 10_000  # characters: all methods with all their options have fewer


def read_sum(text: str, what: str, example: str) -> list[Call]:
    """The names of a sum, each with its options; `what` and `example` are for messages.

    >>> read_sum("fedprox(mu=0.1) + fedbn", "method", "fedprox + fedbn")
    [('fedprox', {'mu': 0.1}), ('fedbn', {})]
    """

    def unreadable(where: str) -> BadInput:
        return BadInput(f'Cannot read the {what} "{shortened(text)}" {shortened(where)}. Write it like "{example}".')

    def term(node: ast.expr) -> Call:
        call = node if isinstance(node, ast.Call) else None
        head = call.func if call else node
        if isinstance(head, ast.Name) and call and call.args:
            raise unreadable(f'at "{ast.unparse(node)}": an option needs its name')
        if isinstance(head, ast.Tuple):
            raise unreadable("at a comma: names are joined by +, and several are given one by one")
        if not isinstance(head, ast.Name):
            raise unreadable(f'at "{ast.unparse(node)}"')
        name, options = head.id.lower(), dict[str, object]()
        for given in call.keywords if call else []:
            if (key := given.arg or "**") in options:
                raise BadInput(f"{name}: option {key} is given twice.")
            options[key] = value(given.value)
        return name, options

    def value(node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return _WORDS.get(node.id.lower(), node.id)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            raise unreadable(f'at "{ast.unparse(node)}"') from None

    if len(text) > _LONGEST:
        raise unreadable(f"of {len(text):,} characters: at most {_LONGEST:,} are read")
    try:
        # A bare word is a string also where Python reserves it: mixbn(kind=global).
        tree = ast.parse(_PYTHON.sub(r"='\1'", " ".join(text.splitlines()).strip()), mode="eval").body
        return [term(node) for node in _terms(tree)]
    except SyntaxError as error:
        raise unreadable(f"near column {error.offset}" if error.offset else "at its end") from None
    except (RecursionError, MemoryError):
        raise unreadable("because it is nested too deeply") from None
    except BadInput:
        raise
    except ValueError:  # a null character
        raise unreadable("at its start") from None


def read_one(text: str, what: str, example: str) -> Call:
    """The name and the options of a single call.

    >>> read_one("iid(clients=3, within=domain)", "partition", "iid(clients=3)")
    ('iid', {'clients': 3, 'within': 'domain'})
    """
    calls = read_sum(text, what, example)
    if len(calls) > 1:
        found = f"expected one name, got {len(calls)}"
        raise BadInput(f'Cannot read the {what} "{shortened(text)}": {found}. Write it like "{example}".')
    return calls[0]


def check_options(name: str, make: Callable[..., object], options: Mapping[str, object]) -> None:
    """Refuse an option that `make` does not take, with the nearest one that it takes."""
    allowed = [p for p in inspect.signature(make).parameters if p != "self"]
    for key in options:
        if key not in allowed:
            known = nearest(key, allowed) if allowed else "it has no options"
            raise BadInput(f'{name} has no option "{key}": {known}.')


def make_from(name: str, make: Callable[..., T], options: Mapping[str, Any]) -> T:
    """Call `make` with options from text, after checking their names.

    >>> make_from("pair", lambda a=1: (a, a), {"a": 2})
    (2, 2)
    """
    check_options(name, make, options)
    return make(**options)


def _terms(node: ast.expr) -> list[ast.expr]:
    found, waiting = list[ast.expr](), [node]
    while waiting:  # a long sum is nested as deeply as it has terms
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            waiting += [node.right, node.left]
        else:
            found.append(node)
    return found
