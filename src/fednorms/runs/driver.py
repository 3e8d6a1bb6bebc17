"""The rounds of a run: train, average, test, write down; and going on where it was interrupted."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorms._version import __version__
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.part import Part
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import ServerState
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.devices import numerics
from fednorms.engines.loop import Trained, repeatable
from fednorms.evaluation.scores import Scores, judged_by
from fednorms.methods.registry import method as read_method
from fednorms.runs.handed_over import federation_keys
from fednorms.runs.identity import named, own_loss, own_model, own_parts, same_code
from fednorms.runs.local_scores import LocalScores
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.session import Session
from fednorms.runs.store.checkpoint import load, save, save_best
from fednorms.runs.store.directory import RunDirectory


@dataclass(frozen=True)
class RoundEvent:
    """What a callback gets after every round: the row of metrics, and the server's state."""

    round: int
    rounds: int
    row: dict[str, Any]
    scores: dict[str, Scores]
    state: ServerState


_TIE = 1e-12  # validation accuracies as near as this differ in the order of their sum alone: the earlier round stays


Callback = Callable[[RoundEvent], None]


def run(
    method: str | Method | Part | None = None,
    federation: str | Path | Federation | None = None,
    model: str | nn.Module | None = None,
    rounds: int | None = None,
    *,
    seed: int | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    participation: str | None = None,
    training: Training | None = None,
    loss: str | Loss | None = None,
    evaluate: list[str] | None = None,
    device: str | None = None,
    engine: str | None = None,
    head: list[str] | None = None,
    on_divergence: str | None = None,
    weighting: str | None = None,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    callback: Callback | None = None,
) -> Result:
    """Train a method on a federation and test it.

    What is not given comes from `recipe`, or from its defaults: 30 rounds of FedAvg with cnn-small on digits-shift.
    `lr`, `epochs` and `batch_size` are short for fields of `training`. With `out` the run is a directory that `resume`
    continues; a directory that holds the same unfinished run is continued. A federation of `fednorms.federation` is
    recorded by its name and options, so that the command line finds it again, unless it was changed.

    `device` is cpu, cuda or auto; `engine` how clients run on it ("loop", "graphs", "workers"); `head` names the
    classifier's layers, if they cannot be found; `on_divergence` is "stop" or "skip", which leaves clients whose update
    is not finite out of the average; `weighting` of client models is "size", "uniform" or as the method's paper says.

    >>> result = run("fedbn", "digits-shift", model="cnn-small", rounds=1)
    >>> result.method, result.headline
    ('fedbn', 'personal/own')
    """
    base = recipe or Recipe()
    short = {"lr": lr, "epochs": epochs, "batch_size": batch_size}
    given = {
        "method": method if method is None or isinstance(method, str) else str(read_method(method)),
        "model": model if model is None or isinstance(model, str) else own_model(model),
        "rounds": rounds,
        "seed": seed,
        "training": vars(training or base.training) | {k: v for k, v in short.items() if v is not None},
        "participation": participation,
        "loss": own_loss(loss) if callable(loss) else loss,
        "evaluate": evaluate,
        "device": device,
        "engine": engine,
        "head": head,
        "on_divergence": on_divergence,
        "weighting": weighting,
        **federation_keys(federation, base.data),
    }
    return execute(
        Recipe.make(base.model_dump() | {k: v for k, v in given.items() if v is not None}),
        out=Path(out) if out else None,
        federation=federation if isinstance(federation, Federation) else None,
        model=model if isinstance(model, nn.Module) else None,
        loss=loss if callable(loss) else None,
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
        recipe_to_resume(directory, model, loss),
        out=Path(path),
        federation=federation,
        model=model,
        loss=loss,
        callback=callback,
    )


