"""Give statistics to a model whose BatchNorm layers keep none, from images of the sites."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.norms import tests_by_batch, unbiased_batch_moments
from fednorms.core.passes import layer_inputs, shuffled_rows
from fednorms.core.round import site_state
from fednorms.core.states import Broadcast, Client, Task
from fednorms.core.tree import Tree


@torch.no_grad()
def measured_statistics(task: Task, sent: Broadcast, clients: Iterable[Client], model: Tree) -> dict[str, Tensor]:
    """Statistics for every BatchNorm without running ones: the mean over batches of the clients' training images.

    m = sum n_b m_b / n, v = sum n_b v_b / n over all batches of n_b images, with the unbiased variance of a batch, as
    BatchNorm itself records them. Every layer normalizes with its batch meanwhile, as in training. Batches hold images
    of one client, shuffled by a fixed key. Dropout is off.
    """
    layers = {name: m for name, m in task.net.module.named_modules() if tests_by_batch(m)}
    sums: dict[str, Tensor] = {}
    images = dict.fromkeys(layers, 0)
    for client in clients:
        mine = site_state(task, sent, client)
        rows = shuffled_rows(client.name, len(client.data))
        for inputs in layer_inputs(task, sent, client, model, mine, tests_by_batch, rows, train=False):
            for name, x in inputs.items():
                images[name] += len(x)
                pair = unbiased_batch_moments(layers[name], {}, x)
                for leaf, value in zip(("running_mean", "running_var"), pair, strict=True):
                    key = f"{name}.{leaf}"
                    sums[key] = sums.get(key, torch.zeros_like(value, dtype=torch.float64)) + len(x) * value.double()
    if not sums:
        raise BadInput("There are too few images to measure normalization statistics: expected at least 2.")
    dtype = next(t.dtype for t in model.values() if t.is_floating_point())
    return {key: (total / images[key.rpartition(".")[0]]).to(dtype) for key, total in sums.items()}
