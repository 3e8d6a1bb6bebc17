"""The batch plan: which rows of a client's data make up each batch of a phase."""

from __future__ import annotations

import torch
from torch import Tensor

from fednorms.core.part import Phase
from fednorms.core.training import Training


def batch_plan(
    n: int, training: Training, phase: Phase, seed: int, *, needs_two: bool = False
) -> tuple[list[Tensor], int]:
    """Which rows make up each batch of a phase, and how many rows were dropped.

    Every epoch is one permutation, split into batches. The short last one is kept, dropped, or filled up from the start
    of the same permutation; a last batch of one image that batch normalization cannot take is always dropped.

    >>> [len(b) for b in batch_plan(10, Training(batch_size=4), Phase(epochs=2), seed=0)[0]]
    [4, 4, 2, 4, 4, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    size = training.batch_size
    wanted = phase.steps * phase.draws if phase.steps else None
    plan: list[Tensor] = []
    dropped = epoch = 0
    epochs = 0 if wanted else phase.epochs or 1
    least = wanted or phase.draws  # a client with fewer batches than one step draws goes through its data again
    while epoch < epochs or len(plan) < least:
        order = torch.randperm(n, generator=generator)
        batches = list(order.split(size))
        short = len(batches[-1]) < size
        if short and training.last == "drop" and len(batches) > 1:
            dropped += len(batches.pop())
        elif short and training.last == "fill":
            missing = size - len(batches[-1])
            batches[-1] = torch.cat([batches[-1], order.repeat(-(-missing // n))[:missing]])
        if needs_two and len(batches[-1]) == 1:
            dropped += len(batches.pop())
        if not batches:
            break
        plan += batches
        epoch += 1
    return plan[:wanted], dropped
