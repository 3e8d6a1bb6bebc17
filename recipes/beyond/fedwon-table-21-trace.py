"""Repeat, step by step and in three precisions, the round in which a client of FedWon diverged.

python recipes/beyond/fedwon-table-21-trace.py RESULTS RUN ROOT OUT

RESULTS is the results.json of a table with a run that diverged (recipes/results/beyond-fedwon-table-21/results.json),
ROOT the folder of Digits-Five, OUT the JSON file to write (fedwon-table-21-trace.json). The run is repeated in the
folder RUN until it diverges again, then its last rounds from the newest checkpoint. Finally the client trains on its
own from the model that the server had sent. Use the device of the stored result.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from fednorms.core.errors import Diverged
from fednorms.core.round import base_phases, begin, broadcast, draws, initial_state, server_update, step
from fednorms.core.states import Broadcast
from fednorms.core.tree import Tree
from fednorms.engines.devices import numerics
from fednorms.runs.driver import execute
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session
from fednorms.runs.store.checkpoint import load

_OTHERS = 8  # more clients of the same round that are traced


def sent_to_the_diverging(recipe: Recipe, run: Path) -> tuple[Broadcast, str, list[str]]:
    """What the server sent in the round that diverged, the client that diverged, and all clients of the round."""
    try:
        execute(recipe, out=run)
    except Diverged as error:
        print(error)
    session = Session.open(recipe)
    task, engine = session.task, session.engine
    found = load(run / "checkpoints", task.like.device)
    state = found.server if found else engine.setup(initial_state(task))
    with numerics(recipe.precision, deterministic=recipe.deterministic):
        while state.round < recipe.rounds:
            cohort = session.participation.cohort(engine.clients, recipe.seed, state.round)
            sent = broadcast(task, state)
            try:
                done = engine.train(sent, cohort)
            except Diverged as error:
                return sent, str(error).split('"')[1], cohort
            state = server_update(task, state, done.combined or done.uploads)
    raise SystemExit("No client diverged.")


def steps_of(recipe: Recipe, sent: Broadcast, client: str) -> list[tuple[float, float]]:
    """Loss and gradient norm in every step of a client's round (with SGD, the gradient is the step over the rate)."""
    session = Session.open(recipe.model_copy(update={"engine": "loop"}))
    task = session.task
    model = Tree({k: v.to(task.like.dtype) if v.is_floating_point() else v for k, v in sent.model.items()})
    steps: list[tuple[float, float]] = []
    with numerics(recipe.precision, deterministic=True):
        carry, _ = begin(task, Broadcast(sent.round, model, sent.parts), session.engine.client(client))
        summed = 0.0
        for batches, phase in draws(task, carry, base_phases(task, carry.context)):
            before = carry.params.detach().clone()
            step(task, carry, batches, phase)
            moved = sum(float((before[k] - v.detach()).square().sum()) for k, v in carry.params.items())
            steps.append((float(carry.loss_sum) - summed, moved**0.5 / carry.context.lr))
            summed = float(carry.loss_sum)
            if math.isnan(summed):
                break
    return steps


def _plain(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None  # JSON has no infinity


def main(results: str, run: str, root: str, out: str) -> None:
    """Trace the client and write the figures."""
    runs = json.loads(Path(results).read_text())["runs"]
    values: dict[str, Any] = next(run["recipe"] for run in runs if run["status"] == "diverged")
    values.pop("own_parts", None)
    recipe = Recipe.make(values | {"data": values["data"] | {"root": root}})
    sent, client, cohort = sent_to_the_diverging(recipe, Path(run))
    figures: dict[str, Any] = {"client": client, "round": sent.round}
    for precision in ("float64", "float32", "tf32"):
        steps = steps_of(recipe.model_copy(update={"precision": precision}), sent, client)
        figures[precision] = [[_plain(x) for x in pair] for pair in steps]
        losses, norms = zip(*steps, strict=True)
        print(f"{precision}: largest loss {max(losses):.3g}, largest gradient {max(norms):.3g}, last {losses[-1]:.3g}")
    plain = recipe.model_copy(update={"precision": "float32"})
    others = [name for name in cohort if name != client][:_OTHERS]
    figures["others"] = {name: _plain(max(norm for _, norm in steps_of(plain, sent, name))) for name in others}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items())
    Path(out).write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
