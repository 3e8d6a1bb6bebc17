"""Method: an ordered tuple of parts, its checks, and its text form `"scaffold + greg(alpha=1.0) + fedfn"`."""

from __future__ import annotations

import ast
import importlib
import inspect
import keyword
import math
import os
import pkgutil
import re
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from fednorms import hook_returns
from fednorms.errors import BadInput, refuse_class
from fednorms.options import nearest
from fednorms.part import REGISTRY, SUMS, Eval, Part, Pass, Phase, Weighting, overrides
from fednorms.views import Context

_PYTHON = re.compile(rf"=\s*({'|'.join(w for w in keyword.kwlist if w.islower())})(?=\s*[,)])")
_WORDS = {"inf": float("inf"), "true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Method:
    """An ordered tuple of parts; no parts at all is FedAvg. `+` joins methods, `str` gives the text form.

    >>> m = method("fedprox(mu=0.01) + fedfn")
    >>> str(m), m == method(str(m)), str(Method())
    ('fedprox(mu=0.01) + fedfn', True, 'fedavg')
    """

    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.parts, (str, Part)) or not all(isinstance(p, Part) for p in self.parts):
            raise BadInput(
                f"Method: expected a tuple of parts, got {self.parts!r}. fednorms.method(...) reads text, and takes a "
                "part alone."
            )
        for p in self.parts:
            _check_part(p)
        problems = [f"{name} is given twice: list each part once" for name in _repeated([p.name for p in self.parts])]
        problems += [
            f"{' and '.join(rivals)} each {what}: keep one of them"
            for what, rivals in [
                ("replace the base loss", [p.name for p in self.having("objective")]),
                ("decide how to fine-tune", [p.name for p in self.parts if p.evaluation().phases]),
                ("decide which server model is tested", [p.name for p in self.parts if p.evaluation().server_model]),
                ("decide with which statistics to test", [p.name for p in self.parts if p.evaluation().statistics]),
                ("decide how to predict", [p.name for p in self.parts if p.evaluation().predict]),
                ("train a second model per client", [p.name for p in self.having("twin")]),
                ("normalise the input", [p.name for p in self.parts if p.normalises_input]),
                ("protect what is sent", [p.name for p in self.having("protect")]),
                ("release what was protected", [p.name for p in self.having("release")]),
            ]
            if len(rivals) > 1
        ]
        if changing := self.changing:
            problems += [
                f"{p.name} needs the clients' plain updates, which {' and '.join(changing)} changes before they are "
                "sent: keep one of them"
                for p in self.parts
                if p.uses_even_mean or p.needs_plain_updates
            ]
        problems += [problem for p in self.having("protect") for problem in self._unprotected(p)]
        problems += [problem for p in self.having("passes") for problem in _riding_problems(p)]
        if problems:
            raise BadInput(f'Method "{self}": ' + "; ".join(problems) + ".")

    def _unprotected(self, p: Part) -> list[str]:
        """What stands against the promise of a part that protects what is sent."""
        found = [
            f"{q.name} sends tensors of its own, which {p.name} does not protect: keep one of them"
            for q in self.parts
            if q.uploads or any(job.when in ("setup", "evaluate") for job in q.passes())
        ]
        mechanism = p.mechanism()
        if mechanism and mechanism.noise and math.isinf(mechanism.clip):
            found.append(f"{p.name} needs a finite clip for its noise, or noise=0")
        return found

    def __add__(self, other: Method | Part) -> Method:
        return Method(self.parts + (other.parts if isinstance(other, Method) else (other,)))

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts)) or "fedavg"

    def __repr__(self) -> str:
        return f"method({str(self)!r})"

    @property
    def changing(self) -> list[str]:
        """The parts by which a client sends something else than its model as it trained it.

        >>> method("fednova").changing, method("fedprox").changing
        (['fednova'], [])
        """
        return [p.name for p in (*self.having("send"), *self.having("protect"))]

    def having(self, hook: str) -> list[Part]:
        """The parts that implement a hook, in order.

        >>> [p.name for p in method("fedprox + scaffold").having("loss")]
        ['fedprox']
        """
        return [p for p in self.parts if overrides(p, hook)]

    def phases(self, phases: list[Phase], c: Context) -> list[Phase]:
        """The phases of a round of local training after every part's `plan`."""
        for p in self.having("plan"):
            phases = hook_returns.phases(p, p.plan(phases, c))
        return phases

    def path(self, c: Context) -> dict[str, Hashable]:
        """The code path of every part in this round."""
        return {p.name: hook_returns.hashable(p, p.path(c)) for p in self.having("path")}

    def evaluation(self) -> Eval:
        """The one evaluation rule of all parts together.

        >>> method("fedbn + finetune(epochs=2)").evaluation().phases[0].epochs
        2
        """
        rules = [p.evaluation() for p in self.parts]
        return Eval(
            phases=next((r.phases for r in rules if r.phases), ()),
            server_model=next((r.server_model for r in rules if r.server_model), None),
            predict=next((r.predict for r in rules if r.predict), None),
            statistics=next((r.statistics for r in rules if r.statistics), None),
            unseen=next((r.unseen for r in rules if r.unseen), None),
        )

    def weighting(self, chosen: Weighting | None = None) -> Weighting:
        """How client models are weighted: the recipe's choice, else the parts' own, else by size.

        >>> method("fedbn").weighting(), method("fedprox").weighting(), method("fedbn").weighting("size")
        ('uniform', 'size', 'size')
        """
        if chosen == "size" and (even := [p.name for p in self.having("release")]):
            raise BadInput(
                f'Method "{self}": {even[0]} needs equal weights, because a client with more data would count for more '
                'than its noise hides. Choose weighting="uniform" or "auto".'
            )
        if chosen:
            return chosen
        wanted = {p.weighting: p.name for p in self.parts if p.weighting}
        if len(wanted) > 1:
            asked = " and ".join(f"{name} ({w})" for w, name in wanted.items())
            raise BadInput(
                f'Method "{self}": {asked} ask for different weightings. Choose with weighting="size" or "uniform".'
            )
        return next((w for w in wanted if w), "size")


