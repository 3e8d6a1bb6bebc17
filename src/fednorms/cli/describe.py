"""`fednorms describe`: what a method does to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from fednorms.cli.output import print_result
from fednorms.cli.parsing import Flag, parse


@dataclass
class Describe:
    """Show what a method does to a model: who owns each tensor, bytes sent and kept, forward passes, round trips."""

    method: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="METHOD")]
    """Parts joined by +, as in "scaffold + fedbn"."""
    model: str = "cnn-small"
    """A name (see `fednorms list models`), torchvision:NAME, timm:NAME, or a custom model, mymodule:Net."""
    classes: int = 10
    """Number of classes."""
    privacy: Flag = False
    """Show what leaves a site instead: which tensors, which of them are statistics of the data, and how many bytes."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def describe(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Describe, "describe", args)
    from fednorms.explain.describe import describe as describe_method
    from fednorms.explain.leaves import what_leaves

    explain = what_leaves if given.privacy else describe_method
    print_result(explain(given.method, given.model, classes=given.classes), as_json=given.json)
    return 0
