"""Train a client's round in which it diverged once more, step by step, in three precisions: what the notes here tell.

python recipes/beyond/fedwon-table-21-trace.py RESULT.json RUN ROOT trace.json

RESULT.json is the result of a run that diverged (results/participation-0.4/fedwon/seed-1.json), ROOT the folder of
Digits-Five. The run is repeated in the folder RUN until it diverges again, and its last rounds from the newest
checkpoint; then the client trains alone from the model that the server had sent it. On the device of the result.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from fednorms import core
from fednorms.core.errors import Diverged
from fednorms.core.tree import Tree
from fednorms.engines.devices import numerics
from fednorms.runs.driver import execute
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session
from fednorms.runs.store.checkpoint import load

_OTHERS = 8  # clients of the same round that are looked at beside it


def sent_to_the_diverging(recipe: Recipe, run: Path) -> tuple[core.Broadcast, str, list[str]]:
    """What the server sent in the round of the divergence, the client that diverged, and all that took part."""
    try:
        execute(recipe, out=run)
    except Diverged as error:
        print(error)
    session = Session.open(recipe)
    task, engine = session.task, session.engine
    found = load(run / "checkpoints", task.like.device)
    state = found.server if found else engine.setup(core.initial_state(task))
    with numerics(recipe.precision, deterministic=recipe.deterministic):
        while state.round < recipe.rounds:
            cohort = session.participation.cohort(engine.clients, recipe.seed, state.round)
            sent = core.broadcast(task, state)
            try:
                done = engine.train(sent, cohort)
            except Diverged as error:
                return sent, str(error).split('"')[1], cohort
            state = core.server_update(task, state, done.combined or done.uploads)
    raise SystemExit("no client diverged")


def steps_of(recipe: Recipe, sent: core.Broadcast, client: str) -> list[tuple[float, float]]:
    """Loss and norm of the gradient in every step of a client's round (SGD: the gradient is the move over the rate)."""
    session = Session.open(recipe.model_copy(update={"engine": "loop"}))
    task = session.task
    model = Tree({k: v.to(task.like.dtype) if v.is_floating_point() else v for k, v in sent.model.items()})
    steps: list[tuple[float, float]] = []
    with numerics(recipe.precision, deterministic=True):
        carry, _ = core.begin(task, core.Broadcast(sent.round, model, sent.parts), session.engine.client(client))
        summed = 0.0
        for batches, phase in core.draws(task, carry, core.base_phases(task, carry.context)):
            before = carry.params.detach().clone()
            core.step(task, carry, batches, phase)
            moved = sum(float((before[k] - v.detach()).square().sum()) for k, v in carry.params.items())
            steps.append((float(carry.loss_sum) - summed, moved**0.5 / carry.context.lr))
            summed = float(carry.loss_sum)
            if math.isnan(summed):
                break
    return steps


def _plain(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None  # JSON has no infinity


def main(result: str, run: str, root: str, out: str) -> None:
    """Trace, and write the figures."""
    values: dict[str, Any] = json.loads(Path(result).read_text())["recipe"]
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
