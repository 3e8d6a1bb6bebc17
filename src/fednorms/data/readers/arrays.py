"""Array files: MedMNIST, NumPy .npz with one file per site, and Hugging Face datasets saved to disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.data.arrays import from_arrays
from fednorms.data.federation import Federation, raise_problems
from fednorms.data.readers.reader import Reader, chosen

MEDMNIST_PROTOCOLS = {"official": "the official train, validation and test splits; one site per file"}
NPZ_PROTOCOLS = {"own": "your own arrays, one .npz per site, with their splits or divided here"}
HF_PROTOCOLS = {"own": "your own dataset, divided into sites by a column, with its splits or divided here"}

_PARTS = ("train", "val", "test")
_X, _Y = ("x", "images", "image", "data", "X"), ("y", "labels", "label", "target", "targets")
_SITE = ("site", "domain", "client", "center", "centre", "hospital")


def medmnist(
    root: str | Path, protocol: str = "official", size: int | None = None, channels: int | None = None
) -> Federation:
    """MedMNIST: a file such as bloodmnist.npz, or a folder of files with the same classes, one site each.

    OrganA, OrganC and OrganS show the same eleven organs from three sides and so make a federation. Multi-label and
    three-dimensional sets are refused.

    Args:
        root: the .npz file, or the folder of several.
        protocol: "official".
        size: in pixels, if not the file's.
        channels: 1 or 3, if not the file's.

    Paper: Yang et al., MedMNIST v2, Scientific Data 2023.
    """
    chosen("medmnist", protocol, MEDMNIST_PROTOCOLS)
    files = [p for p in _npz_files(root) if _is_medmnist(p)]
    if not files:
        raise BadInput(f"medmnist: {str(root)!r} holds no .npz with train_images, train_labels, ...")
    sites: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    problems, tops = [], {}
    for path in files:
        arrays = _arrays(path)
        parts = {}
        for part in _PARTS:
            x, y = arrays.get(f"{part}_images"), arrays.get(f"{part}_labels")
            if x is None or y is None:
                problems.append(f"{path.name}: {part}_images or {part}_labels is missing")
            elif y.ndim == 2 and y.shape[1] > 1:
                problems.append(f"{path.name}: {y.shape[1]} labels per image; only one is supported")
            elif x.ndim == 5 or (x.ndim == 4 and x.shape[3] not in (1, 3)):
                problems.append(f"{path.name}: images of shape {x.shape[1:]}; volumes are not supported")
            else:
                parts[part] = (_nchw(x, size), y.reshape(-1).astype(np.int64))
        if len(parts) == 3:
            sites[path.stem] = parts
            tops[path.stem] = max(int(y.max()) for _, y in parts.values()) + 1
    if len(set(tops.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in tops.items())
        problems.append(f"files with different numbers of classes ({listed}); give the path of one of them")
    raise_problems(f"medmnist in {str(root)!r}", problems)
    several = len({x.shape[1] for parts in sites.values() for x, _ in parts.values()}) > 1
    made = from_arrays(sites, layout="NCHW", channels=channels or (3 if several else None), name="medmnist")
    return _with_source(made, "medmnist", root, protocol, {"size": size, "channels": channels})


def medmnist_layout(root: Path) -> str | None:
    """Whether a folder has files of MedMNIST."""
    files = [path.stem for path in _npz_files(root) if _is_medmnist(path)]
    return f"MedMNIST files: {', '.join(files[:6])}" if files else None


def npz(
    root: str | Path,
    protocol: str = "own",
    size: int | None = None,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
) -> Federation:
    """NumPy archives, one site per file: x and y (divided here), or x_train, y_train, x_test, y_test and perhaps val.

    Images may be called images or data, labels target; N,H,W or N,H,W,C or N,C,H,W. Names of classes may be in an
    array `classes`. Archives that hold Python objects are refused.

    Args:
        root: the .npz file, or the folder of several.
        protocol: "own".
        size: resize to this many pixels.
        seed: of the division, where the file has none.
        val: fraction for validation, where the file has none.
        test: fraction for testing, where the file has none.
    """
    chosen("npz", protocol, NPZ_PROTOCOLS)
    files = _npz_files(root)
    if not files:
        raise BadInput(f"npz: {str(root)!r} is not an .npz file and holds none")
    sites: dict[str, Any] = {}
    problems, named = [], []
    for path in files:
        try:
            sites[path.stem], classes = _site(_arrays(path), size)
        except BadInput as problem:
            problems.append(f"{path.name}: {problem}")
            continue
        if classes is not None:
            named.append(tuple(classes))
    if len(set(named)) > 1:
        problems.append("the files name different classes")
    raise_problems(f"npz in {str(root)!r}", problems)
    name = Path(root).expanduser().resolve().stem
    made = from_arrays(sites, named[0] if named else None, val, test, seed, "NCHW", name=name)
    return _with_source(made, "npz", root, protocol, {"size": size, "seed": seed, "val": val, "test": test})


def npz_layout(root: Path) -> str | None:
    """Whether a folder has .npz files that are not MedMNIST's."""
    files = [path for path in _npz_files(root) if not _is_medmnist(path)]
    for path in files:
        try:
            _site(_arrays(path), None)
        except BadInput:
            return None
    return f"{len(files)} .npz files" if files else None


