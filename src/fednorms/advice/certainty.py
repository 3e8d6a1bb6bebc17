"""How sure a choice is: a paired bootstrap over validation images and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednorms.core.noise import seed_of
from fednorms.core.passes import mixed_rows, prepare_test, shuffled_rows
from fednorms.core.states import context_of
from fednorms.data import Federation
from fednorms.evaluation.modes import answer, model_for, unseen_broadcast
from fednorms.evaluation.statistics import by_batch
from fednorms.runs.identity import Custom
from fednorms.runs.use.open import open_run

RESAMPLES = 2000
Answers = Mapping[str, np.ndarray]
"""Of each site, which validation images a model classifies correctly, in the order of the split."""


@dataclass(frozen=True)
class Difference:
    """Points by which one method is better than another: the mean, a 95 % interval, and how often it is above 0."""

    mean: float
    low: float
    high: float
    probability: float
    images: int
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, in points."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.mean:+.1f} points (95 % interval {self.low:+.1f} to {self.high:+.1f})"


def difference(
    ours: Sequence[Answers],
    theirs: Sequence[Answers],
    labels: Mapping[str, np.ndarray],
    *,
    balanced: bool = False,
    resamples: int = RESAMPLES,
) -> Difference:
    """Compare two methods over the same images and seeds: mean over sites of accuracy, or of recall over classes.

    Each resample draws seeds, and images within each site (`balanced`: within each class), with replacement. Both
    methods are judged on the same draws.
    """
    apart = {
        site: np.stack([a[site].astype(float) - b[site] for a, b in zip(ours, theirs, strict=True)]) for site in labels
    }
    strata = {site: _strata(labels[site], balanced) for site in labels}
    random = np.random.Generator(np.random.PCG64(seed_of("difference", len(ours), *labels)))
    seeds = len(ours)
    drawn_seeds = random.integers(0, seeds, (resamples, seeds))
    per_seed = np.zeros((resamples, seeds))
    point = 0.0
    for site, d in apart.items():
        for rows in strata[site]:
            share = 100 / (len(labels) * len(strata[site]))
            point += share * float(d[:, rows].mean())
            times = random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), resamples) / len(rows)
            per_seed += share * (times @ d[:, rows].T)
    values = np.take_along_axis(per_seed, drawn_seeds, axis=1).mean(1)
    low, high = np.quantile(values, [0.025, 0.975])
    above = float((values > 0).mean() + (values == 0).mean() / 2)
    images = sum(map(len, labels.values()))
    return Difference(point, float(low), float(high), above, images, seeds)


def _strata(labels: np.ndarray, balanced: bool) -> list[np.ndarray]:
    if not balanced:
        return [np.arange(len(labels))]
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


@torch.no_grad()
def answers(path: Path, federation: Federation, custom: Custom) -> Answers:
    """Which validation images a stored run classifies correctly, in the mode that its method is judged by."""
    opened = open_run(path, federation=federation, model=custom.model, loss=custom.loss)
    session, task = opened.session, opened.task
    mode, local = session.headline, opened.local
    sent = session.engine.test_broadcast(opened.state, opened.cohort)
    others = unseen_broadcast(task, sent, session.engine.store.values())
    found: dict[str, np.ndarray] = {}
    for site in federation.clients:
        if site.val is None:
            continue
        here = sent if site.name in session.engine.clients else others
        client, context = local.at_test(site, site.val), None
        with local.seeded("test", here.round, site.name):
            model, mine = model_for(task, here, client, mode)
            context = context_of(task, here.round, client, evaluating=True)
            size = mode.batch_size(task)
            batches = (
                mixed_rows(site.name, len(site.val))
                if size is None
                else list(shuffled_rows(site.name, len(site.val)).split(size))
            )
            right = torch.zeros(len(site.val), dtype=torch.bool)
            for rows in batches:
                x, y = prepare_test(task, site.val.batch(rows), context, mine, here)
                tensors = model if size is None else by_batch(task.net, model)
                shared = size is not None and not (len(rows) == 1 and task.needs_two)
                logits, features = task.net.forward(tensors, x, train=False, batch_statistics=shared)
                right[rows] = (answer(task, here, mine, logits, features).argmax(1) == y).cpu()
        found[site.name] = right.numpy()
    return found
