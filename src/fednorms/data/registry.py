"""Federations by name, as the command line and recipes know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fednorms.core import plugins
from fednorms.core.errors import BadInput
from fednorms.core.grammar import read_one
from fednorms.core.option_names import option
from fednorms.core.options import did_you_mean
from fednorms.data import digits_shift
from fednorms.data.changes import changed
from fednorms.data.federation import Federation
from fednorms.data.folders import from_folders
from fednorms.data.folders.broken import skipping_broken
from fednorms.data.generate import digits
from fednorms.data.generate.crowd import digits_crowd
from fednorms.data.packed import SUFFIX, unpacked
from fednorms.data.problems import raise_problems
from fednorms.data.readers import READERS, recognized
from fednorms.data.sizes import Size, sides, size_problem

_DESCRIPTIONS = {
    "digits-shift": digits_shift.DESCRIPTION,
    "digits-dials": "the same digits with chosen shifts: digits-dials(clients=5, label=0.5, feature=0.5), from 0 to 1",
    "digits-corrupted": "the same digits under the 19 corruptions of CIFAR-10-C: digits-corrupted(severity=4), 1 to 5",
    "digits-crowd": "the same digits at any number of clients, made when they train: digits-crowd(clients=1000000)",
    "digits-styles": "handwritten, blended into photographs (as MNIST-M) and rendered (as SynthDigits), three sites",
    "folder:PATH": "custom images, PATH/site/class/image.png (or jpg, bmp, tif, webp, gif); or only PATH",
    "pack:FILE": "one file made by `fednorms data pack`; or only FILE, if it ends in .fnpack",
    **{name: f"{reader.description}; with root=FOLDER" for name, reader in READERS.items()},
}

_SPELLINGS = {"centers": "centres"}  # recipes and results of all versions have the British spelling
_NUMBER = (int, float)
# The functions of the embedded federations, and the options in parentheses with their types.
_EMBEDDED: dict[str, tuple[Callable[..., Federation], dict[str, tuple[type, ...]]]] = {
    "digits-shift": (digits_shift.digits_shift, {}),
    "digits-dials": (digits.digits_dials, {"clients": (int,), "label": _NUMBER, "feature": _NUMBER}),
    "digits-corrupted": (digits.digits_corrupted, {"severity": (int,)}),
    "digits-crowd": (digits_crowd, {"clients": (int,), "images": (int,), "tested": (int,)}),
    "digits-styles": (digits.digits_styles, {}),
}
_EXAMPLE = "digits-dials(clients=5, label=0.5, feature=0.5)"


def federations() -> dict[str, str]:
    """The names that `federation` accepts, with one line each.

    >>> list(federations())
    ['digits-shift', 'digits-dials', 'digits-corrupted', 'digits-crowd', 'digits-styles', ...]
    """
    return dict(_DESCRIPTIONS)


def federation(
    spec: str | Path | Federation,
    size: Size | None = None,
    seed: int | None = None,
    val: float | None = None,
    test: float | None = None,
    root: str | Path | None = None,
    protocol: str | None = None,
    complete: bool | None = None,
    allow_pickle: bool | None = None,
    group: str | None = None,
    channels: int | None = None,
    group_across: bool | None = None,
    copies: str | None = None,
    skip_broken: bool | None = None,
    subset: float | None = None,
    normalize: str | None = None,
) -> Federation:
    """Open the federation that `spec` names: "digits-shift", a data set, "folder:PATH" or "pack:FILE", or only a path.

    Args:
        spec: the name; a `Federation` is returned as it is.
        size: pixels, or height and width as in "72x96"; by default 16 for embedded digits, and the size of the images
            for folders.
        seed: decides how the data are split (0).
        val: fraction for validation (0.1).
        test: fraction for testing (0.2).
        root: the folder of a data set; for other specs the folder in which a relative path is searched, by default the
            working directory.
        protocol: whose split of a data set (see `fednorms data check`).
        complete: fail if a data set's image counts differ from the published ones (True).
        allow_pickle: open pickled archives (False); only NumPy arrays are accepted.
        group: for folders, a regular expression that finds the patient in a file's name: the images of a patient stay
            in one split.
        channels: for folders, 3 (RGB, the default), 1 (gray) or 4 (RGBA).
        group_across: ids mean the same at all sites, so a patient stays in one split across sites, too (False).
        copies: of equal images, "keep" all, "drop" all but one (a test image stays), or, for folders, keep them
            "together" in one split.
        skip_broken: leave out files that cannot be read (False); `source["left_out"]` lists them.
        subset: keep this fraction of every split of every site, stratified; for quick trials.
        normalize: the input's mean and standard deviation: "imagenet", "half" (pixels in [-1, 1]), "none", or numbers
            as in "0.5/0.25"; by default the data set's own.

    >>> federation("digits-shift").shape
    (3, 16, 16)
    >>> federation("digit-shift")
    Traceback (most recent call last):
    fednorms.BadInput: No federation "digit-shift"; did you mean "digits-shift"? ...
    """
    options = {"size": size, "seed": seed, "val": val, "test": test, "group": group, "root": root}
    options |= {"protocol": protocol, "complete": complete, "allow_pickle": allow_pickle, "channels": channels}
    options |= {"group_across": group_across, "copies": copies, "skip_broken": skip_broken}
    options |= {"subset": subset, "normalize": normalize}
    _check_types(spec, options)
    asked = {option: value for option, value in options.items() if value is not None}
    if isinstance(spec, Federation):
        if given := ", ".join(_dividing(asked)):
            raise BadInput(f'Federation "{spec.name}" already exists: {given} cannot be changed.')
        return spec
    name = str(spec)
    if name in _SPELLINGS and not Path(root or "", name).is_dir():  # a folder of that name comes first
        name = _SPELLINGS[name]
    with skipping_broken() if skip_broken else nullcontext():
        made = _made(name, {option: value for option, value in asked.items() if option not in _AFTERWARDS})
    return changed(made, copies, subset, normalize, seed or 0).remember(name, asked)


_AFTERWARDS = ("subset", "normalize")  # options for any federation, once it is made
_DIVIDING = ("size", "seed", "val", "test", "group", "group_across", "channels", "copies", *_AFTERWARDS)


def _dividing(asked: Mapping[str, Any]) -> list[str]:
    """The given options that decide which images there are and how they are split and seen."""
    return sorted(option for option in asked if option in _DIVIDING)


def _made(text: str, asked: Mapping[str, Any]) -> Federation:
    embedded = text.partition("(")[0].strip() in _EMBEDDED
    of_folders = ("group", "group_across", "channels")
    if (text in READERS or embedded) and (only := [name for name in of_folders if name in asked]):
        raise BadInput(f'Federation "{text}": the option {only[0]} is for folders of images only.')
    if text in READERS:
        return READERS[text].open(asked.get("root"), {k: v for k, v in asked.items() if k not in _OUTSIDE})
    asked = {k: v for k, v in asked.items() if k not in ("copies", "skip_broken") or not (embedded or _is_pack(text))}
    if text in (others := plugins.found("federations")):
        return _plugged(others[text], asked)
    if "protocol" in asked:
        raise BadInput(f'Federation "{text}" has no protocols. These data sets do: {", ".join(READERS)}.')
    if _is_pack(text):
        return _packed(text, asked)
    return _embedded(text, asked) if embedded else _folder(text, asked)


_OUTSIDE = ("root", "copies", "skip_broken")  # what readers do not see


def _is_pack(text: str) -> bool:
    return text.startswith("pack:") or text.endswith(SUFFIX)


def _plugged(plugin: plugins.Plugin, asked: Mapping[str, Any]) -> Federation:
    """A federation of another package: its function gets the options that were given."""
    make = plugin.load()
    arguments = plugins.called_with(make, dict(asked))
    if isinstance(arguments, str):
        raise BadInput(f'Federation "{plugin.name}" of {plugin.package} needs the option {arguments}.')
    if unknown := ", ".join(sorted(set(asked) - set(arguments))):
        raise BadInput(f'Federation "{plugin.name}" of {plugin.package} has no option {unknown}.')
    made = make(**arguments)
    if not isinstance(made, Federation):
        got = type(made).__name__
        raise BadInput(f'Federation "{plugin.name}": {plugin.package} returned {got} instead of a Federation.')
    return made


def _packed(text: str, asked: Mapping[str, Any]) -> Federation:
    if given := ", ".join(_dividing(asked)):
        raise BadInput(f'Federation "{text}" is packed: {given} cannot be changed.')
    return unpacked(Path(asked.get("root") or "", text.removeprefix("pack:")))


def _embedded(text: str, asked: Mapping[str, Any]) -> Federation:
    name, options = read_one(text.replace("-", "_", 1), "federation", _EXAMPLE)
    make, kinds = _EMBEDDED[name.replace("_", "-", 1)]
    if wrong := [key for key, value in options.items() if type(value) not in kinds.get(key, ())]:
        known = f"its options are the numbers {', '.join(kinds)}" if kinds else "it has no options in parentheses"
        raise BadInput(f'Federation "{text}": {", ".join(wrong)} cannot be used; {known}. An example is "{_EXAMPLE}".')
    common = {key: asked[key] for key in ("size", "seed", "val", "test") if key in asked}
    if "size" in common:
        height, width = sides(common["size"])
        if height != width:
            raise BadInput(f'Federation "{text}" has square images: size must be one number of pixels.')
        common["size"] = height
    return make(**common, **options)


def folder_of(text: str, root: str | Path | None = None) -> Path | None:
    """The folder of images that a name means, or None if it names something else.

    >>> folder_of("folder:data/pets"), folder_of("digits-shift")
    (PosixPath('data/pets'), None)
    """
    path = Path(root or "", text.removeprefix("folder:")).expanduser()
    if text.startswith("folder:"):
        return path
    named = text in READERS or text.partition("(")[0].strip() in _EMBEDDED or text in plugins.found("federations")
    return path if path.is_dir() and not named else None


def _folder(text: str, asked: Mapping[str, Any]) -> Federation:
    root = asked.get("root")
    if path := folder_of(text, root):
        try:
            return from_folders(path, **{k: v for k, v in asked.items() if k in _OF_FOLDERS})
        except BadInput as problem:
            if names := [reader.name for reader, _ in recognized(path)]:
                hint = f'It looks like {names[0]}: use federation "{names[0]}" with {option("root")} "{path}"'
                raise BadInput(f"{problem} {hint}.") from None
            raise
    path = Path(root or "", text).expanduser()
    missing = next((p for p in reversed((path, *path.parents)) if not p.exists()), path)
    where = f'"{missing.parent.absolute()}" has no folder "{missing.name}"'
    near = did_you_mean(path.name, _folders_in(path.parent), prefix=text.rstrip("/").removesuffix(path.name))
    if path.exists():
        where = f'"{path}" is a file. A folder of site/class/image.png is expected, or a pack (FILE{SUFFIX})'
    if "/" in text:
        raise BadInput(f'No federation "{text}": {where}{f"; {near}" if near else ". "}'.rstrip())
    known = [*_DESCRIPTIONS, *plugins.found("federations")]
    near = did_you_mean(text, known) or near
    raise BadInput(
        f'No federation "{text}"{f"; {near}" if near else ". "}`fednorms list federations` lists all names; it is not '
        f"a path either: {where}."
    )


def _folders_in(parent: Path) -> list[str]:
    try:
        return [p.name for p in parent.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except OSError:
        return []


_OF_FOLDERS = ("size", "val", "test", "seed", "group", "group_across", "copies", "skip_broken", "channels")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "seed": ((int,), "a whole number"),
    "val": ((int, float), "a fraction"),
    "test": ((int, float), "a fraction"),
    "root": ((str, Path), "a folder"),
    "protocol": ((str,), "the name of a protocol"),
    "complete": ((bool,), "True or False"),
    "allow_pickle": ((bool,), "True or False"),
    "group": ((str,), "a regular expression"),
    "group_across": ((bool,), "True or False"),
    "copies": ((str,), "keep, drop or together"),
    "skip_broken": ((bool,), "True or False"),
    "subset": ((int, float), "a fraction"),
    "normalize": ((str,), "a name or numbers"),
    "channels": ((int,), "1, 3 or 4"),
}


def _check_types(spec: object, given: Mapping[str, object]) -> None:
    """Refuse options of a wrong type before a reader uses them."""
    problems = [
        f"{name} must be {words}, got {value!r}"
        for name, (types, words) in _TYPES.items()
        if (value := given[name]) is not None
        and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types))
    ]
    if given["size"] is not None:
        problems += size_problem(given["size"])
    if not isinstance(spec, (str, Path, Federation)):
        problems.append(f"expected a name or a path, got {spec!r}")
    raise_problems(f'Federation "{spec}"' if isinstance(spec, (str, Path)) else "Federation", problems)
