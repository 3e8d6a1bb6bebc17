"""Data sets described by a table: Camelyon17, Fairface, and any table of images, labels and centres."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, raise_problems
from fednorms.data.folders import EXTENSIONS
from fednorms.data.protocol import Protocol
from fednorms.data.readers.divisions import greg
from fednorms.data.readers.pictures import FEDBN, MEMORY, PLAIN, Cache, Member, Pictures, absent, built, joined
from fednorms.data.readers.reader import Reader, chosen, compared, deviations, home, source_of
from fednorms.data.splits import split

CAMELYON_COUNTS = {"center0": 59_436, "center1": 34_904, "center2": 85_054, "center3": 129_838, "center4": 146_722}
CAMELYON_PROTOCOLS = {
    "greg": "GReg: 3 % of each hospital, 293 training and 293 validation images each, 30 % for testing, 256 px",
    "full": "all patches of each hospital, 70/10/20 with no patient in two splits, 96 px",
}
RACES = ("East Asian", "Indian", "Black", "White", "Middle Eastern", "Latino_Hispanic", "Southeast Asian")
FAIRFACE_PROTOCOLS = {"fednn": "FedNN: a client per race, target gender, official validation set for testing, 224 px"}
CENTRES_PROTOCOLS = {
    "own": "a table of your own (or FLamby's): image, label, centre, and fold or a division drawn here"
}


def camelyon17(
    root: str | Path,
    protocol: str = "greg",
    size: int | None = None,
    seed: int = 0,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Camelyon17 (WILDS): 455,954 patches of lymph nodes from five hospitals, tumour or not.

    The official split is not used: a client is a hospital. GReg's rule is fitted to its Table 6 [I]; it neither
    normalises nor keeps patients apart; "full" keeps them apart [R].

    Args:
        root: the folder of metadata.csv and patches.
        protocol: one of `CAMELYON_PROTOCOLS`.
        size: in pixels, if not the paper's.
        seed: of what is drawn.
        complete: whether other counts than the published ones are an error.
        cache: the folder for decoded images; False for none.
        memory_limit: in bytes; a larger federation stays in the cache.

    Paper: Bandi et al. 2019; Koh et al., WILDS, ICML 2021.
    """
    chosen("camelyon17", protocol, CAMELYON_PROTOCOLS)
    expected = "ROOT/metadata.csv and ROOT/patches/patient_P_node_N/patch_patient_P_node_N_x_X_y_Y.png"
    place = home("camelyon17", root, ("camelyon17_v1.0", "camelyon17"), camelyon_layout, expected)
    rows = read_table(place / "metadata.csv", ("patient", "node", "x_coord", "y_coord", "tumor", "center"))
    found = {}
    for centre in sorted({row["center"] for row in rows}):
        mine = [row for row in rows if row["center"] == centre]
        paths = [place / "patches" / _patch(row) for row in mine]
        labels = np.asarray([whole_number(row["tumor"], "tumor") for row in mine], np.int64)
        found[f"center{whole_number(centre, 'center')}"] = Pictures(paths, labels, [row["patient"] for row in mine])
    problems = compared("metadata.csv", {domain: len(p) for domain, p in found.items()}, CAMELYON_COUNTS)
    if protocol == "greg":
        parts = greg({d: p.y for d, p in found.items()}, 0.4, 0.4, seed, subsample=0.03)
    else:
        parts = {d: split(p.y, {"val": 0.1, "test": 0.2}, seed, d, p.groups) for d, p in found.items()}
    used = {d: found[d][np.concatenate(list(at.values()))] for d, at in parts.items()}
    raise_problems(f"camelyon17 in {str(place)!r}", absent(used))
    notes = deviations("camelyon17", problems, complete)
    members = [Member(domain, domain, at) for domain, at in parts.items()]
    source, classes = source_of(root, protocol, seed, notes), ("normal", "tumor")
    if protocol == "greg":
        norm, pixels, habits = Preprocessing(), size or 256, FEDBN
    else:
        norm, pixels, habits = Preprocessing.imagenet(), size or 96, PLAIN
    return built(
        "camelyon17", place, found, members, classes, pixels, norm, source, cache, memory_limit, protocol=habits
    )


def camelyon_layout(root: Path) -> str | None:
    """Whether a folder is Camelyon17 as WILDS has it."""
    return "WILDS v1.0" if (root / "metadata.csv").is_file() and (root / "patches").is_dir() else None


def _patch(row: Mapping[str, str]) -> str:
    # WILDS numbers patients with three digits, which a spreadsheet may have dropped.
    patient, node = row["patient"].zfill(3), row["node"]
    folder = f"patient_{patient}_node_{node}"
    return f"{folder}/patch_{folder}_x_{row['x_coord']}_y_{row['y_coord']}.png"