def _check_part(p: Part) -> None:
    """What every part needs to be one, and what is asked of it at once."""
    if not hasattr(p, "name"):
        raise _nameless(p)
    hook_returns.one(p, "evaluation", p.evaluation(), Eval)
    hook_returns.several(p, "passes", p.passes(), Pass)


def _nameless(p: Part) -> BadInput:
    kind = type(p).__name__
    return BadInput(f'{kind} has no name to be called by. Put @fn.part("{kind.lower()}") above its class.')


def _riding_problems(p: Part) -> list[str]:
    """What cannot ride together in one training call."""
    riding = [job for job in p.passes() if job.when in ("before", "after")]
    if len(riding) > 1:
        return [f"{p.name} has {len(riding)} passes before or after training, of which a part may have one"]
    if riding and overrides(p, "finish") and p.uploads and riding[0].reduce != p.reduction:
        return [f"{p.name} reduces what its pass sends by {riding[0].reduce} and what finish sends by {p.reduction}"]
    return []


def method(text: str | Method | Part) -> Method:
    """Read a method from its text form: names joined by `+`, options in parentheses.

    >>> method("scaffold + greg(alpha=0.5)").parts[1].alpha
    0.5
    >>> method("fedprocs")
    Traceback (most recent call last):
    fednorms.errors.BadInput: Unknown method "fedprocs": did you mean "fedprox"? Known: ...
    """
    load_all()
    if isinstance(text, (Method, Part)):
        made = text if isinstance(text, Method) else Method((text,))
        for p in made.parts:
            if "name" not in vars(type(p)):  # only that of the part from which it derives
                raise _nameless(p)
            if REGISTRY.get(p.name) is not type(p):
                raise BadInput(f'The name "{p.name}" stands for other code by now: make the part anew.')
        return made
    if not isinstance(text, str):
        if isinstance(text, type) and issubclass(text, Part):
            refuse_class("method", text)
        raise BadInput(
            f"method: expected text, a Method or a part, got {hook_returns.kind(text)}. A class of your own derives "
            'from fn.Part and has @fn.part("name") above it.'
        )
    try:
        # A bare word is a string also where Python keeps the word for itself: mixbn(kind=global).
        tree = ast.parse(_PYTHON.sub(r"='\1'", " ".join(text.splitlines()).strip()), mode="eval").body
    except SyntaxError as error:
        at = f"near column {error.offset}" if error.offset else "at its end"
        raise _unreadable(text, at) from None
    return Method(tuple(p for term in _terms(tree) for p in _read(term, text)))


