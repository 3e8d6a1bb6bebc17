"""Checkpoints that survive kill -9 at any moment, a full disk and damaged files.

The root holds `round-000012/server.safetensors`, `clients/NAME@000012.safetensors` for every client whose state
changed, and `round-000012/manifest.json`. The manifest names every file of the checkpoint with its size and hash,
including the files of clients that have not changed since an earlier round. Three rules make it safe:

1. The manifest is written last. A checkpoint without one was never finished and does not count.
2. A file that a manifest may name is never written again: a second version gets another name.
3. Old files are removed only after the new manifest is on disk, manifests first.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from fednorms.core.errors import RunFailed
from fednorms.core.states import ClientState, ServerState
from fednorms.core.tree import Tree
from fednorms.runs.option_names import option
from fednorms.runs.store.atomic import clear_errors, sync_directory, write_atomic
from fednorms.runs.store.packing import pack_client, pack_server, unpack_client, unpack_server
from fednorms.runs.store.seal import hash_of, hash_of_file

FORMAT = 1

# Manifests that this process has written or fully checked, so `save` need not read every client's file again.
_trusted: set[tuple[Path, str]] = set()


class _Damaged(Exception):
    """A checkpoint cannot be used; says which file and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. Client states are read on access and not kept in memory.

    `notes` say which newer checkpoints were damaged; show them to the user.
    """

    server: ServerState
    clients: Mapping[str, ClientState]
    extra: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _File:
    """A file of a checkpoint: its path under the folder, its size, and its hash."""

    path: str
    size: int
    hash: str


@dataclass(frozen=True)
class _Bare:
    """A client state without tensors (every client of FedAvg): it has no file and is stored in the manifest."""

    round: int
    parts: list[str]


@dataclass(frozen=True)
class _Manifest:
    round: int
    seed: int
    server: _File
    clients: dict[str, _File | _Bare]
    extra: dict[str, Any]
    version: int = FORMAT

    def files(self) -> Iterator[_File]:
        yield self.server
        yield from (entry for entry in self.clients.values() if isinstance(entry, _File))

    def to_json(self) -> dict[str, Any]:
        clients = {name: vars(entry) for name, entry in sorted(self.clients.items())}
        return {**vars(self), "server": vars(self.server), "clients": clients}


def save(
    root: Path,
    server: ServerState,
    changed: Mapping[str, ClientState],
    extra: dict[str, Any],
    *,
    keep_all: bool = False,
) -> None:
    """Write the checkpoint of `server.round`; clients not in `changed` are as in the newest checkpoint.

    `changed` may be lazy: its states are read one at a time. `extra` is any JSON. The last two checkpoints are kept, or
    all of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = ServerState(1, Tree(w=torch.ones(2)), {}, seed=0)
    ...     save(Path(folder), state, {"a": ClientState(0, Tree(b=torch.zeros(1)), {})}, {})
    ...     save(Path(folder), ServerState(2, state.model, {}, seed=0), {}, {"best": 1})
    ...     checkpoint = load(Path(folder))
    ...     checkpoint.server.round, list(checkpoint.clients), checkpoint.extra
    (2, ['a'], {'best': 1})
    """
    base = _newest_sound(root, server.round)
    folder = f"round-{server.round:06d}"
    new = _commit(root, f"{folder}/manifest.json", f"{folder}/server", server, changed, extra, base)
    if keep_all:
        return

    # Besides the new checkpoint, keep the newest older one that is undamaged; a damaged one must not replace it.
    older = base if base is None or base.round < server.round else _newest_sound(root, server.round - 1)
    kept = [m for m in (new, older) if m is not None]
    manifests = {f"round-{m.round:06d}/manifest.json" for m in kept}
    stale = [path for path in root.glob("round-*/manifest.json") if path.relative_to(root).as_posix() not in manifests]
    _remove(stale)
    used = manifests | {file.path for m in kept for file in m.files()}
    _remove(
        path
        for path in itertools.chain(root.glob("round-*/*"), root.glob("clients/*"))
        if path.relative_to(root).as_posix() not in used
    )
    for path in root.glob("round-*"):
        with suppress(OSError):
            path.rmdir()  # removes only an empty folder


def load(root: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """Load the newest checkpoint whose files are all present and undamaged; None if none was ever finished.

    >>> load(Path("no such folder")) is None
    True
    """
    problems: list[tuple[int, _Damaged]] = []
    for number, path in _manifests(root):
        try:
            manifest = _checked(root, path)
        except _Damaged as damage:
            problems.append((number, damage))
            continue
        notes = [
            f"The checkpoint of round {bad} is damaged ({damage}); continuing from round {number}."
            for bad, damage in problems
        ]
        return _opened(root, manifest, notes, device)
    if problems:
        what = "; ".join(f"round {number} ({damage})" for number, damage in problems)
        raise RunFailed(
            f"Every checkpoint in {root} is damaged: {what}. The run cannot be continued. Restore the folder from a "
            f"copy, or start again with another {option('out')}."
        )
    return None


def load_round(root: Path, number: int, device: torch.device | str = "cpu") -> Checkpoint | None:
    """Load the checkpoint of one round; None if there is none, `RunFailed` if it is damaged.

    >>> load_round(Path("no such folder"), 3) is None
    True
    """
    path = dict(_manifests(root)).get(number)
    if path is None:
        return None
    try:
        return _opened(root, _checked(root, path), [], device)
    except _Damaged as damage:
        raise RunFailed(
            f"The checkpoint of round {number} in {root} is damaged ({damage}). Use another round."
        ) from damage


def kept_rounds(root: Path) -> list[int]:
    """The rounds that have a checkpoint, in order.

    >>> kept_rounds(Path("no such folder"))
    []
    """
    return sorted(number for number, _ in _manifests(root))


def save_best(root: Path, server: ServerState, clients: Mapping[str, ClientState], extra: dict[str, Any]) -> None:
    """Store this model, with the states of all clients, as the best so far, and remove the previous best.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_best(Path(folder), ServerState(9, Tree(w=torch.ones(2)), {}, seed=0), {}, {"accuracy": 0.9})
    ...     load_best(Path(folder)).extra
    {'accuracy': 0.9}
    """
    root = root / "best"
    before = None  # files of clients that have not changed since are used again
    with suppress(_Damaged):
        before = _checked(root, root / "manifest.json", trust=True)
    stem = f"server@{server.round:06d}"
    new = _commit(root, "manifest.json", stem, server, clients, extra, before, complete=True)
    used = {"manifest.json"} | {file.path for file in new.files()}
    _remove(
        path
        for path in itertools.chain(root.glob("*"), root.glob("clients/*"))
        if path.is_file() and path.relative_to(root).as_posix() not in used
    )


def load_best(root: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """Load what `save_best` stored last; None if there is nothing, `RunFailed` if it is damaged.

    >>> load_best(Path("no such folder")) is None
    True
    """
    path = root / "best" / "manifest.json"
    if not path.exists():
        return None
    try:
        return _opened(root / "best", _checked(root / "best", path), [], device)
    except _Damaged as damage:
        raise RunFailed(
            f"The best model in {root / 'best'} is damaged ({damage}). Use the last one, or run again."
        ) from damage


def verified(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of every checkpoint, the best model's included, and what is wrong with it (nothing: "").

    >>> list(verified(Path("no such folder")))
    []
    """
    places = [(root, path) for _, path in _manifests(root)]
    if (root / "best").exists():
        places.append((root / "best", root / "best" / "manifest.json"))
    for home, path in places:
        try:
            manifest = _read_manifest(path)
        except _Damaged as damage:
            yield path, str(damage)
            continue
        yield path, ""
        for file in manifest.files():
            try:
                _check(home, file)
            except _Damaged as damage:
                yield home / file.path, str(damage)
            else:
                yield home / file.path, ""


