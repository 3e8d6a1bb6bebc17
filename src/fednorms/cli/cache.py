"""`fednorms cache`: list and clear the cache of decoded images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput


@dataclass
class Cache:
    """List or clear the cache of decoded images.

    Folders and data sets are decoded once, into ~/.cache/fednorms or the folder that the environment variable
    FEDNORMS_CACHE names. FEDNORMS_CACHE=off keeps nothing. Clearing removes no image of yours: runs decode again.
    """

    action: Annotated[tyro.conf.Positional[Literal["list", "clear"]], tyro.conf.arg(metavar="list|clear")]
    """What to do."""
    folder: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: all)")] = ""
    """Only what was decoded from this folder of images."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def cache(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Cache, "cache", args)
    from fednorms.data.folders.cache import cache_folder
    from fednorms.data.folders.stored import below, clear, entries

    place = cache_folder()
    if place is None:
        raise BadInput("The cache is switched off by the environment variable FEDNORMS_CACHE.")
    if given.action == "clear":
        found = clear(made_from=given.folder or None)
    else:
        found = [entry for entry in entries() if not given.folder or below(entry.made_from, given.folder)]
    room = sum(entry.bytes for entry in found)
    if given.json:
        print_json({"cache": str(place), "bytes": room, "entries": [entry.to_dict() for entry in found]})
        return 0
    console = stdout()
    if given.action == "list" and found:
        rows = [
            [
                entry.made_from or "(not known)",
                entry.what,
                f"{entry.images:,}" if entry.images else "-",
                f"{entry.bytes / 1e6:,.1f} MB",
                time.strftime("%Y-%m-%d", time.localtime(entry.used)),
            ]
            for entry in found
        ]
        console.print(grid(["made from", "what", "images", "size", "last used"], rows, numbers_from=2))
    size = f"{room / 1e6:,.1f} MB" if room < 1e9 else f"{room / 1e9:,.2f} GB"
    what = counted(len(found), "entry", "entries")
    text = f"Removed {what}, {size}, from {place}." if given.action == "clear" else f"{place}: {what}, {size}."
    console.print(text, markup=False, soft_wrap=True)
    return 0
