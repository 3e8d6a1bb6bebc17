"""Read an HTML page in a test: tags must be closed in order, and nothing may come from a network."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

_VOID = {"br", "img", "meta"}
CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), "")


class Read(HTMLParser):
    """A page: its tags, texts, links and tables (cells as text, row by row)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.open = text, list[str]()
        self.tags, self.links, self.sources, self.anchors = list[str](), list[str](), list[str](), set[str]()
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []
        assert text.startswith("<!DOCTYPE html>")
        for chart in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
            ElementTree.fromstring(chart)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert not [name for name in given if name.startswith("on")], "no script in attributes"
        self.tags.append(tag)
        self.links += [given["href"]] if "href" in given else []
        self.sources += [given["src"]] if "src" in given else []
        self.anchors |= {given["id"]} if "id" in given else set()
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"style", "script"} & set(self.open):
            return
        if not {"svg"} & set(self.open):
            self.text += data
        if {"td", "th"} & set(self.open) and "svg" not in self.open:
            self.tables[-1][-1][-1] += data


def read_page(file) -> Read:
    """A report that keeps what every report promises: self-contained, under 2 MB, well-formed, links that lead on."""
    text = file.read_text(encoding="utf-8")
    page = Read(text)
    assert len(text.encode()) < 2_000_000 + sum(map(len, page.sources))
    assert page.tags.count("script") == 1  # its own
    assert not re.findall(r"https?:|url\(|@import", text)
    assert all(source.startswith("data:image/") for source in page.sources)
    assert all(link.startswith("#") and link[1:] in page.anchors for link in page.links)
    assert "default-src 'none'" in page.source.replace("&#x27;", "'")
    return page
