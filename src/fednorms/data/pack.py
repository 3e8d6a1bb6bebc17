"""Write a federation to one file; `packed.py` describes the file and reads it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image

from fednorms.core.errors import BadInput, writing
from fednorms.data.blocks import BlockHasher, hash_of
from fednorms.data.federation import Federation, Split
from fednorms.data.packed import MAGIC, PREAMBLE, VERSION

Codec = Literal["raw", "png", "webp", "jpeg"]

_CHUNK = 256  # images that are in memory while packing
_DTYPES = {torch.uint8: "|u1", torch.float32: "<f4", torch.float64: "<f8"}


def pack(
    federation: Federation,
    out: str | Path,
    codec: Codec | None = None,
    quality: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a federation to one file, which `federation("pack:FILE")` opens in under a second.

    Args:
        federation: any federation with uint8, float32 or float64 images.
        out: the file, usually with the suffix .fnpack.
        codec: "raw" keeps pixels as they are and is the fastest to read; "png" and "webp" compress without loss;
            "jpeg", or "webp" with a quality, lose detail. By default raw, or jpeg if a quality is given.
        quality: 1 to 100, of jpeg or webp; the file and a run's records state it.
        progress: called with the number of finished and of all images.

    Equal images (a test set that many clients share) are stored once. Groups (patients) are stored as numbers.

    >>> from fednorms.data import from_arrays
    >>> from fednorms.data.packed import unpacked
    >>> from tempfile import TemporaryDirectory
    >>> small = from_arrays({"a": (np.arange(80, dtype=np.uint8).reshape(5, 4, 4), np.arange(5) % 2)})
    >>> with TemporaryDirectory() as folder:
    ...     path = pack(small, Path(folder, "small.fnpack"))
    ...     unpacked(path).fingerprint() == small.fingerprint()
    True
    """
    if federation.proxy is not None:
        raise BadInput(
            f'Federation "{federation.name}" gives {len(federation.proxy)} images to the server, which a pack cannot '
            "hold. Pack it without them, and give the server images after opening the pack."
        )
    codec = codec or ("raw" if quality is None else "jpeg")
    dtype = next(split for site in federation.sites for split in site.splits.values()).x.dtype
    _check_codec(federation, codec, quality, dtype)
    out = Path(out).expanduser()
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=out.parent, prefix=f"{out.name}.", suffix=".partial")
    try:
        with writing(out):
            with os.fdopen(handle, "wb") as file:
                _write(federation, file, codec, quality, dtype, progress)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, out)
    finally:
        Path(name).unlink(missing_ok=True)
    return out


def _check_codec(federation: Federation, codec: str, quality: int | None, dtype: torch.dtype) -> None:
    channels = federation.shape[0]
    if codec not in ("raw", "png", "webp", "jpeg"):
        raise BadInput(f'Pack: codec must be raw, png, webp or jpeg, got "{codec}".')
    if dtype not in _DTYPES:
        raise BadInput(f"Pack: images must be uint8, float32 or float64, got {dtype}.")
    if codec != "raw" and dtype != torch.uint8:
        raise BadInput(
            f"Pack: {codec} needs uint8 images, got {dtype}; leave out the quality to keep them as they are."
        )
    if codec != "raw" and channels not in (1, 3) and not (channels == 4 and codec in ("png", "webp")):
        raise BadInput(f"Pack: {codec} cannot hold {channels} channels; use raw.")
    if codec == "webp" and channels == 1:
        raise BadInput("Pack: webp stores color only; use raw, png or jpeg for gray images.")
    if quality is not None and (codec in ("raw", "png") or not 1 <= quality <= 100):
        raise BadInput(f"Pack: a quality of 1 to 100 is for jpeg or webp only, got {quality} with {codec}.")
    if codec == "jpeg" and quality is None:
        raise BadInput("Pack: jpeg needs a quality of 1 to 100.")


