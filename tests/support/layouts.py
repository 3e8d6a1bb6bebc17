"""Tiny data sets in the layouts of published ones, for tests of the readers."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path

import numpy as np
from PIL import Image


def shared(name):
    """A folder of real data next to the repository, whether it exists or not."""
    return Path(__file__).resolve().parents[2].parent / "shared" / "data" / name


def picture(path, value, size=(6, 5)):
    """A small image whose pixels all have one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value % 256, value // 256 % 256, 7)).save(path)
    return path


def class_folders(root, domains, classes, each, suffix="png"):
    """domain/class/image with `each` images (a number, or per domain and class); every image has its own value."""
    value = 0
    for domain in domains:
        for i, label in enumerate(classes):
            for k in range(each if isinstance(each, int) else each[domain][i]):
                picture(root / domain / label / f"{k:03d}.{suffix}", value)
                value += 1
    return root


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def pickled(path, value, protocol=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def sizes(federation):
    return {site.name: {part: len(split) for part, split in site.splits.items()} for site in federation.sites}


def first_values(split):
    """The values that `picture` wrote, read back from the images of a split."""
    x = split.x[:].long()
    return (x[:, 0, 0, 0] + 256 * x[:, 1, 0, 0]).tolist()


def gradient(count, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
