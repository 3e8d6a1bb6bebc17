"""Start a run, or continue one that was interrupted: what is given becomes a recipe, and a recipe a session."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Never

from torch import nn

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.method import Method
from fednorms.core.optim import MakeOptimizer
from fednorms.core.part import Part
from fednorms.core.paths import given_path
from fednorms.core.training import Training
from fednorms.data import Federation
from fednorms.data.facts import Facts
from fednorms.data.registry import federations
from fednorms.engines.devices import numerics, repeatable
from fednorms.methods.registry import method as read_method
from fednorms.models.custom import bare, refuse_unasked
from fednorms.runs.callables import NO_CALLABLES, Callables, Epochs, Schedule
from fednorms.runs.device import device_of
from fednorms.runs.identity import (
    Custom,
    custom_name,
    named_model,
    own_loss,
    own_model,
    own_name,
    own_parts,
    recipe_keys,
    same_code,
    training_keys,
)
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import option
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.rounds import Callback, play, refuse_blind_stopping
from fednorms.runs.session import Session
from fednorms.runs.stopping import EarlyStopping, patience_of
from fednorms.runs.store.checkpoint import kept_rounds, load
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.unknown_options import refuse_unknown
from fednorms.runs.watch import watching


def run(
    method: str | Method | Part | None = None,
    federation: str | Path | Federation | None = None,
    model: str | nn.Module | None = None,
    rounds: int | None = None,
    *,
    seed: int | None = None,
    lr: float | None = None,
    epochs: Epochs | None = None,
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
    progress: bool | None = None,
    track: str | Sequence[str] = (),
    optimizer: str | MakeOptimizer | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: str | Schedule | None = None,
    warmup: int | None = None,
    stop: EarlyStopping | None = None,
    **unknown: Never,
) -> Result:
    """Train a method on a federation and test it.

    What is not given comes from `recipe`, or from its defaults: 30 rounds of FedAvg with cnn-small on digits-shift.
    With `out`, the run is stored in a directory that `resume` continues; if the directory holds the same unfinished
    run, that run is continued. A federation made by `fednorms.federation` or `fednorms.from_folders` is recorded by its
    name and options unless it was changed, so the command line can open it again.

    `lr`, `epochs`, `batch_size`, `optimizer`, `momentum`, `weight_decay`, `schedule` and `warmup` override fields of
    `training`. `epochs` may differ between clients: a dictionary {client: epochs}, or a function of the `Site`.
    `optimizer` is "sgd", "adam", "adamw", a class of torch.optim, or a function of (params, lr) that makes an
    optimizer; custom ones run in the engine "loop". All start fresh in every round. `schedule` is "const", "exp",
    "step", "cosine", or a function of the round, counted from 1, that returns the factor of `lr`. `warmup` is a number
    of rounds in which the rate grows.

    `stop=fn.EarlyStopping(patience=5)` ends the run when validation has not improved for 5 rounds. It also ends after
    a round for which `callback` returns `fn.STOP`. Such a run is finished: it can be loaded, tested and exported.

    `device` is cpu, cuda or auto (a GPU if there is one; a run that is continued stays on its device). `engine` says
    how clients run on it ("loop", "graphs", "workers"). `head` names the classifier's layers if they cannot be found.
    `on_divergence` is "stop" or "skip"; "skip" leaves clients whose update or loss is not finite out of the average.
    `weighting` of client models is "size", "uniform" or "auto" (the paper's choice).

    `progress` shows a progress bar (default: on a terminal and in a notebook). `track` names trackers that log every
    round: "tensorboard", "wandb", "mlflow".

    >>> result = run("fedbn", "digits-shift", model="cnn-small", rounds=1)
    >>> result.method, result.headline
    ('fedbn', 'personal/own')
    """
    refuse_unknown(run, unknown, method)
    base = Recipe.given(recipe, training)
    if isinstance(method, Federation) or (isinstance(method, str) and method in federations()):
        shown = f'"{method}"' if isinstance(method, str) else "a Federation"
        raise BadInput(f"method= must be a method, got {shown}. The method comes first: run(METHOD, FEDERATION).")
    short = {"lr": lr, "batch_size": batch_size, "momentum": momentum, "weight_decay": weight_decay, "warmup": warmup}
    settings = {k: v for k, v in short.items() if v is not None} | training_keys(optimizer, schedule, epochs)
    given = {
        "method": method if method is None or isinstance(method, str) else str(read_method(method)),
        "rounds": rounds,
        "seed": seed,
        "training": vars(training or base.training) | settings,
        "patience": patience_of(stop),
        "participation": participation,
        "evaluate": evaluate,
        "device": device,
        "engine": engine,
        "head": head,
        "on_divergence": on_divergence,
        "weighting": weighting,
        **recipe_keys(federation, model, loss, base.data.model_dump()),
    }
    custom = Custom.of(federation, model, loss, Callables.of(optimizer, schedule, epochs))
    made = Recipe.make(base.model_dump() | {k: v for k, v in given.items() if v is not None})
    folder = given_path("out", out) if out else None
    with watching(made, folder, callback, progress, track) as watch:
        result = execute(
            made,
            out=folder,
            federation=custom.federation,
            model=custom.model,
            loss=custom.loss,
            own=custom.training,
            callback=watch.callback,
        )
    return watch.noted(result)


def resume(
    path: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
    track: str | Sequence[str] = (),
    rounds: int | None = None,
    optimizer: MakeOptimizer | None = None,
    schedule: Schedule | None = None,
    stop: EarlyStopping | None = None,
    **unknown: Never,
) -> Result:
    """Continue an interrupted run from its last checkpoint; the end is bit-identical to an uninterrupted run.

    A run with a custom federation, model, loss, optimizer or schedule needs the same objects again. `progress` and
    `track` are those of `run`; a tracker continues the curves of the same directory.

    `rounds` trains a run longer: the model is bit for bit that of a run with so many rounds from the start. Methods and
    schedules that depend on the number of rounds are refused. `stop` replaces the early stopping of the run.
    """
    refuse_unknown(resume, unknown)
    directory, own = RunDirectory(given_path("path", path)), Callables(optimizer, schedule)
    recipe = recipe_to_resume(directory, model, loss, own)
    changed = {k: v for k, v in {"rounds": rounds, "patience": patience_of(stop)}.items() if v is not None}
    refuse_no_patience(directory, recipe, changed)
    if rounds is not None:
        recipe = with_rounds(recipe, directory, rounds)
    with watching(recipe, directory.path, callback, progress, track) as watch:
        result = execute(
            recipe,
            out=directory.path,
            federation=federation,
            model=model,
            loss=loss,
            own=own,
            callback=watch.callback,
            changed=changed,
        )
    return watch.noted(result)


def with_rounds(recipe: Recipe, directory: RunDirectory, rounds: int) -> Recipe:
    """The recipe of a run, to be continued up to another number of rounds; refused if what it trained depends on it."""
    reached = max(kept_rounds(directory.checkpoints), default=0)
    if rounds < max(reached, 1):
        raise BadInput(
            f"Run {directory.path} has reached round {reached}, so it cannot end after round {rounds}. Choose "
            f"{max(reached, 1)} or more ({option('rounds')})."
        )
    if reached and rounds != recipe.rounds:
        bound = [f"the method {name}" for name in recipe.whole_method().bound_to_rounds]
        bound += [f'the schedule "{s}"' for s in [recipe.training.schedule] if s in ("step", "cosine")]
        if bound:
            raise BadInput(
                f"Run {directory.path} cannot change from {recipe.rounds} to {rounds} rounds, because "
                f"{' and '.join(bound)} depends on the number of rounds: the first {reached} would have been "
                f"different. Start a new run with another {option('out')}."
            )
    return Recipe.make(recipe.to_dict() | {"rounds": rounds})


def refuse_no_patience(directory: RunDirectory, recipe: Recipe, changed: Mapping[str, Any]) -> None:
    """Refuse more rounds for a run that early stopping has ended, and would end again at once."""
    found = load(directory.checkpoints)
    stopped = found.extra.get("stopped", "") if found else ""
    longer = changed.get("rounds", recipe.rounds) != recipe.rounds and "patience" not in changed
    if found and "patience" in stopped and longer:
        raise BadInput(
            f"Run {directory.path} was stopped after round {found.server.round}: {stopped}. It would stop again at "
            f"once. Give it more patience ({option('patience')})."
        )


def recipe_to_resume(
    directory: RunDirectory,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    own: Callables = NO_CALLABLES,
) -> Recipe:
    """The recipe of a run to resume, after checking that custom code is the same as when the run began."""
    recipe = Recipe.from_toml(directory.read_recipe(), str(directory.recipe))
    # A run in this process has a fingerprint, and writes its facts again if they are damaged.
    if not recipe.fingerprint and recipe.across_machines(directory.read_facts()):
        raise BadInput(
            f"Run {directory.path} was trained across machines. Continue it there with `flwr run PROJECT here`."
        )
    refuse_unasked(recipe.model, f"Run {directory.path}")
    now = own_parts(read_method(recipe.method))
    changed = [name for name, code in recipe.own_parts.items() if now.get(name) != code]
    changed += [bare(recipe.model)] if named_model(recipe.model) != recipe.model else []
    if changed:
        raise BadInput(
            f"The code of {', '.join(changed)} has changed since this run began. Restore it, or start a new run with "
            f"another {option('out')}."
        )
    custom = {
        "model": (recipe.model, None if model is None else own_model(model)),
        "loss": (recipe.loss, None if loss is None else own_loss(loss)),
        "optimizer": (recipe.training.optimizer, own.optimizer and own_name(own.optimizer)),
        "schedule": (recipe.training.schedule, own.schedule and own_name(own.schedule)),
    }
    for what, (then, given) in custom.items():
        if given is None or "@" not in then or then == given:
            continue
        if not (same_code(then, given) and directory.checkpoints.exists()):
            raise BadInput(
                f"This run was made with another custom {what}: {then.removeprefix('custom:')}, now "
                f"{given.removeprefix('custom:')}. Pass the same code and first weights, or choose another "
                f"{option('out')}."
            )
        warnings.warn(
            "The model has other first weights than the run began with. Clients that keep tensors of their own and "
            "have not trained yet start from these.",
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
    own: Callables = NO_CALLABLES,
    changed: Mapping[str, Any] | None = None,
) -> Result:
    """Run a recipe from the start or from its last checkpoint; `changed` are keys that a stored run has otherwise."""
    recipe = recipe.model_copy(update=dict(changed or {}))
    for what, text, given in (
        ("federation", recipe.federation, federation),
        ("model", recipe.model, model),
        ("loss", recipe.loss, loss),
        ("optimizer", recipe.training.optimizer, own.optimizer),
        ("schedule", recipe.training.schedule, own.schedule),
    ):
        if text.startswith("custom:") and given is None:
            raise BadInput(
                f"This run was made with a custom {what} ({custom_name(text)}). "
                f"Continue it from Python with fednorms.resume(path, {what}=...)."
            )
    directory = RunDirectory(out) if out else None
    recipe = recipe.model_copy(update={"device": device_of(recipe.device, [directory] if directory else [])})
    with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.threads, recipe.seed):
        spill = directory.spill if directory else None
        session = Session.open(recipe, federation, model, loss, spill=spill, own=own)
        with closing(session.engine):
            if directory is None:
                return play(session, None, callback)
            return _in_directory(session, directory, callback, changed=bool(changed))


def _in_directory(session: Session, directory: RunDirectory, callback: Callback | None, *, changed: bool) -> Result:
    refuse_blind_stopping(session)
    recipe, found = session.recipe, session.federation.fingerprint()
    if recipe.fingerprint and recipe.fingerprint != found:
        raise BadInput(
            f'Run {directory.path} was made on other data: federation "{recipe.federation}" had fingerprint '
            f"{recipe.fingerprint}, now {found}. Restore the data, or start a new run with another {option('out')}."
        )
    session.recipe = recipe.model_copy(update={"fingerprint": found})
    if not changed:
        directory.create(session.recipe.to_toml(), resume=True)
    with directory.lock():
        if changed:
            directory.replace_recipe(session.recipe.to_toml())
        if not _has_facts(directory, session.facts):
            directory.write_facts(session.facts)
        try:
            return play(session, directory, callback, go_on=changed)
        except Exception:
            directory.drop_if_empty()  # otherwise the corrected command would find another recipe here
            raise


def _has_facts(directory: RunDirectory, facts: Facts) -> bool:
    try:
        return directory.read_facts() == facts
    except RunFailed:  # damaged: they are written again
        return False
