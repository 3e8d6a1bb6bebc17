"""FairFace: faces of seven groups; the target is gender.

Paper:
    Kärkkäinen, Joo, FairFace: Face Attribute Dataset for Balanced Race, Gender, and Age for Bias Measurement and
    Mitigation, WACV 2021, https://arxiv.org/abs/1908.04913
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.problems import raise_problems
from fednorms.data.protocol import Protocol
from fednorms.data.readers.pictures import MEMORY, Cache, Member, Pictures, absent, built, joined
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of
from fednorms.data.readers.tables import read_table
from fednorms.data.sizes import Size

RACES = ("East Asian", "Indian", "Black", "White", "Middle Eastern", "Latino_Hispanic", "Southeast Asian")
_ROWS = {"train": 86_744, "test": 10_954}
PROTOCOLS = {"fednn": "FedNN: a client per race, target gender, official validation set for testing, 224 px"}


def fairface(
    root: str | Path,
    protocol: str = "fednn",
    size: Size = 224,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read FairFace: seven groups as the data set names them, one client each; the target is gender (Female, Male).

    Our choices: the official validation set is the test set; ImageNet's mean and standard deviation. FedNN augments
    by flips and affine maps without stating their ranges; here they are 10 degrees, shifts of 0.1, scales 0.9 to 1.1.

    `root` is the folder of train, val, fairface_label_train.csv and fairface_label_val.csv.
    """
    place = READER.find(root, protocol)
    tables = {
        part: read_table(place / f"fairface_label_{word}.csv", ("file", "gender", "race"))
        for part, word in (("train", "train"), ("test", "val"))
    }
    problems = compared("rows", {p: len(t) for p, t in tables.items()}, _ROWS)
    genders, found, parts = {"Female": 0, "Male": 1}, {}, {}
    strange = {row["race"] for t in tables.values() for row in t} - set(RACES)
    strange |= {row["gender"] for t in tables.values() for row in t} - set(genders)
    if strange:
        raise BadInput(f'Federation "fairface": unknown values in the tables: {", ".join(sorted(strange))}.')
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
    raise_problems(f'Federation "fairface" in "{place}"', absent(found))
    notes = deviations("fairface", problems, complete)
    members = [Member(race, race, at) for race, at in parts.items()]
    source, norm, habits = source_of(root, protocol, 0, notes), Preprocessing.imagenet(), Protocol("fairface")
    return built(
        "fairface", place, found, members, tuple(genders), size, norm, source, cache, memory_limit, protocol=habits
    )


def layout(root: Path) -> str | None:
    """Whether a folder is FairFace."""
    return "official" if (root / "fairface_label_train.csv").is_file() else None


READER = Reader(
    "fairface",
    "FairFace: gender, seven groups",
    fairface,
    PROTOCOLS,
    layout,
    "ROOT/{train,val}/N.jpg and ROOT/fairface_label_{train,val}.csv",
    ("fairface", "FairFace"),
    Published(
        "Photographs of faces, labeled with race, gender and age. Sites are the seven races, classes the two genders.",
        {"authors": "https://github.com/joojs/fairface"},
        "CC BY 4.0",
        {"all": (_ROWS["train"], _ROWS["test"])},
    ),
)
