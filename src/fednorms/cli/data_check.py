"""`fednorms data check`: open every image of a folder, data set or pack, and say what must be fixed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fednorms.cli.output import grid, print_json, stderr, stdout
from fednorms.cli.parsing import Flag, Text, parse

if TYPE_CHECKING:
    from fednorms.data.readers.reader import Reader


@dataclass
class Check:
    """Open every image of a folder, a data set or a pack, and say what must be fixed before training.

    Exit code 0 if the data are fine, 1 if they must be fixed, 2 for a bad call. A second check is fast: what was seen
    in a file is kept until the file changes.
    """

    root: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
    """The folder or file, or the name of a federation of the library."""
    protocol: Text = ""
    """Check the sites and splits of this protocol (default: the data set's first)."""
    group: Text = ""
    """For folders: a regular expression that finds the patient in a file name, such as "(patient[0-9]+)"."""
    group_across: Flag = False
    """The ids that --group finds mean the same at all sites."""
    copies: Literal["keep", "drop", "together"] = "keep"
    """Equal images: keep all, drop all but one (a test image stays), or keep them together in one split (folders)."""
    skip_broken: Flag = False
    """Leave out files that cannot be read."""
    val: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0.1)")] = None
    """Fraction of each site's images for validation, where the data have no split."""
    test: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: 0.2)")] = None
    """Fraction of each site's images for testing, where the data have no split."""
    seed: Annotated[int, tyro.conf.arg(name="data-seed", aliases=["--seed"])] = 0
    """Seed of the split, where it is drawn."""
    allow_pickle: Flag = False
    """Open pickled archives; only NumPy arrays are accepted."""
    complete: Annotated[
        tyro.conf.FlagConversionOff[bool], tyro.conf.arg(metavar="| --no-complete", help_behavior_hint="(default: yes)")
    ] = True
    """A data set whose image counts differ from the published ones must be fixed."""
    quiet: Flag = False
    """Show no progress."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def check(args: Sequence[str]) -> int:
    """`fednorms data check ROOT`: exit code 0 if the data are fine, 1 if they must be fixed."""
    given = parse(Check, "data check", args)
    from fednorms.data.check import check as check_images
    from fednorms.data.readers import READERS

    with stderr().status(f"checking {given.root}") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"checking {given.root}: {done:,} of {total:,} images")

        found = check_images(
            given.root,
            protocol=given.protocol or None,
            val=given.val,
            test=given.test,
            seed=given.seed or None,
            group=given.group or None,
            group_across=given.group_across or None,
            copies=None if given.copies == "keep" else given.copies,
            skip_broken=given.skip_broken or None,
            allow_pickle=given.allow_pickle or None,
            complete=given.complete,
            progress=None if given.quiet or given.json else progress,
        )
    tables = published(READERS[found.reader]) if found.reader else {}
    if given.json:
        print_json(found.to_dict() | {"tables": tables})
        return int(not found.ok)
    print(found)
    if found.protocols:
        print("\nProtocols (--protocol):")
        rows = [[name, what, ", ".join(tables.get(name, []))] for name, what in found.protocols.items()]
        stdout().print(grid(["protocol", "split", "fednorms reproduce"], rows))
    return int(not found.ok)


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