def hugging_face(
    root: str | Path,
    protocol: str = "own",
    size: int | None = None,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
) -> Federation:
    """A Hugging Face dataset written with `save_to_disk`: an image column, a label column, and perhaps a site column.

    The site column is called site, domain, client, center, centre or hospital; without one there is a single site.
    A DatasetDict's splits train, validation and test are kept; a single Dataset is divided here. Nothing is
    downloaded and no code of the dataset is run. Needs `pip install 'fednorms[hf]'`.

    Args:
        root: the folder that `save_to_disk` wrote.
        protocol: "own".
        size: resize to this many pixels; without it all images must have one size.
        seed: of the division, if it is drawn.
        val: fraction for validation, if it is drawn.
        test: fraction for testing, if it is drawn.
    """
    chosen("huggingface", protocol, HF_PROTOCOLS)
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError:
        raise BadInput("huggingface: reading datasets needs the extra: pip install 'fednorms[hf]'") from None
    root = Path(root).expanduser()
    if hf_layout(root) is None:
        raise BadInput(f"huggingface: {str(root)!r} is not a folder that save_to_disk wrote")
    try:
        loaded = load_from_disk(str(root))
    except Exception as problem:  # the library raises almost anything on broken folders
        raise BadInput(f"huggingface: {str(root)!r} cannot be read: {problem}") from problem
    parts = dict(loaded.items()) if isinstance(loaded, DatasetDict) else {"": loaded}
    words = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test", "": ""}
    if unknown := [part for part in parts if part not in words]:
        raise BadInput(f"huggingface: splits are train, validation and test, got {', '.join(unknown)}")
    sites: dict[str, Any] = {}
    classes: list[str] | None = None
    for part, data in parts.items():
        x_name, y_name = _column(data.features, _X, "image"), _column(data.features, _Y, "label")
        s_name = next((name for name in _SITE if name in data.features), None)
        classes = classes or getattr(data.features[y_name], "names", None)
        labels = np.asarray(data[y_name], np.int64)
        owners = np.asarray([str(s) for s in data[s_name]]) if s_name else np.full(len(labels), root.name)
        for site in dict.fromkeys(owners.tolist()):
            at = np.flatnonzero(owners == site)
            images = [_pixels(data[int(i)][x_name], size) for i in at]
            if len({image.shape for image in images}) > 1:
                raise BadInput(f"huggingface: site {site!r} has images of different sizes; set size=")
            pair = (np.stack(images), labels[at])
            if part:
                sites.setdefault(site, {})[words[part]] = pair
            else:
                sites[site] = pair
    made = from_arrays(sites, classes, val, test, seed, "NHWC", name=root.resolve().name)
    return _with_source(made, "huggingface", root, protocol, {"size": size, "seed": seed, "val": val, "test": test})


