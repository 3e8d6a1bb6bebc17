"""Split the images of folders into training, validation and test data; what belongs together stays together."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.option_names import flag, option, setting
from fednorms.data.folders.scan import ImageFile
from fednorms.data.splits import split

Group = str | Callable[[Path], Hashable]
Copies = Literal["keep", "drop", "together"]
PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Division:
    """How images are split where their folders do not name a split.

    `group` finds in a file's name what stays in one split, such as a patient. With `group_across` an id means the same
    at every site, and its images are in one split over all sites. With `copies="together"` equal images are, too.
    """

    val: float = 0.1
    test: float = 0.2
    seed: int = 0
    group: Group | None = None
    group_across: bool = False
    copies: Copies = "keep"

    def problems(self) -> list[str]:
        """What is wrong with the settings."""
        found = []
        if min(self.val, self.test) < 0 or self.val + self.test >= 1:
            both = " and ".join(option(name).rstrip("=") for name in ("val", "test"))
            found.append(f"{both} must be fractions that leave images to train on, got {self.val} and {self.test}")
        if self.copies not in get_args(Copies):
            found.append(f'copies must be keep, drop or together, got "{self.copies}"')
        if self.group_across and self.group is None:
            found.append(f"{flag('group_across')} says that groups are the same at all sites, but no group is given")
        return found

    def parts(
        self, files: Sequence[ImageFile], y: np.ndarray, content: Sequence[str] = ()
    ) -> dict[str, dict[str, np.ndarray]]:
        """The positions of each split of each site; `content` tells equal images, for `copies="together"`."""
        members: dict[str, list[int]] = {}
        for i, file in enumerate(files):
            members.setdefault(file.site, []).append(i)
        groups = groups_of(files, self.group)
        whole = self._whole(files, groups, content)
        drawn = [site for site, at in members.items() if not files[at[0]].part]
        found = {
            site: self._given(files, np.array(at)) for site, at in members.items() if site not in drawn
        }  # what the folders say
        across = whole is not None and _span_sites(whole, files)
        if across and drawn:
            assert whole is not None
            found |= self._pooled(files, y, whole, {site: np.array(members[site]) for site in drawn})
        else:
            names = groups if whole is None or self.copies != "together" else whole
            for site in drawn:
                at = np.array(members[site])
                whose = None if names is None else [names[i] for i in at]
                found[site] = {part: at[chosen] for part, chosen in self._drawn(y[at], whose, site).items()}
        if whole is not None:
            _check_together(files, groups, whole, found, self.copies)
            self._check_tests(found, len(set(whole if groups is None else groups)), drawn)
        return {site: found[site] for site in members}

    def _whole(
        self, files: Sequence[ImageFile], groups: Sequence[str] | None, content: Sequence[str]
    ) -> list[str] | None:
        """What stays together, as one name per file; None if every image may go anywhere."""
        together = self.copies == "together"
        if groups is None and not together:
            return None
        alone: Sequence[Hashable] = range(len(files))
        links = [alone if groups is None else _ids(files, groups, self.group_across)]
        if together:
            links.append(content)
        return _joined(links)

    def _given(self, files: Sequence[ImageFile], at: np.ndarray) -> dict[str, np.ndarray]:
        said = np.array([files[i].part for i in at])
        return {part: at[said == part] for part in PARTS}

    def _drawn(self, y: np.ndarray, groups: Sequence[str] | None, name: str) -> dict[str, np.ndarray]:
        """Draw the test images first, then the validation images: another `val` leaves the test images unchanged."""
        first = split(y, {"test": self.test}, self.seed, name, groups)
        rest = first["train"]
        of_rest = None if groups is None else [groups[i] for i in rest]
        second = split(y[rest], {"val": self.val / (1 - self.test)}, self.seed, f"{name} val", of_rest)
        return {"train": rest[second["train"]], "val": rest[second["val"]], "test": first["test"]}

    def _pooled(
        self, files: Sequence[ImageFile], y: np.ndarray, groups: Sequence[str], members: Mapping[str, np.ndarray]
    ) -> dict[str, dict[str, np.ndarray]]:
        """Split all sites at once, balanced for every site and class."""
        at = np.concatenate(list(members.values()))
        number = {site: i for i, site in enumerate(members)}
        cells = np.array([number[files[i].site] for i in at]) * (int(y.max()) + 1) + y[at]
        drawn = {p: at[chosen] for p, chosen in self._drawn(cells, [groups[i] for i in at], "all sites").items()}
        return {site: {p: np.intersect1d(found, mine) for p, found in drawn.items()} for site, mine in members.items()}

    def _check_tests(self, found: Mapping[str, Mapping[str, np.ndarray]], groups: int, drawn: Sequence[str]) -> None:
        """Refuse groups so large that no image is left for testing, which would otherwise show only after training."""
        if self.test and len(drawn) == len(found) and not any(len(parts["test"]) for parts in found.values()):
            raise BadInput(
                f"{option('group').rstrip('=')} makes {counted(groups, 'group')}, too few at every site to keep one "
                "for testing. Check that the pattern tells patients apart."
            )


def groups_of(files: Sequence[ImageFile], group: Group | None) -> list[str] | None:
    """The group (a patient) of every file, or None without groups."""
    if group is None:
        return None
    if not isinstance(group, str):
        return [str(group(file.path)) for file in files]
    try:
        pattern = re.compile(group)
    except re.error as problem:
        raise BadInput(f"{setting('group', group)} is not a regular expression: {problem}.") from None
    matches = [pattern.search(file.path.name) for file in files]
    missed = [str(file.path) for file, match in zip(files, matches, strict=True) if match is None]
    if missed:
        raise BadInput(
            f"{setting('group', group)} matches nothing in {len(missed)} of {len(files)} file names; the first is "
            f'"{missed[0]}". If other files are on their own, write "{group}|.+".'
        )
    return [(m.group(1) if pattern.groups else None) or m.group(0) for m in matches if m is not None]


def _ids(files: Sequence[ImageFile], groups: Sequence[str], across: bool) -> list[Hashable]:
    """Groups as they are known at all sites: an id of one site is another patient than the same id of another site."""
    return [whose if across else (file.site, whose) for file, whose in zip(files, groups, strict=True)]


def _joined(links: Sequence[Sequence[Hashable]]) -> list[str]:
    """One name for everything that is linked, directly or through others: "0", "1", ... in the order of the files."""
    parent = list(range(len(links[0])))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for link in links:
        first: dict[Hashable, int] = {}
        for i, name in enumerate(link):
            a, b = root(first.setdefault(name, i)), root(i)
            parent[max(a, b)] = min(a, b)
    return [str(root(i)) for i in range(len(parent))]


def _span_sites(groups: Sequence[str], files: Sequence[ImageFile]) -> bool:
    home: dict[str, str] = {}
    return any(home.setdefault(whose, file.site) != file.site for whose, file in zip(groups, files, strict=True))


def _check_together(
    files: Sequence[ImageFile],
    groups: Sequence[str] | None,
    whole: Sequence[str],
    found: Mapping[str, Mapping[str, np.ndarray]],
    copies: Copies,
) -> None:
    """Refuse split folders that divide a group."""
    home: dict[str, tuple[str, int]] = {}
    for parts in found.values():
        for part, at in parts.items():
            for i in at:
                other, j = home.setdefault(whole[i], (part, i))
                if other != part:
                    what = f'group "{groups[i]}"' if groups and groups[i] == groups[j] else "an image and its copy"
                    raise BadInput(
                        f'Site "{files[i].site}": {what} is in both {other} and {part} ("{files[j].path}", '
                        f'"{files[i].path}"). Move its images into one of them.'
                    )
