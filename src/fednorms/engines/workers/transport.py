"""Letters between processes: Python objects through a pipe, the tensors in them through shared memory.

A sender's tensors lie in one file that both sides map: in the system's shared memory, or, where that has no room (some
containers have 64 MB of it), in the directory for temporary files. A file is removed as soon as all its readers have
mapped it, so that nothing is left behind when a process dies.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, glob
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednorms.core.errors import RunFailed

ALIGNED = 64  # bytes, as torch's own memory: sums may depend on how a tensor is aligned
SHARED_MEMORY = "/dev/shm"


class Place(NamedTuple):
    """Where a tensor lies in a block of bytes, and what it looks like."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    accelerator: bool  # the receiver puts it on a device of its own

    def view(self, block: Tensor) -> Tensor:
        """The tensor at this place."""
        count = 1
        for n in self.shape:
            count *= n
        row = block[self.start : self.start + count * self.dtype.itemsize].view(self.dtype)
        return row.as_strided(self.shape, self.stride).data  # `.data`: a version counter of its own


@dataclass(frozen=True)
class Letter:
    """What goes through the pipe: an object without its tensors, and the file that holds those."""

    sender: str
    path: str
    size: int
    body: bytes
    sole: bool  # there is one reader, who removes the file once it is mapped
    copy: bool  # the reader gets tensors of its own rather than views of the file


class Outbox:
    """Packs letters; the tensors of one letter overwrite those of the letter before.

    >>> a = torch.arange(6.0).view(2, 3).t()
    >>> letter = Outbox("doctest").pack({"a": a, "again": a, "n": 3})
    >>> found = Inbox().read(letter)
    >>> torch.equal(found["a"], a), found["a"].stride() == a.stride(), found["again"] is found["a"]
    (True, True, True)
    """

    def __init__(self, token: str, *, sole: bool = True) -> None:
        self.token, self.sole, self.name = token, sole, secrets.token_hex(8)
        self.path, self.size = "", 0
        self.block = torch.empty(0, dtype=torch.uint8)

    def pack(self, thing: object, *, copy: bool = False) -> Letter:
        """A letter that holds `thing`."""
        body = io.BytesIO()
        pickler = _Pickler(body)
        pickler.dump(thing)
        if pickler.end > self.size:
            self.size = pickler.end + pickler.end // 4
            self.path = _new_file(self.size, self.token)
            self.block = _mapped(self.path, self.size)
        for tensor, place in pickler.seen.values():
            place.view(self.block).copy_(tensor.detach())
        return Letter(self.name, self.path, self.size, body.getvalue(), self.sole, copy)

    def settle(self) -> None:
        """All readers have mapped the file."""
        _remove(self.path)


class Inbox:
    """Reads letters. Tensors are views of the sender's file, right until its next letter, unless they are copied."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.blocks: dict[str, tuple[str, Tensor]] = {}

    def read(self, letter: Letter, *, copy: bool = False) -> Any:  # noqa: ANN401
        """What a letter holds."""
        if letter.path and self.blocks.get(letter.sender, ("",))[0] != letter.path:
            self.blocks[letter.sender] = letter.path, _mapped(letter.path, letter.size)
            if letter.sole:
                _remove(letter.path)
        block = self.blocks[letter.sender][1] if letter.path else torch.empty(0, dtype=torch.uint8)
        return _Unpickler(io.BytesIO(letter.body), block, self.device, copy or letter.copy).load()


def check(thing: object) -> None:
    """Raise what pickle raises if `thing` cannot be sent to another process; tensors are not copied."""
    _Pickler(io.BytesIO()).dump(thing)


def clean_up(token: str) -> None:
    """Remove the files that processes which died with this token may have left."""
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        for path in glob(os.path.join(escape(folder), f"fednorms-{token}-*")):
            _remove(path)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.seen: dict[int, tuple[Tensor, Place]] = {}  # keeps the tensors alive, so that no id comes twice
        self.end = 0

    def persistent_id(self, thing: Any) -> Place | None:  # noqa: ANN401
        if type(thing) is not Tensor or thing.is_meta:
            return None
        if id(thing) not in self.seen:
            stride = torch.empty_like(thing, device="meta").stride()  # dense, in the same order
            place = Place(self.end, tuple(thing.shape), stride, thing.dtype, thing.device.type != "cpu")
            self.seen[id(thing)] = thing, place
            # Also a tensor without elements has a place of its own.
            self.end += max(-(-thing.numel() * thing.element_size() // ALIGNED), 1) * ALIGNED
        return self.seen[id(thing)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: Tensor, device: str, copy: bool) -> None:
        super().__init__(file)
        self.block, self.device, self.copy = block, device, copy
        self.seen: dict[Place, Tensor] = {}

    def persistent_load(self, place: Place) -> Tensor:
        if place not in self.seen:
            view = place.view(self.block)
            if place.accelerator:
                view = view.to(self.device)  # a machine's CPU stands in for devices in tests
            self.seen[place] = view.clone() if self.copy and view.device.type == "cpu" else view
        return self.seen[place]


def _new_file(size: int, token: str) -> str:
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        if not os.path.isdir(folder):
            continue
        with suppress(OSError):
            handle, path = tempfile.mkstemp(prefix=f"fednorms-{token}-", dir=folder)
            try:
                # Taken now: writing to a file that has no room behind it would end the process.
                os.posix_fallocate(handle, 0, size) if hasattr(os, "posix_fallocate") else os.truncate(handle, size)
                return path
            except OSError:
                _remove(path)
            finally:
                os.close(handle)
    raise RunFailed(
        f"No room for {size / 2**20:.0f} MB that worker processes share, neither in {SHARED_MEMORY} nor in "
        f'{tempfile.gettempdir()}. Make room, set TMPDIR, or use engine="loop".'
    )


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
