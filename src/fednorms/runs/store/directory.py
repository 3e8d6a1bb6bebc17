"""A run's directory: recipe, facts, summary, checkpoints, and a lock against a second writer.

`metrics.py` has its metrics.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fednorms.core.errors import BadInput, RunFailed
from fednorms.data.facts import Facts
from fednorms.runs.option_names import option
from fednorms.runs.store.atomic import (
    FULL,
    NOT_WRITABLE,
    TEMPORARY,
    clear_errors,
    explain,
    replace_bytes,
    resume_command,
    write_all,
    write_atomic,
)
from fednorms.runs.store.links import refuse_links
from fednorms.runs.store.metrics import IN_PLACE, MetricsFile, finite
from fednorms.runs.store.seal import hash_of, sealed, unsealed

try:
    import fcntl
except ImportError:  # Windows: no lock there
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"


class RunDirectory(MetricsFile):
    """The files of one run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunDirectory(Path(folder) / "first")
    ...     run.create("rounds = 2", resume=False)
    ...     with run.lock():
    ...         for number in range(2):
    ...             run.append_metrics({"round": number, "loss": 0.5 if number else float("nan")})
    ...     run.metrics(), run.recipe.read_text()
    ([{'round': 0, 'loss': None}, {'round': 1, 'loss': 0.5}], 'rounds = 2')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        super().__init__(self.path / "metrics.jsonl")

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def recipe(self) -> Path:
        """The TOML recipe; it makes the directory a run."""
        return self.path / "recipe.toml"

    @property
    def summary_path(self) -> Path:
        """The summary (JSON) of a run that has ended."""
        return self.path / "summary.json"

    @property
    def facts_path(self) -> Path:
        """The facts of the federation (JSON): enough to use the model without the data."""
        return self.path / "federation.json"

    @property
    def resume_command(self) -> str:
        """The shell command that continues the run."""
        return resume_command(self.path)

    @property
    def checkpoints(self) -> Path:
        """The root of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def spill(self) -> Path:
        """The folder for client states that do not fit in memory; emptied when the run is locked."""
        return self.path / "spill"

    def create(self, recipe_toml: str, resume: bool) -> None:
        """Create the directory and write the recipe; with `resume`, it may already hold a run of the same recipe.

        >>> RunDirectory("pyproject.toml").create("", resume=False)
        Traceback (most recent call last):
        fednorms.BadInput: pyproject.toml is a file, not a directory for a run. Choose another out=.
        """
        try:
            self._claim(recipe_toml, resume)
        except (FileExistsError, NotADirectoryError) as error:
            found = next(p for p in (self.path, *self.path.parents) if p.exists())
            raise BadInput(f"{found} is a file, not a directory for a run. Choose another {option('out')}.") from error
        except OSError as error:
            if error.errno in NOT_WRITABLE:
                raise BadInput(
                    f"Cannot write a run to {self.path} ({error.strerror or error}). Make it writable, or choose "
                    f"another {option('out')}."
                ) from error
            if error.errno not in FULL and not os.path.exists(self.recipe):  # Path.exists raises for long names
                raise BadInput(
                    f"Cannot create a run at {self.path} ({error.strerror or error}). Choose another {option('out')}."
                ) from error
            raise RunFailed(explain(error, self.path)) from error

    def _claim(self, recipe_toml: str, resume: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.recipe.exists():
            # Ignore what a run leaves that was killed as it started.
            others = [n for n in sorted(os.listdir(self.path)) if n != _LOCK and not n.endswith(TEMPORARY)]
            if others:
                raise BadInput(
                    f"{self.path} is not empty and holds no run (it has {', '.join(others[:3])}"
                    f"{', ...' if others[3:] else ''}). Choose another {option('out')}, or empty it first."
                )
            replace_bytes(self.recipe, recipe_toml.encode())
            return
        there = self.recipe.read_text(encoding="utf-8")
        if not same_recipe(there, recipe_toml):
            difference = _first_difference(there, recipe_toml)
            if _without(there, "fingerprint") == _without(recipe_toml, "fingerprint"):
                raise BadInput(
                    f"{self.path} holds a run of this recipe on other data: images or labels of the federation have "
                    f"changed since. Restore them, or choose another {option('out')}."
                )
            own = "@" in difference and "custom:" in difference
            hint = (
                "Custom objects are compared by their code, models also by their first weights: seed torch before you"
            )
            raise BadInput(
                f"{self.path} holds a run of another recipe:\n{difference}\n"
                + f"{hint} build one.\n" * own
                + f"Choose another {option('out')}, or continue that run with `{self.resume_command}`."
            )
        if not resume:
            raise BadInput(
                f"{self.path} already holds a run of this recipe. Continue it with `{self.resume_command}`, or choose "
                f"another {option('out')}."
            )

    def replace_recipe(self, recipe_toml: str) -> None:
        """Write the recipe of a run that continues in another way; it has not ended any more."""
        write_atomic(self.recipe, recipe_toml.encode())
        self.summary_path.unlink(missing_ok=True)

    def read_recipe(self) -> str:
        """Read the recipe of the run; BadInput if there is none.

        >>> RunDirectory("nowhere").read_recipe()
        Traceback (most recent call last):
        fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file ...).
        """
        refuse_links(self.path)
        try:
            return self.recipe.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(
                f"{self.path} is not a run: it has no readable recipe.toml ({reason}).{self._meant()}"
            ) from error

    def _meant(self) -> str:
        """A run that may have been meant: of the same name in runs/, or inside this folder."""
        near = [Path("runs", self.path.name, "recipe.toml"), *sorted(self.path.glob("*/recipe.toml"))]
        found = next((file.parent for file in near if file.is_file()), None)
        return f' Did you mean "{found}"?' if found else ""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing to this run; the system drops the lock if this process dies.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, RunDirectory(folder).lock():
        ...     with RunDirectory(folder).lock():
        ...         pass
        Traceback (most recent call last):
        fednorms.RunFailed: Another process (...) is writing the run in .... Wait for it, or stop it.
        """
        refuse_links(self.path)
        with clear_errors(self.path / _LOCK):
            handle = os.open(self.path / _LOCK, IN_PLACE, 0o666)
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    owner = os.read(handle, 20).decode("ascii", "replace").strip() or "unknown"
                    who = f"Another process ({owner})"
                    raise RunFailed(f"{who} is writing the run in {self.path}. Wait for it, or stop it.") from error
                except OSError:
                    pass  # a file system without locks: run without one
            with clear_errors(self.path / _LOCK):
                os.ftruncate(handle, 0)
                write_all(handle, f"{os.getpid()}\n".encode())
            shutil.rmtree(self.spill, ignore_errors=True)  # left by a process that was killed
            yield
        finally:
            os.close(handle)

    def drop_if_empty(self) -> None:
        """Remove the files of a run that has neither a round nor a checkpoint; the folder stays."""
        if self.checkpoints.exists() or (self.metrics_path.exists() and self.metrics_path.stat().st_size):
            return
        shutil.rmtree(self.spill, ignore_errors=True)
        with suppress(OSError):
            for file in (self.metrics_path, self.facts_path, self.recipe):
                file.unlink(missing_ok=True)

    def recipe_mark(self) -> str:
        """The hash of the recipe as it is now; a checkpoint keeps it."""
        return hash_of(self.recipe.read_bytes())

    def changed_recipe(self, mark: str | None) -> list[str]:
        """A note if the recipe is not the one that a checkpoint was made with: edited deliberately, or damaged."""
        if mark is None or mark == self.recipe_mark():
            return []
        return [
            f"{self.recipe} has changed since the last checkpoint was written; if you have not edited it, restore it"
        ]

    def write_facts(self, facts: Facts) -> None:
        """Write federation.json."""
        indent = 1 if len(facts.sites) <= 1000 else None  # Python indents slowly: seconds for 10,000 sites
        write_atomic(self.facts_path, (json.dumps(sealed(facts.to_dict()), indent=indent) + "\n").encode())

    def read_facts(self) -> Facts | None:
        """Read federation.json; None if there is none.

        >>> RunDirectory("nowhere").read_facts() is None
        True
        """
        try:
            return Facts.from_dict(unsealed(json.loads(self.facts_path.read_bytes())))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunFailed(
                f"Cannot read {self.facts_path} ({error}). Remove it and run `{self.resume_command}` to write it again."
            ) from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary atomically.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     RunDirectory(folder).write_summary({"accuracy": 0.5})
        ...     RunDirectory(folder).summary()
        {'accuracy': 0.5}
        """
        body = json.loads(json.dumps(finite(summary), allow_nan=False, ensure_ascii=False).encode("utf-8", "replace"))
        text = json.dumps(sealed(body), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        write_atomic(self.summary_path, text.encode())

    def summary(self) -> dict[str, Any] | None:
        """Read the summary; None while the run has not ended.

        >>> RunDirectory("nowhere").summary() is None
        True
        """
        try:
            return unsealed(json.loads(self.summary_path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise RunFailed(
                f"Cannot read {self.summary_path} ({error}). `{self.resume_command}` writes it again."
            ) from error


def same_recipe(there: str, asked: str) -> bool:
    """Whether two recipes, as TOML, are the same run; the version that wrote them does not matter."""
    return there == asked or _without(_with_defaults(there), "version") == _without(asked, "version")


def _with_defaults(text: str) -> str:
    """A recipe as it would be written now: an older one lacks keys that were added since."""
    from fednorms.runs.recipe import Recipe

    try:
        return Recipe.from_toml(text).to_toml()
    except BadInput:
        return text


def _without(recipe_toml: str, key: str) -> list[str]:
    return [line for line in recipe_toml.splitlines() if not line.startswith(f"{key} = ")]


def _first_difference(there: str, asked: str) -> str:
    for number, (old, new) in enumerate(zip_longest(there.splitlines(), asked.splitlines()), start=1):
        if old != new:
            old, new = ("(nothing)" if text is None else text for text in (old, new))
            return f"  line {number} of that run: {old}\n  line {number} requested:   {new}"
    return "  they differ in line endings only"