def hf_layout(root: Path) -> str | None:
    """Whether a folder was written by `save_to_disk`."""
    if (root / "dataset_dict.json").is_file():
        return "DatasetDict saved to disk"
    return (
        "Dataset saved to disk" if (root / "state.json").is_file() and (root / "dataset_info.json").is_file() else None
    )


def _column(features: Mapping[str, Any], names: tuple[str, ...], what: str) -> str:
    found = next((name for name in names if name in features), None)
    if found is None:
        raise BadInput(f"huggingface: no {what} column ({', '.join(names)}); it has {', '.join(features)}")
    return found


def _pixels(image: Any, size: int | None) -> np.ndarray:  # noqa: ANN401
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image, np.uint8))
    picture = picture.convert("RGB")
    if size is not None:
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(picture)


def _npz_files(root: str | Path) -> list[Path]:
    root = Path(root).expanduser()
    if root.is_file():
        return [root] if root.suffix == ".npz" else []
    return sorted(p for p in root.glob("*.npz") if not p.name.startswith(".")) if root.is_dir() else []


def _is_medmnist(path: Path) -> bool:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {"train_images", "train_labels"} <= set(arrays.files)
    except Exception:  # not an archive at all
        return False


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as problem:  # zipfile and NumPy raise almost anything on broken or hostile files
        raise BadInput(f"{path.name} cannot be read as plain arrays: {problem}") from problem


def _site(arrays: Mapping[str, np.ndarray], size: int | None) -> tuple[Any, list[str] | None]:
    classes = [str(name) for name in arrays["classes"]] if "classes" in arrays else None
    pair = _pair(arrays, "")
    if pair is not None:
        return (_nchw(pair[0], size), pair[1].reshape(-1)), classes
    parts = {part: found for part in _PARTS if (found := _pair(arrays, part)) is not None}
    if not parts:
        raise BadInput(f"no x and y, and no x_train and y_train; it has {', '.join(arrays)}")
    return {part: (_nchw(x, size), y.reshape(-1)) for part, (x, y) in parts.items()}, classes


def _pair(arrays: Mapping[str, np.ndarray], part: str) -> tuple[np.ndarray, np.ndarray] | None:
    def get(names: tuple[str, ...]) -> np.ndarray | None:
        spelt = [s for n in names for s in ((n,) if not part else (f"{n}_{part}", f"{part}_{n}"))]
        return next((arrays[s] for s in spelt if s in arrays), None)

    x, y = get(_X), get(_Y)
    return None if x is None or y is None else (x, y)


def _nchw(x: np.ndarray, size: int | None) -> np.ndarray:
    """Images of N,H,W or N,H,W,C or N,C,H,W as N,C,H,W, resized (bilinear, as Pillow does) if a size is given."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] not in (1, 3, 4) or x.shape[3] in (1, 3, 4):
        raise BadInput(
            f"cannot tell where the channels are in images of shape {x.shape}; store them as N,H,W or N,H,W,C"
        )
    if size is None or x.shape[2:] == (size, size):
        return x
    from PIL import Image

    if x.dtype != np.uint8:
        raise BadInput(f"resizing needs uint8 images, got {x.dtype}; leave size out")
    planes = x.reshape(-1, *x.shape[2:])  # bilinear treats every channel on its own
    small = [np.asarray(Image.fromarray(plane).resize((size, size), Image.Resampling.BILINEAR)) for plane in planes]
    return np.asarray(small, np.uint8).reshape(*x.shape[:2], size, size)


def _with_source(
    made: Federation, spec: str, root: str | Path, protocol: str, options: Mapping[str, Any]
) -> Federation:
    source = {"spec": spec, "root": str(Path(root).expanduser().resolve()), "protocol": protocol, **options}
    return replace(made, source=source)


MEDMNIST = Reader("medmnist", "MedMNIST .npz files, one site each", medmnist, MEDMNIST_PROTOCOLS, medmnist_layout)
NPZ = Reader("npz", "your own arrays, one .npz per site", npz, NPZ_PROTOCOLS, npz_layout)
HF = Reader("huggingface", "a Hugging Face dataset saved to disk (extra hf)", hugging_face, HF_PROTOCOLS, hf_layout)
