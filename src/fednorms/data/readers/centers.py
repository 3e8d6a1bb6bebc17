"""A table (csv) of images, labels and centers, in the style of FLamby.

Paper:
    Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
    Settings, NeurIPS 2022 (Datasets and Benchmarks), https://arxiv.org/abs/2210.04620
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.folders import EXTENSIONS
from fednorms.data.problems import raise_problems
from fednorms.data.readers.pictures import MEMORY, Cache, Member, Pictures, absent, built
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, chosen
from fednorms.data.readers.tables import columns_of, read_table, tables_in
from fednorms.data.sizes import Size
from fednorms.data.splits import split

PROTOCOLS = {"own": "a custom table (or FLamby's): image, label, center, and fold, or a split drawn here"}
_FOLDS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "path", "file", "filename", "img"),
    "label": ("label", "target", "class"),
    "center": ("center", "centre", "site", "hospital", "client"),
    "fold": ("fold", "split", "part"),
    "patient": ("patient", "patient_id", "group"),
}


def centers(
    root: str | Path,
    protocol: str = "own",
    size: Size = 224,
    seed: int = 0,
    val: float = 0.0,
    test: float = 0.2,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read a federation from one table (csv): image, label, center, and perhaps split.

    The columns may have several names: image (path, file, filename), label (target, class), center (centre, site,
    hospital, client); optional are fold (split, part) with train, val or test, and patient (group), whose images stay
    in one split. Labels may be words. Without a fold, a stratified split is drawn.

    `root` is the table, or the folder with one table in it; images are searched next to it and one folder below. A
    split that the table does not have is drawn.
    """
    chosen("centres", protocol, PROTOCOLS)
    root = Path(root).expanduser()
    table = root if root.is_file() else next((p for p in tables_in(root) if _columns(p)), None)
    columns = _columns(table) if table else None
    if table is None or columns is None:
        raise BadInput(_without_table(root))
    rows = read_table(table, tuple(columns.values()))
    if not rows:
        raise BadInput(f'Federation "centres": "{table}" has no rows.')
    words = sorted(
        {row[columns["label"]] for row in rows}, key=lambda w: (not w.isdigit(), int(w) if w.isdigit() else 0, w)
    )
    number = {word: i for i, word in enumerate(words)}
    found, parts, problems = {}, {}, []
    near = _Near(table.parent)
    for center in sorted({row[columns["center"]] for row in rows}):
        mine = [row for row in rows if row[columns["center"]] == center]
        labels = np.asarray([number[row[columns["label"]]] for row in mine], np.int64)
        groups = [row[columns["patient"]] for row in mine] if "patient" in columns else ()
        found[center] = Pictures([near.find(row[columns["image"]]) for row in mine], labels, groups)
        if "fold" in columns:
            folds = [row[columns["fold"]].lower() for row in mine]
            parts[center] = {part: np.flatnonzero([fold in names for fold in folds]) for part, names in _FOLDS.items()}
            if lost := len(mine) - sum(map(len, parts[center].values())):
                problems.append(f"{center}: {counted(lost, 'row')} whose fold is not train, val or test")
        else:
            parts[center] = split(labels, {"val": val, "test": test}, seed, center, groups or None)
    raise_problems(f'Federation "centres" in "{table}"', problems + absent(found))
    members = [Member(center, center, at) for center, at in parts.items()]
    source = {"root": str(root.resolve()), "protocol": protocol, "seed": seed, "val": val, "test": test}
    return built(
        "centres", table.parent, found, members, words, size, Preprocessing.centered(3), source, cache, memory_limit
    )


def layout(root: Path) -> str | None:
    """Whether a folder has a table of centers."""
    table = next((p for p in tables_in(root) if _columns(p)), None)
    return f"table {table.name}" if table else None


def _without_table(root: Path) -> str:
    """What columns a table needs, under which names, and which ones are there."""
    names = "; ".join(", ".join(_NAMES[what]) for what in ("image", "label", "center"))
    tables = [root] if root.is_file() else tables_in(root)
    there = "; ".join(f"{path.name} has {', '.join(columns_of(path))}" for path in tables[:3])
    return (
        f'Federation "centres": "{root}" has no table (csv) with columns image, label and center. '
        f"Accepted names: {names}. " + (f"Found: {there}." if there else "Found no table.")
    )


def _columns(path: Path) -> dict[str, str] | None:
    there = {name.lower(): name for name in columns_of(path)}
    found = {what: next((there[n] for n in names if n in there), "") for what, names in _NAMES.items()}
    if not all(found[what] for what in ("image", "label", "center")):
        return None
    return {what: name for what, name in found.items() if name}


@dataclass
class _Near:
    """Images in the folder of a table and one folder below; each folder is listed once."""

    folder: Path
    listed: dict[Path, dict[str, Path]] = field(default_factory=dict)

    def find(self, entry: str) -> Path:
        """The file that a table names, perhaps without its folder and ending."""
        relative = Path(entry)
        if ".." in relative.parts or relative.is_absolute():
            raise BadInput(f'The table names "{entry}", which is not inside its folder.')
        if (self.folder / relative).is_file():
            return self.folder / relative
        below = [self.folder, *sorted(p for p in self._names(self.folder).values() if p.is_dir())]
        found = (self._names(folder / relative.parent).get(relative.name) for folder in below)
        return next((path for path in found if path is not None and path.is_file()), self.folder / relative)

    def _names(self, folder: Path) -> dict[str, Path]:
        """What a folder holds, by name; images also by their name without the ending."""
        if folder not in self.listed:
            inside = sorted(folder.iterdir()) if folder.is_dir() else []
            images = [p for p in inside if p.suffix.lower() in EXTENSIONS]
            self.listed[folder] = {p.stem: p for p in reversed(images)} | {p.name: p for p in inside}
        return self.listed[folder]


READER = Reader(
    "centres",
    "a table of images, labels and centers (FLamby's style)",
    centers,
    PROTOCOLS,
    layout,
    "ROOT/*.csv with columns image, label and center, and perhaps fold and patient; images next to it or one folder "
    "below",
    published=Published("Your own images, listed in one table. Labels may be words."),
)
