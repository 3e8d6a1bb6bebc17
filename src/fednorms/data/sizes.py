"""The size of images: one number for a square, or height and width."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fednorms.core.errors import BadInput

Size = int | str | Sequence[int]


def sides(size: Size) -> tuple[int, int]:
    """Height and width of a size that `size_problem` accepts.

    >>> sides(64), sides("72x96"), sides((72, 96))
    ((64, 64), (72, 96), (72, 96))
    """
    if isinstance(size, int):
        return size, size
    height, width = map(int, size.lower().split("x")) if isinstance(size, str) and not size.isdigit() else _both(size)
    return height, width


def _both(size: str | Sequence[int]) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, str) else (size[0], size[-1])


def as_written(size: object) -> int | str:
    """A size as recipes have it: one number for a square, otherwise "72x96"; raises what is wrong with it.

    >>> as_written("64"), as_written([72, 96]), as_written("64x64")
    (64, '72x96', 64)
    """
    if wrong := size_problem(size):
        raise BadInput(f"{wrong[0]}.")
    height, width = sides(size)  # type: ignore[arg-type]
    return height if height == width else f"{height}x{width}"


def size_problem(size: object) -> list[str]:
    """What is wrong with a size, in words; nothing if it can be used.

    >>> size_problem("72x96"), size_problem(0)
    ([], ['size must be a positive number of pixels or height and width as in "72x96", got 0'])
    """
    if isinstance(size, str):
        fine = re.fullmatch(r"[1-9][0-9]{0,5}([xX][1-9][0-9]{0,5})?", size) is not None
    elif isinstance(size, Sequence):
        fine = len(size) in (1, 2) and all(type(side) is int and side > 0 for side in size)
    else:
        fine = type(size) is int and size > 0
    return [] if fine else [f'size must be a positive number of pixels or height and width as in "72x96", got {size!r}']
