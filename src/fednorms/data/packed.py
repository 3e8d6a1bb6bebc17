r"""A federation in one file that is mapped into memory: it opens at once, however large, and can be copied anywhere.

The file is a preamble of 64 bytes, the data, and a header in JSON::

    preamble   "FNPACK\r\n", version (4 bytes), 4 zero bytes, place and length of the header (8 bytes each),
               hash of the header (16 bytes), zeros
    data       images one after the other; where each begins, if they are compressed; labels; rows; groups, if there
               are any; hashes
    header     classes, shape, codec, where each of these parts is, the hash of the data, and the sites

`rows` has one entry per image of a split, the number of the stored image, so equal images are stored once. `groups` has
the number of the patient of each, -1 without one.
`hashes` has one hash per 256 KiB of what is before it; a part of the file is checked when it is first read.
All numbers are little-endian. Hashes are BLAKE2b of 16 bytes. Packs of version 0.1 have no `hashes`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.blocks import DIGEST, SIZE, CheckedBlocks, hash_of
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.mapped import LARGE, MappedImages
from fednorms.data.pack_header import check_header
from fednorms.data.protocol import Protocol

SUFFIX = ".fnpack"
MAGIC = b"FNPACK\r\n"  # a transfer as text damages the line end
VERSION = 1
PREAMBLE = struct.Struct("<8sIIQQ16s16x")

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_CACHE = 64 * 2**20  # bytes of decoded images that a compressed pack keeps


def unpacked(path: str | Path) -> Federation:
    """Open the federation of a pack. Only the header and the labels are read; images are read batch by batch.

    The header, the labels and the rows are checked now, each image when it is first read: see `check_pack` for all.
    """
    store = _store(Path(path).expanduser())
    header = store.header
    labels, rows = store.block("labels", "<i4"), store.block("rows", "<i8")
    groups = store.block("groups", "<i4") if "groups" in header["blocks"] else None
    sites = []
    for entry in header["sites"]:
        splits = {}
        for part, (start, count) in entry["splits"].items():
            at = slice(start, start + count)
            y = torch.from_numpy(labels[at].astype(np.int64))
            whose = None if groups is None or -1 in groups[at] else groups[at].astype(str)
            splits[part] = Split(PackedImages(store.path, rows[at], store), y, whose)
        sites.append(Site(entry["name"], entry["domain"], **splits, attributes=entry["attributes"]))
    source = {"spec": f"pack:{store.path}", "codec": header["codec"], "quality": header["quality"]}
    source |= {key: header["source"][key] for key in ("prepared", "notes") if header["source"].get(key)}
    return Federation(
        header["name"],
        sites,
        header["classes"],
        Preprocessing.from_dict(header["preprocessing"]),
        {**source, "packed_from": header["source"]},
        Protocol.from_dict(header.get("protocol", {})),
    )


def check_pack(path: str | Path) -> dict[str, Any]:
    """Read the whole file and compare its hash; return the header's facts, or raise if the data are damaged."""
    store = _store(Path(path).expanduser())
    digest, left = hashlib.blake2b(digest_size=16), store.header_at - PREAMBLE.size
    with store.path.open("rb") as file:
        file.seek(PREAMBLE.size)
        while left > 0 and (chunk := file.read(min(left, 2**22))):
            digest.update(chunk)
            left -= len(chunk)
    if digest.hexdigest() != store.header["data_hash"]:
        raise BadInput(f'Pack "{store.path}": its data are damaged (the hash differs); create or copy it again.')
    kept = ("name", "classes", "shape", "codec", "quality", "images", "source")
    return {key: store.header[key] for key in kept} | {"bytes": store.path.stat().st_size}


def is_pack(path: str | Path) -> bool:
    """Whether a file begins as a pack does.

    >>> is_pack("/no/such/file")
    False
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class PackedImages(MappedImages):
    """Some images of a pack, read batch by batch; it behaves like a tensor in a `Split`."""

    def __init__(self, path: str | Path, rows: Sequence[int] | np.ndarray | None = None, store: Any = None) -> None:  # noqa: ANN401
        """Map the pack at `path`; `rows` selects and orders its images."""
        self.path = Path(path)
        self._store: _Store = store or _store(self.path)
        self.rows = np.arange(self._store.count) if rows is None else np.asarray(rows, dtype=np.int64)

    @property
    def shape(self) -> torch.Size:
        """(rows, C, H, W)."""
        return torch.Size((len(self.rows), *self._store.shape))

    @property
    def ndim(self) -> int:
        """Four."""
        return 4

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensors that indexing returns."""
        return torch.from_numpy(np.empty(0, self._store.dtype)).dtype

    @property
    def slow(self) -> bool:
        """Whether images are decoded, or large."""
        return self._store.codec != "raw" or math.prod(self._store.shape) * self._store.dtype.itemsize >= LARGE

    def __getitem__(self, indices: Sequence[int] | np.ndarray | slice | Tensor) -> Tensor:
        """The images at `indices` as a tensor in memory."""
        if isinstance(indices, Tensor):
            indices = indices.cpu().numpy()
        rows = self.rows[indices]
        single = np.ndim(rows) == 0
        images = torch.from_numpy(self._store.images(np.atleast_1d(rows)))
        return images[0] if single else images


