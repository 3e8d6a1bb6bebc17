"""The page of a report: one HTML file with its style and script inside, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fednorms._version import __version__
from fednorms.reports.elements import Child, Html, tag

_HERE = Path(__file__).parent
# Nothing is loaded, and no script but the page's own runs, whatever a name contains.
_PAGE = 100  # lines of a listing in two columns that fit on one printed page
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """A section with its heading; `short` is its name in the list of contents."""

    title: str
    content: Sequence[Child]
    short: str = ""

    @property
    def id(self) -> str:
        """The anchor."""
        return "".join(c if c.isascii() and c.isalnum() else "-" for c in (self.short or self.title).lower())


@dataclass(frozen=True)
class KeyFigure:
    """A number that a reader should see first."""

    name: str
    value: str
    more: str = ""


@dataclass
class Page:
    """A report: its kind, title, two sentences, key figures and sections.

    >>> page = Page("Run", "fedbn on digits", ["It works."], sections=[Section("Sites", [paragraph("a < b")])])
    >>> text = page.html()
    >>> text.startswith("<!DOCTYPE html>"), "a &lt; b" in text, "https://" in text
    (True, True, False)
    """

    kind: str
    title: str
    summary: Sequence[str]
    about: str = ""
    figures: Sequence[KeyFigure] = ()
    sections: list[Section] = field(default_factory=list)

    def html(self) -> str:
        """The file's text."""
        style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            tag("title", f"{self.title} - fednorms"),
            tag("style", Html(style)),
        )
        shown = [section for section in self.sections if section.content]
        main = tag(
            "main",
            tag(
                "header",
                tag("p", f"fednorms report: {self.kind}", class_="eyebrow"),
                tag("h1", self.title),
                tag("p", self.about, class_="about") if self.about else None,
            ),
            tag("div", tag("p", " ".join(self.summary)), class_="summary"),
            tag("div", [_figure(f) for f in self.figures], class_="figures") if self.figures else None,
            tag("nav", [tag("a", s.short or s.title, href=f"#{s.id}") for s in shown]),
            [tag("section", tag("h2", s.title, id=s.id), s.content) for s in shown],
            tag("footer", f"Written by fednorms {__version__}."),
        )
        body = tag("body", "\n", main, "\n", tag("script", Html(script)))
        return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _figure(figure: KeyFigure) -> Html:
    more = tag("dd", figure.more, class_="more") if figure.more else None
    return tag("dl", tag("dt", figure.name), tag("dd", figure.value), more, class_="figure")


def paragraph(text: Child) -> Html:
    """A paragraph."""
    return tag("p", text)


def note(text: Child) -> Html:
    """A remark in small type."""
    return tag("p", text, class_="note")


def warning(text: Child) -> Html:
    """What a reader must not miss."""
    return tag("p", text, class_="warning")


def bullets(lines: Sequence[Child]) -> Html:
    """A list, or nothing."""
    return tag("ul", [tag("li", line) for line in lines]) if lines else Html("")


def figure(chart: Html, caption: str, more: str = "") -> Html:
    """A chart with its caption; nothing without a chart."""
    if not chart:
        return Html("")
    return tag("figure", tag("figcaption", caption, " ", tag("small", more) if more else None), chart)


def side_by_side(blocks: Sequence[Html]) -> Html:
    """Blocks next to each other where they fit."""
    return tag("div", blocks, class_="row")


def commands(lines: Sequence[str]) -> Html:
    """Commands to copy."""
    return tag("pre", "\n".join(lines))


def listing(text: str) -> Html:
    """A file's text in small type, in columns where they fit."""
    return tag("pre", text, class_="long pages" if text.count("\n") > _PAGE else "long")


def legend(keys: Sequence[tuple[str, str]]) -> Html:
    """Colors and what they mean."""
    return tag("p", [tag("span", swatch(color), name, class_="key") for color, name in keys], class_="legend")


def swatch(color: str) -> Html:
    """A small square of a color."""
    return tag("span", class_="swatch", style=f"background:{color}")
