"""`fednorms verify`: compare files with their content hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fednorms.cli.output import print_json, stdout
from fednorms.cli.parsing import Flag, parse


@dataclass
class Verify:
    """Compare every file of a run, an exported model, a comparison or a pack with its content hash.

    Each file is intact, damaged, or not covered by a hash. The exit code is 1 if a file is damaged.
    """

    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")]
    """A directory or a pack."""
    json: Flag = False
    """Print one JSON object and nothing else."""


def verify(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Verify, "verify", args)
    from fednorms.runs.use.verify import verify as verify_path

    found = verify_path(given.path)
    if given.json:
        print_json(found.to_dict())
    else:
        stdout().print(repr(found), markup=False, soft_wrap=True)
    return int(bool(found.damaged))
