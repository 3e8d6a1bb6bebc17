"""The metrics of a run: one JSON object per line, appended, cut at a checkpoint, and compared with its mark."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fednorms.core.errors import RunFailed
from fednorms.runs.store.atomic import clear_errors, write_all, write_atomic
from fednorms.runs.store.seal import hash_of

# For files that are written in place: never through a link.
IN_PLACE = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class MetricsFile:
    """The rows of a run. A mark is their number and hash; a checkpoint keeps it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = MetricsFile(Path(folder) / "metrics.jsonl")
    ...     rows.append_metrics({"round": 0, "loss": 0.5})
    ...     rows.metrics(), rows.metrics_mark()["rows"]
    ([{'round': 0, 'loss': 0.5}], 1)
    """

    def __init__(self, path: Path) -> None:
        self.metrics_path = path
        self._mark: tuple[int, str] | None = None  # rows and hash, once they are known

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        r"""Append one row, in one write; a number that is not finite becomes null.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = MetricsFile(Path(folder) / "metrics.jsonl")
        ...     rows.append_metrics({"round": 0, "accuracy": {"a": float("inf")}})
        ...     rows.metrics_path.read_text()
        '{"round": 0, "accuracy": {"a": null}}\n'
        """
        line = _line(row)
        with clear_errors(self.metrics_path):
            handle = os.open(self.metrics_path, IN_PLACE, 0o666)
            try:
                end = _end_of_whole_lines(handle)
                try:
                    write_all(handle, line)
                except BaseException:
                    os.ftruncate(handle, end)  # also works on a full disk
                    raise
            finally:
                os.close(handle)
        if self._mark is not None:
            self._mark = _mark_of([json.loads(line)], self._mark)

    def metrics(self) -> list[dict[str, Any]]:
        """Read all rows; a last line that a crash left unfinished is ignored.

        >>> MetricsFile(Path("nowhere")).metrics()
        []
        """
        return [row for _, row in self._lines()]

    def metrics_mark(self, *, without_last: bool = False) -> dict[str, Any]:
        """How many rows the metrics have, and their hash, after putting them on disk for good; for a checkpoint.

        `without_last` leaves out the last row, which is about to be written again.

        >>> MetricsFile(Path("nowhere")).metrics_mark()["rows"]
        0
        """
        if self._mark is None:
            self._mark = _mark_of(self.metrics())
        with clear_errors(self.metrics_path), suppress(FileNotFoundError):
            handle = os.open(self.metrics_path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        rows, digest = _mark_of(self.metrics()[:-1]) if without_last else self._mark
        return {"rows": rows, "hash": digest}

    def check_metrics(self, mark: Mapping[str, Any] | None) -> str:
        """Compare the metrics with what a checkpoint says of them; returns a note if they were removed.

        Rows after the checkpoint do not count: a resumed run writes them again.
        """
        if not mark or not mark["rows"]:
            return ""
        if not self.metrics_path.exists():
            return f"{self.metrics_path} is missing: the result lacks the rounds before the last checkpoint"
        if _mark_of(self.metrics()[: mark["rows"]]) != (mark["rows"], mark["hash"]):
            raise RunFailed(
                f"{self.metrics_path} is damaged: its rows are not those that the last checkpoint was made with. "
                "Restore it from a copy, or delete it to continue without these rows."
            )
        return ""

    def replace_metrics(self, row: Mapping[str, Any]) -> None:
        """Write the row of the last round again, with more in it; the other rows stay."""
        kept = [line for line, other in self._lines() if other.get("round") != row["round"]]
        write_atomic(self.metrics_path, b"".join([*kept, _line(row)]))
        self._mark = None

    def cut_metrics(self, round: int) -> int:
        """Drop the rows of rounds after `round`, which a resumed run writes again; returns how many were dropped.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = MetricsFile(Path(folder) / "metrics.jsonl")
        ...     for number in range(5):
        ...         run.append_metrics({"round": number})
        ...     run.cut_metrics(1), run.metrics()
        (3, [{'round': 0}, {'round': 1}])
        """
        lines = self._lines()
        kept = [line for line, row in lines if row.get("round", round) <= round]
        self._mark = None
        if self.metrics_path.exists():
            write_atomic(self.metrics_path, b"".join(kept))
        return len(lines) - len(kept)

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        try:
            data = self.metrics_path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFailed(f"Cannot read {self.metrics_path}: {error.strerror or error}.") from error
        lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
        out = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError
            except ValueError as error:
                if number == len(lines):
                    break  # a power cut can leave the last line's length without its bytes
                raise RunFailed(
                    f"{self.metrics_path}, line {number}, is not a JSON object. Repair or remove that line."
                ) from error
            out.append((line, row))
        return out


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(finite(row), allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:  # noqa: ANN401
    """The same value as plain JSON types, with null for NaN and the infinities."""
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):  # also NumPy's scalars
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return value


def _mark_of(rows: Sequence[Mapping[str, Any]], before: tuple[int, str] = (0, "")) -> tuple[int, str]:
    """The number of rows and their hash, continued from `before`; times are left out: equal runs differ there."""
    count, found = before
    for row in rows:
        count += 1
        found = hash_of(json.dumps([found, {**row, "seconds": None}], sort_keys=True).encode())
    return count, found


def _end_of_whole_lines(handle: int) -> int:
    """Cut off an unfinished last line, and move to where the next line begins."""
    end = os.lseek(handle, 0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        os.lseek(handle, start, os.SEEK_SET)
        block = os.read(handle, end - start)
        end = start + block.rfind(b"\n") + 1 if b"\n" in block else start
        if b"\n" in block:
            break
    os.ftruncate(handle, end)
    return os.lseek(handle, end, os.SEEK_SET)
