"""`fednorms export`: write a model as plain weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fednorms.cli.output import print_result
from fednorms.cli.parsing import Flag, parse

Which = Literal["last", "best"]


@dataclass
class Export:
    """Write a model as plain weights (safetensors) with its classes and preprocessing, for use without the run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """A new directory for the model."""
    site: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: the global model)")] = None
    """Export the personal model of this site."""
    averaged: Flag = False
    """Export the mean of the clients' models, if the method has no global one."""
    which: Which = "last"
    """The last round, or the round with the best validation accuracy."""
    onnx: Flag = False
    """Also write it as ONNX (model.onnx), which takes images as bytes."""
    torch_export: Flag = False
    """Also write it as a program of torch.export (model.pt2), which needs only torch."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def export(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Export, "export", args)
    from fednorms.runs.use.export import export as export_run

    done = export_run(
        given.run,
        given.out,
        site=given.site,
        averaged=given.averaged,
        which=given.which,
        onnx=given.onnx,
        torch_export=given.torch_export,
    )
    print_result(done, as_json=given.json)
    return 0