def recipe_to_resume(directory: RunDirectory, model: nn.Module | None = None, loss: Loss | None = None) -> Recipe:
    """The recipe of a run that is continued with the user's own code, which must be what the run began with."""
    recipe = Recipe.from_toml(directory.read_recipe(), str(directory.recipe))
    now = own_parts(read_method(recipe.method))
    if changed := [name for name, code in recipe.own_parts.items() if now.get(name) != code]:
        raise BadInput(f"The code of {', '.join(changed)} has changed since this run began: choose another out.")
    own = {
        "model": (recipe.model, None if model is None else own_model(model)),
        "loss": (recipe.loss, None if loss is None else own_loss(loss)),
    }
    for what, (then, given) in own.items():
        if given is None or "@" not in then or then == given:
            continue
        if not (same_code(then, given) and directory.checkpoints.exists()):
            raise BadInput(
                f"This run was made with another {what} of your own: {then.removeprefix('custom:')}, now "
                f"{given.removeprefix('custom:')}. Pass the same code and first weights, or choose another out."
            )
        warnings.warn(
            "The model has other first weights than the run began with: clients that have kept tensors to "
            "themselves and not trained yet start from these.",
            stacklevel=3,
        )
    return recipe


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
    for what, text, given in (
        ("federation", recipe.federation, federation),
        ("model", recipe.model, model),
        ("loss", recipe.loss, loss),
    ):
        if text.startswith("custom:") and given is None:
            raise BadInput(
                f"This run was made with a {what} of your own ({named(text)}); "
                f"continue it from Python with fednorms.resume(path, {what}=...)."
            )
    with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.threads, recipe.seed):
        return _execute(recipe, RunDirectory(out) if out else None, federation, model, loss, callback)


def _execute(
    recipe: Recipe,
    directory: RunDirectory | None,
    federation: Federation | None,
    model: nn.Module | None,
    loss: Loss | None,
    callback: Callback | None,
) -> Result:
    session = Session.open(recipe, federation, model, loss, spill=directory.spill if directory else None)
    with closing(session.engine):
        return _in_directory(session, directory, callback)


def _in_directory(session: Session, directory: RunDirectory | None, callback: Callback | None) -> Result:
    recipe = session.recipe
    if directory is None:
        return play(session, None, callback)
    found = session.federation.fingerprint()
    if recipe.fingerprint and recipe.fingerprint != found:
        raise BadInput(
            f'Run {directory.path} was made on other data: federation "{recipe.federation}" had fingerprint '
            f"{recipe.fingerprint}, now {found}. Restore the data, or start a new run with another out."
        )
    session.recipe = recipe.model_copy(update={"fingerprint": found})
    directory.create(session.recipe.to_toml(), resume=True)
    with directory.lock():
        if not directory.facts_path.exists():
            directory.write_facts(session.facts)
        try:
            return play(session, directory, callback)
        except Exception:
            directory.drop_if_empty()  # the same command, mended, would find another recipe here
            raise


