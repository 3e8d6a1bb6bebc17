"""What a check of data found: numbers per site, and what must be fixed or should be known."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fednorms.core.markup import html_page, html_table

_SHOWN = 20  # sites and findings in a text
_WIDTH = 80
_PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Finding:
    """One thing that was found: its kind (a word for programs), a sentence, and the files it is about."""

    kind: str
    text: str
    files: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": self.kind, "text": self.text, "files": list(self.files)}


@dataclass(frozen=True)
class SiteNumbers:
    """A site in numbers; `classes` counts its images of each class over all splits, `None` is not known."""

    name: str
    domain: str
    train: int
    val: int
    test: int
    classes: tuple[int, ...]
    label_shift: float | None
    feature_shift: float | None
    test_interval: tuple[float, float] | None  # Wilson's 95 % interval of an accuracy of 80 %


@dataclass(frozen=True)
class Checked:
    """The result of `fednorms.check`: sites in numbers, and findings; `ok` if nothing must be fixed.

    `sizes` and `modes` count the images of every size (height, width) and mode (Pillow's word, such as RGB).
    """

    name: str
    what: str
    classes: tuple[str, ...]
    sites: tuple[SiteNumbers, ...]
    images: int
    sizes: dict[tuple[int, int], int]
    modes: dict[str, int]
    must_fix: tuple[Finding, ...]
    should_know: tuple[Finding, ...]
    facts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    reader: str = ""  # the data set's name, if it is a known one
    protocols: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing must be fixed."""
        return not self.must_fix

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "name": self.name,
            "what": self.what,
            "ok": self.ok,
            "must_fix": [finding.to_dict() for finding in self.must_fix],
            "should_know": [finding.to_dict() for finding in self.should_know],
            "classes": list(self.classes),
            "images": self.images,
            "sizes": [{"height": h, "width": w, "images": n} for (h, w), n in self.sizes.items()],
            "modes": self.modes,
            "sites": [{**vars(s), "classes": dict(zip(self.classes, s.classes, strict=True))} for s in self.sites],
            "facts": list(self.facts),
            "left_out": list(self.left_out),
            "reader": self.reader,
            "protocols": self.protocols,
        }

    def _overview(self) -> list[str]:
        sizes = [
            f"{h}x{w} ({n:,})" if len(self.sizes) > 1 else f"{h}x{w}" for (h, w), n in list(self.sizes.items())[:4]
        ]
        more = f" and {len(self.sizes) - 4} more sizes" if len(self.sizes) > 4 else ""
        modes = [f"{mode} ({n:,})" if len(self.modes) > 1 else mode for mode, n in self.modes.items()]
        shape = [f"{self.images:,} images, height x width {', '.join(sizes)}{more}, mode {', '.join(modes)}"]
        return [*self.facts, *(shape if self.sizes else [])]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        header = ["site", "train", "val", "test", "80 % could be", "label shift", "feature shift"]
        rows = []
        for s in self.sites[:_SHOWN]:
            sure = "-" if s.test_interval is None else "{:.0f} to {:.0f} %".format(*(100 * v for v in s.test_interval))
            shifts = ["-" if v is None else f"{v:.2f}" for v in (s.label_shift, s.feature_shift)]
            rows.append([s.name, *(str(getattr(s, part) or "-") for part in _PARTS), sure, *shifts])
        return header, rows

    def _counts(self) -> list[str]:
        """Images per class, a line for each site; of many classes the most common."""
        lines = []
        for s in self.sites[:_SHOWN]:
            order = range(len(s.classes))
            if len(s.classes) > 12:
                order = sorted(order, key=lambda c: -s.classes[c])[:12]  # type: ignore[assignment]
            said = ", ".join(f"{self.classes[c]} {s.classes[c]:,}" for c in order)
            lines.append(f"{s.name}: {said}" + (", ..." if len(s.classes) > 12 else ""))
        return lines

    def _explained(self) -> list[str]:
        return [
            "80 % could be: the 95 % interval of an accuracy of 80 % with so many test images.",
            "Label shift: distance of a site's class shares from those of all sites, 0 to 1.",
            "Feature shift: brightness and color against other sites, class by class, in standard deviations of an "
            "image; 0.2 is small, 0.5 clear, 1 strong.",
        ]

    def __repr__(self) -> str:
        lines = [
            *_wrapped(f"{self.name}: {self.what}"),
            *(line for fact in self._overview() for line in _wrapped(fact)),
        ]
        lines += ["", *_columns(*self._table())]
        if len(self.sites) > _SHOWN:
            lines.append(f"... and {len(self.sites) - _SHOWN} more sites")
        lines += ["", *(line for text in self._explained() for line in _wrapped(text))]
        lines += ["", "Images per class"]
        lines += [line for text in self._counts() for line in _wrapped(text, "  ")]
        for title, found in (("Must fix", self.must_fix), ("Should know", self.should_know)):
            lines += ["", title, *_listed(found)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        header, rows = self._table()
        counts = [[s.name, *(f"{n:,}" for n in s.classes)] for s in self.sites[:_SHOWN]]
        blocks = [html_table(header, rows), html_table(["images per class", *self.classes], counts)]
        for title, found in (("Must fix", self.must_fix), ("Should know", self.should_know)):
            said = [[str(i), finding.text] for i, finding in enumerate(found, 1)] or [["", "nothing"]]
            blocks.append(html_table([title, ""], said, numbers_from=2))
        return html_page(f"{self.name}: {self.what}", *blocks, notes=[*self._overview(), *self._explained()])


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _listed(found: Sequence[Finding]) -> list[str]:
    if not found:
        return ["  nothing"]
    lines = []
    for i, finding in enumerate(found, 1):
        lines += textwrap.wrap(
            finding.text, _WIDTH, initial_indent=f"{i:3}. ", subsequent_indent="     ", break_on_hyphens=False
        )
    return lines


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table that fits 80 columns: long names of sites are cut."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    widths[0] = max(4, min(widths[0], _WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)))

    def line(row: Sequence[str]) -> str:
        first = row[0] if len(row[0]) <= widths[0] else f"{row[0][: widths[0] - 1]}…"
        return "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])

    return [line(header), *map(line, rows)]
