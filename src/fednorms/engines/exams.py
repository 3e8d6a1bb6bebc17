"""Tests as graphs: a forward pass over a batch of images is recorded once, whosever model and images it gets.

Sites that are tested with the very same tensors share batches: a thousand sites with four images each cost as much as
one site with four thousand. Nothing on the host waits for the device until all sites are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fednorms.data import Split
from fednorms.engines.capture import Device, Job
from fednorms.engines.layout import Layout, copy_tree
from fednorms.evaluation.modes import Mode, answer
from fednorms.evaluation.scores import SiteScore, Tally
from fednorms.passes import prepare_test
from fednorms.states import Broadcast, Client, Task, context_of
from fednorms.tree import Tree

SIZES = (32, 128, 512, 2048)  # images per recorded batch; the smallest that holds what is left
WARM_UPS = 3


@dataclass(frozen=True)
class Sitting:
    """A model that is tested on one site's images: the parts' states are those of that site."""

    sent: Broadcast
    client: Client
    model: Tree
    mine: dict[str, Tree]


@dataclass
class Pile:
    """The test images of several sites on the device, one after the other, and whose each is."""

    splits: list[Split]  # held, so that their identities stay theirs
    x: Tensor
    y: Tensor
    site: Tensor
    ends: list[int]

    @classmethod
    def of(cls, splits: list[Split], device: torch.device) -> Pile:
        """Bring the images of splits together."""
        both = [split.batch(torch.arange(len(split))) for split in splits]
        sizes = torch.tensor([len(y) for _, y in both])
        whose = torch.repeat_interleave(torch.arange(len(both)), sizes)
        x, y = torch.cat([b[0] for b in both]), torch.cat([b[1] for b in both])
        return cls(splits, x.to(device), y.to(device), whose.to(device), sizes.cumsum(0).tolist())

    def rows(self, place: int) -> tuple[int, int]:
        """First and last (exclusive) row of a site."""
        return (self.ends[place - 1] if place else 0), self.ends[place]


@dataclass
class Recorded:
    """A batch's forward pass as a graph, the images that it reads, and what it finds."""

    run: Job
    x: Tensor
    y: Tensor
    right: Tensor
    loss: Tensor


