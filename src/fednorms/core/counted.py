"""Numbers of things in words: 1 round, 2 rounds."""

from __future__ import annotations


def counted(number: int, thing: str, things: str = "") -> str:
    """A number of things; `things` is a plural that does not end in s.

    >>> counted(1, "round"), counted(2, "round"), counted(1200, "class", "classes")
    ('1 round', '2 rounds', '1,200 classes')
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
