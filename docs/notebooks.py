"""Tutorials: notebooks of docs/tutorials as Markdown, with the outputs they were saved with. Nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter


def converted(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """The text of a notebook's page, and its pictures by file name."""
    read = nbformat.read(notebook, as_version=4)
    read.metadata.setdefault("language_info", {"name": "python"})  # which a notebook that never ran does not say
    text, resources = MarkdownExporter().from_notebook_node(read)
    pictures = {f"{notebook.stem}-{name}": data for name, data in (resources["outputs"] or {}).items()}
    for name in resources["outputs"] or {}:
        text = text.replace(f"]({name})", f"]({notebook.stem}-{name})")
    # Tables of data frames look like the others of the site.
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace('<table border="1" class="dataframe">', "<table>")
    return text, pictures


def title(notebook: Path) -> str:
    """The first heading of a notebook."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "markdown" and (found := re.match(r"#\s+(.+)", cell.source.strip())):
            return found[1].strip()
    return notebook.stem
