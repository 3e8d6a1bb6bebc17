"""The stored results of a table: one file per run while it runs, one file for all of them afterwards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fednorms.core.errors import RunFailed
from fednorms.papers.tables.record import Values
from fednorms.papers.tables.table import Row, Setting
from fednorms.runs.run_names import slug
from fednorms.runs.store.atomic import clear_errors, write_atomic

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RUNS, SEARCHES = "results.json", "searches.json"
_SINGLE = {RUNS: "results/*/*/seed-*.json", SEARCHES: "search/*/*.json"}
_LIST = {RUNS: "runs", SEARCHES: "searches"}  # the one key of each file


@dataclass(frozen=True)
class ResultStore:
    """The runs and searches of a table that an output folder holds.

    A run is written to its own file as soon as it ends (results/SETTING/ROW/seed-N.json), and a search after each
    of its runs (search/SETTING/ROW.json). `fold` moves them into results.json and searches.json. Both are read; a
    single file is newer than its entry there.
    """

    out: Path

    def runs(self) -> dict[tuple[str, str], list[Values]]:
        """The stored runs by the slugs of setting and row, in the order of their seeds."""
        found: dict[tuple[str, str], list[Values]] = {}
        for (setting, row, _), values in self._merged(RUNS).items():
            found.setdefault((setting, row), []).append(values)
        return found

    def search(self, setting: Setting, row: Row) -> Values | None:
        """The stored search of a row in a setting."""
        return self._merged(SEARCHES).get((setting.slug, row.slug, 0))

    def save_run(self, setting: Setting, row: Row, seed: int, values: Mapping[str, object]) -> None:
        """Store a run that has ended, all of it or nothing."""
        _write(self.out / "results" / setting.slug / row.slug / f"seed-{seed}.json", _text(values))

    def save_search(self, setting: Setting, row: Row, values: Mapping[str, object]) -> None:
        """Store a search as far as it has run, all of it or nothing."""
        _write(self.out / "search" / setting.slug / f"{row.slug}.json", _text(values))

    def directory(self, setting: Setting, row: Row, seed: int) -> Path:
        """The directory of a run while it lasts."""
        return self.out / "runs" / setting.slug / row.slug / f"seed-{seed}"

    def search_directory(self, setting: Setting, row: Row, name: str) -> Path:
        """The directory of one run of a search while it lasts."""
        return self.out / "runs" / "search" / setting.slug / row.slug / name

    def files(self, kind: str = RUNS) -> list[Path]:
        """The files with stored runs, or with searches; later ones in the list are older.

        Single files come first: `fold` removes them after writing the others, so a reader never misses an entry.
        """
        everything = self.out / kind
        return [*sorted(self.out.glob(_SINGLE[kind])), *([everything] if everything.is_file() else [])]

    def fold(self) -> None:
        """Move single files into one file for all runs and one for all searches."""
        with _locked(self.out):
            for kind in (RUNS, SEARCHES):
                single = [file for file in self.files(kind) if file != self.out / kind]
                if single:
                    records = ",\n".join(map(_text, self._merged(kind).values()))
                    _write(self.out / kind, f'{{"{_LIST[kind]}": [\n{records}\n]}}')
                for file in single:
                    remove(file, self.out)

    def _merged(self, kind: str) -> dict[tuple[str, str, int], Values]:
        found: dict[tuple[str, str, int], Values] = {}
        for file in self.files(kind):
            for values in read_records(file):
                name = (slug(values["setting"]), slug(values["row"]), _seed(values) if kind == RUNS else 0)
                found.setdefault(name, values)
        return dict(sorted(found.items()))


def read_records(file: Path) -> list[Values]:
    """The records in a file of one or of all runs (or searches)."""
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:  # another process has just folded it
        return []
    except (OSError, ValueError) as error:
        raise RunFailed(f"Cannot read the results {file}: {error}. Repair it, or remove it and run again.") from error
    folded = isinstance(values, dict) and len(values) == 1  # a record has more keys
    records = next(iter(values.values())) if folded else [values]
    if not isinstance(records, list) or not all(map(_is_record, records)):
        raise RunFailed(f"{file} does not hold results of runs. Remove it and run again.")
    return records


def _is_record(values: object) -> bool:
    if not isinstance(values, dict) or not {"setting", "row", "status", "recipe"} <= set(values):
        return False
    recipe = values["recipe"]
    return isinstance(recipe, dict) and {"seed", "method", "fingerprint", "evaluate_every"} <= set(recipe)


def _seed(values: Values) -> int:
    return int(values["recipe"]["seed"])


def _text(values: Mapping[str, object]) -> str:
    """One line per key, which keeps differences between two versions readable."""
    lines = [f"{json.dumps(key)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for key, v in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _write(path: Path, text: str) -> None:
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f"{text}\n".encode())


def remove(path: Path, top: Path) -> None:
    """Remove a file or a directory, and the folders above it (below `top`) that are then empty."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == top or any(folder.iterdir()):
            return
        folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time fold the results of a folder, where the system can lock."""
    if fcntl is None or not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
