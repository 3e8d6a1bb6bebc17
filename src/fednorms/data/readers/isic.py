"""Fed-ISIC2019: skin lesions from six centers, with the loss, the augmentation and the metric of FLamby.

Papers:
    Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
    Settings, NeurIPS 2022 (Datasets and Benchmarks), https://arxiv.org/abs/2210.04620
    Tschandl, Rosendahl, Kittler, The HAM10000 Dataset, a Large Collection of Multi-Source Dermatoscopic Images of
    Common Pigmented Skin Lesions, Scientific Data 5 (2018), https://doi.org/10.1038/sdata.2018.161
    Combalia et al., BCN20000: Dermoscopic Lesions in the Wild, arXiv 2019, https://arxiv.org/abs/1908.02288
    Codella et al., Skin Lesion Analysis Toward Melanoma Detection: A Challenge at the 2017 International Symposium on
    Biomedical Imaging (ISBI), Hosted by the International Skin Imaging Collaboration (ISIC), ISBI 2018,
    https://arxiv.org/abs/1710.05006
    Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, https://arxiv.org/abs/1708.02002
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation
from fednorms.data.folders.preparations import lesion_square
from fednorms.data.problems import raise_problems
from fednorms.data.protocol import Protocol
from fednorms.data.readers.divisions import fractions
from fednorms.data.readers.pictures import MEMORY, Cache, Member, Pictures, built
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of
from fednorms.data.readers.tables import columns_of, read_table, tables_in, whole_number, with_suffix
from fednorms.data.splits import split

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTERS = ("BCN", "HAM vidir_molemax", "HAM vidir_modern", "HAM rosendahl", "MSK", "HAM vienna_dias")
COUNTS = ((9930, 2483), (3163, 791), (2691, 672), (1807, 452), (655, 164), (351, 88))
# N / n_c over the 18,597 pooled training images, for the focal loss of FLamby (gamma 2).
WEIGHTS = tuple(18_597 / n for n in (3332, 9084, 2649, 712, 1950, 184, 201, 485))
PROTOCOLS = {
    "flamby": "FLamby and FedWon's Table 11: six centers, official folds, color constancy, 200 of 224 px; focal loss "
    "with class weights N/n_c, FLamby's augmentation, balanced accuracy",
    "lesions": "as flamby, but split by lesion: all images of a lesion are in one split, across centers too (80/20, "
    "drawn)",
}
_FLAMBY = Protocol("isic", "focal", WEIGHTS, "balanced_accuracy")
_RAW = ("ISIC_2019_Training_Metadata.csv", "ISIC_2019_Training_GroundTruth.csv")
_FOLDERS = ("ISIC_2019_Training_Input*", "HAM10000_images*")
_DIAGNOSES = {
    "mel": "MEL", "nv": "NV", "bcc": "BCC", "akiec": "AK", "bkl": "BKL", "df": "DF", "vasc": "VASC",
}  # fmt: skip
_HAM = ("HAM10000_metadata", "HAM10000_metadata.csv", "HAM10000_metadata.tab")


def fed_isic2019(
    root: str | Path,
    protocol: str = "flamby",
    size: int = 200,
    seed: int = 0,
    complete: bool = True,
    cache: Cache = None,
    memory_limit: int = MEMORY,
    val: float = 0.0,
) -> Federation:
    """Read Fed-ISIC2019: 23,247 pictures of skin lesions, eight diagnoses, six centers.

    The shorter side becomes 224 pixels (bilinear, aspect kept), then "shades of gray" of power 6, with
    e_c = (mean I_c^6)^(1/6), e <- e/|e|, I_c <- I_c / (sqrt(3) e_c), clipped where FLamby's code wraps around (our
    choice). The middle square of 224 pixels is stored; FLamby keeps the longer side, too. A network sees 200 of them: a
    random square in training, the middle in tests. ImageNet's mean and standard deviation. The federation's protocol is
    FLamby's: weighted focal loss (gamma 2), its augmentation, and balanced accuracy.

    `root` is the folder of ISIC_2019_Training_Input (or of its preprocessed copy) and FLamby's table with the columns
    image, target, center and fold ("train" or "test"). Without folds an 80/20 split is drawn and recorded. Without that
    table, the centers come from the raw metadata: the prefix of lesion_id (images without one are left out), and for
    HAM the `dataset` of HAM10000_metadata. HAM10000's own table (image_id, dx, dataset) is enough for its four centers.
    With `complete=False`, listed images and centers that are not there are left out. `size` is what a network sees;
    stored are 224/200 of it.

    FLamby's folds divide lesions: many test images show a lesion that is trained on. The protocol "lesions" draws a
    split that keeps the images of a lesion together, balanced for every center and diagnosis; it needs a table with
    lesion_id. `val` is the fraction of the training images that are for validation, by lesion where lesions are known.
    Intervals of judgements draw whole lesions, if a table has lesion_id; an image without one counts by itself.
    """
    place = READER.find(root, protocol)
    if not isinstance(size, int) or size < 1:
        raise BadInput(f'Federation "fed-isic2019": size must be a positive number of pixels, got {size!r}.')
    table = _split_table(place)
    rows = read_table(table, ("image", "target", "center")) if table else list(_raw_rows(place))
    files = _images(place)
    problems: list[str] = []
    lost = [row["image"] for row in rows if with_suffix(Path(row["image"])).name not in files]
    if len(lost) == len(rows):
        raise BadInput(f'Federation "fed-isic2019": none of the {len(rows):,} listed images is in "{place}".')
    if lost:
        problems.append(f"{len(lost):,} of {len(rows):,} listed images missing, the first is {lost[0]}")
        rows = [row for row in rows if with_suffix(Path(row["image"])).name in files]
    center = np.array([whole_number(row["center"], "center") for row in rows])
    target = np.array([whole_number(row["target"], "target") for row in rows], np.int64)
    lesion_of = _lesions(place)
    lesions = [lesion_of.get(Path(row["image"]).stem, row["image"]) for row in rows]
    part, notes = _parts(place, table, rows, center, target, protocol, val, seed, lesions if lesion_of else None)
    found, parts = {}, {}
    for i, name in enumerate(CENTERS):
        mine = np.flatnonzero(center == i)
        paths = [files[with_suffix(Path(rows[j]["image"])).name] for j in mine]
        found[name] = Pictures(paths, target[mine], [lesions[j] for j in mine] if lesion_of else ())
        parts[name] = {which: np.flatnonzero(part[mine] == which) for which in ("train", "val", "test")}
        if "fold" in rows[0] and protocol == "flamby":
            have = {"train": len(parts[name]["train"]) + len(parts[name]["val"]), "test": len(parts[name]["test"])}
            problems += compared(name, have, dict(zip(("train", "test"), COUNTS[i], strict=True)))
        else:
            problems += compared("counts", {name: len(mine)}, {name: sum(COUNTS[i])})
    notes = deviations("fed-isic2019", problems, complete) + notes
    members = [Member(name, name, at) for name, at in parts.items() if len(found[name])]
    side = max(size, size * 224 // 200)
    norm, source = Preprocessing.imagenet(crop=size), source_of(root, protocol, seed, notes) | {"size": size}
    return built(
        "fed-isic2019",
        place,
        found,
        members,
        CLASSES,
        side,
        norm,
        source,
        cache,
        memory_limit,
        lesion_square(side),
        _FLAMBY,
    )


def layout(root: Path) -> str | None:
    """Whether a folder is Fed-ISIC2019, and where its centers come from."""
    if not any(path.is_dir() for pattern in _FOLDERS for path in root.glob(pattern)):
        return None
    if table := _split_table(root):
        return f"FLamby's table {table.name}"
    there = all((root / name).is_file() for name in _RAW) and _ham_table(root) is not None
    if there:
        return "raw metadata, without FLamby's folds"
    ham = _ham_table(root)
    return f"HAM10000's own {ham.name}, four of the six centers" if ham and "dx" in columns_of(ham) else None


def _parts(
    place: Path,
    table: Path | None,
    rows: Sequence[Mapping[str, str]],
    center: np.ndarray,
    target: np.ndarray,
    protocol: str,
    val: float,
    seed: int,
    known: Sequence[str] | None,
) -> tuple[np.ndarray, list[str]]:
    """The split of every row, and notes about it; `known` are lesions."""
    lesions = list(known or [row["image"] for row in rows])
    cells = center * len(CLASSES) + target
    part = np.full(len(rows), "train")
    notes = []
    if protocol == "lesions":
        if known is None:
            raise BadInput(
                f'Federation "fed-isic2019": the protocol "lesions" needs the column lesion_id, but no table in '
                f'"{place}" has it ({_HAM[0]}, {_RAW[0]}, or a csv with image and lesion_id).'
            )
        part[split(cells, {"test": 0.2}, seed, "fed-isic2019 lesions", lesions)["test"]] = "test"
    elif "fold" in rows[0]:
        part[np.array([row["fold"] == "test" for row in rows])] = "test"
        part[np.array([row["fold"] not in ("train", "test") for row in rows])] = "none"
    else:
        where = f"{table.name} has no folds" if table else "the raw metadata have no folds"
        notes.append(f"{where}: an 80/20 split per centre was drawn with seed {seed}, which is not FLamby's")
        for i, name in enumerate(CENTERS):
            mine = np.flatnonzero(center == i)
            if len(mine):
                part[mine[fractions(target[mine], 0.0, 0.2, seed, name).get("test", [])]] = "test"
    trained = {lesion for lesion, where in zip(lesions, part, strict=True) if where == "train"}
    tests = np.flatnonzero(part == "test")
    if shared := sum(lesions[i] in trained for i in tests):
        notes.append(
            f"{shared:,} of {len(tests):,} test images show a lesion that is also trained on; the protocol lesions "
            "keeps lesions together"
        )
    if not 0 <= val < 1:
        raise BadInput(f'Federation "fed-isic2019": val must be a fraction from 0 to below 1, got {val}.')
    if val:
        train = np.flatnonzero(part == "train")
        whose = [lesions[i] for i in train]
        part[train[split(cells[train], {"val": val}, seed, "fed-isic2019 val", whose)["val"]]] = "val"
        notes.append(f"{100 * val:g} % of the training images are for validation, which is not FLamby's")
    return part, notes


def _lesions(place: Path) -> dict[str, str]:
    """The lesion that each image shows, from any table that says it."""
    found: dict[str, str] = {}
    for path in dict.fromkeys([*tables_in(place), *(place / name for name in _HAM if (place / name).is_file())]):
        columns = columns_of(path)
        image = next((name for name in ("image", "image_id") if name in columns), "")
        if image and "lesion_id" in columns:
            rows = read_table(path, (image, "lesion_id"))
            found |= {Path(row[image]).stem: row["lesion_id"] for row in rows if row["lesion_id"]}
    return found


def _split_table(place: Path) -> Path | None:
    return next((path for path in tables_in(place) if {"image", "target", "center"} <= set(columns_of(path))), None)


def _ham_table(place: Path) -> Path | None:
    return next((place / name for name in _HAM if (place / name).is_file()), None)


def _images(place: Path) -> dict[str, Path]:
    """The image files by name; of several folders with the same image, the first by name."""
    folders = [p for pattern in _FOLDERS for p in sorted(place.glob(pattern)) if p.is_dir()]
    return {path.name: path for folder in reversed(folders) for path in folder.iterdir()}


def _ham_rows(ham: Path) -> Iterator[dict[str, str]]:
    """Image, target and center of HAM10000's own table."""
    problems = []
    for row in read_table(ham, ("image_id", "dx", "dataset")):
        label, center = _DIAGNOSES.get(row["dx"].lower()), f"HAM {row['dataset']}"
        if label is None or center not in CENTERS:
            problems.append(f'{row["image_id"]}: unknown dx "{row["dx"]}" or dataset "{row["dataset"]}"')
            continue
        yield {
            "image": row["image_id"], "target": str(CLASSES.index(label)), "center": str(CENTERS.index(center)),
        }  # fmt: skip
    raise_problems(f'Table "{ham}"', problems)