class _Hashed:
    """A file that hashes what is appended to it and knows where it is."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.at, self.digest = file, PREAMBLE.size, hashlib.blake2b(digest_size=16)
        self.blocks = BlockHasher()
        file.write(b"\0" * PREAMBLE.size)

    def append(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.blocks.append(data)
        self.at += len(data)

    def align(self) -> None:
        self.append(b"\0" * (-self.at % 64))

    def block(self, data: bytes) -> list[int]:
        self.align()
        start = self.at
        self.append(data)
        return [start, len(data)]


def _write(
    federation: Federation,
    file: BinaryIO,
    codec: Codec,
    quality: int | None,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
) -> None:
    out = _Hashed(file)
    total = sum(len(split) for site in federation.sites for split in site.splits.values())
    seen: dict[bytes, int] = {}
    numbers: dict[str, int] = {}
    begins, sites = [0], []
    labels: list[int] = []
    rows: list[int] = []
    groups: list[int] = []
    for site in federation.sites:
        entry: dict[str, Any] = {"name": site.name, "domain": site.domain, "attributes": dict(site.attributes)}
        entry["splits"] = {}
        for part, split in site.splits.items():
            entry["splits"][part] = [len(rows), len(split)]
            groups += _numbered(split, numbers)
            for x, y in split.batches(_CHUNK):
                labels += y.tolist()
                for image in x.contiguous().numpy():
                    key = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
                    if key not in seen:
                        seen[key] = len(seen)
                        out.append(_encoded(image, codec, quality))
                        begins.append(out.at - PREAMBLE.size)
                    rows.append(seen[key])
                if progress is not None:
                    progress(len(rows), total)
        sites.append(entry)
    blocks = {"images": [PREAMBLE.size, out.at - PREAMBLE.size]}
    if codec != "raw":
        blocks["begins"] = out.block(np.asarray(begins, "<i8").tobytes())
    blocks["labels"] = out.block(np.asarray(labels, "<i4").tobytes())
    blocks["rows"] = out.block(np.asarray(rows, "<i8").tobytes())
    if numbers:
        blocks["groups"] = out.block(np.asarray(groups, "<i4").tobytes())
    out.align()
    covered, table = out.at - PREAMBLE.size, out.blocks.table()
    blocks["hashes"] = out.block(table)
    header: Mapping[str, Any] = {
        "name": federation.name,
        "classes": list(federation.classes),
        "preprocessing": federation.preprocessing.to_dict(),
        "protocol": federation.protocol.to_dict(),
        "source": dict(federation.source),
        "shape": list(federation.stored_shape),
        "dtype": _DTYPES[dtype],
        "codec": codec,
        "quality": quality,
        "images": len(seen),
        "blocks": blocks,
        "covered": covered,
        "hashes_hash": hash_of(table),
        "data_hash": out.digest.hexdigest(),
        "sites": sites,
    }
    text = json.dumps(header, ensure_ascii=False, default=str).encode()
    file.write(text)
    file.seek(0)
    digest = hashlib.blake2b(text, digest_size=16).digest()
    file.write(PREAMBLE.pack(MAGIC, VERSION, 0, out.at, len(text), digest))
    file.flush()
    os.fsync(file.fileno())


def _numbered(split: Split, numbers: dict[str, int]) -> list[int]:
    """The number of each image's group (a patient), -1 without one. Names of patients are not written."""
    if split.groups is None:
        return [-1] * len(split)
    return [numbers.setdefault(str(group), len(numbers)) for group in split.groups]


def _encoded(image: np.ndarray, codec: Codec, quality: int | None) -> bytes:
    if codec == "raw":
        return image.tobytes()
    pixels = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    data = io.BytesIO()
    picture = Image.fromarray(pixels)
    if codec == "png":
        picture.save(data, "PNG")
    elif codec == "webp" and quality is None:
        picture.save(data, "WEBP", lossless=True, exact=True)
    elif codec == "webp":
        picture.save(data, "WEBP", quality=quality)
    else:
        picture.save(data, "JPEG", quality=quality, subsampling=0)
    return data.getvalue()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