def fairface(
    root: str | Path,
    protocol: str = "fednn",
    size: int = 224,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Fairface: faces of seven groups named by the data set, one client each; the target is gender (Female, Male).

    Choices: tested on the official validation set, pooled; ImageNet's mean and deviation; FedNN augments by flips and
    affine maps whose ranges it does not state: rotation 10 degrees, shifts 0.1, scale 0.9 to 1.1 [R].

    Args:
        root: the folder of train, val, fairface_label_train.csv and fairface_label_val.csv.
        protocol: one of `FAIRFACE_PROTOCOLS`.
        size: in pixels.
        complete: whether other counts than the published ones are an error.
        cache: the folder for decoded images; False for none.
        memory_limit: in bytes; a larger federation stays in the cache.

    Paper: Kärkkäinen and Joo, WACV 2021.
    """
    chosen("fairface", protocol, FAIRFACE_PROTOCOLS)
    expected = "ROOT/{train,val}/N.jpg and ROOT/fairface_label_{train,val}.csv"
    place = home("fairface", root, ("fairface", "FairFace"), fairface_layout, expected)
    tables = {
        part: read_table(place / f"fairface_label_{word}.csv", ("file", "gender", "race"))
        for part, word in (("train", "train"), ("test", "val"))
    }
    problems = compared("rows", {p: len(t) for p, t in tables.items()}, {"train": 86_744, "test": 10_954})
    genders, found, parts = {"Female": 0, "Male": 1}, {}, {}
    strange = {row["race"] for t in tables.values() for row in t} - set(RACES)
    strange |= {row["gender"] for t in tables.values() for row in t} - set(genders)
    if strange:
        raise BadInput(f"fairface: unknown values in the tables: {', '.join(sorted(strange))}")
    for race in RACES:
        rows = {part: [row for row in table if row["race"] == race] for part, table in tables.items()}
        if not any(rows.values()):
            problems.append(f"no row of race {race}")
            continue
        lists = {
            part: Pictures(
                [place / r["file"] for r in mine], np.asarray([genders[r["gender"]] for r in mine], np.int64)
            )
            for part, mine in rows.items()
        }
        found[race], parts[race] = joined(lists)
    raise_problems(f"fairface in {str(place)!r}", absent(found))
    notes = deviations("fairface", problems, complete)
    members = [Member(race, race, at) for race, at in parts.items()]
    source, norm, habits = source_of(root, protocol, 0, notes), Preprocessing.imagenet(), Protocol("fairface")
    return built(
        "fairface", place, found, members, tuple(genders), size, norm, source, cache, memory_limit, protocol=habits
    )


def fairface_layout(root: Path) -> str | None:
    """Whether a folder is Fairface."""
    return "official" if (root / "fairface_label_train.csv").is_file() else None


def centres(
    root: str | Path,
    protocol: str = "own",
    size: int = 224,
    seed: int = 0,
    val: float = 0.0,
    test: float = 0.2,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """A federation from one table (csv): which image, which label, which centre, and perhaps which split.

    Columns, by any of their names: image (path, file, filename), label (target, class), center (centre, site,
    hospital, client), and perhaps fold (split, part) with train, val or test, and patient (group), none of whom is
    then divided. Labels may be words. Without a fold the division is drawn here, stratified.

    Args:
        root: the table, or the folder with one table in it; images are looked for beside it and one folder below.
        protocol: "own".
        size: in pixels.
        seed: of the division, if it is drawn.
        val: fraction for validation, if it is drawn.
        test: fraction for testing, if it is drawn.
        cache: the folder for decoded images; False for none.
        memory_limit: in bytes; a larger federation stays in the cache.
    """
    chosen("centres", protocol, CENTRES_PROTOCOLS)
    root = Path(root).expanduser()
    table = root if root.is_file() else next((p for p in tables_in(root) if _centre_columns(p)), None)
    columns = _centre_columns(table) if table else None
    if table is None or columns is None:
        raise BadInput(f"centres: {str(root)!r} has no table (csv) with columns image, label and center")
    rows = read_table(table, tuple(columns.values()))
    if not rows:
        raise BadInput(f"centres: {str(table)!r} has no rows")
    words = sorted(
        {row[columns["label"]] for row in rows}, key=lambda w: (not w.isdigit(), int(w) if w.isdigit() else 0, w)
    )
    number = {word: i for i, word in enumerate(words)}
    found, parts, problems = {}, {}, []
    for centre in sorted({row[columns["center"]] for row in rows}):
        mine = [row for row in rows if row[columns["center"]] == centre]
        labels = np.asarray([number[row[columns["label"]]] for row in mine], np.int64)
        groups = [row[columns["patient"]] for row in mine] if "patient" in columns else ()
        found[centre] = Pictures([_near(table.parent, row[columns["image"]]) for row in mine], labels, groups)
        if "fold" in columns:
            folds = [row[columns["fold"]].lower() for row in mine]
            parts[centre] = {part: np.flatnonzero([fold in names for fold in folds]) for part, names in _FOLDS.items()}
            if lost := len(mine) - sum(map(len, parts[centre].values())):
                problems.append(f"{centre}: {lost} rows whose fold is not train, val or test")
        else:
            parts[centre] = split(labels, {"val": val, "test": test}, seed, centre, groups or None)
    raise_problems(f"centres in {str(table)!r}", problems + absent(found))
    members = [Member(centre, centre, at) for centre, at in parts.items()]
    source = {"root": str(root.resolve()), "protocol": protocol, "seed": seed, "val": val, "test": test}
    return built(
        "centres", table.parent, found, members, words, size, Preprocessing.centred(3), source, cache, memory_limit
    )


_FOLDS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "path", "file", "filename", "img"),
    "label": ("label", "target", "class"),
    "center": ("center", "centre", "site", "hospital", "client"),
    "fold": ("fold", "split", "part"),
    "patient": ("patient", "patient_id", "group"),
}


def centres_layout(root: Path) -> str | None:
    """Whether a folder has a table of centres."""
    table = next((p for p in tables_in(root) if _centre_columns(p)), None)
    return f"table {table.name}" if table else None


def _centre_columns(path: Path) -> dict[str, str] | None:
    there = {name.lower(): name for name in columns_of(path)}
    found = {what: next((there[n] for n in names if n in there), "") for what, names in _NAMES.items()}
    if not all(found[what] for what in ("image", "label", "center")):
        return None
    return {what: name for what, name in found.items() if name}


def tables_in(place: Path) -> list[Path]:
    """The tables of a folder: csv files, and FLamby's, which has no ending."""
    if not place.is_dir():
        return []
    return sorted(
        p for p in place.iterdir() if p.is_file() and (p.suffix.lower() == ".csv" or p.name == "train_test_split")
    )


def columns_of(path: Path) -> list[str]:
    """The names of a table's columns; none if it is not a table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file, delimiter=_delimiter(file)), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def read_table(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table (commas or tabs), which must have the needed columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter=_delimiter(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise BadInput(f"table {str(path)!r} cannot be read: {problem}") from None
    columns = list(rows[0]) if rows else columns_of(path)
    if missing := [name for name in needed if name not in columns]:
        raise BadInput(f"table {str(path)!r} has no column {', '.join(missing)}; it has {', '.join(map(str, columns))}")
    if broken := next((i for i, row in enumerate(rows, 2) if any(row[name] is None for name in needed)), 0):
        raise BadInput(f"table {str(path)!r}, line {broken}: too few entries")
    return rows


def _delimiter(file: TextIO) -> str:
    """A comma, or a tab if the first line has one."""
    first = file.readline()
    file.seek(0)
    return "\t" if "\t" in first else ","


def whole_number(text: str, column: str) -> int:
    """An entry as a number that counts something, as 3 or 3.0.

    >>> whole_number("3.0", "center")
    3
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != value or value != int(value) or value < 0:
        raise BadInput(f"column {column}: expected a whole number, got {text!r}")
    return int(value)


def with_suffix(path: Path) -> Path:
    """An image's path, with .jpg where a table leaves the ending out.

    >>> with_suffix(Path("ISIC_0000001")).name
    'ISIC_0000001.jpg'
    """
    return path if path.suffix.lower() in EXTENSIONS else path.with_name(f"{path.name}.jpg")


def _near(folder: Path, entry: str) -> Path:
    relative = Path(entry)
    if ".." in relative.parts or relative.is_absolute():
        raise BadInput(f"the table names {entry!r}, which is not inside its folder")
    choices: list[Callable[[], Path | None]] = [
        lambda: folder / relative,
        lambda: with_suffix(folder / relative),
        lambda: next((p for p in folder.glob(f"*/{relative.as_posix()}*") if p.suffix.lower() in EXTENSIONS), None),
    ]
    for choice in choices:
        path = choice()
        if path is not None and path.is_file():
            return path
    return folder / relative


CAMELYON = Reader(
    "camelyon17", "Camelyon17 (WILDS): tumour or not, five hospitals", camelyon17, CAMELYON_PROTOCOLS, camelyon_layout
)
FAIRFACE = Reader("fairface", "Fairface: gender, seven groups", fairface, FAIRFACE_PROTOCOLS, fairface_layout)
CENTRES = Reader(
    "centres", "a table of images, labels and centres (FLamby's style)", centres, CENTRES_PROTOCOLS, centres_layout
)
