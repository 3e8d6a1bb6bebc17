"""HTML and SVG elements; text is escaped unless it is markup already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

Child = str | int | float | None | Iterable["Child"]
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # a file name may hold them, a page may not
_EMPTY = {"br", "img", "meta", "circle", "line", "path", "polyline", "rect"}


class Html(str):
    """Markup. Every other string is text and is escaped where it becomes part of a page."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element; `class_` means class, other underscores in names of attributes mean hyphens, None leaves one out.

    >>> tag("p", "a < b", tag("br"), class_="note", data_tip="1 & 2")
    '<p class="note" data-tip="1 &amp; 2">a &lt; b<br/></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = " ".join([name, *(f'{key}="{html.escape(_text(value))}"' for key, value in given.items())])
    empty = name in _EMPTY and not children
    return Html(f"<{head}/>" if empty else f"<{head}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """Several elements and texts after each other; None is nothing.

    >>> joined("1 < 2", None, [Html("<br/>"), 3])
    '1 &lt; 2<br/>3'
    """
    return Html("".join(_markup(child) for child in children))


def _markup(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, str | int | float):
        return child if isinstance(child, Html) else html.escape(_text(child))
    return joined(*child)


def _text(value: object) -> str:
    """A number without needless digits: they are coordinates, and a page has thousands of them."""
    if isinstance(value, float):
        return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")  # + 0.0: no -0
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))
