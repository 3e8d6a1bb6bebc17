"""Names of folders in the spellings in which data circulate: Back Pack, back_pack and back-pack are one class."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Separators next to a letter; those between digits and a leading minus are part of a number.
_SEPARATORS = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=\w)|(?<=\d)[\s_-]+(?=[^\W\d_])")
SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
BETWEEN = ("images", "image", "imgs", "img", "pictures", "photos")  # folders that say only that images are inside


def key_of(name: str) -> str:
    """A name without case, and without blanks, dashes and underscores next to letters.

    >>> key_of("Back Pack") == key_of("back_pack") == key_of("backpack"), key_of("-1") == key_of("1")
    (True, False)
    """
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", name).strip().casefold())


def split_named(name: str) -> str:
    """The split that a folder's name means, or "".

    >>> split_named("Validation"), split_named("valley")
    ('val', '')
    """
    return SPLITS.get(key_of(name), "")


def one_spelling(where: Iterable[tuple[object, str]]) -> dict[str, str]:
    """The spelling to use instead of each name that is spelled differently elsewhere; `where` are (place, name) pairs.

    Names that differ at one place are different: a site with folders a and A tells them apart. Otherwise, the spelling
    that most places use is taken.

    >>> one_spelling([("oslo", "cat"), ("berlin", "Cat"), ("rome", "cat"), ("rome", "dog")])
    {'Cat': 'cat'}
    >>> one_spelling([("oslo", "a"), ("oslo", "A"), ("berlin", "a")])
    {}
    """
    pairs = list(dict.fromkeys(where))
    used = Counter(name for _, name in pairs)
    spellings: dict[str, set[str]] = {}
    for name in used:
        spellings.setdefault(key_of(name), set()).add(name)
    apart = {place: Counter(key_of(name) for p, name in pairs if p == place) for place in {p for p, _ in pairs}}
    found: dict[str, str] = {}
    for key, names in sorted(spellings.items()):
        if len(names) > 1 and all(counts[key] <= 1 for counts in apart.values()):
            best = min(names, key=lambda name: (-used[name], name))
            found |= {name: best for name in sorted(names - {best})}
    return found


def as_known(names: Iterable[str], known: Sequence[str]) -> Mapping[str, str]:
    """The known spelling of each name that is not known as it is, where there is exactly one.

    >>> as_known(["Benign", "other"], ["benign", "malignant"])
    {'Benign': 'benign'}
    """
    by_key: dict[str, list[str]] = {}
    for name in known:
        by_key.setdefault(key_of(name), []).append(name)
    fits = {name: by_key.get(key_of(name), []) for name in sorted(set(names)) if name not in known}
    return {name: options[0] for name, options in fits.items() if len(options) == 1}
