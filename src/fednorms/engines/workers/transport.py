"""Messages between processes: Python objects through a pipe, their tensors through shared memory.

The tensors of a sender are in one file that both sides map. The file is in the system's shared memory or, if there is
no room (some containers have only 64 MB), in the directory for temporary files. On Linux the file never has a name:
readers open it through the sender's descriptor, and it vanishes with its last user, however that one ends. Elsewhere
it has a name with the sender's process id until all readers have mapped it; the next pool removes those of dead ones.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import secrets
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, glob
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednorms.core.errors import RunFailed

ALIGNED = 64  # bytes, as in torch's allocator: sums may depend on the alignment of a tensor
SHARED_MEMORY = "/dev/shm"
DESCRIPTORS = "/proc/self/fd"  # where a file without a name can be opened again


class Place(NamedTuple):
    """Where a tensor is in a block of bytes, and its shape and type."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    accelerator: bool  # the receiver moves it to its own device

    def view(self, block: Tensor) -> Tensor:
        """The tensor at this place."""
        count = 1
        for n in self.shape:
            count *= n
        row = block[self.start : self.start + count * self.dtype.itemsize].view(self.dtype)
        return row.as_strided(self.shape, self.stride).data  # `.data` gives it its own version counter


@dataclass(frozen=True)
class Message:
    """What goes through the pipe: a pickled object without its tensors, and the file that holds them."""

    sender: str
    path: str
    size: int
    body: bytes
    one_reader: bool  # the only reader removes the file once it is mapped
    copy: bool  # the reader gets its own tensors instead of views of the file


class Sender:
    """Packs messages; the tensors of a message overwrite those of the one before. It must live until they are read.

    >>> a = torch.arange(6.0).view(2, 3).t()
    >>> sender = Sender("doctest")
    >>> found = Receiver().read(sender.pack({"a": a, "again": a, "n": 3}))
    >>> torch.equal(found["a"], a), found["a"].stride() == a.stride(), found["again"] is found["a"]
    (True, True, True)
    """

    def __init__(self, token: str, *, one_reader: bool = True) -> None:
        self.token, self.one_reader, self.name = token, one_reader, secrets.token_hex(8)
        self.path, self.size = "", 0
        self.block = torch.empty(0, dtype=torch.uint8)
        self._close: weakref.finalize[..., Sender] | None = None

    def pack(self, thing: object, *, copy: bool = False) -> Message:
        """A message that holds `thing`."""
        body = io.BytesIO()
        pickler = _Pickler(body)
        pickler.dump(thing)
        if pickler.end > self.size:
            self.size = pickler.end + pickler.end // 4
            self.path, handle = _new_file(self.size, self.token)
            self.block = _mapped(self.path, self.size)
            self._open_until_replaced(handle)
        for tensor, place in pickler.seen.values():
            place.view(self.block).copy_(tensor.detach())
        return Message(self.name, self.path, self.size, body.getvalue(), self.one_reader, copy)

    def remove_file(self) -> None:
        """Remove the file's name, if it has one, after all readers have mapped it."""
        _remove(self.path)

    def _open_until_replaced(self, handle: int | None) -> None:
        if self._close is not None:
            self._close()
        self._close = None if handle is None else weakref.finalize(self, os.close, handle)


class Receiver:
    """Reads messages. Unless copied, tensors are views of the sender's file and valid until its next message."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.blocks: dict[str, Tensor] = {}

    def read(self, message: Message, *, copy: bool = False) -> Any:  # noqa: ANN401
        """The object that a message holds."""
        block = self.blocks.get(message.sender, torch.empty(0, dtype=torch.uint8))
        if message.size != len(block):  # each new file of a sender is larger than the one before
            block = self.blocks[message.sender] = _mapped(message.path, message.size)
            if message.one_reader:
                _remove(message.path)
        return _Unpickler(io.BytesIO(message.body), block, self.device, copy or message.copy).load()


def check_picklable(thing: object) -> None:
    """Raise what pickle raises if `thing` cannot be sent to another process; tensors are not copied."""
    _Pickler(io.BytesIO()).dump(thing)


def clean_up(token: str) -> None:
    """Remove files with this token that processes left behind when they died."""
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        for path in glob(os.path.join(escape(folder), f"fednorms-*{token}-*")):
            _remove(path)


def remove_stale() -> None:
    """Remove the files with names whose process is dead: it was killed before its readers had mapped them."""
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        for path in glob(os.path.join(escape(folder), "fednorms-*")):
            found = re.fullmatch(r"fednorms-(\d{1,10})-[0-9a-f]{12}-.*", os.path.basename(path))
            if found and not _alive(int(found[1])):
                _remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.seen: dict[int, tuple[Tensor, Place]] = {}  # keeps the tensors alive, so no id is used twice
        self.end = 0

    def persistent_id(self, thing: Any) -> Place | None:  # noqa: ANN401
        if type(thing) is not Tensor or thing.is_meta:
            return None
        if id(thing) not in self.seen:
            stride = torch.empty_like(thing, device="meta").stride()  # dense, in the same order
            place = Place(self.end, tuple(thing.shape), stride, thing.dtype, thing.device.type != "cpu")
            self.seen[id(thing)] = thing, place
            # A tensor without elements also gets its own place.
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
                view = view.to(self.device)  # in tests the CPU stands in for devices
            self.seen[place] = view.clone() if self.copy and view.device.type == "cpu" else view
        return self.seen[place]


def _new_file(size: int, token: str) -> tuple[str, int | None]:
    """A path that opens a new file, and the descriptor to keep open until its readers have opened it, if any."""
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        if not os.path.isdir(folder):
            continue
        with suppress(OSError):
            handle, path, named = _opened(folder, token)
            try:
                # Reserve the space now: writing to a mapped file without space behind it kills the process.
                os.posix_fallocate(handle, 0, size) if hasattr(os, "posix_fallocate") else os.truncate(handle, size)
            except OSError:
                if named:
                    _remove(path)
                os.close(handle)
                continue
            if named:
                os.close(handle)
            return path, None if named else handle
    raise RunFailed(
        f"No room for the {size / 2**20:.0f} MB that worker processes share, neither in {SHARED_MEMORY} nor in "
        f'{tempfile.gettempdir()}. Free some space, set TMPDIR to another directory, or use engine="loop".'
    )


def _opened(folder: str, token: str) -> tuple[int, str, bool]:
    """A new file in a folder: its descriptor, the path that opens it, and whether that path is its name."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir(DESCRIPTORS):
        with suppress(OSError):  # some file systems have no files without a name
            handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            return handle, f"/proc/{os.getpid()}/fd/{handle}", False
    handle, path = tempfile.mkstemp(prefix=f"fednorms-{os.getpid()}-{token}-", dir=folder)
    return handle, path, True


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _remove(path: str) -> None:
    with suppress(OSError):  # also raised for a descriptor, which has no name
        os.unlink(path)
