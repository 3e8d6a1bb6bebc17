"""What a site has answered, on its own disk: messages per round, and noised answers with their epsilon.

A noised answer is given once. The same request gets the same bytes again; another request for the same round of a run
is refused, because two answers with different noise tell more than epsilon counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fednorms.core.accounting import epsilon_of_answers
from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.states import Broadcast
from fednorms.core.views import Mechanism
from fednorms.runs.store.atomic import clear_errors, write_atomic

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NEW_RUN = "It gives one noised answer per round: start a new run with another seed."


class Answer(BaseModel):
    """One noised answer: for which round of which run, to which request, with how much noise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    round: Annotated[int, Field(ge=0)]
    request: str
    clip: float
    noise: Annotated[float, Field(ge=0)]
    kept: int  # the round of the state that the site keeps with it


class _Pages(BaseModel):
    model_config = ConfigDict(extra="forbid")

    answers: list[Answer] = []
    messages: dict[str, dict[int, int]] = {}  # by run and round


class Ledger:
    """The record of one site over all runs.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     ledger = Ledger(Path(root), "north-1234")
    ...     with ledger.held():
    ...         ledger.count("run", 3, most=1)
    ...         ledger.count("run", 3, most=1)
    Traceback (most recent call last):
    fednorms.BadInput: This site answers 1 message per round, and this is message 2 for the model after 3 rounds.
    """

    def __init__(self, root: Path, site: str) -> None:
        self.path = root / f"ledger-{site}.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes of the site from answering at the same time."""
        with clear_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(
                self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600
            )
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @property
    def answers(self) -> list[Answer]:
        """All noised answers so far."""
        return self._read().answers

    def count(self, run: str, t: int, most: int | None) -> None:
        """Count a message of a round, and refuse it beyond the limit."""
        pages = self._read()
        rounds = pages.messages.setdefault(run, {})
        rounds[t] = rounds.get(t, 0) + 1
        if most is not None and rounds[t] > most:
            raise BadInput(
                f"This site answers {most} message{'s' * (most != 1)} per round, and this is message {rounds[t]} for "
                f"the model after {t} round{'s' * (t != 1)}."
            )
        self._write(pages)

    def find(self, run: str, t: int, request: str) -> Answer | None:
        """The answer that was given for a round; another request for the same round is refused."""
        given = next((a for a in self.answers if (a.run, a.round) == (run, t)), None)
        if given is not None and given.request != request:
            raise BadInput(
                f"This site has answered round {t + 1} of this run, for another model than this one. {NEW_RUN}"
            )
        return given

    def check_budget(self, mechanism: Mechanism, most: float | None, delta: float) -> None:
        """Refuse an answer that would take the site's epsilon above its limit."""
        if most is None:
            return
        after = self.epsilon(delta, mechanism.noise)
        if not after <= most:
            raise BadInput(
                f"This site's epsilon would be {after:.3g} at delta {delta:g} after this answer; its policy allows "
                f"{most:g}."
            )

    def epsilon(self, delta: float, *more: float) -> float:
        """Epsilon of all noised answers so far, and of further ones with these noise multipliers."""
        return epsilon_of_answers([*(a.noise for a in self.answers), *more], delta)

    def spent(self, delta: float) -> str:
        """How much privacy the site has used, in words."""
        given = len(self.answers)
        said = f"{given} noised answer{'s' * (given != 1)} of this site in all runs"
        try:
            return f"{said}, epsilon {self.epsilon(delta):.3g} at delta {delta:g}"
        except BadInput:  # the accountant is not installed here; the server's metrics have epsilon, too
            return said

    def record(self, answer: Answer) -> None:
        """Write down an answer, before it is sent."""
        pages = self._read()
        pages.answers.append(answer)
        self._write(pages)

    def _read(self) -> _Pages:
        try:
            return _Pages.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return _Pages()
        except (OSError, ValidationError) as error:
            raise RunFailed(
                f"The record of this site's answers, {self.path}, cannot be read. Restore it from a copy: without it, "
                "nobody knows how much privacy was used."
            ) from error

    def _write(self, pages: _Pages) -> None:
        write_atomic(self.path, json.dumps(pages.model_dump(), indent=1).encode() + b"\n")


def request_of(sent: Broadcast) -> str:
    """A hash of what a site was sent: the same for a message that is repeated."""
    digest = hashlib.blake2b(str(sent.round).encode(), digest_size=16)
    for where, tree in (("", sent.model), *sorted(sent.parts.items())):
        for name, t in tree.items():
            digest.update(f"{where}/{name} {t.dtype} {tuple(t.shape)}".encode())
            digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