def newest_extra(root: Path) -> tuple[int, dict[str, Any]] | None:
    """Round and `extra` of the newest checkpoint with a readable manifest.

    >>> newest_extra(Path("no such folder")) is None
    True
    """
    for number, path in _manifests(root):
        with suppress(_Damaged):
            return number, _read_manifest(path).extra
    return None


class _LazyClients(Mapping[str, ClientState]):
    """The client states of a checkpoint, each read from its file on access."""

    def __init__(self, root: Path, entries: dict[str, _File | _Bare], device: torch.device | str) -> None:
        self._root, self._entries, self._device = root, entries, device

    def __getitem__(self, name: str) -> ClientState:
        entry = self._entries[name]
        if isinstance(entry, _Bare):
            return ClientState(entry.round, Tree(), {part: Tree() for part in entry.parts})
        return unpack_client(_read(self._root, entry), self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _commit(
    root: Path,
    manifest_path: str,
    server_stem: str,
    server: ServerState,
    clients: Mapping[str, ClientState],
    extra: dict[str, Any],
    base: _Manifest | None,
    complete: bool = False,
) -> _Manifest:
    json.dumps(extra)  # fails before anything is written if it is not JSON
    path = root / manifest_path
    with clear_errors(path):
        for folder in (path.parent, root / "clients"):
            folder.mkdir(parents=True, exist_ok=True)
    server_file = _place(root, server_stem, pack_server(server))
    before = base.clients if base else {}
    entries: dict[str, _File | _Bare] = {} if complete else dict(before)
    for name in sorted(clients):
        state, stem = clients[name], f"clients/{_safe(name)}@{server.round:06d}"
        if any((state.local, state.velocity, *state.parts.values())):
            entries[name] = _place(root, stem, pack_client(state), before.get(name))
        else:
            entries[name] = _Bare(state.round, list(state.parts))
    manifest = _Manifest(server.round, server.seed, server_file, dict(sorted(entries.items())), extra)
    text = _text(manifest)
    with clear_errors(path):
        for folder in {path.parent, root / "clients", root}:
            sync_directory(folder)
    write_atomic(path, text.encode())
    _trusted.add((path.resolve(), hash_of(text.encode())))
    return manifest


def _place(root: Path, stem: str, data: bytes, before: _File | _Bare | None = None) -> _File:
    """Write `data` under a name that no manifest uses for anything else."""
    content = hash_of(data)
    if isinstance(before, _File) and before.hash == content:
        return before
    for version in itertools.count():
        name = f"{stem}~{version}.safetensors" if version else f"{stem}.safetensors"
        path = root / name
        with clear_errors(path):
            if not path.exists():
                write_atomic(path, data, sync=False)
                break
            if hash_of(path.read_bytes()) == content:  # a round repeated after a crash writes the same bytes
                break
    return _File(name, len(data), content)


def _manifests(root: Path) -> list[tuple[int, Path]]:
    """All manifests, newest first."""
    found = []
    for path in root.glob("round-*/manifest.json"):
        number = path.parent.name.removeprefix("round-")
        if number.isdecimal():
            found.append((int(number), path))
    return sorted(found, reverse=True)


def _newest_sound(root: Path, last: int) -> _Manifest | None:
    """The newest undamaged checkpoint up to round `last`: what `load` returned, or what was saved since."""
    for number, path in _manifests(root):
        if number <= last:
            with suppress(_Damaged):
                return _checked(root, path, trust=True)
    return None


def _checked(root: Path, path: Path, trust: bool = False) -> _Manifest:
    """Read a manifest and check every file it names."""
    manifest = _read_manifest(path)
    mark = path.resolve(), hash_of(_text(manifest).encode())
    if not (trust and mark in _trusted):
        _trusted.discard(mark)
        for file in manifest.files():
            _check(root, file)
        _trusted.add(mark)
    return manifest


def _check(root: Path, file: _File) -> None:
    path = root / file.path
    try:
        size = path.stat().st_size
        if size != file.size:
            raise _Damaged(f"{path.name}: {size} bytes instead of {file.size}")
        found = hash_of_file(path)
    except FileNotFoundError as error:
        raise _Damaged(f"{path.name}: missing") from error
    except OSError as error:
        raise _Damaged(f"{path.name}: cannot be read, {error.strerror or error}") from error
    if found != file.hash:
        raise _Damaged(f"{path.name}: hash differs")


def _read(root: Path, file: _File) -> bytes:
    try:
        data = (root / file.path).read_bytes()
    except OSError as error:
        raise RunFailed(f"Cannot read {root / file.path}: {error.strerror or error}.") from error
    if hash_of(data) != file.hash:
        raise RunFailed(
            f"{root / file.path} has changed since the checkpoint was opened. Is another process writing it?"
        )
    return data


def _opened(root: Path, manifest: _Manifest, notes: list[str], device: torch.device | str) -> Checkpoint:
    server = unpack_server(_read(root, manifest.server), device)
    return Checkpoint(server, _LazyClients(root, manifest.clients, device), manifest.extra, notes)


def _text(manifest: _Manifest) -> str:
    body = manifest.to_json()
    return json.dumps({"hash": hash_of(json.dumps(body).encode()), **body}, indent=1) + "\n"


def _read_manifest(path: Path) -> _Manifest:
    try:
        body = json.loads(path.read_bytes())
        claimed = body.pop("hash")
        if hash_of(json.dumps(body).encode()) != claimed:
            raise _Damaged(f"{path.name}: hash differs")
        if body["version"] != FORMAT:
            raise _Damaged(f"{path.name}: format {body['version']}, this version of fednorms reads {FORMAT}")
        clients = {name: _Bare(**e) if "parts" in e else _File(**e) for name, e in body.pop("clients").items()}
        manifest = _Manifest(server=_File(**body.pop("server")), clients=clients, **body)
        if outside := [f.path for f in manifest.files() if ".." in Path(f.path).parts or Path(f.path).is_absolute()]:
            raise _Damaged(f"{path.name}: names a file outside of the run, {outside[0]}")
        return manifest
    except OSError as error:
        raise _Damaged(f"{path.name}: cannot be read, {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{path.name}: not a complete manifest") from error


def _remove(paths: Iterable[Path]) -> None:
    # The checkpoint is already safe. A file that cannot be removed now is removed after the next one.
    for path in list(paths):
        with suppress(OSError):
            path.unlink()


def _safe(name: str) -> str:
    """A file name for a client with any name: readable, short, and unique even if case is ignored."""
    encoded = name.encode("utf-8", "surrogatepass")
    return f"{quote(encoded, safe='')[:60]}-{hash_of(encoded)[:10]}"
