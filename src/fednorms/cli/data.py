"""`fednorms data`: check data sets on disk, pack them into one file, and show them.

A new subcommand is one entry in `_COMMANDS`: its module and a description. Its function has the subcommand's name.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fednorms.cli.output import grid, print_json, stderr, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.options import nearest

if TYPE_CHECKING:
    from fednorms.data.federation import Federation
    from fednorms.data.readers.reader import Reader

_COMMANDS = {
    "check": ("data", "recognize a folder: its sites, classes, sizes, and its tables"),
    "pack": ("data", "write a federation to one file, for fast opening or another machine"),
    "show": ("data_show", "show a federation's sites, their labels, and how much they differ"),
}


_PARTS = ("train", "val", "test")


def data(args: Sequence[str]) -> int:
    """Run a subcommand of `fednorms data`."""
    if not args or args[0] in ("-h", "--help", "help"):
        lines = ["usage: fednorms data COMMAND [OPTIONS]", ""]
        lines += [f"  {name:<10}{what}" for name, (_, what) in _COMMANDS.items()]
        print("\n".join([*lines, "", "`fednorms data COMMAND --help` shows a command's options."]))
        return 0 if args else 2
    if args[0] not in _COMMANDS:
        raise BadInput(f'No command "data {args[0]}": {nearest(args[0], _COMMANDS)}. See `fednorms data --help`.')
    module = import_module(f"fednorms.cli.{_COMMANDS[args[0]][0]}")
    return int(getattr(module, args[0])(args[1:]))


@dataclass
class Check:
    """Recognize a data set on disk (or a pack), and show its sites, classes, sizes and the tables that use it."""

    root: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
    """The folder or file."""
    protocol: str = ""
    """Count the sites of this protocol (default: the data set's first)."""
    allow_pickle: Flag = False
    """Open pickled archives; only NumPy arrays are accepted."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def check(args: Sequence[str]) -> int:
    """`fednorms data check ROOT`: exit code 0 if the data set is complete, 2 if not."""
    given = parse(Check, "data check", args)
    root = Path(given.root).expanduser()
    report = _check_pack(root) if root.is_file() and root.suffix != ".npz" else _check_folder(root, given)
    if given.json:
        print_json(report)
        return int(report["problem"] is not None) * 2
    console = stdout()
    print(f"{root}: {report['what']}")
    for line in report["facts"]:
        print(line)
    if report["sites"]:
        rows = [[s["site"], s["domain"], *(str(s[p] or "-") for p in _PARTS)] for s in report["sites"]]
        shown = rows[:20]
        console.print(grid(["site", "domain", "train", "val", "test"], shown, numbers_from=2))
        if len(rows) > 20:
            print(f"... and {counted(len(rows) - 20, 'more site')}")
    if report["protocols"]:
        print("\nProtocols (--protocol):")
        rows = [[name, what, ", ".join(report["tables"].get(name, []))] for name, what in report["protocols"].items()]
        console.print(grid(["protocol", "split", "fednorms reproduce"], rows))
    if report["problem"]:
        sys.stdout.flush()
        raise BadInput(report["problem"])
    return 0


def _check_pack(path: Path) -> dict[str, Any]:
    from fednorms.data.packed import check_pack, unpacked

    header = check_pack(path)
    how = header["codec"] if header["quality"] is None else f"{header['codec']} of quality {header['quality']}"
    facts = [
        f"{counted(header['images'], 'image')} stored as {how}, {header['bytes'] / 2**20:,.1f} MiB; the hash matches"
    ]
    found = unpacked(path)
    return {
        "what": f"a pack of {found.name}",
        "facts": [*facts, *_facts(found)],
        "sites": _sites(found),
        "protocols": {},
        "tables": {},
        "problem": None,
    }


def _check_folder(root: Path, given: Check) -> dict[str, Any]:
    from fednorms.data.folders import counted_only, from_folders
    from fednorms.data.readers import recognized

    if not root.exists():
        raise BadInput(f'"{root}": no such file or folder.')
    known = recognized(root)
    if not known:
        try:
            with counted_only():
                found = from_folders(root, size=1, cache=False)
        except BadInput as problem:
            raise BadInput(
                f'"{root}" is not a data set of `fednorms list federations`, and not a folder of images: {problem}'
            ) from None
        what = "custom images, site/class/image (use it as folder:PATH)"
        nothing: dict[str, Any] = {"protocols": {}, "tables": {}, "problem": None}
        notes = [f"note: {note}" for note in found.source.get("notes", [])]
        opened = "files were counted but not opened; `fednorms data show` opens every file"
        return {"what": what, "facts": [*_facts(found, False), opened, *notes], "sites": _sites(found), **nothing}
    reader, layout = known[0]
    report: dict[str, Any] = {
        "what": f"{reader.name} ({layout})",
        "facts": [],
        "sites": [],
        "protocols": dict(reader.protocols),
        "tables": published(reader),
        "problem": None,
    }
    options = {"protocol": given.protocol or None, "allow_pickle": given.allow_pickle or None}
    try:
        found = reader.counted(root, options)
    except BadInput as problem:
        report["problem"] = str(problem)
        try:
            found = reader.counted(root, {**options, "complete": False})
        except BadInput:
            return report
    size = f", images of {found.source['size']} pixels" if found.source.get("size") else ""
    notes = [] if report["problem"] else [f"note: {note}" for note in found.source.get("notes", [])]
    habits = [f"as in its papers: {', '.join(found.protocol.facts)}"] if found.protocol.facts else []
    report["facts"] = [f"protocol {found.source['protocol']}{size}", *_facts(found, False), *habits, *notes]
    report["sites"] = _sites(found)
    return report


def published(reader: Reader) -> dict[str, list[str]]:
    """The tables that `fednorms reproduce` runs on each protocol of a data set, in the papers' order.

    >>> from fednorms.data.readers import READERS
    >>> all(protocol in READERS["pacs"].protocols for protocol in published(READERS["pacs"]))
    True
    """
    from fednorms.papers.tables.catalog import file_of, known
    from fednorms.papers.tables.table import merged

    first, serves = next(iter(reader.protocols)), dict[str, dict[str, None]]()
    for name in known():
        values = tomllib.loads(file_of(name).read_text(encoding="utf-8"))
        for setting in values.get("settings", []):
            recipe = merged(values.get("recipe", {}), setting.get("recipe", {}))
            if recipe.get("federation") == reader.name:
                serves.setdefault(recipe.get("data", {}).get("protocol") or first, {})[name] = None
    return {protocol: list(names) for protocol, names in serves.items()}


def _facts(found: Federation, shape: bool = True) -> list[str]:
    size = f", images {'x'.join(map(str, found.shape))}" if shape else ""
    names = ", ".join(found.classes[:12]) + (" ..." if found.num_classes > 12 else "")
    clients = f"{counted(len(found.clients), 'site')} with training data"
    unseen = f", {len(found.unseen)} unseen" if found.unseen else ""
    return [f"{clients}{unseen}, {counted(found.num_classes, 'class', 'classes')} ({names}){size}"]


def _sites(found: Federation) -> list[dict[str, Any]]:
    return [
        {"site": s.name, "domain": s.domain, **{p: len(s.splits[p]) if p in s.splits else 0 for p in _PARTS}}
        for s in found.sites
    ]


@dataclass
class Pack:
    """Write a federation to one file: `fednorms run --federation pack:OUT` uses it, here or on another machine."""

    root: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
    """The folder of a data set or of custom images, or the name of an embedded federation."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """The file to write; it should end in .fnpack."""
    protocol: str = ""
    """Whose split of a data set (default: its first; see `fednorms data check ROOT`)."""
    size: int = 0
    """Resize images to this many pixels (default: the protocol's)."""
    channels: int = 0
    """For folders: 3 (RGB, the default), 1 (gray) or 4 (RGBA)."""
    quality: int = 0
    """Compress with this quality, 1 to 100, as jpeg unless --codec says otherwise (default: keep every pixel)."""
    codec: Literal["auto", "raw", "png", "webp", "jpeg"] = "auto"
    """How images are stored: raw is the fastest to read; png, and webp without a quality, are smaller without loss."""
    seed: int = 0
    """Seed of the split, where it is drawn."""
    val: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0.1)")] = None
    """Fraction of each site's images for validation, where the data have no split."""
    test: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0.2)")] = None
    """Fraction of each site's images for testing, where the data have no split."""
    group: str = ""
    """For folders: a regular expression that finds the patient in a file name, such as "(patient[0-9]+)"."""
    complete: Annotated[
        tyro.conf.FlagConversionOff[bool], tyro.conf.arg(metavar="| --no-complete", help_behavior_hint="(default: yes)")
    ] = True
    """Fail if image counts differ from the published ones."""
    allow_pickle: Flag = False
    """Open pickled archives; only NumPy arrays are accepted."""
    quiet: Flag = False
    """Show no progress."""


