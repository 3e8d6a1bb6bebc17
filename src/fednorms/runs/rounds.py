"""The rounds of a run: train, average, test, store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fednorms._version import __version__
from fednorms.core.errors import BadInput
from fednorms.core.option_names import option
from fednorms.core.round import broadcast, initial_state
from fednorms.core.states import Broadcast, ServerState, Task
from fednorms.core.tree import Tree
from fednorms.engines.base import Trained
from fednorms.evaluation.modes import MEASURED
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.runs.last_predictions import keep_predictions
from fednorms.runs.local_scores import LocalScores
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.session import Session
from fednorms.runs.stopping import STOP
from fednorms.runs.store.checkpoint import load, save, save_best
from fednorms.runs.store.directory import RunDirectory

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


def play(
    session: Session, directory: RunDirectory | None, callback: Callback | None = None, *, go_on: bool = False
) -> Result:
    """Run all rounds that are left, from the directory's last checkpoint or from the start.

    A run that was stopped has none left, unless it is to `go_on`.
    """
    refuse_blind_stopping(session)
    run = _Run.starting(session, directory, go_on=go_on)
    if directory and run.state.round == 0 and session.recipe.keep_checkpoints == "all":
        run.save(directory, [], better=False, last=False)  # curves of analyses start here
    while run.state.round < session.recipe.rounds and not run.stopped:
        if why := run.out_of_patience():
            run.stop(why)
            break
        event = run.next_round()
        if callback and callback(event) is STOP and run.state.round < session.recipe.rounds:
            run.stop("the callback returned STOP")
    return run.ended()


def refuse_blind_stopping(session: Session) -> None:
    """Refuse early stopping where no site has validation images."""
    if session.recipe.patience and not session.engine.tested("val"):
        raise BadInput(
            f"Early stopping looks at validation images, but no site has any. Hold some out with {option('val')} (of a "
            "federation that is opened by name or folder), or train without early stopping."
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
            self.save(self.directory, cohort, better, last=last)
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
            self.save(self.directory, cohort, better=False, last=True, open_row=True)
            self.directory.replace_metrics(row)
            self.save(self.directory, cohort, better, last=True)

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
            "bytes_down": sum(_bytes_to(task, sent, name) for name in cohort),
            "bytes_up": sum(u.model.nbytes() + _bytes(u.parts) for u in uploads),
            "scores": {k: s.to_dict() for k, s in scores.items()},
            **({"after_local": {k: s.to_dict() for k, s in between.items()}} if between else {}),
        }

    def _refused_since(self) -> int:
        """Messages that could not be used since the last row."""
        new, self.refused = self.session.engine.refused - self.refused, self.session.engine.refused
        return new

    def save(
        self, directory: RunDirectory, cohort: list[str], better: bool, *, last: bool, open_row: bool = False
    ) -> None:
        """Write the best model and the checkpoint where they are due; with an `open_row`, the last row may change."""
        recipe, engine, state = self.session.recipe, self.session.engine, self.state
        extra = dict[str, Any](best=self.best) | ({"stopped": self.stopped} if self.stopped and not open_row else {})
        kept = engine.with_measurements(state, cohort) if better or last else state
        if better and recipe.keep_checkpoints != "resume":
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


def _bytes_to(task: Task, sent: Broadcast, client: str) -> int:
    here = sent.to(client)
    return here.model.pick(task.net.exchanged).nbytes() + _bytes(here.parts)


def _bytes(parts: dict[str, Tree]) -> int:
    return sum(tree.nbytes() for tree in parts.values())
