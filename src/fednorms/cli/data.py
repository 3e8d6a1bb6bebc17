"""`fednorms data`: check data sets on disk, pack them into one file, and show them.

A new subcommand is one entry in `_COMMANDS`: its module and a description. Its function has the subcommand's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fednorms.cli.output import stderr
from fednorms.cli.parsing import Flag, Text, parse
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.options import nearest

_COMMANDS = {
    "check": ("data_check", "open every image, and say what must be fixed before training"),
    "pack": ("data", "write a federation to one file, for fast opening or another machine"),
    "show": ("data_show", "show a federation's sites, their labels, and how much they differ"),
}


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
class Pack:
    """Write a federation to one file: `fednorms run --federation pack:OUT` uses it, here or on another machine."""

    root: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
    """The folder of a data set or of custom images, or the name of an embedded federation."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """The file to write; it should end in .fnpack."""
    protocol: Text = ""
    """Whose split of a data set (default: its first; see `fednorms data check ROOT`)."""
    size: Annotated[str, tyro.conf.arg(metavar="N|HxW", help_behavior_hint="(default: the protocol's)")] = ""
    """Resize images to this many pixels, or to height and width as in 72x96."""
    channels: Annotated[int, tyro.conf.arg(help_behavior_hint="(default: 3)")] = 0
    """For folders: 3 (RGB), 1 (gray) or 4 (RGBA)."""
    quality: int = 0
    """Compress with this quality, 1 to 100, as jpeg unless --codec says otherwise (default: keep every pixel)."""
    codec: Literal["auto", "raw", "png", "webp", "jpeg"] = "auto"
    """How images are stored: raw is the fastest to read; png, and webp without a quality, are smaller without loss."""
    seed: Annotated[int, tyro.conf.arg(name="data-seed", aliases=["--seed"])] = 0
    """Seed of the split, where it is drawn."""
    val: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0.1)")] = None
    """Fraction of each site's images for validation, where the data have no split."""
    test: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0.2)")] = None
    """Fraction of each site's images for testing, where the data have no split."""
    group: Text = ""
    """For folders: a regular expression that finds the patient in a file name, such as "(patient[0-9]+)"."""
    group_across: Flag = False
    """The ids that --group finds mean the same at all sites: a patient stays in one split across sites, too."""
    copies: Literal["keep", "drop", "together"] = "keep"
    """Equal images: keep all, drop all but one (a test image stays), or keep them together in one split (folders)."""
    skip_broken: Flag = False
    """Leave out files that cannot be read."""
    subset: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: all)")] = None
    """Keep this fraction of every split of every site, stratified."""
    normalize: Annotated[str, tyro.conf.arg(metavar="imagenet|half|none|MEAN/STD", help_behavior_hint="")] = ""
    """Normalization of the network's input (default: the data set's own)."""
    complete: Annotated[
        tyro.conf.FlagConversionOff[bool], tyro.conf.arg(metavar="| --no-complete", help_behavior_hint="(default: yes)")
    ] = True
    """Fail if image counts differ from the published ones."""
    allow_pickle: Flag = False
    """Open pickled archives; only NumPy arrays are accepted."""
    quiet: Flag = False
    """Show no progress."""


def sized(text: str) -> int | str | None:
    """A size as typed: a number, or height and width.

    >>> sized("64"), sized("72x96"), sized("")
    (64, '72x96', None)
    """
    return int(text) if text.isdigit() else text or None


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
        size=sized(given.size),
        seed=given.seed or None,
        val=given.val,
        test=given.test,
        root=root,
        protocol=given.protocol or None,
        complete=None if given.complete or not known else False,
        allow_pickle=given.allow_pickle or None,
        group=given.group or None,
        channels=given.channels or None,
        group_across=given.group_across or None,
        copies=None if given.copies == "keep" else given.copies,
        skip_broken=given.skip_broken or None,
        subset=given.subset,
        normalize=given.normalize or None,
    )
    console = stderr()
    with console.status(f"packing {found.name}") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"packing {found.name}: {done:,} of {total:,} images")

        codec = None if given.codec == "auto" else given.codec
        path = write(found, out, codec, given.quality or None, None if given.quiet else progress)
    print(f"{path}: {path.stat().st_size / 2**20:,.1f} MiB, {counted(len(found.sites), 'site')}; use it as pack:{path}")
    return 0