class Exams:
    """Tests models on piles of images with recorded forward passes.

    `record` makes a graph of a job (or gives the job back where that is impossible).
    """

    def __init__(
        self, task: Task, layout: Layout, device: Device, classes: int, record: Callable[[Job, object, object], Job]
    ) -> None:
        self.task, self.layout, self.device, self.classes, self.record = task, layout, device, classes, record
        self.uses_states = bool(task.hooks["batch"]) or any(
            p.evaluation().predict for p in task.method.having("evaluation")
        )
        self.piles: dict[tuple[int, ...], Pile] = {}
        self.stream, self.pool = device.stream(), device.pool()
        self.block = layout.block(task.like)
        self.model = Tree()
        self.parts: tuple[dict[str, Tree], dict[str, Tree]] = {}, {}  # what parts sent down, and have at the site
        self.graphs: dict[tuple[int, torch.dtype], Recorded] = {}
        self.sizes: tuple[int, ...] = SIZES

    def pile(self, splits: list[Split]) -> Pile | None:
        """The images of these splits, kept on the device after their first use; None if they would crowd it."""
        key = tuple(map(id, splits))
        if key not in self.piles:
            pixels = sum(len(split) for split in splits) * splits[0].batch(torch.arange(1))[0][0].nbytes
            if 16 * pixels > self.device.free():
                return None
            self.piles[key] = Pile.of(splits, self.task.like.device)
        return self.piles[key]

    def shared(self, mode: Mode) -> bool:
        """Whether a mode tests the server's own tensors at every site, so that nothing need be asked of the sites."""
        task = self.task
        same = mode.model in ("global", "unseen") or not task.personal
        return same and mode.statistics == "global" and not self.uses_states and not task.method.having("begin")

    def scores(self, sittings: Sequence[Sitting], pile: Pile) -> list[SiteScore]:
        """Test every sitting on its part of the pile."""
        right = torch.zeros(len(pile.y), dtype=torch.bool, device=pile.y.device)
        loss = torch.zeros(len(pile.y), dtype=torch.float64, device=pile.y.device)
        self.device.fork([self.stream])
        with self.device.on(self.stream), torch.no_grad():
            for group in self._groups(sittings):
                self._load(sittings[group[0]])
                for start, stop in _joined(pile.rows(place) for place in group):
                    self._sit(sittings[group[0]], pile, start, stop, right, loss)
        self.device.join([self.stream])
        return self._scores(pile, right, loss)

    def _groups(self, sittings: Sequence[Sitting]) -> list[list[int]]:
        """Sittings that test the very same tensors."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, sitting in enumerate(sittings):
            trees = [sitting.model]
            if self.uses_states:
                trees += [*sitting.mine.values(), *sitting.sent.parts.values()]
            groups.setdefault(tuple(id(t) for tree in trees for t in tree.values()), []).append(place)
        return list(groups.values())

    def _load(self, sitting: Sitting) -> None:
        """Copy a model, and the parts' states where a test reads them, to where the graphs look for them."""
        given = (sitting.sent.parts, sitting.mine) if self.uses_states else ({}, {})
        shapes = [{name: {k: t.shape for k, t in tree.items()} for name, tree in group.items()} for group in given]
        known = [{name: {k: t.shape for k, t in tree.items()} for name, tree in group.items()} for group in self.parts]
        if not self.model or shapes != known:
            integers = Tree({n: sitting.model[n].clone() for n in self.layout.integers})
            self.model = Tree({**self.layout.views(self.block), **integers})
            down, mine = ({name: tree.clone() for name, tree in group.items()} for group in given)
            self.parts = down, mine
            self.graphs.clear()
        for names in (self.layout.names, self.layout.integers):
            copy_tree(self.model.pick(names), sitting.model)
        for mine, theirs in zip(self.parts, given, strict=True):
            for name, tree in theirs.items():
                copy_tree(mine[name], tree)

    def _sit(self, sitting: Sitting, pile: Pile, start: int, stop: int, right: Tensor, loss: Tensor) -> None:
        while start < stop:
            size = next((s for s in self.sizes if s >= stop - start), self.sizes[-1])
            n = min(size, stop - start)
            try:
                recorded = self._recorded(sitting, pile, size)
            except torch.OutOfMemoryError:
                if len(self.sizes) == 1:
                    raise
                self.sizes = self.sizes[:-1]
                self.device.settle()
                self.device.forget()
                continue
            recorded.x[:n].copy_(pile.x[start : start + n])  # beyond them lie older images, whose answers are not read
            recorded.y[:n].copy_(pile.y[start : start + n])
            recorded.run()
            right[start : start + n].copy_(recorded.right[:n])
            loss[start : start + n].copy_(recorded.loss[:n])
            start += n

    def _recorded(self, sitting: Sitting, pile: Pile, size: int) -> Recorded:
        key = size, pile.x.dtype
        if key in self.graphs:
            return self.graphs[key]
        x, y = pile.x.new_zeros(size, *pile.x.shape[1:]), pile.y.new_zeros(size)
        right = torch.zeros(size, dtype=torch.bool, device=y.device)
        loss = torch.zeros(size, dtype=torch.float64, device=y.device)
        task, model, (down, mine) = self.task, self.model, self.parts
        context = context_of(task, sitting.sent.round, sitting.client, evaluating=True)
        sent = Broadcast(sitting.sent.round, Tree(), down)

        def job() -> None:
            images, labels = prepare_test(task, (x, y), context, mine, sent)
            logits, features = task.net.forward(model, images, train=False, batch_statistics=False)
            if self.uses_states:
                logits = answer(task, sent, mine, logits, features)
            hit, nats = Tally.judge(logits, labels)
            right.copy_(hit)
            loss.copy_(nats)

        for _ in range(WARM_UPS):
            job()
        self.device.settle()
        self.graphs[key] = Recorded(self.record(job, self.stream, self.pool), x, y, right, loss)
        return self.graphs[key]

    def _scores(self, pile: Pile, right: Tensor, loss: Tensor) -> list[SiteScore]:
        sites, cells = len(pile.ends), pile.site * self.classes + pile.y
        counts = torch.zeros(2, sites * self.classes, dtype=torch.long, device=cells.device)
        counts[0].index_add_(0, cells, right.long())
        counts[1].index_add_(0, cells, torch.ones_like(cells))
        sums = torch.zeros(sites, dtype=torch.float64, device=cells.device).index_add_(0, pile.site, loss)
        found, losses = counts.view(2, sites, self.classes).cpu(), sums.cpu()  # here the host waits
        return [Tally(self.classes, found[:, k], losses[k]).score() for k in range(sites)]


def _joined(ranges: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of rows, neighbours made one.

    >>> _joined([(0, 2), (2, 5), (7, 8)])
    [(0, 5), (7, 8)]
    """
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if out and out[-1][1] == start:
            out[-1] = out[-1][0], stop
        else:
            out.append((start, stop))
    return out
