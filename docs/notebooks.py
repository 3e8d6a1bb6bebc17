"""Tutorials: notebooks of docs/tutorials as Markdown, with the outputs they were saved with. Nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter


def converted(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """The text of a notebook's page, and its pictures by file name."""
    text, resources = MarkdownExporter().from_filename(str(notebook))
    pictures = {f"{notebook.stem}-{name}": data for name, data in (resources["outputs"] or {}).items()}
    for name in resources["outputs"] or {}:
        text = text.replace(f"]({name})", f"]({notebook.stem}-{name})")
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)  # of data frames: the site has its own
    return text, pictures


def title(notebook: Path) -> str:
    """The first heading of a notebook."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "markdown" and (found := re.match(r"#\s+(.+)", cell.source.strip())):
            return found[1].strip()
    return notebook.stem
