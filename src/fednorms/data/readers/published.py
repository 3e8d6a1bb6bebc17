"""Where a data set is published, under which license, and how large it is: for docs/data.md and for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Published:
    """What a person needs to get a data set.

    Attributes:
        what: what the images show, in one or two sentences.
        links: pages that publish it, by name; empty for custom data.
        license: its license, as far as the publisher states one.
        counts: images per domain, or training and test images.
    """

    what: str
    links: Mapping[str, str] = field(default_factory=dict)
    license: str = ""
    counts: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """One or two sentences for the message that data are missing; empty for custom data.

        >>> Published("Dogs.", {"authors": "https://example.org/dogs"}, "CC BY 4.0").where
        'It is published at https://example.org/dogs (authors). License: CC BY 4.0.'
        """
        if not self.links:
            return ""
        places = ", ".join(f"{link} ({name})" for name, link in self.links.items())
        return f"It is published at {places}. License: {self.license}."


NOWHERE = Published("")
