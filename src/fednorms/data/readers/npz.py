"""NumPy archives (.npz), one site per file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.data.arrays import from_arrays
from fednorms.data.federation import Federation
from fednorms.data.problems import raise_problems
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, chosen
from fednorms.data.sizes import Size, sides

PROTOCOLS = {"own": "custom arrays, one .npz per site; their splits, or drawn ones"}
_PARTS = ("train", "val", "test")
IMAGE_NAMES = ("x", "images", "image", "data", "X")
LABEL_NAMES = ("y", "labels", "label", "target", "targets")


def npz(
    root: str | Path,
    protocol: str = "own",
    size: Size | None = None,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
) -> Federation:
    """Read NumPy archives, one site per file: x and y (split here), or x_train, y_train, x_test, y_test, perhaps val.

    Images may also be called images or data, and labels target. Their shape is N,H,W or N,H,W,C or N,C,H,W. An array
    `classes` may name the classes. Archives with Python objects are refused.

    `root` is the .npz file, or the folder of several. A split is drawn where the file has none.
    """
    chosen("npz", protocol, PROTOCOLS)
    files = array_files(root)
    if not files:
        raise BadInput(f'Federation "npz": "{root}" is not an .npz file and contains none.')
    sites: dict[str, Any] = {}
    problems, named = [], []
    for path in files:
        try:
            sites[path.stem], classes = _site(arrays_in(path), size)
        except BadInput as problem:
            problems.append(f"{path.name}: {problem}")
            continue
        if classes is not None:
            named.append(tuple(classes))
    if len(set(named)) > 1:
        problems.append("the files name different classes")
    raise_problems(f'Federation "npz" in "{root}"', problems)
    name = Path(root).expanduser().resolve().stem
    made = from_arrays(sites, named[0] if named else None, val, test, seed, "NCHW", name=name)
    return with_source(made, "npz", root, protocol, {"size": size, "seed": seed, "val": val, "test": test})


def layout(root: Path) -> str | None:
    """Whether a folder has .npz files that are not MedMNIST's."""
    files = [path for path in array_files(root) if not is_medmnist(path)]
    for path in files:
        try:
            _site(arrays_in(path), None)
        except BadInput:
            return None
    return f"{len(files)} .npz files" if files else None


def array_files(root: str | Path) -> list[Path]:
    """The .npz files of a folder, or the file itself."""
    root = Path(root).expanduser()
    if root.is_file():
        return [root] if root.suffix == ".npz" else []
    return sorted(p for p in root.glob("*.npz") if not p.name.startswith(".")) if root.is_dir() else []


def is_medmnist(path: Path) -> bool:
    """Whether a file has the arrays of MedMNIST."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {"train_images", "train_labels"} <= set(arrays.files)
    except Exception:  # not an archive at all
        return False


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; Python objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as problem:  # zipfile and NumPy raise almost anything on broken or hostile files
        raise BadInput(f"{path.name} cannot be read as plain arrays: {problem}.") from problem


def _site(arrays: Mapping[str, np.ndarray], size: Size | None) -> tuple[Any, list[str] | None]:
    classes = [str(name) for name in arrays["classes"]] if "classes" in arrays else None
    pair = _pair(arrays, "")
    if pair is not None:
        return (nchw(pair[0], size), pair[1].reshape(-1)), classes
    parts = {part: found for part in _PARTS if (found := _pair(arrays, part)) is not None}
    if not parts:
        raise BadInput(f"no x and y, and no x_train and y_train; it has {', '.join(arrays)}.")
    return {part: (nchw(x, size), y.reshape(-1)) for part, (x, y) in parts.items()}, classes


def _pair(arrays: Mapping[str, np.ndarray], part: str) -> tuple[np.ndarray, np.ndarray] | None:
    def get(names: tuple[str, ...]) -> np.ndarray | None:
        spelt = [s for n in names for s in ((n,) if not part else (f"{n}_{part}", f"{part}_{n}"))]
        return next((arrays[s] for s in spelt if s in arrays), None)

    x, y = get(IMAGE_NAMES), get(LABEL_NAMES)
    return None if x is None or y is None else (x, y)


def nchw(x: np.ndarray, size: Size | None) -> np.ndarray:
    """Images of N,H,W or N,H,W,C or N,C,H,W as N,C,H,W, resized (bilinear, as Pillow does) if a size is given."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] not in (1, 3, 4) or x.shape[3] in (1, 3, 4):
        raise BadInput(
            f"cannot tell where the channels are in images of shape {x.shape}; store them as N,H,W or N,H,W,C."
        )
    if size is None or x.shape[2:] == sides(size):
        return x
    height, width = sides(size)
    from PIL import Image

    if x.dtype != np.uint8:
        raise BadInput(f"resizing needs uint8 images, got {x.dtype}; leave size out.")
    planes = x.reshape(-1, *x.shape[2:])  # bilinear treats every channel on its own
    small = [np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR)) for plane in planes]
    return np.asarray(small, np.uint8).reshape(*x.shape[:2], height, width)


def with_source(made: Federation, spec: str, root: str | Path, protocol: str, options: Mapping[str, Any]) -> Federation:
    """The federation with a record of how it was read."""
    source = {"spec": spec, "root": str(Path(root).expanduser().resolve()), "protocol": protocol, **options}
    return replace(made, source=source)


READER = Reader(
    "npz",
    "custom arrays, one .npz per site",
    npz,
    PROTOCOLS,
    layout,
    "ROOT/SITE.npz with arrays x and y, or x_train, y_train, x_test and y_test, perhaps x_val and y_val; images of "
    "shape N,H,W or N,H,W,C or N,C,H,W. Images may be called "
    f"{', '.join(IMAGE_NAMES[1:4])}, and labels {', '.join(LABEL_NAMES[1:])}",
    published=Published("Your own arrays, one file per site."),
)
