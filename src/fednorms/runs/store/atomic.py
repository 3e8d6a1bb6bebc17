"""Files that are either the old one or the new one, and disk errors as one clear message."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fednorms.core.errors import BadInput, RunFailed

FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
TEMPORARY = ".tmp"  # how the names of half-written files end


def check_folder(out: Path) -> None:
    """Refuse a file where a folder is to be, or one that is not writable, before the work whose results go there.

    >>> check_folder(Path("pyproject.toml/results"))
    Traceback (most recent call last):
    fednorms.BadInput: --out pyproject.toml/results: pyproject.toml is a file; choose another folder
    """
    there = next((p for p in (out, *out.parents) if os.path.lexists(p)), out)
    if os.path.lexists(there) and not there.is_dir():
        raise BadInput(f"--out {out}: {there} is a file; choose another folder")
    if not os.access(there if there.is_dir() else Path.cwd(), os.W_OK | os.X_OK):
        raise BadInput(f"--out {out}: {there} cannot be written to; make it writable or choose another folder")


def resume_command(run: Path | str) -> str:
    """What continues a run, for a shell.

    >>> resume_command("runs/my first")
    "fednorms resume 'runs/my first'"
    """
    return f"fednorms resume {shlex.quote(str(run))}"


def replace_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Put `data` into `path` by writing beside it and renaming; raises the plain OSError.

    With `sync=False` the file itself is on the disk, but its name perhaps not yet: call `sync_directory` once
    after several files.

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
    """Write all of `data`, however little each call takes.

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
    """Make the names in a folder survive a power cut, where the system can.

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
    """Like `replace_bytes`, but a disk error is a `RunFailed` that says what to do; the old file stays.

    >>> write_atomic(Path("no such folder/a"), b"")
    Traceback (most recent call last):
    fednorms.RunFailed: cannot write no such folder/a: No such file or directory. ...
    """
    with clear_errors(path):
        replace_bytes(path, data, sync=sync)


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into a `RunFailed`.

    >>> with clear_errors(Path("runs/a/metrics.jsonl")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    fednorms.RunFailed: cannot write runs/a/metrics.jsonl: the disk is full. What was written before is
    safe: free space and continue with `fednorms resume RUN`
    """
    try:
        yield
    except OSError as error:
        raise RunFailed(explain(error, path)) from error


def explain(error: OSError, path: Path) -> str:
    """What went wrong with `path`, and what to do about it, in one sentence each.

    >>> print(explain(OSError(errno.EROFS, "Read-only file system"), Path("runs/a")))
    cannot write runs/a: it is not writable (Read-only file system). What was written before is
    safe: make it writable and continue with `fednorms resume RUN`
    """
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in FULL:
        what, remedy = "the disk is full", "free space"
    elif error.errno == errno.EFBIG:
        what = "the file would be larger than the file system or this process's limit (`ulimit -f`) allows"
        remedy = "raise the limit or free space"
    elif error.errno in NOT_WRITABLE:
        what, remedy = f"it is not writable ({reason})", "make it writable"
    else:
        what, remedy = reason, "see that the disk is there and healthy"
    return (
        f"cannot write {path}: {what}. What was written before is safe: {remedy} and continue with "
        f"`{resume_command(_run_of(path))}`"
    )


def _run_of(path: Path) -> str:
    with suppress(OSError):
        for folder in path.parents:
            if (folder / "recipe.toml").exists():
                return str(folder)
    return "RUN"
