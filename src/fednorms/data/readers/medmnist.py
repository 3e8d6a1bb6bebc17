"""MedMNIST: biomedical images in .npz files, one site each.

Paper:
    Yang et al., MedMNIST v2: A Large-Scale Lightweight Benchmark for 2D and 3D Biomedical Image Classification,
    Scientific Data 2023, https://doi.org/10.1038/s41597-022-01721-8
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.data.arrays import from_arrays
from fednorms.data.federation import Federation
from fednorms.data.problems import raise_problems
from fednorms.data.readers.npz import array_files, arrays_in, is_medmnist, nchw, with_source
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, chosen
from fednorms.data.sizes import Size

PROTOCOLS = {"official": "the official train, validation and test splits; one site per file"}
_PARTS = ("train", "val", "test")


def medmnist(
    root: str | Path, protocol: str = "official", size: Size | None = None, channels: int | None = None
) -> Federation:
    """Read MedMNIST: a file such as bloodmnist.npz, or a folder of files with the same classes, one site each.

    OrganA, OrganC and OrganS show the same eleven organs in three planes, so they make a federation. Multi-label and
    three-dimensional sets are refused.

    `root` is the .npz file, or the folder of several. `channels` are 1 or 3, by default the file's, and so is the size.
    """
    chosen("medmnist", protocol, PROTOCOLS)
    files = [p for p in array_files(root) if is_medmnist(p)]
    if not files:
        raise BadInput(f'Federation "medmnist": "{root}" has no .npz file with train_images, train_labels, ...')
    sites: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    problems, tops = [], {}
    for path in files:
        arrays = arrays_in(path)
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
                parts[part] = (nchw(x, size), y.reshape(-1).astype(np.int64))
        if len(parts) == 3:
            sites[path.stem] = parts
            tops[path.stem] = max(int(y.max()) for _, y in parts.values()) + 1
    if len(set(tops.values())) > 1:
        listed = ", ".join(f"{name} {n}" for name, n in tops.items())
        problems.append(f"files with different numbers of classes ({listed}); give the path of one of them")
    raise_problems(f'Federation "medmnist" in "{root}"', problems)
    several = len({x.shape[1] for parts in sites.values() for x, _ in parts.values()}) > 1
    made = from_arrays(sites, layout="NCHW", channels=channels or (3 if several else None), name="medmnist")
    return with_source(made, "medmnist", root, protocol, {"size": size, "channels": channels})


def layout(root: Path) -> str | None:
    """Whether a folder has files of MedMNIST."""
    files = [path.stem for path in array_files(root) if is_medmnist(path)]
    return f"MedMNIST files: {', '.join(files[:6])}" if files else None


READER = Reader(
    "medmnist",
    "MedMNIST .npz files, one site each",
    medmnist,
    PROTOCOLS,
    layout,
    "ROOT/*mnist*.npz with {train,val,test}_{images,labels}, or one such file",
    published=Published(
        "Biomedical images of many kinds, at 28 to 224 pixels. Files with the same classes become one site each.",
        {"authors": "https://medmnist.com/"},
        "CC BY 4.0; DermaMNIST CC BY-NC 4.0",
    ),
)
