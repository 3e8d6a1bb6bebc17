"""Digits-Five: MNIST, SVHN, USPS, SynthDigits and MNIST-M, ten digits in five domains.

Papers:
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
    https://arxiv.org/abs/2102.07623 (lists and protocol)
    LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proceedings of the IEEE 86(11) 1998,
    https://doi.org/10.1109/5.726791 (MNIST)
    Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, NIPS 2011 workshop on deep
    learning and unsupervised feature learning, http://ufldl.stanford.edu/housenumbers/nips2011_housenumbers.pdf (SVHN)
    Hull, A Database for Handwritten Text Recognition Research, IEEE Trans. Pattern Analysis and Machine Intelligence
    16(5) 1994, https://doi.org/10.1109/34.291440 (USPS)
    Ganin, Lempitsky, Unsupervised Domain Adaptation by Backpropagation, ICML 2015, https://arxiv.org/abs/1409.7495
    (SynthDigits and MNIST-M)
"""

from __future__ import annotations

import bz2
import gzip
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.folders.decode import FORMATS
from fednorms.data.pickles import load_pickle
from fednorms.data.problems import raise_problems
from fednorms.data.readers.divisions import even, sklearn_eighty_twenty
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, compared, deviations, source_of

PROTOCOLS = {
    "fedwon": "FedBN and FedWon, cross-silo tables: five clients with part 0 (743 images) each, 28 px",
    "fedwon-cross-device": "FedWon, cross-device tables: 7,438 images per domain over 20 clients, 28 px",
    "fedwon-cross-device-1000": "FedWon, 1,000 clients: 7,438 images per domain over 200 clients, 28 px",
    "fednn": "FedNN's Digit: the first half of part 0 (371 images) per client, 32 px; pooled score",
    "full": "all 7,438 training images of each domain at one client, for partition rules",
    "fedwon-val": "as fedwon, with images 743 to 1,485 of each domain's training part for validation",
    "fednn-val": "as fednn, with the same validation images",
    "fedwon-cross-device-val": "as fedwon-cross-device, with the same validation images, which then do not train",
}
_VALIDATION = slice(743, 1486)  # for the search of learning rates
_CLIENTS = {"fedwon-cross-device": 20, "fedwon-cross-device-1000": 200}
_SIZES = {"fedwon": 743, "fednn": 371}
_DOMAIN = 7438  # training images per domain: all that USPS, the smallest, has
_TILE, _ROW = 28, 100  # of a sheet of images


@dataclass(frozen=True)
class _Domain:
    name: str
    folder: str  # in FedBN's release
    sheet: str
    train: int
    test: int


# In the order of FedBN and FedWon.
_DOMAINS = (
    _Domain("mnist", "MNIST", "mnist", 56_000, 14_000),
    _Domain("svhn", "SVHN", "svhn", 79_431, 19_858),
    _Domain("usps", "USPS", "usps", 7_438, 1_860),
    _Domain("synthdigits", "SynthDigits", "synthdigits", 391_162, 97_791),
    _Domain("mnist-m", "MNIST_M", "mnist_m", 56_000, 14_000),
)
_FEDNN_ORDER = ("mnist", "mnist-m", "svhn", "synthdigits", "usps")


