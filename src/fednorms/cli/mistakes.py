"""Mistakes in a command line, explained before it is parsed: one message each, with what to write instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fednorms.core.errors import BadInput
from fednorms.core.options import did_you_mean, shortened
from fednorms.runs.option_names import ELSEWHERE

_NUMBER = re.compile(r"-\.?\d")
_TRUTH = ("true", "false")
_WANTED = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Argument:
    """An option of a command, such as --rounds, or an argument that is known by its place, such as RUN."""

    name: str
    kind: Any
    by_place: bool = False
    required: bool = False
    shown: str = ""  # what stands for its value in the help
    doc: str = ""
    valued: bool = False  # a switch that tyro reads with a value

    @property
    def named(self) -> str:
        """Its name in a message that asks for it."""
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(map(str, get_args(self.kind)))}"
        return self.name if self.by_place else f"{self.name} {self.shown}"

    @property
    def several(self) -> bool:
        """Whether it takes more than one value."""
        return any(get_origin(kind) is list for kind in (self.kind, *get_args(self.kind)))


def explain(args: Sequence[str], known: Sequence[Argument], command: str) -> None:
    """Raise BadInput for the first mistake that the types of a command's arguments show."""
    options = {argument.name: argument for argument in known if not argument.by_place}
    places = [argument for argument in known if argument.by_place]
    if "-h" in args or "--help" in args:
        return
    given, loose = dict[str, list[str]](), list[str]()
    for name, values in _read(args, options):
        if not name:
            loose += values
            continue
        argument = options.get(name)
        if argument is None:
            raise _unknown(name, values, options, command, args)
        given[name] = values
        for value in values:
            _check(argument, name, value)
        if not values and argument.kind is not bool:
            about = f" ({_small(argument.doc)})" if argument.doc else ""
            raise BadInput(f"{name} needs {_WANTED.get(argument.kind, 'a value')} after it{about}.")
    if loose:
        _check_places(loose, places, options, given, command)
    found = [*given, *(place.name for place in places[: len(loose)])]
    if missing := [a for a in known if a.required and a.name not in found]:
        needed = "; and ".join(f"{a.named} ({_small(a.doc)})" for a in missing)
        raise BadInput(f"`fednorms {command}` needs {needed}. See `fednorms {command} --help`.")


def _small(doc: str) -> str:
    return (doc[:1].lower() + doc[1:]).rstrip(".")


def _read(args: Sequence[str], options: Mapping[str, Argument]) -> Iterator[tuple[str, list[str]]]:
    """Options with their values, in order; without a name, what is not an option's value."""
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            yield "", rest
            return
        if not _is_option(arg):
            yield "", [arg]
            continue
        name, equals, value = arg.partition("=")
        name = name.replace("_", "-")
        if name not in options and (plain := f"--{name.removeprefix('--no-')}") in options and plain != name:
            name = plain
        if equals:
            yield name, [value]
            continue
        argument = options.get(name)
        values = list[str]()
        while rest and not _is_option(rest[0]) and (not values or (argument and argument.several)):
            if argument and argument.kind is bool and rest[0].lower() not in _TRUTH:
                break
            values.append(rest.pop(0))
        yield name, values


def _is_option(arg: str) -> bool:
    return arg.startswith("-") and len(arg) > 1 and not _NUMBER.match(arg)


def _check(argument: Argument, name: str, value: str) -> None:
    """Refuse a value of the wrong type."""
    if argument.kind in (int, float):
        try:
            argument.kind(value)
        except ValueError:
            point = re.fullmatch(r"(-?\d*),(\d+)", value)
            hint = f" Write {point[1] or '0'}.{point[2]}, with a point." if point and argument.kind is float else ""
            got = f'got "{shortened(value)}"'
            raise BadInput(f"{name} must be {_WANTED[argument.kind]}, {got}.{hint}") from None
    if get_origin(argument.kind) is Literal and value not in (choices := [str(c) for c in get_args(argument.kind)]):
        other = f"{ELSEWHERE.get(value.rstrip('s'), value)}s"
        near = f'did you mean "{other}"? ' if other in choices else did_you_mean(value, choices)
        listed = ", ".join(f'"{choice}"' for choice in choices)
        got = f'got "{shortened(value)}"'
        raise BadInput(f"{name} must be one of {listed}; {got}{f'; {near.strip()}' if near else '.'}")


