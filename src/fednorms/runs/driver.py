"""The rounds of a run: train, average, test, write down; and going on where it was interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorms.core import broadcast, initial_state, server_update
from fednorms.data import Federation
from fednorms.errors import BadInput
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.method import Method
from fednorms.part import Part
from fednorms.runs.checkpoint import load, save, save_best
from fednorms.runs.directory import RunDirectory
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.session import Session
from fednorms.states import ServerState
from fednorms.training import Training
from fednorms.tree import Tree


@dataclass(frozen=True)
class RoundEvent:
    """What a callback gets after every round: the row of metrics, and the server's state."""

    round: int
    rounds: int
    row: dict[str, Any]
    scores: dict[str, Scores]
    state: ServerState


Callback = Callable[[RoundEvent], None]


def run(
    method: str | Method | Part = "fedavg",
    federation: str | Path | Federation = "digits-shift",
    model: str | nn.Module = "cnn-small",
    rounds: int = 30,
    *,
    seed: int = 0,
    lr: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    participation: str = "all",
    training: Training | None = None,
    loss: str | Loss = "cross_entropy",
    evaluate: list[str] | None = None,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    callback: Callback | None = None,
) -> Result:
    """Train a method on a federation and test it.

    `recipe` gives all other settings; `lr`, `epochs` and `batch_size` are short for fields of `training`. With `out`
    the run is a directory that `resume` continues; a directory that holds the same unfinished run is continued.

    >>> result = run("fedbn", "digits-shift", model="cnn-small", rounds=1)
    >>> result.method, result.headline
    ('fedbn', 'personal/own')
    """
    base = recipe or Recipe()
    short = {"lr": lr, "epochs": epochs, "batch_size": batch_size}
    settings = vars(training or base.training) | {k: v for k, v in short.items() if v is not None}
    own_federation = federation if isinstance(federation, Federation) else None
    own_model = model if isinstance(model, nn.Module) else None
    values = {
        "method": str(method),
        "federation": f"custom:{own_federation.name}" if own_federation else str(federation),
        "model": f"custom:{type(model).__name__}" if own_model else model,
        "rounds": rounds,
        "seed": seed,
        "training": settings,
        "participation": participation,
        "loss": loss if isinstance(loss, str) else f"custom:{getattr(loss, '__name__', type(loss).__name__)}",
        "evaluate": evaluate or base.evaluate,
    }
    full = Recipe.make(base.model_dump() | values)
    return execute(
        full,
        out=Path(out) if out else None,
        federation=own_federation,
        model=own_model,
        loss=None if isinstance(loss, str) else loss,
        callback=callback,
    )


def resume(
    path: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    callback: Callback | None = None,
) -> Result:
    """Continue an interrupted run from its last checkpoint; ends bit-identical to an uninterrupted one.

    A run with a federation, model or loss of your own needs the same objects again.
    """
    directory = RunDirectory(Path(path))
    return execute(
        Recipe.from_toml(directory.read_recipe(), str(directory.recipe)),
        out=Path(path),
        federation=federation,
        model=model,
        loss=loss,
        callback=callback,
    )


def execute(
    recipe: Recipe,
    *,
    out: Path | None = None,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    callback: Callback | None = None,
) -> Result:
    """Run a recipe from the start or from its last checkpoint."""
    recipe = recipe.resolved()
    for what, text, given in (
        ("federation", recipe.federation, federation),
        ("model", recipe.model, model),
        ("loss", recipe.loss, loss),
    ):
        if text.startswith("custom:") and given is None:
            raise BadInput(
                f"This run was made with a {what} of your own ({text.removeprefix('custom:')}); "
                f"continue it from Python with fednorms.resume(path, {what}=...)."
            )
    session = Session.open(recipe, federation, model, loss)
    if out is None:
        return _rounds(session, None, callback)
    found = session.federation.fingerprint()
    if recipe.fingerprint and recipe.fingerprint != found:
        raise BadInput(
            f'Run {out} was made on other data: federation "{recipe.federation}" had fingerprint '
            f"{recipe.fingerprint}, now {found}. Restore the data, or start a new run with another out."
        )
    session.recipe = recipe.model_copy(update={"fingerprint": found})
    directory = RunDirectory(out)
    directory.create(session.recipe.to_toml(), resume=True)
    with directory.lock():
        return _rounds(session, directory, callback)