class _Store:
    """One open pack, shared by everything that reads from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, self.header_at = _read_header(path)
        check_header(self.header, f'Pack "{path}"')
        self.shape: tuple[int, int, int] = tuple(self.header["shape"])
        self.dtype = np.dtype(self.header["dtype"])
        self.count: int = self.header["images"]
        self.codec: str = self.header["codec"]
        _check_blocks(self)
        self._checked = _checked_blocks(self)
        for name in ("labels", "rows", "begins", "groups"):
            if name in self.header["blocks"]:
                at, length = self.header["blocks"][name]
                self._check([at], [at + length])
        self._begin = self.header["blocks"]["images"][0]
        self._pixels: np.ndarray | None = None
        if self.codec == "raw":
            self._pixels = self.block("images", self.header["dtype"]).reshape(self.count, *self.shape)
        else:
            self._bytes, self._begins = self.block("images", "|u1"), self.block("begins", "<i8")
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._most = max(1, _CACHE // math.prod(self.shape))
        self._lock = threading.Lock()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def block(self, name: str, dtype: str) -> np.ndarray:
        """A block of data, mapped."""
        at, length = self.header["blocks"][name]
        count = length // np.dtype(dtype).itemsize
        return np.memmap(self.path, dtype, "r", at, (count,)).view(np.ndarray) if count else np.empty(0, dtype)

    def _check(self, starts: np.ndarray | list[int], ends: np.ndarray | list[int]) -> None:
        """Check the hashes of these ranges of the file, unless it is of version 0.1."""
        if self._checked is not None:
            self._checked.check(np.asarray(starts) - PREAMBLE.size, np.asarray(ends) - PREAMBLE.size)

    def images(self, rows: np.ndarray) -> np.ndarray:
        """These images, in this order, copied out of the file."""
        out = np.empty((len(rows), *self.shape), self.dtype)
        if self._pixels is not None:
            size = math.prod(self.shape) * self.dtype.itemsize
            self._check(self._begin + rows * size, self._begin + (rows + 1) * size)
            # "clip" copies straight into `out`; rows were checked when the file was opened.
            return np.take(self._pixels, rows, axis=0, out=out, mode="clip")
        order = np.argsort(rows, kind="stable")  # reading in file order is faster
        missing = []
        with self._lock:
            for i in order:
                image = self._cache.get(int(rows[i]))
                if image is None:
                    missing.append(int(i))
                else:
                    self._cache.move_to_end(int(rows[i]))
                    out[i] = image
        for i, image in zip(missing, self._decoded([int(rows[i]) for i in missing]), strict=True):
            out[i] = image
            with self._lock:
                self._cache[int(rows[i])] = image
                if len(self._cache) > self._most:
                    self._cache.popitem(last=False)
        return out

    def _decoded(self, rows: Sequence[int]) -> list[np.ndarray]:
        threads = min(8, os.cpu_count() or 1, len(rows) // 2)
        if threads < 2:
            return [self._decode(row) for row in rows]
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork
            self._pool = (os.getpid(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)))
        shares = [rows[len(rows) * i // threads : len(rows) * (i + 1) // threads] for i in range(threads)]
        decoded = self._pool[1].map(lambda share: [self._decode(row) for row in share], shares)
        return [image for share in decoded for image in share]

    def _decode(self, row: int) -> np.ndarray:
        channels, height, width = self.shape
        begin, end = int(self._begins[row]), int(self._begins[row + 1])
        self._check([self._begin + begin], [self._begin + end])
        data = self._bytes[begin:end].tobytes()
        try:
            with Image.open(io.BytesIO(data), formats=(self.codec.upper(),)) as image:
                if image.size != (width, height):
                    raise ValueError(f"it has {image.width} x {image.height} pixels, not {width} x {height}")
                plain = image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
                pixels = np.asarray(plain).reshape(height, width, channels)
        except Exception as problem:  # Pillow's decoders raise almost anything on broken data
            raise BadInput(f'Pack "{self.path}": image {row} is damaged ({problem}).') from None
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


_open_stores: WeakValueDictionary[tuple[str, int, int], _Store] = WeakValueDictionary()


def _store(path: Path) -> _Store:
    path = path.resolve()
    try:
        found = path.stat()
    except OSError:
        raise BadInput(f'Pack "{path}": no such file.') from None
    key = (str(path), found.st_mtime_ns, found.st_size)
    store = _open_stores.get(key)
    if store is None:
        store = _open_stores[key] = _Store(path)
    return store


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    where = f'Pack "{path}"'
    if path.is_dir():
        raise BadInput(f"{where}: it is a folder, not a file made by `fednorms data pack`.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(PREAMBLE.size)
        if start[: len(MAGIC)] != MAGIC:
            if size and MAGIC.startswith(start[: len(MAGIC)]):
                raise BadInput(f"{where}: truncated after {size} bytes; copy it again.")
            raise BadInput(f"{where}: it was not made by `fednorms data pack`.")
        if len(start) < PREAMBLE.size:
            raise BadInput(f"{where}: truncated after {size} bytes; copy it again.")
        _, version, _, at, length, digest = PREAMBLE.unpack(start)
        if version != VERSION:
            raise BadInput(f"{where}: version {version}, but this fednorms reads version {VERSION}; pack it again.")
        if size < at + length:
            raise BadInput(f"{where}: truncated: {size:,} of {at + length:,} bytes; copy it again.")
        if size > at + length or at < PREAMBLE.size:
            raise BadInput(f"{where}: damaged: {size:,} bytes, expected {at + length:,}; copy it again.")
        file.seek(at)
        text = file.read(length)
    if hashlib.blake2b(text, digest_size=16).digest() != digest:
        raise BadInput(f"{where}: its header is damaged (the hash differs); create or copy it again.")
    try:
        return json.loads(text), at
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: its header is not JSON that fednorms writes; create it again.") from None


def _check_blocks(store: _Store) -> None:
    """Check that the header fits the file before pixels are read by it (its hash is already checked)."""
    blocks, splits = store.header["blocks"], [at for s in store.header["sites"] for at in s["splits"].values()]
    samples = sum(count for _, count in splits)
    pixels = store.count * math.prod(store.shape) * store.dtype.itemsize
    right = all(
        PREAMBLE.size <= at and length >= 0 and at + length <= store.header_at for at, length in blocks.values()
    )
    right = right and blocks["labels"][1] == 4 * samples and blocks["rows"][1] == 8 * samples
    right = right and blocks.get("groups", (0, 4 * samples))[1] == 4 * samples
    right = right and all(start + count <= samples for start, count in splits)
    if store.codec == "raw":
        right = right and blocks["images"][1] == pixels
    else:
        right = right and blocks.get("begins", (0, 0))[1] == 8 * (store.count + 1)
        if right:
            begins = store.block("begins", "<i8")
            right = begins[0] == 0 and begins[-1] == blocks["images"][1] and bool((np.diff(begins) >= 0).all())
    if right:
        rows = store.block("rows", "<i8")
        right = len(rows) == 0 or (rows.min() >= 0 and rows.max() < store.count)
    if not right:
        raise BadInput(f'Pack "{store.path}": damaged: its tables do not fit its data; create or copy it again.')


def _checked_blocks(store: _Store) -> CheckedBlocks | None:
    """The data with the hashes of their blocks; None for a pack of version 0.1."""

    def damaged(block: int) -> BadInput:
        where = f"near byte {PREAMBLE.size + block * SIZE:,}"
        return BadInput(
            f'Pack "{store.path}": its data are damaged {where} (the hash differs); create or copy it again.'
        )

    if "hashes" not in store.header["blocks"]:
        return None
    at, length = store.header["blocks"]["hashes"]
    table = store.block("hashes", "|u1").tobytes()
    if hash_of(table) != store.header.get("hashes_hash"):
        raise damaged(at // SIZE)
    covered = store.header["covered"]
    if not 0 < covered <= at - PREAMBLE.size or length % DIGEST:
        raise damaged(at // SIZE)
    return CheckedBlocks(np.memmap(store.path, np.uint8, "r", PREAMBLE.size, (covered,)), table, damaged)
