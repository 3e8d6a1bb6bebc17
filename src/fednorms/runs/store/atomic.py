"""Atomic writes: a file is either the old one or the new one. Disk errors become one clear message."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fednorms.core.errors import BadInput, RunFailed
from fednorms.runs.option_names import option

FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
TEMPORARY = ".tmp"  # suffix of half-written files


def check_folder(out: Path) -> None:
    """Refuse an output folder that is a file or not writable, before the work whose results go there.

    >>> check_folder(Path("pyproject.toml/results"))
    Traceback (most recent call last):
    fednorms.BadInput: Cannot write to pyproject.toml/results: pyproject.toml is a file. Choose another folder (out=).
    """
    there = next((p for p in (out, *out.parents) if os.path.lexists(p)), out)
    if os.path.lexists(there) and not there.is_dir():
        raise BadInput(f"Cannot write to {out}: {there} is a file. Choose another folder ({option('out')}).")
    if not os.access(there if there.is_dir() else Path.cwd(), os.W_OK | os.X_OK):
        raise BadInput(
            f"Cannot write to {out}: {there} is not writable. Make it writable, or choose another folder "
            f"({option('out')})."
        )


def resume_command(run: Path | str) -> str:
    """The shell command that continues a run.

    >>> resume_command("runs/my first")
    "fednorms resume 'runs/my first'"
    """
    return f"fednorms resume {shlex.quote(str(run))}"


def replace_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Put `data` into `path` by writing a temporary file and renaming it; raises the plain OSError.

    With `sync=False` the file is on disk, but its name may not be yet: call `sync_directory` once after several files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_bytes(Path(folder) / "a", b"new")
    ...     (Path(folder) / "a").read_bytes()
    b'new'
    """
    temporary = path.with_name(f".{secrets.token_hex(6)}{TEMPORARY}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_directory(path.parent)


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as it takes.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as f:
    ...     write_all(f.fileno(), b"abc")
    ...     f.tell()
    3
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def sync_directory(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system supports it.

    >>> sync_directory(Path("."))
    """
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Like `replace_bytes`, but a disk error becomes a `RunFailed` that says what to do; the old file stays.

    >>> write_atomic(Path("no such folder/a"), b"")
    Traceback (most recent call last):
    fednorms.RunFailed: Cannot write no such folder/a: No such file or directory. ...
    """
    with clear_errors(path):
        replace_bytes(path, data, sync=sync)


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into a `RunFailed`.

    >>> with clear_errors(Path("runs/a/metrics.jsonl")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    fednorms.RunFailed: Cannot write runs/a/metrics.jsonl: the disk is full. What was written before is
    safe. Free space, and continue with `fednorms resume RUN`.
    """
    try:
        yield
    except OSError as error:
        raise RunFailed(explain(error, path)) from error


def explain(error: OSError, path: Path) -> str:
    """Say what went wrong with `path`, and what to do about it.

    >>> print(explain(OSError(errno.EROFS, "Read-only file system"), Path("runs/a")))
    Cannot write runs/a: it is not writable (Read-only file system). What was written before is
    safe. Make it writable, and continue with `fednorms resume RUN`.
    """
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in FULL:
        what, remedy = "the disk is full", "Free space"
    elif error.errno == errno.EFBIG:
        what = "the file would be larger than the file system or this process's limit (`ulimit -f`) allows"
        remedy = "Raise the limit or free space"
    elif error.errno in NOT_WRITABLE:
        what, remedy = f"it is not writable ({reason})", "Make it writable"
    else:
        what, remedy = reason, "Check the disk"
    return (
        f"Cannot write {path}: {what}. What was written before is safe. {remedy}, and continue with "
        f"`{resume_command(_run_of(path))}`."
    )


def _run_of(path: Path) -> str:
    with suppress(OSError):
        for folder in path.parents:
            if (folder / "recipe.toml").exists():
                return str(folder)
    return "RUN"
