"""Find patients in file names: a part of the name that several files share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_WORDS = (
    "patient|pat|subject|subj|sub|person|participant|case|lesion|"
    "study|exam|slide|specimen|animal|mouse|family|donor|pid|eye"
)
# In this order: a word that says it, all before the last separator, the first piece, a number before letters (012L).
_CANDIDATES = (
    rf"((?i:{_WORDS})[ _-]?[0-9]+)",
    r"^(.*[0-9].*)[ _-][^ _-]*$",
    r"^([^ _-]*[0-9][^ _-]*)[ _-]",
    r"^(.*[0-9])[A-Za-z]{1,5}[.][^.]*$",
)
_MATCHED = 0.9  # share of a site's files that must have the pattern
_SHARED = 0.3  # share of these files that must have a sibling
_LARGEST = 0.2  # share of a site's files that one patient may have


@dataclass(frozen=True)
class Ids:
    """A pattern that finds ids in file names, as `--group` takes it, and the id of every file (None without one)."""

    pattern: str
    named: bool  # by a word such as patient
    ids: tuple[str | None, ...]

    @property
    def example(self) -> str:
        """The id that most files have."""
        return Counter(i for i in self.ids if i is not None).most_common(1)[0][0]


def likely_ids(files: Sequence[str], sites: Sequence[str], labels: Sequence[int]) -> Ids | None:
    """The first pattern that looks like patients at some site, or None.

    An id must be shared by several files, and there must be many ids: a counter (ISIC_0024306), a class (056_0001) and
    a folder's name are not ids.

    >>> names = [f"patient{i // 3:03d}_{i % 3}.png" for i in range(30)]
    >>> likely_ids(names, ["oslo"] * 30, [i // 3 % 2 for i in range(30)]).pattern
    '((?i:patient)[ _-]?[0-9]+)'
    >>> likely_ids([f"ISIC_{i:07d}.jpg" for i in range(30)], ["oslo"] * 30, [0, 1] * 15) is None
    True
    """
    for number, text in enumerate(_CANDIDATES):
        pattern = re.compile(text)
        found = [_id(pattern, name) for name in files]
        fitting = [
            s
            for s in dict.fromkeys(sites)
            if _plausible([(i, y) for i, t, y in zip(found, sites, labels, strict=True) if t == s])
        ]
        if not fitting:
            continue
        ids = tuple(i if site in fitting else None for i, site in zip(found, sites, strict=True))
        if number == 0:  # only the words that are there
            used = dict.fromkeys(re.match(r"[^\W\d_]+", i)[0].lower() for i in ids if i)  # type: ignore[index]
            text = rf"((?i:{'|'.join(used)})[ _-]?[0-9]+)"
        return Ids(text if all(i is not None for i in found) else f"{text}|.+", number == 0, ids)
    return None


def _id(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.search(name)
    return None if match is None else match.group(1)


def _plausible(files: Sequence[tuple[str | None, int]]) -> bool:
    """Whether the ids of one site's files, each with its label, look like patients."""
    ids = Counter(i for i, _ in files if i is not None)
    matched = sum(ids.values())
    if matched < _MATCHED * len(files) or len(ids) < 3:
        return False
    siblings = sum(n for n in ids.values() if n > 1)
    per_class: dict[int, set[str]] = {}
    for i, label in files:
        if i is not None:
            per_class.setdefault(label, set()).add(i)
    largest = max(2, _LARGEST * len(files))
    classes = len(per_class)
    return siblings >= _SHARED * matched and max(ids.values()) <= largest and len(ids) > 2 * classes
