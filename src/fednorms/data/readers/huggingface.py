"""Hugging Face datasets saved to disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fednorms.core.errors import BadInput
from fednorms.data.arrays import from_arrays
from fednorms.data.federation import Federation
from fednorms.data.readers.npz import IMAGE_NAMES, LABEL_NAMES, with_source
from fednorms.data.readers.published import Published
from fednorms.data.readers.reader import Reader, chosen
from fednorms.data.sizes import Size, sides

PROTOCOLS = {"own": "a custom dataset, divided into sites by a column; its splits, or drawn ones"}
_SITE = ("site", "domain", "client", "center", "centre", "hospital")


def hugging_face(
    root: str | Path,
    protocol: str = "own",
    size: Size | None = None,
    seed: int = 0,
    val: float = 0.1,
    test: float = 0.2,
) -> Federation:
    """Read a Hugging Face dataset of `save_to_disk`, with an image column, a label column, and perhaps a site column.

    The site column is called site, domain, client, center, centre or hospital; without one there is a single site.
    A DatasetDict's splits train, validation and test are kept; a single Dataset is split here. Nothing is
    downloaded and no code of the dataset is run. Needs `pip install 'fednorms[hf]'`.

    `root` is the folder that `save_to_disk` wrote. Without a size, all images must have one size.
    """
    chosen("huggingface", protocol, PROTOCOLS)
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError:
        raise BadInput('Federation "huggingface" needs the extra "hf": pip install "fednorms[hf]".') from None
    root = Path(root).expanduser()
    if layout(root) is None:
        raise BadInput(f'Federation "huggingface": "{root}" was not written by save_to_disk.')
    try:
        loaded = load_from_disk(str(root))
    except Exception as problem:  # the library raises almost anything on broken folders
        raise BadInput(f'Federation "huggingface": "{root}" cannot be read: {problem}.') from problem
    parts = dict(loaded.items()) if isinstance(loaded, DatasetDict) else {"": loaded}
    words = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test", "": ""}
    if unknown := [part for part in parts if part not in words]:
        raise BadInput(f'Federation "huggingface": splits are train, validation and test, got {", ".join(unknown)}.')
    sites: dict[str, Any] = {}
    classes: list[str] | None = None
    for part, data in parts.items():
        x_name, y_name = _column(data.features, IMAGE_NAMES, "image"), _column(data.features, LABEL_NAMES, "label")
        s_name = next((name for name in _SITE if name in data.features), None)
        classes = classes or getattr(data.features[y_name], "names", None)
        labels = np.asarray(data[y_name], np.int64)
        owners = np.asarray([str(s) for s in data[s_name]]) if s_name else np.full(len(labels), root.name)
        for site in dict.fromkeys(owners.tolist()):
            at = np.flatnonzero(owners == site)
            images = [_pixels(data[int(i)][x_name], size) for i in at]
            if len({image.shape for image in images}) > 1:
                raise BadInput(f'Federation "huggingface": site "{site}" has images of different sizes; set size=.')
            pair = (np.stack(images), labels[at])
            if part:
                sites.setdefault(site, {})[words[part]] = pair
            else:
                sites[site] = pair
    made = from_arrays(sites, classes, val, test, seed, "NHWC", name=root.resolve().name)
    return with_source(made, "huggingface", root, protocol, {"size": size, "seed": seed, "val": val, "test": test})


def layout(root: Path) -> str | None:
    """Whether a folder was written by `save_to_disk`."""
    if (root / "dataset_dict.json").is_file():
        return "DatasetDict saved to disk"
    return (
        "Dataset saved to disk" if (root / "state.json").is_file() and (root / "dataset_info.json").is_file() else None
    )


def _column(features: Mapping[str, Any], names: tuple[str, ...], what: str) -> str:
    found = next((name for name in names if name in features), None)
    if found is None:
        raise BadInput(
            f'Federation "huggingface": no {what} column ({", ".join(names)}); it has {", ".join(features)}.'
        )
    return found


def _pixels(image: Any, size: Size | None) -> np.ndarray:  # noqa: ANN401
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image, np.uint8))
    picture = picture.convert("RGB")
    if size is not None:
        picture = picture.resize(sides(size)[::-1], Image.Resampling.BILINEAR)
    return np.asarray(picture)


READER = Reader(
    "huggingface",
    "a Hugging Face dataset saved to disk (extra hf)",
    hugging_face,
    PROTOCOLS,
    layout,
    f"a folder that `save_to_disk` wrote, with a column of images ({', '.join(IMAGE_NAMES)}), one of labels "
    f"({', '.join(LABEL_NAMES)}), and perhaps one of sites ({', '.join(_SITE)})",
    published=Published("Your own Hugging Face dataset, divided into sites by a column."),
)