def digits_five(
    root: str | Path,
    protocol: str = "fedwon",
    size: int | None = None,
    seed: int = 0,
    complete: bool = True,
    allow_pickle: bool = False,
) -> Federation:
    """Read the five digit domains, divided as FedBN, FedWon or FedNN do.

    Every domain has one stratified 80/20 split of all images (seed 0). The first 7,438 training images, in the order of
    the split, are cut into ten parts of 743 or 744. Gray images become RGB. All images are resized (bilinear) to 28
    pixels, or 32 for FedNN; pixels are scaled to [-1, 1]; there is no augmentation.

    The papers do not state everything. We infer 743 images cross-silo and 7,438 cross-device, and 371 for a client of
    FedNN, as in its released code. Our choice: cross-device clients get an even random share of the training images and
    an even share of their domain's test images, so a domain's accuracy is that of its test set.

    The seed is that of the cross-device division; the 80/20 split and the parts are fixed.

    >>> digits_five("/no/such/place")
    Traceback (most recent call last):
    fednorms.BadInput: Federation "digits-five": "/no/such/place" is not a folder; expected ...
    """
    place = READER.find(root, protocol)
    base, validated = protocol.removesuffix("-val"), protocol.endswith("-val")
    size = size or (32 if base == "fednn" else 28)
    found, problems, sites = {}, [], []
    for domain in _DOMAINS:
        try:
            found[domain.name] = _read(place, domain, allow_pickle)
        except BadInput as problem:
            problems.append(f"{domain.name}: {problem}")
    raise_problems(f'Federation "digits-five" in "{place}"', problems)
    notes = deviations("digits-five", _differences(found), complete) + _shortened(found)
    domains = {d.name: d for d in _DOMAINS}
    for name in _FEDNN_ORDER if base == "fednn" else tuple(domains):
        (x, y), (x_test, y_test) = found[name]
        at = np.arange(min(_SIZES.get(base, _DOMAIN), len(y)))
        held = np.arange(len(y))[_VALIDATION] if validated else np.arange(0)
        at = np.setdiff1d(at, held)
        train, test = _split(x[at], y[at], size), _split(x_test, y_test, size)
        val = _split(x[held], y[held], size) if len(held) else None
        sites += _sites(name, train, val, test, _CLIENTS.get(base, 1), seed)
    return Federation(
        "digits-five",
        sites,
        [str(digit) for digit in range(10)],
        Preprocessing.centered(3),
        {"spec": "digits-five", **source_of(root, protocol, seed, notes), "size": size, "layout": layout(place)},
    )


def layout(root: Path) -> str | None:
    """Which layout of Digits-Five a folder has, in words."""
    if any((root / f"{d.sheet}_train.{suffix}").is_file() for d in _DOMAINS for suffix in ("webp", "png")):
        return "image sheets"
    folders = [root / d.folder for d in _DOMAINS if (root / d.folder).is_dir()]
    if len(folders) < 2:
        return None
    for words, pattern in (
        ("FedBN release (pickles)", "train.pkl"),
        ("FedBN release (pickles)", "partitions/train_part0.pkl"),
        ("FedBN release (npz)", "train.npz"),
    ):
        if any((folder / pattern).is_file() for folder in folders):
            return words
    return "raw sources" if any(_raw_files(root, d) for d in _DOMAINS) else None


Arrays = tuple[np.ndarray, np.ndarray]


def _read(place: Path, domain: _Domain, allow_pickle: bool) -> tuple[Arrays, Arrays]:
    """Training and test images (N,H,W or N,H,W,3, uint8) and labels, in the order of the 80/20 split."""
    for suffix in ("webp", "png"):
        if (place / f"{domain.sheet}_train.{suffix}").is_file():
            return _sheet(place, f"{domain.sheet}_train", suffix), _sheet(place, f"{domain.sheet}_test", suffix)
    folder = place / domain.folder
    if (folder / "train.npz").is_file():
        return _npz(folder / "train.npz"), _npz(folder / "test.npz")
    if (folder / "test.pkl").is_file():
        return _released_train(folder, allow_pickle), _pair(folder / "test.pkl", allow_pickle)
    if files := _raw_files(place, domain):
        return _split_raw(*_raw(domain, files, allow_pickle))
    raise BadInput(
        f"nothing to read; expected {domain.folder}/train.pkl and test.pkl, {domain.folder}/train.npz and test.npz, "
        f"{', '.join(f'{domain.folder}/{name}' for name in _RAW[domain.name])}, or {domain.sheet}_train.webp."
    )


def _sheet(place: Path, name: str, suffix: str) -> Arrays:
    picture, table = place / f"{name}.{suffix}", place / f"{name}_labels.npy"
    try:
        y = np.load(table, allow_pickle=False)
        with Image.open(picture, formats=FORMATS) as image:
            sheet = np.asarray(image.convert("RGB"))
    except FileNotFoundError as problem:
        raise BadInput(f"{Path(str(problem.filename)).name} is missing.") from None
    except Exception as problem:  # Pillow's decoders raise almost anything on broken files
        raise BadInput(f"{picture.name} or {table.name} cannot be read: {problem}.") from problem
    high, wide, _ = sheet.shape
    if wide != _ROW * _TILE or high % _TILE or y.ndim != 1 or not 0 <= high // _TILE * _ROW - len(y) < _ROW:
        raise BadInput(
            f"{picture.name} is {high}x{wide} pixels and {table.name} has shape {y.shape}; expected rows of {_ROW} "
            f"tiles of {_TILE}x{_TILE}, as many as there are labels."
        )
    tiles = sheet.reshape(high // _TILE, _TILE, _ROW, _TILE, 3).swapaxes(1, 2).reshape(-1, _TILE, _TILE, 3)
    return tiles[: len(y)], _digits(y, table)


def _npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in ("x", "y") if name not in arrays]
            if missing:
                raise BadInput(f'{path.name} has no array "{missing[0]}"; it has {", ".join(arrays)}.')
            return _checked(arrays["x"], arrays["y"], path)
    except BadInput:
        raise
    except Exception as problem:  # zipfile and NumPy raise almost anything on broken files
        raise BadInput(f"{path.name} cannot be read: {problem}.") from problem


