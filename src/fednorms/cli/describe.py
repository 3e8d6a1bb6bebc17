"""`fednorms describe`: what a method does to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from fednorms.cli.output import print_json, print_text
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
    if given.privacy:
        return _privacy(given)
    from fednorms.explain.describe import describe as describe_method

    found = describe_method(given.method, given.model, classes=given.classes)
    if given.json:
        print_json(found.to_dict())
    else:
        print_text(repr(found))
    return 0


def _privacy(given: Describe) -> int:
    from fednorms.explain.leaves import what_leaves

    found = what_leaves(given.method, given.model, classes=given.classes)
    if given.json:
        print_json(found.to_dict())
    else:
        print_text(repr(found))
    return 0
