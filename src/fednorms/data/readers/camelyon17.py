"""Camelyon17 (WILDS): patches of lymph nodes from five hospitals, tumor or not.

Papers:
    Bándi et al., From Detection of Individual Metastases to Classification of Lymph Node Status at the Patient Level:
    The CAMELYON17 Challenge, IEEE Trans. Medical Imaging 38(2) 2019, https://doi.org/10.1109/TMI.2018.2867350
    Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, ICML 2021, https://arxiv.org/abs/2012.07421
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.problems import raise_problems
from fednorms.data.readers.divisions import greg
from fednorms.data.readers.pictures import FEDBN, MEMORY, PLAIN, Cache, Member, Pictures, absent, built
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of
from fednorms.data.readers.tables import read_table, whole_number
from fednorms.data.sizes import Size
from fednorms.data.splits import split

COUNTS = {"center0": 59_436, "center1": 34_904, "center2": 85_054, "center3": 129_838, "center4": 146_722}
PROTOCOLS = {
    "greg": "GReg: 3 % of each hospital, 293 training and 293 validation images each, 30 % for testing, 256 px",
    "full": "all patches of each hospital, 70/10/20 with no patient in two splits, 96 px",
}


def camelyon17(
    root: str | Path,
    protocol: str = "greg",
    size: Size | None = None,
    seed: int = 0,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read Camelyon17 (WILDS): 455,954 patches of lymph nodes from five hospitals, tumor or not.

    The official split is not used: a client is a hospital. GReg's rule is inferred from its Table 6; it neither
    normalizes nor keeps the patches of a patient in one split. "full" does (our choice).

    `root` is the folder of metadata.csv and patches.
    """
    place = READER.find(root, protocol)
    rows = read_table(place / "metadata.csv", ("patient", "node", "x_coord", "y_coord", "tumor", "center"))
    found = {}
    for center in sorted({row["center"] for row in rows}):
        mine = [row for row in rows if row["center"] == center]
        paths = [place / "patches" / _patch(row) for row in mine]
        labels = np.asarray([whole_number(row["tumor"], "tumor") for row in mine], np.int64)
        found[f"center{whole_number(center, 'center')}"] = Pictures(paths, labels, [row["patient"] for row in mine])
    problems = compared("metadata.csv", {domain: len(p) for domain, p in found.items()}, COUNTS)
    if protocol == "greg":
        parts = greg({d: p.y for d, p in found.items()}, 0.4, 0.4, seed, subsample=0.03)
    else:
        parts = {d: split(p.y, {"val": 0.1, "test": 0.2}, seed, d, p.groups) for d, p in found.items()}
    used = {d: found[d][np.concatenate(list(at.values()))] for d, at in parts.items()}
    raise_problems(f'Federation "camelyon17" in "{place}"', absent(used))
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


def layout(root: Path) -> str | None:
    """Whether a folder is Camelyon17 as WILDS has it."""
    return "WILDS v1.0" if (root / "metadata.csv").is_file() and (root / "patches").is_dir() else None


def _patch(row: Mapping[str, str]) -> str:
    # WILDS numbers patients with three digits; a spreadsheet may have dropped leading zeros.
    patient, node = row["patient"].zfill(3), row["node"]
    folder = f"patient_{patient}_node_{node}"
    return f"{folder}/patch_{folder}_x_{row['x_coord']}_y_{row['y_coord']}.png"


READER = Reader(
    "camelyon17",
    "Camelyon17 (WILDS): tumor or not, five hospitals",
    camelyon17,
    PROTOCOLS,
    layout,
    "ROOT/metadata.csv and ROOT/patches/patient_P_node_N/patch_patient_P_node_N_x_X_y_Y.png",
    ("camelyon17_v1.0", "camelyon17"),
    Published(
        "Patches of lymph node sections (96 x 96 pixels) from five hospitals: tumor in the central region or not.",
        {"WILDS": "https://wilds.stanford.edu/datasets/", "slides": "https://camelyon17.grand-challenge.org/Data/"},
        "CC0",
        COUNTS,
    ),
)
