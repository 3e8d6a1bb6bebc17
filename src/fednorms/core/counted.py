"""Numbers of things in words: 1 round, 2 rounds, 113.7 MB."""

from __future__ import annotations


def counted(number: int, thing: str, things: str = "") -> str:
    """A number of things; `things` is a plural that does not end in s.

    >>> counted(1, "round"), counted(2, "round"), counted(1200, "class", "classes")
    ('1 round', '2 rounds', '1,200 classes')
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def sized(number: float) -> str:
    """A number of bytes.

    >>> sized(12), sized(14_219_210), sized(113_700_000_000)
    ('12 B', '14.2 MB', '113.7 GB')
    """
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
