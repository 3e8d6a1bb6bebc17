"""The rounds of a run: train, average, test, store; and resuming a run that was interrupted."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never

from torch import nn

from fednorms._version import __version__
from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.method import Method
from fednorms.core.optim import MakeOptimizer
from fednorms.core.part import Part
from fednorms.core.round import broadcast, initial_state
from fednorms.core.states import Broadcast, ServerState
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.data.facts import Facts
from fednorms.engines.base import Trained
from fednorms.engines.devices import numerics, repeatable
from fednorms.evaluation.modes import MEASURED
from fednorms.evaluation.scores import Scores, SiteScore
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
from fednorms.runs.last_predictions import keep_predictions
from fednorms.runs.local_scores import LocalScores
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import option
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.session import Session
from fednorms.runs.stopping import STOP, EarlyStopping, patience_of
from fednorms.runs.store.checkpoint import kept_rounds, load, save, save_best
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.unknown_options import refuse_unknown
from fednorms.runs.watch import watching

_EXPLODED = 1e6  # a training loss above this is noted
_TIE = 1e-12  # closer validation accuracies differ only in the order of their sum: the earlier round stays the best


@dataclass(frozen=True)
class RoundEvent:
    """What a callback gets after every round: the row of metrics, the scores, the server's state, and the recipe.

    Rounds count from 1. The recipe is that of the run, with nothing left open ("auto").
    """

    round: int
    rounds: int
    row: dict[str, Any]
    scores: dict[str, Scores]
    state: ServerState
    recipe: Recipe


Callback = Callable[[RoundEvent], object]
"""Called after every round; a run ends if it returns `fednorms.STOP`."""


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
    run, that run is continued. A federation made by `fednorms.federation` is recorded by its name and options unless it
    was changed, so the command line can open it again.

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
    base = recipe or Recipe()
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
    with watching(made, out, callback, progress, track) as watch:
        result = execute(
            made,
            out=Path(out) if out else None,
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
    directory, own = RunDirectory(Path(path)), Callables(optimizer, schedule)
    recipe = recipe_to_resume(directory, model, loss, own)
    changed = {k: v for k, v in {"rounds": rounds, "patience": patience_of(stop)}.items() if v is not None}
    refuse_no_patience(directory, recipe, changed)
    if rounds is not None:
        recipe = with_rounds(recipe, directory, rounds)
    with watching(recipe, path, callback, progress, track) as watch:
        result = execute(
            recipe,
            out=Path(path),
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
    _refuse_blind_stopping(session)
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


def play(
    session: Session, directory: RunDirectory | None, callback: Callback | None = None, *, go_on: bool = False
) -> Result:
    """Run all rounds that are left, from the directory's last checkpoint or from the start.

    A run that was stopped has none left, unless it is to `go_on`.
    """
    _refuse_blind_stopping(session)
    run = _Run.starting(session, directory, go_on=go_on)
    while run.state.round < session.recipe.rounds and not run.stopped:
        if why := run.out_of_patience():
            run.stop(why)
            break
        event = run.next_round()
        if callback and callback(event) is STOP and run.state.round < session.recipe.rounds:
            run.stop("the callback returned STOP")
    return run.ended()


def _refuse_blind_stopping(session: Session) -> None:
    if session.recipe.patience and not session.engine.tested("val"):
        raise BadInput(
            "Early stopping looks at validation images, but no site has any. Hold some out (val=0.1 for a federation "
            "that is opened by name or folder), or train without early stopping."
        )


@dataclass
class _Run:
    """A session between two rounds."""

    session: Session
    directory: RunDirectory | None
    state: ServerState
    best: dict[str, Any] | None  # round and score of the best validation so far
    result: Result
    local: LocalScores
    refused: int = 0  # messages of clients that could not be used, up to the last row
    stopped: str = ""  # why it ended before its last round

    @classmethod
    def starting(cls, session: Session, directory: RunDirectory | None, *, go_on: bool) -> _Run:
        """Take up the last checkpoint, or make the first state."""
        engine, task = session.engine, session.task
        stopped = ""
        found = load(directory.checkpoints, task.like.device) if directory else None
        history: list[dict[str, Any]] = []
        if found and directory:
            state, best = found.server, found.extra.get("best")
            stopped = "" if go_on else found.extra.get("stopped", "")
            if state.round < session.recipe.rounds and not stopped:  # measured for the tests of an end that is none now
                state = replace(state, parts={k: v for k, v in state.parts.items() if not k.endswith(MEASURED)})
            engine.use(engine.store.starting_from(found.clients))
            missing = directory.check_metrics(found.extra.get("metrics"))
            directory.cut_metrics(state.round)
            history, notes = directory.metrics(), [*found.notes, *([missing] if missing else [])]
            notes += [] if go_on else directory.changed_recipe(found.extra.get("recipe"))
            if session.recipe.version != __version__:
                notes.append(f"started with fednorms {session.recipe.version}, continued with {__version__}")
        else:
            loaded = getattr(task.net.module, "loaded_weights", None)  # says what a file gave to the model
            notes = [str(loaded)] if loaded else []
            state, best = engine.setup(initial_state(task)), None
            if directory:
                directory.cut_metrics(0)
        path = directory.path if directory else None
        result = Result.of(session, history, best, session.notes + notes, path)
        return cls(session, directory, state, best, result, LocalScores(session, history), stopped=stopped)

    def next_round(self) -> RoundEvent:
        """Train, average, test, and store what came out."""
        started, session, task = time.perf_counter(), self.session, self.session.task
        t = self.state.round
        cohort = session.cohort(t)
        sent = broadcast(task, self.state)
        scored = bool(self.local.ends_here(t))
        done = session.engine.train(sent, cohort, score=scored) if cohort else Trained([])
        between = self.local.take(t, done.after_local)
        self._average(done)
        last = self.state.round == session.recipe.rounds
        scores = self._test(cohort, self.local.due(t), last=last)
        row = self._row(sent, cohort, done, scores, between) | {"seconds": time.perf_counter() - started}
        self._note_explosions(done)
        better = self._found_better(scores)
        if self.directory:
            self.directory.append_metrics(row)
            self._save(self.directory, cohort, better, last=last)
        self.result.add(row, self.best)
        return RoundEvent(self.state.round, session.recipe.rounds, row, scores, self.state, session.recipe)

    def out_of_patience(self) -> str:
        """Why early stopping ends the run here; empty if it does not."""
        recipe, t = self.session.recipe, self.state.round
        validated = t > 0 and (self.local.due(t - 1) or (recipe.validate_every and t % recipe.validate_every == 0))
        if not recipe.patience or not validated or not self.best or t - self.best["round"] < recipe.patience:
            return ""
        return f"validation has not improved since round {self.best['round']} (patience {recipe.patience})"

    def stop(self, why: str) -> None:
        """Make the last round the run's end: test what only an end tests, and write row and checkpoint again."""
        self.stopped = why
        t, row = self.state.round, self.result.history[-1]
        cohort = self.session.cohort(t - 1)
        scores = self._test(cohort, self.local.due(t - 1), last=True)
        row["scores"] = row["scores"] | {k: s.to_dict() for k, s in scores.items()}
        better = self._found_better(scores)
        self.result.best = self.best
        if self.directory:  # a kill in between must not leave a row that the checkpoint does not know
            self._save(self.directory, cohort, better=False, last=True, open_row=True)
            self.directory.replace_metrics(row)
            self._save(self.directory, cohort, better, last=True)

    def _found_better(self, scores: dict[str, Scores]) -> bool:
        """Whether this round has the best validation so far; it is then recorded."""
        val = scores.get(f"{self.session.headline}/val")
        better = val is not None and self._better(val)
        if val is not None and better:
            self.best = {"round": self.state.round, "val": self._judged(val)}
        return better

    def _note_explosions(self, done: Trained) -> None:
        """Note the first training loss that is finite but too large to mean anything."""
        said = "the training loss of client"
        large = {u.client: loss for u in done.uploads if (loss := float(u.metrics["loss"])) > _EXPLODED}
        if large and not any(said in note for note in self.result.notes):
            client = max(large, key=lambda name: large[name])
            self.result.notes.append(
                f'round {self.state.round}: {said} "{client}" was {large[client]:.3g}; lower the learning rate or set '
                "clip if this was not expected"
            )

    def ended(self) -> Result:
        """Close the result, and write the summary."""
        if self.stopped:
            rounds = f"round {self.state.round} of {self.session.recipe.rounds}"
            self.result.notes.append(f"stopped after {rounds}: {self.stopped}")
        self.result.notes += self.session.engine.notes
        self.result.close(self.session, self.state)
        if self.directory:
            self.result.notes += keep_predictions(self.session, self.directory, self.state, self.best)
            self.directory.write_summary(self.result.to_dict())
        return self.result

    def _average(self, done: Trained) -> None:
        task = self.session.task
        if done.uploads or task.method.moves_without_clients:  # noise hides whether anybody took part
            self.state = self.session.engine.average(self.state, done)
        else:
            self.state = replace(self.state, round=self.state.round + 1)

    def _test(self, cohort: list[str], due: bool, *, last: bool) -> dict[str, Scores]:
        """Test all modes, and validate the first; between two tests, only if the round is the best so far."""
        recipe, engine, state = self.session.recipe, self.session.engine, self.state
        if not (due or last) and (not recipe.validate_every or state.round % recipe.validate_every):
            return {}
        val = engine.evaluate(state, self.session.headline, cohort, split="val")
        if not (due or last) and (val is None or not self._better(val)):
            return {}
        scores: dict[str, Scores] = {}
        for mode in self.session.modes:
            if mode.model == "adapted" and not last:
                continue  # fine-tuning every client after every round would cost more than the training
            if mode.model == "after_local" and not due and not (last and self.local.every_round):
                continue  # only some clients have such scores then
            found = self.local.scores() if mode.model == "after_local" else engine.evaluate(state, mode, cohort)
            if found is not None:
                scores[f"{mode}/test"] = found
        if val is not None:
            scores[f"{self.session.headline}/val"] = val
        return scores

    def _row(
        self,
        sent: Broadcast,
        cohort: list[str],
        done: Trained,
        scores: dict[str, Scores],
        between: dict[str, SiteScore],
    ) -> dict[str, Any]:
        """The round as plain values: a line of metrics.jsonl, without its time."""
        task, guarantee, uploads = self.session.task, self.session.guarantee, done.uploads
        return {
            "round": self.state.round,
            "lr": task.rate(sent.round),
            "clients": len(cohort),
            "train_loss": _mean([float(u.metrics["loss"]) for u in uploads], [u.weight for u in uploads]),
            "dropped": sum(int(u.metrics["dropped"]) for u in uploads),
            "diverged": done.diverged,
            **({"lost": done.lost} if done.lost else {}),
            **({"refused": refused} if (refused := self._refused_since()) else {}),
            **({"epsilon": guarantee.epsilon(self.state.round)} if guarantee else {}),
            "bytes_down": len(cohort) * (sent.model.pick(task.net.exchanged).nbytes() + _bytes(sent.parts)),
            "bytes_up": sum(u.model.nbytes() + _bytes(u.parts) for u in uploads),
            "scores": {k: s.to_dict() for k, s in scores.items()},
            **({"after_local": {k: s.to_dict() for k, s in between.items()}} if between else {}),
        }

    def _refused_since(self) -> int:
        """Messages that could not be used since the last row."""
        new, self.refused = self.session.engine.refused - self.refused, self.session.engine.refused
        return new

    def _save(
        self, directory: RunDirectory, cohort: list[str], better: bool, *, last: bool, open_row: bool = False
    ) -> None:
        """Write the best model and the checkpoint where they are due; with an `open_row`, the last row may change."""
        recipe, engine, state = self.session.recipe, self.session.engine, self.state
        extra = dict[str, Any](best=self.best) | ({"stopped": self.stopped} if self.stopped and not open_row else {})
        kept = engine.with_measurements(state, cohort) if better or last else state
        if better:
            save_best(directory.checkpoints, kept, engine.store, extra)
        if last or state.round % recipe.checkpoint_every == 0:
            now, changed = kept if last else state, engine.store.changed
            extra |= {"metrics": directory.metrics_mark(without_last=open_row), "recipe": directory.recipe_mark()}
            save(directory.checkpoints, now, changed, extra, keep_all=recipe.keep_checkpoints == "all")
            engine.store.mark_clean()

    def _judged(self, val: Scores) -> float:
        return val.judged(self.session.recipe.metric)

    def _better(self, val: Scores) -> bool:
        return self.best is None or self._judged(val) > self.best["val"] + _TIE


def _mean(values: list[float], weights: list[float]) -> float | None:
    found = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if values else math.nan
    return None if math.isnan(found) else found


def _bytes(parts: dict[str, Tree]) -> int:
    return sum(tree.nbytes() for tree in parts.values())
