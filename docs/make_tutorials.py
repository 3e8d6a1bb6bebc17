"""Execute the notebooks of docs/tutorials and save them with their outputs: `make tutorials`.

The site shows these outputs; it executes nothing. One notebook: `python docs/make_tutorials.py 01-first-comparison`.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from traitlets.config import Config

REPOSITORY = Path(__file__).resolve().parents[1]
TUTORIALS = REPOSITORY / "docs" / "tutorials"
PARAMETERS = "parameters"  # the tag of the cell with numbers of rounds and seeds
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPINNER = re.compile(r"^[\u2800-\u28ff] .*\n", re.MULTILINE)  # it stops where it was when the work was done
_ABOUT = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(notebook: Path, folder: Path, parameters: str = "", before: str = "") -> NotebookNode:
    """A notebook with the outputs of a new kernel that works in a folder; nothing else is written.

    `parameters` is code that runs after the cell with the tag "parameters", to train fewer rounds. `before` is a
    heading: its cell and those below it are left out.
    """
    read = nbformat.read(notebook, as_version=4)
    if before:
        read.cells = read.cells[: next(i for i, cell in enumerate(read.cells) if before in cell.source)]
    if parameters:
        at = next(i for i, cell in enumerate(read.cells) if PARAMETERS in cell.metadata.get("tags", []))
        read.cells[at].source += "\n" + parameters
    paths = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # for !fednorms
        "HOME": str(folder),  # caches, histories and configurations stay there
        "IPYTHONDIR": str(folder / ".ipython"),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "XDG_STATE_HOME": str(folder / ".state"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm asks for widgets, which a page does not show
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    environment.pop("MPLBACKEND", None)  # the kernel shows pictures inline
    with tempfile.TemporaryDirectory() as sockets:  # files, so the kernel listens on no port
        client = NotebookClient(
            read,
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            kernel_name="python3",
            startup_timeout=1800,  # only a kernel that hangs takes so long
            timeout=None,
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=environment)
    return read


def cleaned(read: NotebookNode) -> NotebookNode:
    """A notebook without what differs from one execution to the next: numbers, times, random identifiers."""
    cells = []
    for number, cell in enumerate(read.cells, start=1):
        tags = cell.metadata.get("tags", [])
        kept = {
            "cell_type": cell.cell_type,
            "id": f"cell-{number:02}",
            "metadata": {"tags": tags} if tags else {},
            "source": cell.source,
        }
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if not _is_progress(output)]
            kept |= {"execution_count": None, "outputs": [_output(output) for output in shown]}
        cells.append(kept)
    return nbformat.from_dict({"cells": cells, "metadata": _ABOUT, "nbformat": 4, "nbformat_minor": 5})


def _is_progress(output: NotebookNode) -> bool:
    """Whether an output is a progress bar, which only says how long it took."""
    return output.output_type == "display_data" and set(output.data) == {"text/html", "text/plain"}


def _output(output: NotebookNode) -> dict[str, object]:
    kept = dict(output)
    if "metadata" in kept:
        kept["metadata"] = {}
    if "execution_count" in kept:
        kept["execution_count"] = None
    if "text" in kept:
        kept["text"] = _SPINNER.sub("", _ESCAPES.sub("", kept["text"]).replace("\r\n", "\n"))
    if "image/png" in kept.get("data", {}):  # without the words "<Figure size ...>"
        kept["data"] = {"image/png": _small(kept["data"]["image/png"])}
    return kept


def _small(picture: str) -> str:
    """A picture in 256 colors and at most 800 pixels wide: every version of it stays in the repository."""
    image: Image.Image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode == "P" and image.width <= 800:
        return picture
    image = image.convert("RGB")
    image.thumbnail((800, 800))
    buffer = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    """Execute and save the notebooks that are named, or all."""
    names = sys.argv[1:] or [path.stem for path in sorted(TUTORIALS.glob("*.ipynb"))]
    for name in names:
        notebook, start = TUTORIALS / f"{name}.ipynb", time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            made = cleaned(executed(notebook, Path(folder)))
        nbformat.write(made, notebook)
        print(f"{name}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
