"""The two packs of the search: Digits-Five with more validation images, and natural images under generated shifts.

    python benchmarks/own_data.py --digits FOLDER --cifar FOLDER --out FOLDER

Digits-Five is FedWon's protocol (743 training images a site); the 1,500 training images after those validate. The
natural images are CIFAR-10's, at five sites with one corruption each and 743 training images, no image at two sites.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.generate.corruptions import corrupt
from fednorms.data.pack import pack
from fednorms.data.readers import digits_five as reader

TRAIN, VAL, TEST = 743, 1500, 400
LOOKS = ("clean", "fog", "contrast", "saturate", "gaussian_blur")
SEVERITY = 4


def digits(root: Path) -> Federation:
    """FedWon's protocol with 1,500 validation images of each domain's training part."""
    whole, first = reader.digits_five(root, "full"), reader.digits_five(root, "fedwon")
    sites = []
    for site, of in zip(first.sites, whole.sites, strict=True):
        assert of.train is not None
        held = of.train.subset(torch.arange(TRAIN, TRAIN + VAL))
        sites.append(replace(site, val=held))
    return replace(first, sites=sites)


def natural(folder: Path) -> Federation:
    """CIFAR-10 at five sites: as it is, in fog, with little contrast, in other colors, and blurred."""
    labels = json.loads((folder / "labels.json").read_text())
    parts = [(f"train_{i:02d}.webp", np.array(labels["labels"]["train"][1000 * i : 1000 * (i + 1)])) for i in range(14)]
    x = torch.from_numpy(np.concatenate([_sheet(folder / name) for name, _ in parts]))
    y = torch.from_numpy(np.concatenate([of for _, of in parts])).long()
    sites, each = [], TRAIN + VAL // 2 + TEST
    for k, look in enumerate(LOOKS):
        at = torch.arange(k * each, (k + 1) * each)
        seen = x[at] if look == "clean" else corrupt(x[at], look, SEVERITY)
        cut = [slice(0, TRAIN), slice(TRAIN, TRAIN + VAL // 2), slice(TRAIN + VAL // 2, each)]
        sites.append(Site(look, look, *(Split(seen[c], y[at][c]) for c in cut)))
    return Federation("natural", sites, labels["classes"], Preprocessing.centered(3), {"spec": "natural-search"})


def _sheet(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(25, 32, 40, 32, 3).transpose(0, 2, 4, 1, 3).reshape(1000, 3, 32, 32).copy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=Path, help="folder of Digits-Five")
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10 as sheets, with labels.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the packs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.digits:
        pack(digits(given.digits), given.out / "digits-search.fnpack", codec="webp")
    if given.cifar:
        pack(natural(given.cifar), given.out / "natural-search.fnpack", codec="webp")
