"""The test predictions that a finished run keeps: of its last round, and of the best one on validation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.states import ServerState
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.predictions import Predictions
from fednorms.runs.session import Session
from fednorms.runs.store import predictions as store
from fednorms.runs.store.checkpoint import load_best
from fednorms.runs.store.directory import RunDirectory


def keep_predictions(
    session: Session, directory: RunDirectory, state: ServerState, best: Mapping[str, Any] | None
) -> list[str]:
    """Write the predictions of the run's modes that are not there yet; returns notes.

    Nothing is kept across machines, if the recipe says so, or if they are large.
    """
    rounds = {state.round} | ({int(best["round"])} if best else set())
    wanted = session.recipe.keep_predictions
    store.drop_others(directory, rounds if wanted is not False else ())
    modes, size = predicted_modes(session), _size(session)
    if session.data is None or wanted is False or not modes:
        return []
    if wanted is None and size > store.LIMIT:
        return [
            f"test predictions were not kept, because they take {size / 2**20:.0f} MB per mode; "
            "keep_predictions = true keeps them"
        ]
    try:
        _write_missing(session, directory, state, rounds, modes)
    except BadInput as diverged:  # a run that leaves diverging clients out can end with a model that is not finite
        return [f"test predictions were not kept: {diverged}"]
    return []


def _write_missing(
    session: Session, directory: RunDirectory, state: ServerState, rounds: set[int], modes: list[Mode]
) -> None:
    for t in sorted(rounds):
        todo = [mode for mode in modes if not _there(directory, t, mode)]
        if not todo:
            continue
        if t == state.round:
            _write(session, directory, state, todo)
        elif (found := load_best(directory.checkpoints, session.task.like.device)) is not None:
            with session.engine.using(session.engine.store.starting_from(found.clients)):
                _write(session, directory, found.server, todo)


def predicted_modes(session: Session) -> list[Mode]:
    """The modes whose predictions can be repeated cheaply: "after_local" models are gone, "adapted" ones train."""
    return [mode for mode in session.modes if mode.model not in ("after_local", "adapted")]


def predict_now(session: Session, state: ServerState, mode: Mode) -> dict[str, Predictions]:
    """What a mode predicts on the test images in this state."""
    return session.engine.predict(state, mode, session.cohort(max(state.round - 1, 0)))


def _size(session: Session) -> int:
    if session.data is None:
        return 0
    images = sum(len(site.test) for site in (*session.data.scored, *session.data.unseen) if site.test is not None)
    return store.size_of(images, session.facts.num_classes)


def _there(directory: RunDirectory, round: int, mode: Mode) -> bool:
    try:
        return store.read(directory, round, str(mode)) is not None
    except RunFailed:  # damaged: it is written again
        return False


def _write(session: Session, directory: RunDirectory, state: ServerState, modes: list[Mode]) -> None:
    for mode in modes:
        if found := predict_now(session, state, mode):
            store.write(directory, state.round, str(mode), "test", found)
