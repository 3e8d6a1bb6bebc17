"""CIFAR-10 and CIFAR-100 at one site, for partition rules, and CIFAR-10-C as nineteen corruptions.

Papers:
    Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, University of Toronto 2009,
    https://www.cs.toronto.edu/~kriz/learning-features-2009-TR.pdf
    Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
    https://arxiv.org/abs/1903.12261
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.folders.decode import open_image
from fednorms.data.generate.corruptions import CORRUPTIONS
from fednorms.data.pickles import load_pickle
from fednorms.data.problems import raise_problems
from fednorms.data.protocol import Protocol
from fednorms.data.readers.digits_five import as_rgb
from fednorms.data.readers.divisions import stratified
from fednorms.data.readers.enlarged import enlarged
from fednorms.data.readers.pictures import FEDBN, MEMORY, Cache, Pictures, images_in
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FEDDC = Preprocessing((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
# Mean and standard deviation, and augmentation, of each paper.
_TEN = {
    "fedntd": (
        Preprocessing((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768)),
        Protocol("crop_flip_cutout"),
    ),
    "feddc": (_FEDDC, Protocol("feddyn")),
    "fedbabu": (Preprocessing.imagenet(), Protocol("crop_flip")),
    "greg": (Preprocessing(), FEDBN),
}
_HUNDRED = {
    "feddc": (Preprocessing((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)), Protocol("feddyn_cifar100")),
    "fedbabu": (Preprocessing((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)), Protocol("crop_flip")),
}
CIFAR10_PROTOCOLS = {
    "fedntd": "FedNTD and EasyFL (FedWon's label-skew figures): their normalization; one site, for partition rules",
    "feddc": "FedDyn, FedDC and FedNN's label-skew tables: their normalization; one site, for partition rules",
    "fedbabu": "FedBABU and FedFN: their normalization; one site, for partition rules",
    "greg": "GReg's appendix: half of the training images, 224 px; one site, for partition rules (2,500 each of ten)",
}
CIFAR100_PROTOCOLS = {name: CIFAR10_PROTOCOLS[name] for name in _HUNDRED}
CIFAR10C_PROTOCOLS = {
    "fednn": "FedNN: nineteen clients, one corruption each at severity 4, 500 common test images; the pooled score",
    **{f"severity-{s}": f"as fednn, at severity {s}" for s in (1, 2, 3, 5)},
}


@dataclass(frozen=True)
class _Edition:
    name: str
    classes: int
    train: tuple[str, ...]
    test: tuple[str, ...]
    label: str
    protocols: Mapping[str, tuple[Preprocessing, Protocol]]


_CIFAR10 = _Edition(
    "cifar-10", 10, tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), "labels", _TEN,
)  # fmt: skip
_CIFAR100 = _Edition(
    "cifar-100", 100, ("train",), ("test",), "fine_labels", _HUNDRED,
)  # fmt: skip
_PAGE = {"authors": "https://www.cs.toronto.edu/~kriz/cifar.html"}
_EXPECTED = (
    "the python batches (data_batch_1 ... or train and test), the binary ones (.bin), or {train,test}/{class}/*.png"
)


def cifar_10(
    root: str | Path,
    protocol: str = "fedntd",
    size: int | None = None,
    complete: bool = True,
    allow_pickle: bool = False,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read CIFAR-10: 50,000 training and 10,000 test images at one site, for a partition rule to divide.

    `root` is the folder of the python batches (pickles), of the binary version, or of {train,test}/{class}/*.png. The
    protocol says whose mean and standard deviation. GReg does not state its input size, normalization and choice of
    images; here it is 224 pixels, as on its other data sets, no normalization, and a stratified half.
    """
    return _cifar(CIFAR10, _CIFAR10, root, protocol, size, complete, allow_pickle, cache, memory_limit)


def cifar_100(
    root: str | Path,
    protocol: str = "feddc",
    size: int | None = None,
    complete: bool = True,
    allow_pickle: bool = False,
    cache: Cache = None,
    memory_limit: int = MEMORY,
) -> Federation:
    """Read CIFAR-100: 50,000 training and 10,000 test images of a hundred classes at one site.

    The options are those of `cifar_10`; the labels are the fine ones.

    `root` is the folder of the python files, of the binary version, or of {train,test}/{class}/*.png. The protocol says
    whose mean and standard deviation.
    """
    return _cifar(CIFAR100, _CIFAR100, root, protocol, size, complete, allow_pickle, cache, memory_limit)


def cifar10_layout(root: Path) -> str | None:
    """Which layout of CIFAR-10 a folder has, in words."""
    return _layout(_CIFAR10, root)


def cifar100_layout(root: Path) -> str | None:
    """Which layout of CIFAR-100 a folder has, in words."""
    return _layout(_CIFAR100, root)


