"""Leave out image files that cannot be read, and say which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from fednorms.core.errors import BadInput
from fednorms.data.folders.look import looks
from fednorms.data.folders.scan import ImageFile
from fednorms.data.problems import some

_skipping: ContextVar[bool] = ContextVar("fednorms_skipping_broken", default=False)


@dataclass(frozen=True)
class Broken:
    """A file that cannot be read, below the root of its data, and why."""

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


@contextmanager
def skipping_broken() -> Iterator[None]:
    """Within this context, readers of data sets leave out files that cannot be read."""
    token = _skipping.set(True)
    try:
        yield
    finally:
        _skipping.reset(token)


def is_skipping() -> bool:
    """Whether readers leave out files that cannot be read."""
    return _skipping.get()


def broken_files(root: Path, paths: Sequence[Path], cache: str | Path | bool | None = None) -> dict[int, Broken]:
    """The files that cannot be read, by their position."""
    return {
        i: Broken(path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path), look.problem)
        for i, (path, look) in enumerate(zip(paths, looks(root, paths, cache), strict=True))
        if look.problem
    }


def without_broken(
    root: Path, files: Sequence[ImageFile], cache: str | Path | bool | None = None
) -> tuple[list[ImageFile], list[Broken]]:
    """The files that can be read, and those that cannot."""
    broken = broken_files(root, [file.path for file in files], cache)
    left = [file for i, file in enumerate(files) if i not in broken]
    if not left:
        raise BadInput(f'Folder "{root}": none of its {len(files)} images can be read, the first is {broken[0]}.')
    return left, list(broken.values())


def left_out_note(broken: Sequence[Broken]) -> list[str]:
    """A note about files that were left out.

    >>> left_out_note([Broken("oslo/cat/1.png", "the file is empty")])
    ['1 file that cannot be read is left out: "oslo/cat/1.png"']
    """
    if not broken:
        return []
    what = "1 file that cannot be read is" if len(broken) == 1 else f"{len(broken):,} files that cannot be read are"
    return [f"{what} left out: {some([one.name for one in broken], 3)}"]
