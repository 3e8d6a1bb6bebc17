"""Refuse a run directory whose files are somewhere else: a directory from a stranger must not reach other files."""

from __future__ import annotations

import os
from pathlib import Path

from fednorms.core.errors import BadInput


def refuse_links(folder: Path) -> None:
    """Refuse a folder that holds a link out of it, or anything that is neither a file, a folder nor a link.

    Links within the folder are allowed, and so is a link to the folder itself.

    >>> refuse_links(Path("no such folder"))
    """
    root = Path(os.path.realpath(folder))
    waiting = [folder]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # missing or not readable: whoever opens a file there says so
            continue
        for entry in entries:
            if entry.is_symlink():
                target = Path(os.path.realpath(entry.path))
                if not target.is_relative_to(root):
                    raise BadInput(
                        f"{entry.path} is a link to {target}, outside of {folder}. The files of a run must be in its "
                        "own directory: replace the link by the file, or link to the whole directory."
                    )
            elif entry.is_dir():
                waiting.append(Path(entry.path))
            elif not entry.is_file():
                raise BadInput(f"{entry.path} is neither a file nor a folder. Remove it.")