def play(session: Session, directory: RunDirectory | None, callback: Callback | None = None) -> Result:
    """All rounds of a session that are left, from its directory's last checkpoint or from the start."""
    recipe, engine, task = session.recipe, session.engine, session.task
    found = load(directory.checkpoints, task.like.device) if directory else None
    if found and directory:
        state, best = found.server, found.extra.get("best")
        engine.store = engine.store.starting_from(found.clients)
        directory.cut_metrics(state.round)
        history, notes = directory.metrics(), list(found.notes)
        if recipe.version != __version__:
            notes.append(f"started with fednorms {recipe.version}, continued with {__version__}")
    else:
        loaded = getattr(task.net.module, "loaded_weights", None)  # what a file gave to the model
        notes = [str(loaded)] if loaded else []
        state, best, history = engine.setup(initial_state(task)), None, []
        if directory:
            directory.cut_metrics(0)
    notes = session.notes + notes
    result = Result.of(session, history, best, notes, directory.path if directory else None)
    local = LocalScores(session, history)
    while state.round < recipe.rounds:
        started = time.perf_counter()
        cohort = session.participation.cohort(engine.clients, recipe.seed, state.round)
        last, due = state.round + 1 == recipe.rounds, local.due(state.round)
        sent = broadcast(task, state)
        scored = bool(local.ends_here(state.round))
        done = engine.train(sent, cohort, score=scored) if cohort else Trained([])
        between = local.take(state.round, done.after_local)
        uploads = done.uploads
        moves = uploads or task.method.having("release")  # noise hides whether anybody came
        state = server_update(task, state, done.combined or uploads) if moves else replace(state, round=state.round + 1)
        scores = _test(session, state, cohort, local, best, due)
        row: dict[str, Any] = {
            "round": state.round,
            "lr": task.training.rate(sent.round, recipe.rounds),
            "clients": len(cohort),
            "train_loss": _mean([float(u.metrics["loss"]) for u in uploads], [u.weight for u in uploads]),
            "dropped": sum(int(u.metrics["dropped"]) for u in uploads),
            "diverged": done.diverged,
            **({"lost": done.lost} if done.lost else {}),
            **({"epsilon": session.guarantee.epsilon(state.round)} if session.guarantee else {}),
            "bytes_down": len(cohort) * (sent.model.pick(task.net.exchanged).nbytes() + _bytes(sent.parts)),
            "bytes_up": sum(u.model.nbytes() + _bytes(u.parts) for u in uploads),
            "scores": {k: s.to_dict() for k, s in scores.items()},
            **({"after_local": {k: s.to_dict() for k, s in between.items()}} if between else {}),
            "seconds": time.perf_counter() - started,
        }
        val = scores.get(f"{session.headline}/val")
        better = val is not None and _better(session, val, best)
        if val is not None and better:
            best = {"round": state.round, "val": _reached(session, val)}
        if directory:
            directory.append_metrics(row)
            kept = engine.with_measurements(state, cohort) if better or last else state
            if better:
                save_best(directory.checkpoints, kept, engine.store, {"best": best})
            if last or state.round % recipe.checkpoint_every == 0:
                now, changed = kept if last else state, engine.store.changed
                save(directory.checkpoints, now, changed, {"best": best}, keep_all=recipe.keep_checkpoints == "all")
                engine.store.mark_clean()
        result.add(row, best)
        if callback:
            callback(RoundEvent(state.round, recipe.rounds, row, scores, state))
    result.notes += engine.notes
    result.close(session, state)
    if directory:
        directory.write_summary(result.to_dict())
    return result


def _test(
    session: Session, state: ServerState, cohort: list[str], local: LocalScores, best: dict[str, Any] | None, due: bool
) -> dict[str, Scores]:
    """All modes on test data and the first on validation data; between two tests, if that is the best so far."""
    recipe, engine = session.recipe, session.engine
    if not due and (not recipe.validate_every or state.round % recipe.validate_every):
        return {}
    val = engine.evaluate(state, session.headline, cohort, split="val")
    if not due and (val is None or not _better(session, val, best)):
        return {}
    scores: dict[str, Scores] = {}
    for mode in session.modes:
        if mode.model == "adapted" and state.round < recipe.rounds:
            continue  # fine-tuning every client after every round would cost more than the training
        if mode.model == "after_local" and not due:
            continue  # there they are known of some clients only
        found = local.scores() if mode.model == "after_local" else engine.evaluate(state, mode, cohort)
        if found is not None:
            scores[f"{mode}/test"] = found
    if val is not None:
        scores[f"{session.headline}/val"] = val
    return scores


def _reached(session: Session, val: Scores) -> float:
    return float(getattr(val, judged_by(session.recipe.metric)))


def _better(session: Session, val: Scores, best: dict[str, Any] | None) -> bool:
    return best is None or _reached(session, val) > best["val"] + _TIE


def _mean(values: list[float], weights: list[float]) -> float | None:
    found = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if values else math.nan
    return None if math.isnan(found) else found


def _bytes(parts: dict[str, Tree]) -> int:
    return sum(tree.nbytes() for tree in parts.values())