def _unknown(
    name: str, values: Sequence[str], options: Mapping[str, Argument], command: str, args: Sequence[str]
) -> BadInput:
    """The answer to an option that a command does not have: ours, a method's parameter, or another library's word."""
    word, value = name.lstrip("-").replace("-", "_"), values[0] if values else ""
    if (called := f"--{ELSEWHERE.get(word, '').replace('_', '-')}") in options:
        return BadInput(f"`fednorms {command}` has no option {name}. It is called {called}.")
    if word == "seeds" and command == "run":
        return BadInput(
            "`fednorms run` trains with one seed (--seed). For several, use "
            f"`fednorms compare --methods METHOD --seeds {value or 'N'}`."
        )
    if "--methods" in options and word == "method":
        return BadInput(f"`fednorms {command}` has no option {name}. It is called --methods: it takes several.")
    option = next((o for o in ("--method", "--methods") if o in options), "")
    if option and name.startswith("--") and (having := _having(word, args)):
        others = f" (also of {', '.join(having[1:])})" if having[1:] else ""
        return BadInput(
            f"{name} is not an option of `fednorms {command}`, but a parameter of the method {having[0]}{others}. "
            f'Write it into the method: {option} "{having[0]}({word}={value or "..."})".'
        )
    near = [o for o in options if not name.startswith("--") and o[2:3] == word[:1]][:1]  # -m may mean --method
    hint = f'did you mean "{near[0]}"? ' if near else did_you_mean(name, options, alike=0.7)
    known = f"`fednorms {command} --help` lists all."
    return BadInput(f"`fednorms {command}` has no option {name}{f'; {hint}' if hint else '. '}{known}")


def _check_places(
    loose: Sequence[str],
    places: Sequence[Argument],
    options: Mapping[str, Argument],
    given: Mapping[str, Sequence[str]],
    command: str,
) -> None:
    """Refuse words that belong to an option, and more words than a command takes."""
    option = next((o for o in ("--method", "--methods") if o in options), "")
    before = [*given.get(option, ())]
    if option and any(word.startswith("+") or word.endswith("+") for word in (*loose, *before)):
        whole = " ".join([*before, *loose])
        raise BadInput(f"A method with blanks is one word in quotes: {option} {_quoted(whole)}.")
    if option and (methods := [word for word in loose if is_method(word)]):
        every = [*before, *methods]
        if option == "--method" and len(every) > 1:
            raise BadInput(
                f"`fednorms {command}` trains one method, got {', '.join(every)}. To compare them: `fednorms compare "
                f"--methods {' '.join(map(_quoted, every))}`. To combine them: --method {_quoted(' + '.join(every))}."
            )
        written = " ".join(map(_quoted, every))
        raise BadInput(f'"{methods[0]}" is a method. Write `fednorms {command} {option} {written}`.')
    if "--federation" in options:
        for word in loose:
            if Path(word, "recipe.toml").is_file():
                raise BadInput(f'"{word}" is a run. Continue it with `fednorms resume {_quoted(word)}`.')
            if Path(word).is_dir() or _is_federation(word):
                raise BadInput(f'"{word}" is a federation. Write --federation {_quoted(word)}.')
    for place, word in zip(places, loose, strict=False):
        _check(place, place.name, word)
    if len(loose) > len(places) and not any(place.several for place in places):
        extra = " ".join(loose[len(places) :])
        raise BadInput(
            f'`fednorms {command}` cannot use "{shortened(extra)}". The names of options begin with --; '
            f"`fednorms {command} --help` lists all."
        )


def _quoted(word: str) -> str:
    return f'"{word}"' if re.search(r"[\s()]", word) and '"' not in word else shlex.quote(word)


def is_method(text: str) -> bool:
    """Whether a word names methods, such as fedbn or "scaffold + fedprox(mu=0.1)".

    >>> is_method("fedbn"), is_method("scaffold+greg(alpha=1)"), is_method("recipe.toml")
    (True, True, False)
    """
    from fednorms.cli.index import index

    names = {row["name"] for row in index()["methods"]}
    return all(part.partition("(")[0].strip() in names for part in re.split(r"\+|,", text))


def _is_federation(text: str) -> bool:
    from fednorms.cli.index import index

    return text.partition("(")[0] in {row["name"] for row in index()["federations"]}


def _having(parameter: str, args: Sequence[str]) -> list[str]:
    """The methods that have a parameter; first those that were asked for, then those that most papers compare with."""
    from fednorms.cli.index import index

    asked = set(re.findall(r"[a-z]\w*", " ".join(args)))
    papers = index()["papers"].values()
    found: list[str] = index()["parameters"].get(parameter, [])
    return sorted(found, key=lambda m: (m not in asked, -sum(m in methods for methods in papers), m))