def _layout(edition: _Edition, root: Path) -> str | None:
    for suffix, words in (("", "python batches (pickles)"), (".bin", "binary batches")):
        if all((root / f"{name}{suffix}").is_file() for name in (*edition.train, *edition.test)):
            return words
    folders = [p.name for p in (root / "train").iterdir() if p.is_dir()] if (root / "train").is_dir() else []
    if not (root / "test").is_dir() or len(folders) != edition.classes:
        return None
    return "PNG folders" if edition.classes == 100 or sorted(folders) == list(CIFAR10_CLASSES) else None


def _cifar(
    reader: Reader,
    edition: _Edition,
    root: str | Path,
    protocol: str,
    size: int | None,
    complete: bool,
    allow_pickle: bool,
    cache: Cache,
    memory_limit: int,
) -> Federation:
    place = reader.find(root, protocol)
    size = size or (224 if protocol == "greg" else 32)
    found = _layout(edition, place)
    problems: list[str] = []
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    sizes, classes = {}, list(CIFAR10_CLASSES)
    for part, names in (("train", edition.train), ("test", edition.test)):
        try:
            if found == "PNG folders":
                x, y, classes = _pngs(place / part)
            elif found == "binary batches":
                x, y = _binary(edition, [place / f"{name}.bin" for name in names])
            else:
                x, y = _batches(edition, [place / name for name in names], allow_pickle)
        except BadInput as problem:
            problems.append(f"{part}: {problem}")
            continue
        sizes[part] = len(y)
        if protocol == "greg" and part == "train":
            half = stratified(y, len(y) // 2, 0, edition.name)
            x, y = x[half], y[half]
        arrays[part] = x, y
    raise_problems(f'Federation "{edition.name}" in "{place}"', problems)
    if edition.classes == 100 and found != "PNG folders":
        classes = _fine_names(place, allow_pickle)
    notes = deviations(edition.name, compared(edition.name, sizes, {"train": 50_000, "test": 10_000}), complete)
    pixels, where = {part: x for part, (x, _) in arrays.items()}, f'Federation "{edition.name}"'
    images = enlarged(where, pixels, size, cache, memory_limit, str(place.resolve()))
    splits = {part: Split(images[part], torch.from_numpy(y)) for part, (_, y) in arrays.items()}
    site = Site(edition.name, edition.name, splits["train"], test=splits["test"])
    source = {"spec": edition.name, **source_of(root, protocol, 0, notes), "size": size}
    return Federation(
        edition.name, [site], classes, edition.protocols[protocol][0], source, edition.protocols[protocol][1]
    )


def _batches(edition: _Edition, paths: list[Path], allow_pickle: bool) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for path in paths:
        batch = load_pickle(path, allow_pickle, encoding="latin1")
        if not isinstance(batch, dict) or not {"data", edition.label} <= set(batch):
            raise BadInput(f'{path.name} is not a batch of {edition.name}: it has no "data" and "{edition.label}".')
        data = np.asarray(batch["data"])
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072 or len(data) != len(batch[edition.label]):
            raise BadInput(f"{path.name} must hold uint8 rows of 3,072 pixels with a label each, got {data.shape}.")
        images.append(data)
        labels.append(np.asarray(batch[edition.label], np.int64))
    return np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.concatenate(labels)


def _binary(edition: _Edition, paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """One byte of label (two for CIFAR-100: coarse, fine) and 3,072 of pixels per image."""
    head = 1 if edition.classes == 10 else 2
    rows = []
    for path in paths:
        data = np.fromfile(path, np.uint8)
        if len(data) % (head + 3072):
            raise BadInput(f"{path.name} has {len(data):,} bytes, not a multiple of {head + 3072:,}; it is truncated.")
        rows.append(data.reshape(-1, head + 3072))
    table = np.concatenate(rows)
    return table[:, head:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), table[:, head - 1].astype(np.int64)


def _pngs(folder: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir())
    paths = [(path, i) for i, name in enumerate(classes) for path in images_in(folder / name)]
    pictures = Pictures([path for path, _ in paths], np.asarray([label for _, label in paths], np.int64))
    images = np.empty((len(pictures), 32, 32, 3), np.uint8)
    for i, path in enumerate(pictures.paths):
        try:
            with open_image(path) as image:
                images[i] = np.asarray(image.convert("RGB"))
        except Exception as problem:  # Pillow's decoders raise almost anything on broken files
            raise BadInput(f'"{path}" cannot be read as 32x32 pixels: {problem}.') from None
    return images, pictures.y, classes


def _fine_names(place: Path, allow_pickle: bool) -> list[str]:
    text = place / "fine_label_names.txt"
    if text.is_file():
        return text.read_text(encoding="utf-8").split()
    if (place / "meta").is_file():
        return [str(name) for name in load_pickle(place / "meta", allow_pickle, encoding="latin1")["fine_label_names"]]
    return [str(label) for label in range(100)]


def cifar_10_c(
    root: str | Path, protocol: str = "fednn", size: int = 32, seed: int = 23, complete: bool = True
) -> Federation:
    """Read CIFAR-10-C: the test images of CIFAR-10 under nineteen corruptions, one per client.

    Severity s is rows (s-1) 10,000 to s 10,000 of every file. All clients have the same 10,000 images, so 500 of them
    (stratified) are kept for testing at all clients, and nobody trains on them (our choice). Mean, standard deviation,
    flips and crops are those of FedDyn, on which FedNN builds (our choice).

    `root` is the folder of gaussian_noise.npy, ... and labels.npy. The seed decides which 500 images are tested;
    `complete` fails if a corruption is missing.
    """
    place = CIFAR10C.find(root, protocol)
    severity = 4 if protocol == "fednn" else int(protocol[-1])
    problems, missing, sites = [], [], []
    labels = _npy(place / "labels.npy")
    per_level = len(labels) // 5
    if labels.ndim != 1 or per_level == 0 or not np.array_equal(labels[:per_level], labels[per_level : 2 * per_level]):
        raise BadInput(
            f'Federation "cifar-10-c": "{place / "labels.npy"}" must repeat the same labels for five severities.'
        )
    rows = slice((severity - 1) * per_level, severity * per_level)
    y = labels[rows].astype(np.int64)
    held = stratified(y, per_level // 20, seed, "cifar-10-c")
    kept = np.setdiff1d(np.arange(per_level), held)
    for name in CORRUPTIONS:
        if not (place / f"{name}.npy").is_file():
            missing.append(f"{name}.npy is missing")
            continue
        images = _npy(place / f"{name}.npy")
        if images.dtype != np.uint8 or images.shape != (len(labels), 32, 32, 3):
            problems.append(
                f"{name}.npy must be uint8 of shape {(len(labels), 32, 32, 3)}, got {images.dtype} {images.shape}"
            )
            continue
        x = as_rgb(np.asarray(images[rows]), size)
        train, test = (Split(torch.from_numpy(x[at]), torch.from_numpy(y[at])) for at in (kept, held))
        sites.append(Site(name, name, train, test=test))
    raise_problems(f'Federation "cifar-10-c" in "{place}"', problems)
    missing += compared("cifar-10-c", {"labels": len(labels)}, {"labels": 50_000}, "rows")
    notes = deviations("cifar-10-c", missing, complete)
    source = {"spec": "cifar-10-c", **source_of(root, protocol, seed, notes), "size": size}
    return Federation("cifar-10-c", sites, CIFAR10_CLASSES, _FEDDC, source, Protocol("feddyn"))


def corruptions_layout(root: Path) -> str | None:
    """Whether a folder is CIFAR-10-C."""
    there = sum((root / f"{name}.npy").is_file() for name in CORRUPTIONS)
    return f"{there} of 19 corruptions" if there and (root / "labels.npy").is_file() else None


def _npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as problem:  # NumPy raises almost anything on broken files
        raise BadInput(f'Federation "cifar-10-c": {path.name} cannot be read: {problem}.') from None


CIFAR10 = Reader(
    "cifar-10",
    "CIFAR-10: ten classes at one site, for partition rules",
    cifar_10,
    CIFAR10_PROTOCOLS,
    cifar10_layout,
    _EXPECTED,
    ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "CIFAR-10", "cifar-10"),
    Published(
        "Small photographs (32 x 32 pixels) of ten classes.", _PAGE, "none found", {"cifar-10": (50_000, 10_000)}
    ),
    square=True,
)
CIFAR100 = Reader(
    "cifar-100",
    "CIFAR-100: 100 classes at one site, for partition rules",
    cifar_100,
    CIFAR100_PROTOCOLS,
    cifar100_layout,
    _EXPECTED,
    ("cifar-100-python", "cifar-100-binary", "cifar100", "CIFAR-100", "cifar-100"),
    Published(
        "Small photographs (32 x 32 pixels) of 100 classes.", _PAGE, "none found", {"cifar-100": (50_000, 10_000)}
    ),
    square=True,
)
CIFAR10C = Reader(
    "cifar-10-c",
    "CIFAR-10-C: ten classes under nineteen corruptions",
    cifar_10_c,
    CIFAR10C_PROTOCOLS,
    corruptions_layout,
    "ROOT/gaussian_noise.npy, ..., labels.npy",
    ("CIFAR-10-C", "cifar-10-c"),
    Published(
        "The 10,000 test images of CIFAR-10 under nineteen corruptions, each at five severities.",
        {"authors": "https://zenodo.org/records/2535967"},
        "CC BY 4.0",
        {"all": 950_000},
    ),
    square=True,
)
