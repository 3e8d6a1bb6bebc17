"""The papers that a docstring names, in the one form `Paper: Title. Authors. Venue year. Link`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(
    r"Paper: (?P<title>.+?[.?]) (?P<authors>.+?(?: et al)?)\. (?P<venue>.+?)\. (?P<link>https?://\S+|No link found)"
)


@dataclass(frozen=True)
class Paper:
    """Where an idea was published."""

    title: str
    authors: str
    venue: str
    link: str  # "" if none was found

    @property
    def short(self) -> str:
        """Authors and year."""
        return f"{self.authors} {self.venue.split()[-1]}"


def papers(doc: str) -> list[Paper]:
    """The papers that a docstring names, in its order.

    >>> papers("Paper: Group Normalization. Wu and He. ECCV 2018. https://arxiv.org/abs/1803.08494")[0].short
    'Wu and He 2018'
    """
    return [
        Paper(
            found["title"].removesuffix("."),
            re.sub(r"et al$", "et al.", found["authors"]),
            found["venue"],
            found["link"] if found["link"].startswith("http") else "",
        )
        for found in _FORM.finditer(" ".join(doc.split()))
    ]
