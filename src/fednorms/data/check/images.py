"""Every image of a federation with its place, label and what it shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fednorms.data.federation import Federation, Split
from fednorms.data.folders.listed import ListedImages
from fednorms.data.folders.look import Look, Progress, look_at, looks

_CHUNK = 256  # images in memory at once


@dataclass(frozen=True)
class Seen:
    """One image of a federation: where it is, its label, its file (or its position), and what it shows."""

    site: str
    part: str
    label: int
    name: str
    look: Look
    path: Path | None = None


def seen_in(
    federation: Federation, cache: str | Path | bool | None = None, progress: Progress | None = None
) -> list[Seen]:
    """Look at all images: files that are only listed are opened, others are taken from memory or a pack.

    >>> from fednorms.data.registry import federation
    >>> len(seen_in(federation("digits-shift")))
    1797
    """
    total = sum(len(split) for site in federation.sites for split in site.splits.values())
    found: list[Seen] = []
    listed = _listed(federation, cache, progress)
    for site in federation.sites:
        for part, split in site.splits.items():
            if isinstance(split.x, ListedImages):
                root = split.x.path
                for path, label in zip(split.x.files, split.y.tolist(), strict=True):
                    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
                    found.append(Seen(site.name, part, label, name, listed[path], path))
            else:
                for i, (look, label) in enumerate(zip(_looked(split), split.y.tolist(), strict=True)):
                    found.append(Seen(site.name, part, label, f"{site.name}, {part} image {i + 1}", look))
                    if progress and len(found) % _CHUNK == 0:
                        progress(len(found), total)
    return found


def _listed(federation: Federation, cache: str | Path | bool | None, progress: Progress | None) -> dict[Path, Look]:
    """What the listed files show; sites may share files."""
    by_root: dict[Path, dict[Path, None]] = {}
    for site in federation.sites:
        for split in site.splits.values():
            if isinstance(split.x, ListedImages):
                by_root.setdefault(split.x.path, {}).update(dict.fromkeys(split.x.files))
    return {
        path: look
        for root, paths in by_root.items()
        for path, look in zip(paths, looks(root, list(paths), cache, progress), strict=True)
    }


def _looked(split: Split) -> Iterator[Look]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for x, _ in split.batches(_CHUNK):
            yield from pool.map(_look_at_pixels, x)


def _look_at_pixels(x: torch.Tensor) -> Look:
    """Look at an image (C, H, W) in memory; floating-point values are scaled to their range."""
    if not torch.isfinite(x).all():
        return Look("it has values that are not finite")
    if x.dtype != torch.uint8:
        low, high = (0.0, 1.0) if x.min() >= 0 and x.max() <= 1 else (float(x.min()), float(x.max()))
        x = ((x.double() - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(len(x), "L")
    pixels = np.ascontiguousarray(x.permute(1, 2, 0).numpy())
    return look_at(Image.fromarray(pixels[..., 0] if mode == "L" else pixels))