def _rounds(session: Session, directory: RunDirectory | None, callback: Callback | None) -> Result:
    recipe, engine, task = session.recipe, session.engine, session.task
    found = load(directory.checkpoints, task.like.device) if directory else None
    if found and directory:
        state, best = found.server, found.extra.get("best")
        for name, client in found.clients.items():
            engine.store.put(name, client)
        engine.store.mark_clean()
        directory.cut_metrics(state.round)
        history = directory.metrics()
    else:
        state, best, history = engine.setup(initial_state(task)), None, []
        if directory:
            directory.cut_metrics(0)
    result = Result.of(session, history, best, found.notes if found else [], directory.path if directory else None)
    while state.round < recipe.rounds:
        started = time.perf_counter()
        cohort = session.participation.cohort(engine.clients, recipe.seed, state.round)
        last = state.round + 1 == recipe.rounds
        due = last or (state.round + 1) % recipe.evaluate_every == 0
        sent = broadcast(task, state)
        done = engine.train(sent, cohort, score=due and any(m.model == "after_local" for m in session.modes))
        uploads = done.uploads
        state = server_update(task, state, uploads) if uploads else replace(state, round=state.round + 1)
        scores = _test(session, state, cohort, done.after_local, last) if due else {}
        row: dict[str, Any] = {
            "round": state.round,
            "lr": task.training.rate(sent.round, recipe.rounds),
            "clients": len(cohort),
            "train_loss": _mean([u.metrics["loss"] for u in uploads], [u.weight for u in uploads]),
            "dropped": sum(int(u.metrics["dropped"]) for u in uploads),
            "diverged": done.diverged,
            "bytes_down": len(cohort) * (sent.model.pick(task.net.exchanged).nbytes() + _bytes(sent.parts)),
            "bytes_up": sum(u.model.nbytes() + _bytes(u.parts) for u in uploads),
            "scores": {k: s.to_dict() for k, s in scores.items()},
            "seconds": time.perf_counter() - started,
        }
        val = scores.get(f"{session.headline}/val")
        better = val is not None and (best is None or val.mean > best["val"])
        if val is not None and better:
            best = {"round": state.round, "val": val.mean}
        if directory:
            directory.append_metrics(row)
            if better:
                save_best(directory.checkpoints, state, engine.store, {"best": best})
            if last or state.round % recipe.checkpoint_every == 0:
                save(directory.checkpoints, state, engine.store.changed, {"best": best})
                engine.store.mark_clean()
        result.add(row, best)
        if callback:
            callback(RoundEvent(state.round, recipe.rounds, row, scores, state))
    result.close(session, state)
    if directory:
        directory.write_summary(result.to_dict())
    return result


def _test(
    session: Session, state: ServerState, cohort: list[str], after_local: dict[str, SiteScore], last: bool
) -> dict[str, Scores]:
    scores: dict[str, Scores] = {}
    domains = {s.name: s.domain for s in session.federation.sites}
    for mode in session.modes:
        if mode.model == "adapted" and not last:
            continue  # fine-tuning every client after every round would cost more than the training
        if mode.model == "after_local":
            if after_local:
                scores[f"{mode}/test"] = Scores(mode.model, mode.statistics, "test", after_local, domains)
            continue
        if (found := session.engine.evaluate(state, mode, cohort)) is not None:
            scores[f"{mode}/test"] = found
    if (val := session.engine.evaluate(state, session.headline, cohort, split="val")) is not None:
        scores[f"{session.headline}/val"] = val
    return scores


def _mean(values: list[float], weights: list[float]) -> float | None:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if values else None


def _bytes(parts: dict[str, Tree]) -> int:
    return sum(tree.nbytes() for tree in parts.values())
