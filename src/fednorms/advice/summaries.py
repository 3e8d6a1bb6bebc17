"""What a site may send for `advise`: counts, sums and moments of its data after one probing round; never an image."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.noise import hashed_uniform, seed_of
from fednorms.core.norms import is_norm
from fednorms.core.passes import prepare_test, rows_of_test
from fednorms.core.round import broadcast, initial_state, load, own_state
from fednorms.core.states import Broadcast, Client, Task, context_of
from fednorms.data import Federation
from fednorms.engines.local import LocalEngine
from fednorms.runs.identity import Custom
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session

SMALL = 5  # classes with fewer images at a site are not reported
INPUT = "input"  # the images as the network gets them, listed like a layer


@dataclass(frozen=True)
class Moments:
    """Number of values per channel, their sums and their sums of squares (float64), for one set of images."""

    count: float
    total: Tensor
    squares: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean of each channel."""
        return self.total / self.count

    @property
    def var(self) -> Tensor:
        """The biased variance of each channel.

        >>> Moments(2, torch.tensor([4.0]), torch.tensor([10.0])).var
        tensor([1.])
        """
        return (self.squares / self.count - self.mean.square()).clamp_min(0)

    def as_if(self, times: float) -> Moments:
        """Moments with the same mean and variance, as if of `times` as many values."""
        return Moments(self.count * times, self.total * times, self.squares * times)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True)
class SiteSummary:
    """All that leaves a site: measures are computed from these and from nothing else.

    `counts` has None for classes with fewer than `SMALL` images, and noise if it was asked for. `by_class` lacks the
    same classes. Its means and variances have no noise; its numbers of values are made to match `counts`. The server
    needs `gradient` only as the mean over sites, as secure aggregation provides it.
    """

    site: str
    images: int
    counts: list[int | None]
    layers: dict[str, Moments]
    by_class: dict[str, dict[int, Moments]]
    gradient_square: float
    gradient: Tensor


def probe(recipe: Recipe, federation: Federation, custom: Custom, epsilon: float | None = None) -> list[SiteSummary]:
    """Train one round of FedAvg at all sites, and summarize each site's training data under the averaged model.

    A model whose batch normalization cannot train here (batches of one image) is probed with group normalization.
    """
    given = {"rounds": 1, "participation": "all", "engine": "loop", "evaluate": [], "patience": None}
    probed = recipe.model_copy(update=given)
    try:
        session = _session(probed, "fedavg", federation, custom)
    except BadInput:
        session = _session(probed, "gn", federation, custom)
    task, engine = session.task, session.engine
    assert isinstance(engine, LocalEngine)
    state = engine.setup(initial_state(task))
    state = engine.average(state, engine.train(broadcast(task, state), engine.clients))
    sent = broadcast(task, state)
    found = []
    for name in engine.clients:
        with engine.local.seeded("summary", name):
            found.append(_summary(task, sent, engine.local.client(name), federation.num_classes, epsilon))
    return found


def _session(recipe: Recipe, method: str, federation: Federation, custom: Custom) -> Session:
    given = recipe.model_copy(update={"method": method})
    return Session.open(given, federation, custom.model, custom.loss, own=custom.training)


def _summary(task: Task, sent: Broadcast, client: Client, classes: int, epsilon: float | None) -> SiteSummary:
    net, context = task.net, context_of(task, sent.round, client, evaluating=True)
    mine = own_state(task, sent, client.state)
    model = load(task, sent, client, context, mine)
    true = torch.bincount(client.data.y, minlength=classes).tolist()
    counts = noised(true, client.name, task.seed, epsilon)
    shown = {c for c, n in enumerate(true) if n >= SMALL and counts[c] is not None}
    layers: dict[str, Moments] = {}
    by_class: dict[str, dict[int, Moments]] = {}
    leaves = {n: model[n].detach().clone().requires_grad_() for n in net.trained}
    total = {n: torch.zeros_like(leaf, dtype=torch.float64) for n, leaf in leaves.items()}
    with net.watching(watched(net.module)) as seen:
        for rows in rows_of_test(task, client.name, len(client.data)):
            seen.clear()
            x, y = prepare_test(task, client.data.batch(rows), context, mine, sent)
            logits, _ = net.forward({**model, **leaves}, x, train=False, batch_statistics=False)
            loss = task.loss_of(logits, y) * len(y)
            slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            for name, slope in zip(leaves, slopes, strict=True):
                total[name] += 0 if slope is None else slope.double()
            for name, inputs in {INPUT: x, **seen}.items():
                _add(layers, by_class, name, _channels(net.module, name, inputs.detach()), y, shown)
    gradient = torch.cat([t.flatten() for t in total.values()]).cpu() / len(client.data)
    if epsilon is not None:  # the moments would reveal the true counts
        by_class = {
            name: {c: moments.as_if(counts[c] / true[c]) for c, moments in of_class.items()}  # type: ignore[operator]
            for name, of_class in by_class.items()
        }
    square = float(gradient.square().sum())
    return SiteSummary(client.name, len(client.data), counts, layers, by_class, square, gradient)


def watched(module: nn.Module) -> Callable[[nn.Module], bool]:
    """Which layers are measured: normalization layers, or convolutions and linear ones in a model without any."""
    if any(is_norm(m) for m in module.modules()):
        return is_norm
    return lambda m: isinstance(m, nn.Conv2d | nn.Linear)


def _channels(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """A layer's input as (N, C, positions); layer normalization has its channels last."""
    last = name != INPUT and isinstance(module.get_submodule(name), nn.LayerNorm | nn.Linear) and x.dim() > 2
    return (x.movedim(-1, 1) if last else x).double().reshape(len(x), x.shape[-1 if last else 1], -1)


def _add(
    layers: dict[str, Moments],
    by_class: dict[str, dict[int, Moments]],
    name: str,
    x: Tensor,
    y: Tensor,
    shown: set[int],
) -> None:
    layers[name] = _moments(x) + layers[name] if name in layers else _moments(x)
    mine = by_class.setdefault(name, {})
    for c in shown & set(y.tolist()):
        some = _moments(x[y == c])
        mine[c] = some + mine[c] if c in mine else some


def _moments(x: Tensor) -> Moments:
    return Moments(x.shape[0] * x.shape[2], x.sum((0, 2)).cpu(), x.square().sum((0, 2)).cpu())


def noised(counts: list[int], site: str, seed: int, epsilon: float | None) -> list[int | None]:
    """Class counts as a site sends them: with discrete Laplace noise if `epsilon` is given, small ones as None.

    The noise is the difference of two geometric numbers with ratio exp(-epsilon): one image more or less changes the
    probability of any answer by a factor of at most exp(epsilon). It is hashed from the seed, so advice repeats.

    >>> noised([12, 3], "clinic", 0, None)
    [12, None]
    """
    if epsilon is None:
        return [n if n >= SMALL else None for n in counts]
    word = seed_of("noise of counts", seed, site)
    u = hashed_uniform(torch.tensor([word >> 32, word & 0xFFFFFFFF]), 1, (2, len(counts)), torch.float64)
    geometric = (u.clamp_min(1e-12).log() / -epsilon).floor()
    changed = [n + math.floor(d) for n, d in zip(counts, (geometric[0] - geometric[1]).tolist(), strict=True)]
    return [n if n >= SMALL else None for n in changed]