def pack(args: Sequence[str]) -> int:
    """`fednorms data pack ROOT OUT`."""
    given = parse(Pack, "data pack", args)
    from fednorms.data.pack import pack as write
    from fednorms.data.readers import recognized
    from fednorms.data.registry import federation

    out = Path(given.out).expanduser()
    if out.exists() and not out.is_file():
        raise BadInput(
            f'"{given.out}" is a folder. Give the file to write, such as {given.out.rstrip("/")}/data.fnpack.'
        )
    known = recognized(given.root)
    named, root = (known[0][0].name, given.root) if known else (given.root, None)
    found = federation(
        named,
        size=given.size or None,
        seed=given.seed or None,
        val=given.val,
        test=given.test,
        root=root,
        protocol=given.protocol or None,
        complete=None if given.complete or not known else False,
        allow_pickle=given.allow_pickle or None,
        group=given.group or None,
        channels=given.channels or None,
    )
    console = stderr()
    with console.status(f"packing {found.name}") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"packing {found.name}: {done:,} of {total:,} images")

        codec = None if given.codec == "auto" else given.codec
        path = write(found, out, codec, given.quality or None, None if given.quiet else progress)
    print(f"{path}: {path.stat().st_size / 2**20:,.1f} MiB, {counted(len(found.sites), 'site')}; use it as pack:{path}")
    return 0
