"""`fednorms data show`: sites, labels and images of a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fednorms.cli.grid import Grid
from fednorms.cli.output import grid, print_json, stdout
from fednorms.cli.parsing import DataOptions, Flag, merged, parse
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.runs.recipe import Recipe

if TYPE_CHECKING:
    from collections import Counter

    from fednorms.data.folders.sizes import Size
    from fednorms.data.show import View

_SHOWN = 40
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Show:
    """Show the sites of a federation: sizes, labels, and how much labels and images differ between them."""

    federation: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FEDERATION")]
    """A name (see `fednorms list federations`), a folder or a pack."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png", help_behavior_hint="(default: no picture)")] = None
    """Draw sample images, labels and sizes into this file."""
    images: int = 8
    """Sample images per site in the picture."""
    json: Flag = False
    """Print one JSON object and nothing else."""
    data: DataOptions = field(default_factory=DataOptions)


def show(args: Sequence[str]) -> int:
    """Run `fednorms data show`."""
    given = parse(Show, "data show", args)
    from fednorms.data.duplicates import duplicates
    from fednorms.data.folders.sizes import shown
    from fednorms.data.show import picture, view
    from fednorms.runs.session import data_notes, open_federation

    recipe = merged(Recipe(federation=given.federation), given.data)
    recipe, sizes = _at_one_size(recipe)
    federation = open_federation(recipe)
    found = view(federation)
    drawn = picture(federation, given.out, max(1, given.images), found) if given.out else None
    notes = data_notes(federation) + duplicates(federation)
    if sizes:
        notes.append(
            f"images differ in size; they are shown here at {recipe.data.size}x{recipe.data.size}. To train on them, "
            f"choose a size: --size {recipe.data.size}"
        )
    if given.json:
        pixels = {"pixels": {name: {shown({k: n}): n for k, n in c.items()} for name, c in sizes.items()}}
        more = {"notes": notes, "picture": None if drawn is None else str(drawn)}
        print_json({**found.to_dict(), **(pixels if sizes else {}), **more})
        return 0
    console = stdout()
    clients, classes = counted(len(federation.clients), "client"), counted(len(found.classes), "class", "classes")
    console.print(f"{found.name}: {clients}, {classes}", markup=False)
    console.print(table(found, {name: shown(counts) for name, counts in sizes.items()}))
    if len(found.sites) > _SHOWN:
        console.print(f"... and {counted(len(found.sites) - _SHOWN, 'more site')}")
    console.print(
        f"label shift {found.label_shift:.3f} (mean distance of a client's labels from the pooled ones, 0 to 1), "
        f"feature shift {found.feature_shift:.3f} (of its pixels' mean and spread, in standard deviations), "
        f"the largest client has {found.size_ratio:.1f} times the images of the smallest"
    )
    for note in notes:
        console.print(f"note: {note}", markup=False)
    if drawn:
        console.print(f"Picture: {drawn}", markup=False, soft_wrap=True)
    return 0


def _at_one_size(recipe: Recipe) -> tuple[Recipe, dict[str, Counter[Size]]]:
    """A recipe that opens a folder of images of several sizes, and these sizes by site; none if one size was asked for.

    Training asks the user for a size. What is only shown need not.
    """
    from fednorms.data.folders.sizes import common_side, differ, sizes_in
    from fednorms.data.registry import folder_of

    folder = folder_of(recipe.federation, recipe.data.root or None)
    if folder is None or recipe.data.size is not None:
        return recipe, {}
    try:
        sizes = sizes_in(folder)
    except BadInput:  # opening it says what is wrong, and which data set it may be
        return recipe, {}
    if not differ(sizes):
        return recipe, {}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"size": common_side(sizes)})}), sizes


def table(found: View, pixels: Mapping[str, str]) -> Grid:
    """One row per site; `pixels` are the sizes of its images, where they differ."""
    channels = range(len(found.sites[0].mean))
    rows = [
        [
            site.name,
            site.domain,
            bars(site.labels),
            *(str(n or "-") for n in (site.train, site.val, site.test)),
            *([pixels.get(site.name, "-")] if pixels else []),
            f"{site.label_shift:.3f}",
            f"{site.feature_shift:.3f}",
            " ".join(f"{site.mean[c]:.2f}±{site.std[c]:.2f}" for c in channels),
        ]
        for site in found.sites[:_SHOWN]
    ]
    header = ["site", "domain", "labels", "train", "val", "test"] + ["pixels"] * bool(pixels)
    header += ["label shift", "feature shift", "channels"]
    return grid(header, rows, numbers_from=3, optional=["channels", "domain"])


def bars(counts: Sequence[int], most: int = 40) -> str:
    """A histogram in one line; with many classes, neighbors share a bar.

    >>> bars([0, 4, 8])
    ' ▄█'
    """
    per = -(-len(counts) // most)
    sums = [sum(counts[i : i + per]) for i in range(0, len(counts), per)]
    top = max(max(sums), 1)
    return "".join(_BARS[-(-n * (len(_BARS) - 1) // top)] for n in sums)