def load_all() -> None:
    """Import every file of `fednorms.methods`, and the modules that FEDNORMS_METHODS names: each part registers itself.

    FEDNORMS_METHODS="mine other" (names with a space between) is for the command line and for worker processes; a
    module may lie in the working directory.

    >>> load_all(); "fedbn" in REGISTRY
    True
    """
    load_library()
    for module in os.environ.get("FEDNORMS_METHODS", "").split():
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        try:
            importlib.import_module(module)
        except (ImportError, SyntaxError) as error:
            hint = " Give the module's name, without .py." if module.endswith(".py") else ""
            raise BadInput(
                f'FEDNORMS_METHODS names the module "{module}", which cannot be imported: {error}.{hint}'
            ) from None


@cache
def load_library() -> None:
    """Import every file of `fednorms.methods`."""
    package = importlib.import_module("fednorms.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fednorms.methods.{module.name}")


def names() -> list[str]:
    """Every name that `method` understands.

    >>> "fedavg" in names() and "fedwon" in names()
    True
    """
    load_all()
    return sorted({*REGISTRY, *SUMS, "fedavg"})


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]


def _read(node: ast.expr, text: str) -> tuple[Part, ...]:
    call = node if isinstance(node, ast.Call) else None
    head = call.func if call else node
    if not isinstance(head, ast.Name) or (call and call.args):
        raise _unreadable(text, f'at "{ast.unparse(node)}"')
    name = head.id.lower()
    options = {k.arg or "**": _value(k.value, text) for k in call.keywords} if call else {}
    make = _fedavg if name == "fedavg" else SUMS.get(name) or REGISTRY.get(name)
    if make is None:
        raise BadInput(
            f'Unknown method "{head.id}": {nearest(name, names())}. One of your own is found if FEDNORMS_METHODS names '
            "the module it stands in (as FEDNORMS_METHODS=mymodule)."
        )
    allowed = [p for p in inspect.signature(make).parameters if p != "self"]
    for key in _repeated([k.arg or "**" for k in call.keywords] if call else []):
        raise BadInput(f"{name}: option {key} is given twice.")
    for key in options:
        if key not in allowed:
            known = nearest(key, allowed) if allowed else "it has no options"
            raise BadInput(f'{name} has no option "{key}": {known}')
    made = make(**options)
    return made if isinstance(made, tuple) else (made,)


def _fedavg() -> tuple[Part, ...]:
    return ()


def _value(node: ast.expr, text: str) -> object:
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if isinstance(node, ast.Name):  # a bare word is a string: greg(variant=paper)
            return node.id
        raise _unreadable(text, f'at "{ast.unparse(node)}"') from None


def _unreadable(text: str, where: str) -> BadInput:
    return BadInput(f'Cannot read the method "{text}" {where}. Write names joined by +: "scaffold + greg(alpha=1.0)".')


def _repeated(items: list[str]) -> list[str]:
    return sorted({i for i in items if items.count(i) > 1})
