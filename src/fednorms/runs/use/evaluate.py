"""Evaluate a run again: in other modes, with other statistics, on another split or other data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.data import Federation
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import Scores
from fednorms.runs.identity import custom_name
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import option
from fednorms.runs.progress import Reporter, is_wanted, per_cent
from fednorms.runs.use.open import OpenRun, Which, open_run


def evaluate_run(
    path: str | Path,
    modes: list[str] | None = None,
    which: Which = "last",
    split: Literal["test", "val", "train"] = "test",
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str = "auto",
    progress: bool | None = None,
) -> dict[str, Scores]:
    """Evaluate a run's models in the given modes ("personal", "global/batch", ...; default: those of its recipe).

    The keys are "mode/statistics/split". The run's data must be available; `federation` evaluates on other data with
    the same classes. "after_local" scores are those that the run recorded, because these models are gone.
    `device` is cpu, cuda or auto (the run's own, or the CPU if that is not here). `progress` shows a progress bar
    (default: on a terminal and in a notebook).

    >>> import tempfile
    >>> from fednorms.runs.driver import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("fedbn", rounds=1, out=folder + "/run")
    ...     again = evaluate_run(folder + "/run", ["personal", "personal/re-estimated"])
    >>> again["personal/own/test"].mean == result.accuracy, sorted(again)
    (True, ['personal/own/test', 'personal/re-estimated/test'])
    """
    if split not in ("test", "val", "train"):
        raise BadInput(f'Unknown split "{split}". Expected "test", "val" or "train".')
    opened = open_run(path, which, federation, model, loss, device)
    for note in opened.notes:
        warnings.warn(note, stacklevel=2)
    session = opened.session
    asked = session.modes if not modes else [Mode.read(text).resolved(opened.task) for text in modes]
    found: dict[str, Scores] = {}
    empty: list[Mode] = []
    tested = list(dict.fromkeys(asked))
    with Reporter("evaluate", len(tested), silent=not is_wanted(progress), unit="mode") as reporter:
        for number, mode in enumerate(tested, 1):
            refuse_lost_loss(opened, mode)
            if mode.model == "after_local":
                scores: Scores | None = recorded_scores(opened, mode, split)
            else:
                scores = session.engine.evaluate(opened.state, mode, opened.cohort, split)
            if scores is None:
                empty.append(mode)
            else:
                found[f"{mode}/{split}"] = scores
            reporter.advance(number, f"{mode}: " + ("nothing to test" if scores is None else per_cent(scores.mean)))
    if not found or (empty and modes):
        raise BadInput(nothing_to_test(session.federation, empty, split))
    return found


def refuse_lost_loss(opened: OpenRun, mode: Mode) -> None:
    """Refuse a mode that trains if the run's custom loss was not passed again."""
    if mode.model == "adapted" and opened.lost_loss:
        raise BadInput(
            f'Mode "adapted" trains with the run\'s custom loss ({custom_name(opened.lost_loss)}). Pass it as loss=.'
        )


def nothing_to_test(federation: Federation, empty: list[Mode], split: str) -> str:
    """Say why a mode could not be tested, and what can be."""
    if not empty:
        return 'The recipe tests nothing (evaluate = []). Name a mode, such as "global" or "personal".'
    unseen = empty[0].model == "unseen"
    sites, others = (federation.unseen, federation.clients) if unseen else (federation.clients, federation.unseen)
    there = [part for part in ("test", "val", "train") if any(part in site.splits for site in sites)]
    if not sites:
        why = f"every site trains. A run has unseen sites only if its recipe holds some out ({option('hold_out')})"
    else:
        why = f"{'unseen sites' if unseen else 'sites that train'} have no {split} images. "
        why += f"Choose {' or '.join(there)} ({option('split')})"
        if not unseen and any(split in site.splits for site in others):
            why += ', or evaluate "unseen", whose sites have some'
    return f'"{empty[0]}" cannot be tested on {split} data of federation "{federation.name}": {why}.'


def recorded_scores(opened: OpenRun, mode: Mode, split: str) -> Scores:
    """The scores that a run recorded right after local training: these models are not stored."""
    name = f"{mode}/{split}"
    for row in opened.directory.metrics():
        if row["round"] == opened.state.round and name in row["scores"]:
            return Scores.from_dict(row["scores"][name], opened.facts.domain_of)
    raise BadInput(
        f'Run {opened.directory.path} has not recorded "{name}" in round {opened.state.round}, and the models right '
        'after local training are not stored. Run again with evaluate = ["after_local"].'
    )
