"""Federations by name, as the command line and recipes know them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput
from fednorms.core.grammar import read_one
from fednorms.core.options import did_you_mean
from fednorms.data import digits_shift
from fednorms.data.federation import Federation, raise_problems
from fednorms.data.folders import from_folders
from fednorms.data.pack import SUFFIX, unpacked
from fednorms.data.readers import READERS, recognised

_DESCRIPTIONS = {
    "digits-shift": digits_shift.DESCRIPTION,
    "digits-dials": "the same digits with dials: digits-dials(clients=5, label=0.5, feature=0.5), each from 0 to 1",
    "folder:PATH": "your own images, PATH/site/class/image.png (or jpg, bmp, tif, webp, gif); also just PATH",
    "pack:FILE": "one file made by `fednorms data pack`; also just FILE, if it ends in .fnpack",
    **{name: f"{reader.description}; with root=FOLDER" for name, reader in READERS.items()},
}


def federations() -> dict[str, str]:
    """What `federation` understands: a name (or form of name) and one line about it.

    >>> list(federations())
    ['digits-shift', 'digits-dials', 'folder:PATH', ...]
    """
    return dict(_DESCRIPTIONS)


def federation(
    spec: str | Path | Federation,
    size: int | None = None,
    seed: int | None = None,
    val: float | None = None,
    test: float | None = None,
    root: str | Path | None = None,
    protocol: str | None = None,
    complete: bool | None = None,
    allow_pickle: bool | None = None,
    group: str | None = None,
) -> Federation:
    """The federation that `spec` names: "digits-shift", a data set, "folder:PATH" or "pack:FILE", or just that path.

    Args:
        spec: the name; a `Federation` is returned as it is.
        size: pixels; 16 for digits-shift, and that of the images for folders, if not given.
        seed: decides how the data are divided (0).
        val: fraction for validation (0.1).
        test: fraction for testing (0.2).
        root: the folder of a data set; for other specs where a relative folder is looked for, if not in the
            working directory.
        protocol: whose division of a data set (see `fednorms data check`).
        complete: whether a data set with other counts than the published ones is an error (True).
        allow_pickle: whether pickled archives may be opened (False); nothing but NumPy arrays is admitted.
        group: for folders, a regular expression that finds in a file's name what stays together (a patient): images of
            one group are never divided between training, validation and testing.

    >>> federation("digits-shift").shape
    (3, 16, 16)
    >>> federation("digit-shift")
    Traceback (most recent call last):
    fednorms.BadInput: No federation "digit-shift"; did you mean "digits-shift"? ...
    """
    options = {"size": size, "seed": seed, "val": val, "test": test, "group": group, "root": root}
    options |= {"protocol": protocol, "complete": complete, "allow_pickle": allow_pickle}
    _check_types(spec, options)
    asked = {option: value for option, value in options.items() if value is not None}
    if isinstance(spec, Federation):
        if given := ", ".join(_dividing(asked)):
            raise BadInput(f'Federation "{spec.name}" already exists: {given} cannot be changed.')
        return spec
    return _made(str(spec), asked).remember(str(spec), asked)


def _dividing(asked: Mapping[str, Any]) -> list[str]:
    """Which options are asked for that decide what images there are, and who holds them."""
    return sorted(option for option in asked if option in ("size", "seed", "val", "test", "group"))


def _made(text: str, asked: Mapping[str, Any]) -> Federation:
    root, group, size = asked.get("root"), asked.get("group"), asked.get("size")
    if group is not None and (text in READERS or text.startswith("digits-")):
        raise BadInput(f'Federation "{text}": the option group is for folders of images only.')
    if text in READERS:
        return READERS[text].open(root, {option: value for option, value in asked.items() if option != "root"})
    if "protocol" in asked:
        raise BadInput(f'Federation "{text}" has no protocols. These data sets do: {", ".join(READERS)}.')
    if text.startswith("pack:") or text.endswith(SUFFIX):
        if given := ", ".join(_dividing(asked)):
            raise BadInput(f'Federation "{text}" is packed already: {given} cannot be changed.')
        return unpacked(Path(root or "", text.removeprefix("pack:")))
    seed, val, test = asked.get("seed", 0), asked.get("val", 0.1), asked.get("test", 0.2)
    if text.startswith("digits-dials"):
        return _dials(text, size, seed, val, test)
    if text == "digits-shift":
        return digits_shift.digits_shift(16 if size is None else size, seed, val, test)
    path = Path(root or "", text.removeprefix("folder:")).expanduser()
    if text.startswith("folder:") or path.is_dir():
        try:
            return from_folders(path, size, val=val, test=test, seed=seed, group=group)
        except BadInput as problem:
            if names := [reader.name for reader, _ in recognised(path)]:
                hint = f'It looks like {names[0]}: use federation "{names[0]}" with root="{path}"'
                raise BadInput(f"{problem} {hint}.") from None
            raise
    where = f'in root "{root}"' if root else f'from "{Path.cwd()}"'
    if "/" in text:
        raise BadInput(f'No federation "{text}": there is no such folder, looked for {where}.')
    raise BadInput(
        f'No federation "{text}"; {did_you_mean(text, _DESCRIPTIONS)}There are {", ".join(_DESCRIPTIONS)}, and the '
        f"path of a folder (looked for {where})."
    )


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "size": ((int,), "a whole number of pixels"),
    "seed": ((int,), "a whole number"),
    "val": ((int, float), "a fraction"),
    "test": ((int, float), "a fraction"),
    "root": ((str, Path), "a folder"),
    "protocol": ((str,), "the name of a division"),
    "complete": ((bool,), "True or False"),
    "allow_pickle": ((bool,), "True or False"),
    "group": ((str,), "a regular expression"),
}


def _check_types(spec: object, given: Mapping[str, object]) -> None:
    """Options that are of no use to any reader, before one of them stumbles over it."""
    problems = [
        f"{name} must be {words}, got {value!r}"
        for name, (types, words) in _TYPES.items()
        if (value := given[name]) is not None
        and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types))
    ]
    if not isinstance(spec, (str, Path, Federation)):
        problems.append(f"expected a name or a path, got {spec!r}")
    raise_problems(f'Federation "{spec}"' if isinstance(spec, (str, Path)) else "Federation", problems)


def _dials(text: str, size: int | None, seed: int, val: float, test: float) -> Federation:
    from fednorms.data.generate.shifts import digits_dials

    example = "digits-dials(clients=5, label=0.5, feature=0.5)"
    name, options = read_one(text.replace("-", "_", 1), "federation", example)
    wrong = [key for key in options if key not in ("clients", "label", "feature")]
    numbers = all(type(v) in (int, float) for v in options.values()) and type(options.get("clients", 5)) is int
    if name != "digits_dials" or wrong or not numbers:
        raise BadInput(f'No federation "{text}"; its dials are numbers, as in "{example}".')
    return digits_dials(size=16 if size is None else size, seed=seed, val=val, test=test, **options)  # type: ignore[arg-type]
