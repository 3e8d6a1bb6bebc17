"""What the cache of decoded images holds: list it, and clear it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednorms.data.folders.cache import cache_folder

_OURS = re.compile(r"([0-9a-f]{32})(\.npy|\.json|\.looks\.json|\.[^.]+\.partial|\.[^.]+\.[^.]+\.partial)")


@dataclass(frozen=True)
class Entry:
    """The files of one cached set of images: what they were made from, and how much room they take."""

    key: str
    made_from: str  # "" where it is not known: files of version 0.1
    what: str
    images: int
    bytes: int
    used: float  # when it was last written or read, in seconds since 1970
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "files": [str(path) for path in self.files]}


def entries(cache: str | Path | None = None) -> list[Entry]:
    """Everything in the cache, the largest first; files that the library did not write are not looked at."""
    folder = cache_folder(cache)
    if folder is None or not folder.is_dir():
        return []
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if (match := _OURS.fullmatch(path.name)) and path.is_file():
            kind = "looks" if ".looks" in path.name else "images"
            groups.setdefault(f"{match[1]} {kind}", []).append(path)
    found = [_entry(name, files) for name, files in groups.items()]
    return sorted(found, key=lambda entry: (-entry.bytes, entry.key))


def clear(cache: str | Path | None = None, made_from: str | Path | None = None) -> list[Entry]:
    """Remove what the cache holds, or only what was made from this folder and the folders below; return what went."""
    gone = [entry for entry in entries(cache) if made_from is None or below(entry.made_from, made_from)]
    for entry in gone:
        for path in entry.files:
            path.unlink(missing_ok=True)
    return gone


def below(made_from: str, folder: str | Path) -> bool:
    """Whether something was made from this folder, or from one below it."""
    return bool(made_from) and Path(made_from).is_relative_to(Path(folder).expanduser().resolve())


def _entry(name: str, files: list[Path]) -> Entry:
    key, _, kind = name.partition(" ")
    told: dict[str, Any] = {}
    for path in files:
        if path.suffix == ".json":
            told = _read(path)
    found = [path.stat() for path in files]
    seen = kind == "looks"
    return Entry(
        key=key,
        made_from=str(told.get("from", "")),
        what="what `data check` saw" if seen else "x".join(map(str, told.get("shape", [])[1:])) or "images",
        images=len(told.get("files", {})) if seen else int((told.get("shape") or [0])[0]),
        bytes=sum(one.st_size for one in found),
        used=max(max(one.st_mtime, one.st_atime) for one in found),
        files=tuple(files),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
