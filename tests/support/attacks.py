"""Five clients of a tiny federation, of which one may be hostile, and what the server makes of their uploads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fednorms.core.round import server_update
from fednorms.core.states import ServerState, Task, Upload
from fednorms.core.tree import Tree, mean
from tests.support.tiny import rounds, setup, tiny_data, tiny_task

SIZES = (8, 6, 7, 5, 9)
Attack = Callable[[Tree], Tree]


def millionfold(update: Tree) -> Tree:
    return update * 1e6


def noise(update: Tree) -> Tree:
    generator = torch.Generator().manual_seed(0)
    return update.map(lambda t: t + 1e3 * torch.randn(t.shape, generator=generator, dtype=t.dtype).abs())


def backwards(update: Tree) -> Tree:
    return update * -1e6


ATTACKS = [millionfold, noise, backwards]


def a_round(text: str, sizes=SIZES, **settings) -> tuple[Task, ServerState, list[Upload]]:
    """A task, the server before its first round, and the honest uploads."""
    data = tiny_data(*sizes)
    task = tiny_task(text, data, **settings)
    start = setup(task, data)
    return task, start.server, list(rounds(task, data, 1, run=start).uploads.values())


def attacked(task: Task, state: ServerState, uploads: list[Upload], attack: Attack, who: int = 2) -> list[Upload]:
    """The uploads after one client changed its update."""
    start = sent(state.model, task)
    bad = attack(uploads[who].model.pick(start) - start)
    changed = replace(uploads[who], model=Tree({**uploads[who].model, **(start + bad)}))
    return [changed if i == who else u for i, u in enumerate(uploads)]


def sent(model: Tree, task: Task) -> Tree:
    """The floating tensors that are sent."""
    return Tree({k: model[k] for k in task.net.exchanged if model[k].is_floating_point()})


def flat(tree: Tree) -> np.ndarray:
    return torch.cat([t.flatten() for t in tree.values()]).numpy()


def distance(task: Task, state: ServerState, uploads: list[Upload], attack: Attack) -> float:
    """How far an attack moves the new model from the honest clients' mean, in honest update lengths."""
    hit = attacked(task, state, uploads, attack)
    after = sent(server_update(task, state, hit).model, task)
    honest = [sent(u.model, task) for i, u in enumerate(uploads) if i != 2]
    lengths = [float((m - sent(state.model, task)).sqnorm().sqrt()) for m in honest]
    return float((after - mean(honest, [1.0] * 4)).sqnorm().sqrt()) / max(lengths)
