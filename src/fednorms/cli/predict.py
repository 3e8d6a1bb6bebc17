"""`fednorms predict`: classify images with a trained model."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fednorms.cli.output import grid, per_cent, print_json, stderr, stdout
from fednorms.cli.parsing import Flag, parse
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput, writing
from fednorms.runs.store.atomic import replace_bytes

if TYPE_CHECKING:
    from fednorms.runs.use.predict import Prediction

Which = Literal["last", "best"]


@dataclass
class Predict:
    """Classify images with the model of a run, or with an exported or adapted model. Needs no training data."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of the run or of the exported model."""
    images: Annotated[
        tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="IMAGE [IMAGE ...]", help_behavior_hint="(required)")
    ]
    """Image files, or folders of images."""
    site: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: the global model)")] = None
    """Use the personal model of this site."""
    averaged: Flag = False
    """Use the mean of the clients' models, if the method has no global one."""
    which: Which = "last"
    """The last round, or the round with the best validation accuracy."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.csv", help_behavior_hint="")] = None
    """Write a CSV file with the probability of every class instead of printing a table."""
    skip_broken: Flag = False
    """Skip images that cannot be read and name them, instead of stopping."""
    device: str = "auto"
    """cpu, cuda, or auto (the run's own, or the CPU if that is not here)."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def predict(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Predict, "predict", args)
    if given.out and not given.out.absolute().parent.is_dir():
        raise BadInput(f"--out {given.out}: the folder {given.out.parent} does not exist. Create it first.")
    from fednorms.runs.use.predict import predict as predict_images

    found = predict_images(
        given.run,
        given.images,
        site=given.site,
        which=given.which,
        skip_broken=given.skip_broken,
        device=given.device,
        averaged=given.averaged,
    )
    if given.out:
        _write_csv(given.out, found)
    if given.json:
        print_json({"predictions": [p.to_dict() for p in found]})
        return 0
    if given.out:
        stdout().print(f"{counted(len(found), 'prediction')} written to {given.out}", markup=False, soft_wrap=True)
    else:
        rows = [[str(p.file), p.label, per_cent(p.probability)] for p in found]
        stdout().print(grid(["file", "class", "probability"], rows, numbers_from=2))
    for note in dict.fromkeys(p.note for p in found if p.note):
        stderr().print(f"note: {note}", markup=False, soft_wrap=True)
    return 0


def _write_csv(path: Path, found: list[Prediction]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "class", "probability", *found[0].probabilities])
    for p in found:
        every = (f"{x:.6f}" for x in p.probabilities.values())
        writer.writerow([p.file, p.label, f"{p.probability:.6f}", *every])
    data = text.getvalue().encode(errors="backslashreplace")  # a file name need not be valid text
    with writing(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)  # a link, a pipe or a terminal stays as it is
        else:
            replace_bytes(path, data)
