"""The ServerApp: our rounds over Flower's Grid."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import INFO
from pathlib import Path

import torch
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fednorms.core.accounting import Guarantee
from fednorms.core.errors import BadInput
from fednorms.core.states import Task
from fednorms.data import Federation, Site, Split
from fednorms.engines.base import EngineSettings, SplitName
from fednorms.engines.devices import numerics, repeatable
from fednorms.evaluation.modes import Mode, headline
from fednorms.explain.deployable import refuse_obstacles
from fednorms.flower import settings
from fednorms.flower.agreement import Agreement
from fednorms.flower.engine import Remote
from fednorms.flower.roster import Roster
from fednorms.methods.registry import method as read_method
from fednorms.models import build
from fednorms.runs.driver import RoundEvent, play
from fednorms.runs.facts import Facts, SiteFacts
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result
from fednorms.runs.session import Session, modes_of, participation_of
from fednorms.runs.store.atomic import write_atomic
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.opened import task_of


def server_app(model: Callable[[], nn.Module] | None = None, loss: Loss | None = None) -> ServerApp:
    """The ServerApp of a project, for any recipe and method; `model` and `loss` as in `client_app`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context.run_config, model, loss)

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
    # A site keeps the last state that was accepted and the one after it, so no round may go without a checkpoint.
    recipe = given.resolved().model_copy(update={"checkpoint_every": 1, "engine": "loop"})
    with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.threads, recipe.seed):
        start = model() if model else None  # under the recipe's seed, as at the sites
        directory = RunDirectory(Path(deployment.out).expanduser())
        directory.create(recipe.to_toml(), resume=True)
        with directory.lock():
            roster = Roster(grid, deployment)
            roster.names = _names_of_run(directory) or roster.names
            roster.gather()
            session = open_session(recipe, roster, start, loss)
            _write_facts(directory, recipe, roster)
            log(INFO, "fednorms: %s with %s", recipe.method, ", ".join(roster.names))
            result = play(session, directory, _report)
            log(INFO, "fednorms: done, in %s\n%r", directory.path.resolve(), result)
            return result


def open_session(recipe: Recipe, roster: Roster, model: nn.Module | None = None, loss: Loss | None = None) -> Session:
    """A session whose engine asks the sites of a roster."""
    facts = _facts(recipe, roster)
    recipe = recipe.adopting(facts.protocol)
    if model is None:
        channels, height, _ = facts.shape
        start = {"pretrained": recipe.pretrained, "weights": recipe.weights or None}
        model = build(recipe.model, facts.num_classes, channels, height, recipe.seed, **start)  # type: ignore[arg-type]
    task = task_of(recipe, facts, model, loss)
    task.method.weighting(task.weighting)
    participation = participation_of(recipe, task.method)
    participation.cohort(roster.names, recipe.seed, 0)
    # Every site reads the seed in the run's config, so that who takes part is no secret.
    guarantee = Guarantee.of(task.method, participation, roster.names, recipe.seed, secret=False)
    task = replace(task, cohort=participation.expected(len(roster.names)), deployed=True)
    first, federation = headline(task), _blank_federation(roster, task)
    modes = modes_of(recipe, task, first, federation)
    if any(mode.model == "unseen" for mode in modes):
        raise BadInput('"unseen" cannot be tested across machines: every site here is a client.')
    tests: list[tuple[Mode, SplitName]] = [(m, "test") for m in modes if m.model != "after_local"]
    engine = Remote(task, roster, EngineSettings(recipe.threads, recipe.on_divergence), [*tests, (first, "val")])
    return Session(recipe, federation, task, engine, participation, modes, first, guarantee)


def _blank_federation(roster: Roster, task: Task) -> Federation:
    """The sites by name, each with one black image: all that a server has of them."""
    shape = next(card.shape for card in roster.cards.values())
    black = Split(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    domains = {name: card.domain for name, card in roster.cards.items()}
    classes = list(next(iter(roster.cards.values())).classes)
    return Federation("flower", [Site(n, domains.get(n, n), black) for n in roster.names], classes, task.preprocessing)


def _facts(recipe: Recipe, roster: Roster) -> Facts:
    sites = []
    for name in roster.names:
        card = roster.cards.get(name)
        images = {"train": list(card.counts)} if card and card.counts else {}
        sites.append(SiteFacts(name, card.domain if card else name, images=images))
    return Agreement.of([card for _, card in sorted(roster.cards.items())], len(roster.names)).facts(sites)


def _write_facts(directory: RunDirectory, recipe: Recipe, roster: Roster) -> None:
    facts = _facts(recipe, roster).to_dict()
    write_atomic(directory.facts_path, (json.dumps(facts, indent=1) + "\n").encode())


def _names_of_run(directory: RunDirectory) -> list[str]:
    """The sites of a run that is continued, in their order."""
    path = directory.facts_path
    return list(json.loads(path.read_bytes())["clients"]) if path.exists() else []


def _report(event: RoundEvent) -> None:
    row = event.row
    scores = "  ".join(f"{name} {s['mean']:.3f}" for name, s in row["scores"].items())
    lost = "  ".join(f"without {name}: {why}" for name, why in row.get("lost", {}).items())
    log(INFO, "round %d/%d  loss %s  %s  %s", event.round, event.rounds, row["train_loss"], scores, lost)
