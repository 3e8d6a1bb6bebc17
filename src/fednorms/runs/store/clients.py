"""Client states between rounds: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.engines.states import ClientStates
from fednorms.runs.store.atomic import clear_errors
from fednorms.runs.store.packing import pack_client, unpack_client
from fednorms.runs.store.seal import hash_of


class ClientStore(ClientStates):
    """The states of all clients by name, in sorted order.

    When their tensors take more than `limit_bytes`, the least recently used states are written to a folder under
    `spill` (default: the system's temporary directory) and read back bit for bit, onto the device they were on. The
    folder is removed with the store. `source` holds states that need not be in memory, such as those of a checkpoint:
    they are read on access.

    >>> store = ClientStore(limit_bytes=100)
    >>> for name in ("b", "a"):
    ...     store.put(name, ClientState(0, Tree(w=torch.full((20,), float(ord(name)))), {}))
    >>> store.names(), store.in_memory(), store.get("b").local["w"][0].item(), store.get("c")
    (['a', 'b'], 80, 98.0, None)
    """

    def __init__(
        self, limit_bytes: int, spill: Path | None = None, source: Mapping[str, ClientState] | None = None
    ) -> None:
        if limit_bytes < 0:
            raise BadInput(f"The memory for client states must be at least 0 bytes, got {limit_bytes}.")
        self.limit_bytes, self.spill = limit_bytes, spill
        self._source: Mapping[str, ClientState] = source if source is not None else {}
        self._live: OrderedDict[str, ClientState] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._own: set[str] = set()  # put here: the source's state is out of date
        self._files: dict[str, tuple[Path, torch.device, str]] = {}  # spilled and still up to date; with its hash
        self._changed: set[str] = set()
        self._folder: Path | None = None
        self._written = 0
        self._end: weakref.finalize[..., ClientStore] | None = None

    def __getitem__(self, name: str) -> ClientState:
        if name in self._live:
            self._live.move_to_end(name)
            return self._live[name]
        if name in self._files:
            state = self._reload(name)
        elif name in self._own:
            raise RunFailed(f'The state of client "{name}" is gone: the client store was closed.')
        else:
            state = self._source[name]
        self._keep(name, state)
        return state

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._own | self._source.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._source

    def names(self) -> list[str]:
        """The clients that have a state, sorted.

        >>> ClientStore(0).names()
        []
        """
        return sorted(self._own | self._source.keys())

    def put(self, name: str, state: ClientState) -> None:
        """Store `state` as the client's newest.

        >>> store = ClientStore(0)
        >>> store.put("a", ClientState(4, Tree(), {}))
        >>> store["a"].round
        4
        """
        if name in self._live:
            self._bytes -= _nbytes(self._live.pop(name))
        if name in self._files:
            self._files.pop(name)[0].unlink(missing_ok=True)
        self._own.add(name)
        self._changed.add(name)
        self._keep(name, state)

    @property
    def changed(self) -> Mapping[str, ClientState]:
        """The clients put since `mark_clean`, sorted; a state is read on access.

        >>> store = ClientStore(0)
        >>> store.put("a", ClientState(4, Tree(), {}))
        >>> list(store.changed)
        ['a']
        """
        return _Some(self, dict.fromkeys(sorted(self._changed)))

    def mark_clean(self) -> None:
        """Note that everything is in a checkpoint now.

        >>> store = ClientStore(0)
        >>> store.put("a", ClientState(4, Tree(), {})); store.mark_clean()
        >>> list(store.changed)
        []
        """
        self._changed.clear()

    def starting_from(self, states: Mapping[str, ClientState]) -> ClientStore:
        """A new, clean store with the same limit that holds these states.

        >>> ClientStore(0).starting_from({"a": ClientState(4, Tree(), {})}).names()
        ['a']
        """
        return ClientStore(self.limit_bytes, self.spill, source=states)

    def in_memory(self) -> int:
        """The bytes that states take in memory now; between calls never more than the limit.

        >>> ClientStore(0).in_memory()
        0
        """
        return self._bytes

    def close(self) -> None:
        """Remove the spilled files now, not only when the store is garbage collected or the program ends.

        >>> ClientStore(0).close()
        """
        self._files.clear()
        if self._end is not None:
            self._end()
        self._folder = self._end = None

    def _keep(self, name: str, state: ClientState) -> None:
        self._live[name] = state
        self._bytes += _nbytes(state)
        gone = []
        for oldest, held in self._live.items():
            if self._bytes <= self.limit_bytes:
                break
            if size := _nbytes(held):  # dropping a state without tensors would free nothing
                if oldest in self._own and oldest not in self._files:
                    self._files[oldest] = self._write(held)
                self._bytes -= size
                gone.append(oldest)
        for oldest in gone:
            del self._live[oldest]

    def _write(self, state: ClientState) -> tuple[Path, torch.device, str]:
        with clear_errors(self.spill or Path(tempfile.gettempdir())):
            if self._folder is None:
                if self.spill is not None:
                    self.spill.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix="fednorms-clients-", dir=self.spill))
                self._end = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._written += 1
            path = self._folder / f"{self._written}.safetensors"
            data = pack_client(state)
            path.write_bytes(data)
        device = next((t.device for tree in _trees(state) for t in tree.values()), torch.device("cpu"))
        return path, device, hash_of(data)

    def _reload(self, name: str) -> ClientState:
        path, device, written = self._files[name]
        try:
            data = path.read_bytes()
            if hash_of(data) != written:
                raise OSError("its content has changed since it was written")
        except OSError as error:
            raise RunFailed(
                f'Cannot read the state of client "{name}" back from {path}: {error.strerror or error}. '
                "Continue from the last checkpoint with `fednorms resume RUN`."
            ) from error
        return unpack_client(data, device)


class _Some(Mapping[str, ClientState]):
    """Some of a store's states, looked up on access."""

    def __init__(self, store: ClientStore, names: dict[str, None]) -> None:
        self._store, self._names = store, names

    def __getitem__(self, name: str) -> ClientState:
        if name not in self._names:
            raise KeyError(name)
        return self._store[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _trees(state: ClientState) -> list[Tree]:
    return [state.local, state.velocity, *state.parts.values()]


def _nbytes(state: ClientState) -> int:
    return sum(tree.nbytes() for tree in _trees(state))