def _raw_rows(place: Path) -> Iterator[dict[str, str]]:
    """Image, target and center of every image that has a lesion_id, as FLamby makes them."""
    ham = _ham_table(place)
    assert ham is not None  # `layout` has seen it
    if not all((place / name).is_file() for name in _RAW):
        yield from _ham_rows(ham)
        return
    part_of = {row["image_id"]: row["dataset"] for row in read_table(ham, ("image_id", "dataset"))}
    truth = {row["image"]: row for row in read_table(place / _RAW[1], ("image", *CLASSES))}
    number = {name: str(i) for i, name in enumerate(CENTERS)}
    problems = []
    for row in read_table(place / _RAW[0], ("image", "lesion_id")):
        image, prefix = row["image"], row["lesion_id"][:3]
        if not prefix:
            continue
        center = f"HAM {part_of.get(image, '?')}" if prefix == "HAM" else prefix
        said = [float(truth[image][name]) for name in CLASSES] if image in truth else []
        if center not in number:
            problems.append(f'{image}: lesion_id "{row["lesion_id"]}" belongs to no center ({center})')
        elif sum(said) != 1 or max(said) != 1:
            problems.append(f"{image}: {_RAW[1]} does not give it one of the eight diagnoses")
        else:
            yield {"image": image, "target": str(said.index(1.0)), "center": number[center]}
    raise_problems(f'Federation "fed-isic2019" in "{place}"', problems)


READER = Reader(
    "fed-isic2019",
    "Fed-ISIC2019: eight skin lesions, six centers",
    fed_isic2019,
    PROTOCOLS,
    layout,
    "ROOT/ISIC_2019_Training_Input*/*.jpg and a table (csv) with image, target, center and fold, or "
    f"{', '.join(_RAW)} and {_HAM[0]}, or {_HAM[0]} alone (image_id, dx, dataset); images also in HAM10000_images*",
    ("fed_isic2019", "ISIC_2019"),
    Published(
        "Dermoscopic images of eight kinds of skin lesions from six centers, as FLamby divides ISIC 2019.",
        {
            "ISIC 2019": "https://challenge.isic-archive.com/data/#2019",
            "HAM10000": "https://doi.org/10.7910/DVN/DBW86T",
            "FLamby": "https://github.com/owkin/FLamby",
        },
        "CC BY-NC 4.0",
        dict(zip(CENTERS, COUNTS, strict=True)),
    ),
    square=True,
)
