"""The ServerApp: the rounds of a run over Flower's Grid."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fednorms.core.errors import BadInput, FednormsError
from fednorms.engines.base import EngineSettings, SplitName
from fednorms.engines.devices import numerics, repeatable
from fednorms.evaluation.modes import Mode
from fednorms.explain.deployable import refuse_obstacles
from fednorms.flower import settings
from fednorms.flower.agreement import Card, known_facts
from fednorms.flower.engine import Remote
from fednorms.flower.keys import Watched, claims
from fednorms.flower.lifeline import end_with_link
from fednorms.flower.roster import Roster
from fednorms.methods.registry import method as read_method
from fednorms.runs.assemble import assemble
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.rounds import RoundEvent, play
from fednorms.runs.session import Plan, Session
from fednorms.runs.store.checkpoint import kept_rounds
from fednorms.runs.store.directory import RunDirectory


def server_app(model: Callable[[], nn.Module] | None = None, loss: Loss | None = None) -> ServerApp:
    """Make the ServerApp of a project, for any recipe and method; `model` and `loss` as in `client_app`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with_link()
        try:
            serve(grid, context.run_config, model, loss)
        except FednormsError:
            logging.getLogger("flwr").addFilter(_message_only)  # Flower logs what an app raises
            raise

    return app


def serve(
    grid: Grid,
    config: Mapping[str, settings.Scalar],
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
) -> Result:
    """Run a recipe over a Grid from the start or from its last checkpoint; the run's directory is `deploy.out`."""
    given, deployment = settings.read(config)
    refuse_obstacles(read_method(given.method))
    # A site stores only its last accepted state and the one after it, so every round needs a checkpoint.
    recipe = given.resolved().model_copy(update={"checkpoint_every": 1, "engine": "loop"})
    with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.threads, recipe.seed):
        start = model() if model else None  # with the recipe's seed, as at the sites
        directory = RunDirectory(Path(deployment.out).expanduser())
        directory.create(recipe.to_toml(), resume=True)
        with directory.lock():
            roster = Roster(grid, deployment, Watched.of_link(), recipe.data.size)
            if (known := known_facts(directory)) is not None:  # a run that is continued has its sites, and its data
                roster.names, roster.usual = list(known.clients) or roster.names, Card(known, {})
            _go_back(directory, deployment.restart)
            roster.gather()
            session = open_session(recipe, roster, start, loss)
            directory.write_facts(session.facts)
            log(INFO, "fednorms: %s with %s", recipe.method, ", ".join(roster.names))
            result = play(session, directory, _report)
            log(INFO, "fednorms: done, in %s\n%r", directory.path.resolve(), result)
            return result


def open_session(recipe: Recipe, roster: Roster, model: nn.Module | None = None, loss: Loss | None = None) -> Session:
    """Open a session whose engine asks the sites of a roster."""
    facts = roster.facts
    recipe = recipe.adopting(facts.protocol)
    task = assemble(recipe, facts, model, loss, deployed=True)
    plan = Plan.of(recipe, task, facts, secret=False)  # every site reads the seed in the run's config
    if any(m.model == "averaged" for m in plan.modes):
        raise BadInput(
            'Mode "averaged" needs the tensors that clients keep, and these stay at the sites. Remove it from '
            '"evaluate".'
        )
    tests: list[tuple[Mode, SplitName]] = [(m, "test") for m in plan.modes if m.model != "after_local"]
    settings = EngineSettings(recipe.threads, recipe.on_divergence)
    engine = Remote(task, roster, settings, [*tests, (plan.headline, "val")])
    if roster.unbounded and task.method.weighting(task.weighting) == "size":
        engine.notes.append(claims(roster.unbounded))
    return Session(recipe, facts, None, task, engine, *plan)


def _message_only(record: logging.LogRecord) -> bool:
    """Let Flower log an error of ours as its message: the traceback would say nothing to the person who can fix it."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FednormsError):
        record.msg, record.args, record.exc_info = "fednorms: %s", (str(error),), None
    return True


def _go_back(directory: RunDirectory, number: int) -> None:
    """Drop the checkpoints after a round, to continue the run from there; 0 drops none."""
    kept = kept_rounds(directory.checkpoints)
    if not number or (kept and max(kept) == number):
        return
    if number not in kept:
        there = " and ".join(map(str, kept)) or "none"
        raise BadInput(f"deploy.restart is {number}, but there is no checkpoint of that round. Kept rounds: {there}.")
    for later in (n for n in kept if n > number):
        (directory.checkpoints / f"round-{later:06d}" / "manifest.json").unlink()
    log(INFO, "fednorms: continuing from round %d; later checkpoints were dropped", number)


def _report(event: RoundEvent) -> None:
    row = event.row
    scores = "  ".join(f"{name} {s.mean:.3f}" for name, s in event.scores.items())
    lost = "  ".join(f"without {name}: {why}" for name, why in row.get("lost", {}).items())
    log(INFO, "round %d/%d  loss %s  %s  %s", event.round, event.rounds, row["train_loss"], scores, lost)
