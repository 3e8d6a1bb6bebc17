"""A site's audit log: what it was asked and what it sent, one JSON object per line, only ever appended to.

| key | meaning |
|---|---|
| `time` | UTC |
| `event` | "asked", "sent", or "refused" (with `reason`) |
| `run`, `kind`, `round` | Flower's number of the run; hello, measure, train or evaluate; the round, from 1 |
| `method`, `bundle` | the method that the run asks for; SHA-256 of the app bundle that came with the run |
| `bytes`, `records` | size of the message, and of each of its records |
| `hash` | SHA-256 of the message, as Flower computes it from all of its parts |
| `previous` | SHA-256 of the line before, so a changed line, or one missing in the middle, is noticed |

The site's node writes it, before it works and before it sends. Neither the run nor the server can reach it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from fednorms.core.errors import BadInput, RunFailed

FIRST = "0" * 64


class AuditLog:
    """The audit log in a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = AuditLog(Path(folder) / "north.jsonl")
    ...     log.write("asked", {"kind": "train", "round": 1})
    ...     log.write("sent", {"kind": "train", "round": 1})
    ...     [line["event"] for line in log.lines()]
    ['asked', 'sent']
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, about: Mapping[str, Any]) -> None:
        """Append a line; it is on disk when this returns."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(self.path, flags, 0o600), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time = datetime.now(UTC).isoformat(timespec="milliseconds")
                line = {"time": time, "event": event, **about, "previous": _mark(_last_line(file))}
                file.seek(0, os.SEEK_END)
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadInput(
                f"Cannot write the audit log {self.path} ({error.strerror}). Nothing was answered."
            ) from None

    def lines(self) -> list[dict[str, Any]]:
        """All lines; RunFailed names the first one that does not follow from the line before."""
        found, previous = [], b""
        try:
            text = self.path.read_bytes()
        except OSError as error:
            raise BadInput(f"Cannot read the audit log {self.path} ({error.strerror}).") from None
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            told: Any = None
            with contextlib.suppress(ValueError):
                told = json.loads(line)
            if not isinstance(told, dict) or told.get("previous") != _mark(previous) or not line.endswith(b"\n"):
                raise RunFailed(f"Line {number} of {self.path}, or the line before it, was changed or is missing.")
            found.append(told)
            previous = line
        return found


def _mark(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else FIRST


def _last_line(file: IO[bytes]) -> bytes:
    """The last line of a file, with its end; a line that a crash cut short is ended first."""
    size = file.seek(0, os.SEEK_END)
    step, found = 4096, b""
    while len(found) < size and found.count(b"\n", 0, -1) == 0:
        start = max(0, size - len(found) - step)
        file.seek(start)
        found = file.read(size - start)
    if found and not found.endswith(b"\n"):
        file.write(b"\n")
        file.flush()
        return _last_line(file)
    return found[found.rfind(b"\n", 0, -1) + 1 :]