def _released_train(folder: Path, allow_pickle: bool) -> Arrays:
    if (folder / "train.pkl").is_file():
        return _pair(folder / "train.pkl", allow_pickle)
    parts = [_pair(folder / "partitions" / f"train_part{i}.pkl", allow_pickle) for i in range(10)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _pair(path: Path, allow_pickle: bool) -> Arrays:
    pair = load_pickle(path, allow_pickle)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadInput(f"{path.name} must hold a pair (images, labels), got {type(pair).__name__}.")
    return _checked(np.asarray(pair[0]), np.asarray(pair[1]), path)


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> Arrays:
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
        raise BadInput(f"{path.name}: images must be uint8 of shape N,H,W or N,H,W,3, got {x.dtype} {x.shape}.")
    if len(x) != y.size:
        raise BadInput(f"{path.name}: {len(x)} images but {y.size} labels.")
    return x, _digits(y, path)


def _digits(y: np.ndarray, path: Path) -> np.ndarray:
    labels = np.asarray(y).reshape(-1)
    if labels.dtype.kind not in "iuf" or len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
        raise BadInput(f"{path.name}: labels must be the digits 0 to 9, got {labels.dtype} {labels[:5].tolist()} ...")
    return labels.astype(np.int64)


# Raw sources: the files as they are published.
_RAW: Mapping[str, tuple[str, ...]] = {
    "mnist": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    "svhn": ("train_32x32.mat", "test_32x32.mat"),
    "usps": ("usps.bz2", "usps.t.bz2"),
    "synthdigits": ("synth_train_32x32.mat", "synth_test_32x32.mat"),
    "mnist-m": ("mnistm_data.pkl",),
}


def _raw_files(root: Path, domain: _Domain) -> list[Path]:
    places = [root / domain.folder, root / domain.folder / "raw", root]
    found = []
    for name in _RAW[domain.name]:
        options = [place / file for place in places for file in (name, f"{name}.gz")]
        there = next((path for path in options if path.is_file()), None)
        if there is None:
            return []
        found.append(there)
    return found


def _raw(domain: _Domain, files: list[Path], allow_pickle: bool) -> Arrays:
    try:
        if domain.name == "mnist":
            parts = [_idx(path) for path in files]
            return np.concatenate(parts[0::2]), np.concatenate(parts[1::2])
        if domain.name == "usps":
            pairs = [_libsvm(path) for path in files]
        elif domain.name == "mnist-m":
            data = load_pickle(files[0], allow_pickle)
            pairs = [(data[part], data[f"{part}_label"]) for part in ("train", "valid", "test")]
        else:
            pairs = [_mat(path) for path in files]
    except BadInput:
        raise
    except Exception as problem:  # a broken file fails anywhere in NumPy, gzip or SciPy
        raise BadInput(f"{', '.join(p.name for p in files)} cannot be read: {problem}.") from problem
    return np.concatenate([x for x, _ in pairs]), np.concatenate([np.asarray(y).reshape(-1) for _, y in pairs])


def _split_raw(x: np.ndarray, y: np.ndarray) -> tuple[Arrays, Arrays]:
    parts = sklearn_eighty_twenty(y)
    # Only the first 7,438 training images are ever used; SynthDigits has fifty times as many.
    train = parts["train"][:_DOMAIN]
    return (x[train], y[train].astype(np.int64)), (x[parts["test"]], y[parts["test"]].astype(np.int64))


def _idx(path: Path) -> np.ndarray:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zero, kind, axes = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != 8:
        raise BadInput(f"{path.name} is not an IDX file of bytes.")
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _libsvm(path: Path) -> Arrays:
    images, labels = [], []
    with bz2.open(path, "rt") as lines:
        for line in lines:
            label, *values = line.split()
            labels.append(int(label) - 1)
            images.append([value.rpartition(":")[2] for value in values])
    pixels = np.asarray(images, dtype=np.float32).reshape(-1, 16, 16)
    return ((pixels + 1) / 2 * 255).astype(np.uint8), np.asarray(labels)


def _mat(path: Path) -> Arrays:
    from scipy.io import loadmat  # SciPy comes with scikit-learn

    data = loadmat(path)
    y = data["y"].astype(np.int64).reshape(-1)
    return data["X"].transpose(3, 0, 1, 2), np.where(y == 10, 0, y)


def _differences(found: Mapping[str, tuple[Arrays, Arrays]]) -> list[str]:
    """Counts that are not the published ones."""
    told = []
    for domain in _DOMAINS:
        train, test = (len(y) for _, y in found[domain.name])
        # Sheets and raw sources have only the images that are used; sheets have at most 4,000 test images.
        if train not in (domain.train, _DOMAIN):
            told += compared(domain.name, {"train": train}, {"train": _DOMAIN})
        if test not in (domain.test, min(4000, domain.test)):
            told += compared(domain.name, {"test": test}, {"test": domain.test})
    return told


def _shortened(found: Mapping[str, tuple[Arrays, Arrays]]) -> list[str]:
    short = [d for d in _DOMAINS if len(found[d.name][1][1]) < d.test]
    return [f"{d.name}: tested on the first {len(found[d.name][1][1]):,} of {d.test:,} test images" for d in short]


def _split(x: np.ndarray, y: np.ndarray, size: int) -> Split:
    return Split(torch.from_numpy(as_rgb(x, size)), torch.from_numpy(y.copy()))


def as_rgb(x: np.ndarray, size: int) -> np.ndarray:
    """N,H,W or N,H,W,C pixels as N,3,size,size, resized as Pillow does (bilinear).

    >>> as_rgb(np.full((2, 4, 4), 7, np.uint8), 8).shape
    (2, 3, 8, 8)
    """
    if x.ndim == 4 and x.shape[3] == 1:
        x = x[..., 0]
    out = np.empty((len(x), 3, size, size), np.uint8)
    if x.shape[1:3] == (size, size):
        out[:] = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x[:, None]
        return out
    for into, image in zip(out, x, strict=True):  # one by one: all at 224 pixels would not fit into memory
        resized = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
        into[:] = resized.transpose(2, 0, 1) if resized.ndim == 3 else resized
    return out


def _sites(name: str, train: Split, val: Split | None, test: Split, clients: int, seed: int) -> list[Site]:
    if clients == 1:
        return [Site(name, name, train, val, test)]
    digits = len(str(clients - 1))
    mine = even(len(train), clients, "digits-five", seed, name)
    tested = np.array_split(np.arange(len(test)), clients)
    held = [val.subset(at) for at in np.array_split(np.arange(len(val)), clients)] if val else [None] * clients
    return [
        Site(f"{name}-{i:0{digits}d}", name, train.subset(at), checks, test.subset(tests))
        for i, (at, checks, tests) in enumerate(zip(mine, held, tested, strict=True))
    ]


READER = Reader(
    "digits-five",
    "MNIST, SVHN, USPS, SynthDigits and MNIST-M: ten digits, five domains",
    digits_five,
    PROTOCOLS,
    layout,
    "ROOT/{MNIST,SVHN,USPS,SynthDigits,MNIST_M} with train.pkl and test.pkl (FedBN's release), train.npz and "
    "test.npz, or the raw sources; or ROOT/{mnist,svhn,usps,synthdigits,mnist_m}_{train,test}.webp with "
    "..._labels.npy (sheets of 28-pixel tiles, 100 in a row)",
    ("digits-five", "digits_five", "digits", "data"),
    Published(
        "Ten digits in five domains: handwritten (MNIST, USPS), house numbers (SVHN), rendered (SynthDigits) and "
        "blended into photographs (MNIST-M). FedBN's release has all five, prepared.",
        {
            "FedBN's release": "https://github.com/med-air/FedBN",
            "MNIST": "http://yann.lecun.com/exdb/mnist/",
            "SVHN": "http://ufldl.stanford.edu/housenumbers/",
            "USPS": "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
            "SynthDigits and MNIST-M": "http://yaroslav.ganin.net/",
        },
        "SVHN is for non-commercial use; none found for the others",
        {domain.name: (domain.train, domain.test) for domain in _DOMAINS},
    ),
    square=True,
)
