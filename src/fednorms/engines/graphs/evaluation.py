"""Tests as graphs: a forward pass over a batch of images is recorded once, whosever model and images it gets.

Sites that are tested with the very same tensors share batches: a thousand sites with four images each cost as much as
one site with four thousand. Nothing on the host waits for the device until all sites are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fednorms.core.passes import depends_on_batch, prepare_test
from fednorms.core.states import Broadcast, Client, Task, context_of
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.engines.graphs.capture import WARM_UPS, Device, Job
from fednorms.engines.graphs.layout import Layout, copy_tree, shapes_of
from fednorms.evaluation.modes import Mode, answer
from fednorms.evaluation.scores import SiteScore, Tally

SIZES = (32, 128, 512, 2048)  # images per recorded batch; the smallest that holds what is left
PILES = 4  # sets of sites whose images stay on the device


class DrawsInTests(Exception):
    """A model answers the same images differently each time."""


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
        self.graphs: dict[tuple[object, ...], Recorded] = {}
        self.sizes: tuple[int, ...] = SIZES
        self.apart = depends_on_batch(task)  # sites must be tested one by one, and not here

    def pile(self, splits: list[Split]) -> Pile | None:
        """The images of these splits, kept on the device after their first use.

        None if they would crowd it, or if an answer depends on the images beside it or on random numbers.
        """
        if self.apart:
            return None
        key = tuple(map(id, splits))
        if key in self.piles:
            self.piles[key] = self.piles.pop(key)  # the last used is the last to go
        else:
            pixels = sum(len(split) for split in splits) * splits[0].batch(torch.arange(1))[0][0].nbytes
            if 16 * pixels > self.device.free():
                return None
            self.piles[key] = Pile.of(splits, self.task.like.device)
            if len(self.piles) > PILES:  # cohorts that are tested right after training differ from round to round
                self.device.settle()
                del self.piles[next(iter(self.piles))]
        return self.piles[key]

    def shared(self, mode: Mode) -> bool:
        """Whether a mode tests the server's own tensors at every site, so that nothing need be asked of the sites."""
        task = self.task
        same = mode.model in ("global", "unseen") or (mode.model == "personal" and not task.personal)
        return same and mode.statistics == "global" and not self.uses_states and not task.method.having("begin")

    def scores(self, sittings: Iterable[Sitting], pile: Pile) -> list[SiteScore]:
        """Test one sitting per site of the pile, in its order; each is made when its turn comes, on our stream."""
        right = torch.zeros(len(pile.y), dtype=torch.bool, device=pile.y.device)
        loss = torch.zeros(len(pile.y), dtype=torch.float64, device=pile.y.device)
        self.device.fork([self.stream])
        try:
            with self.device.on(self.stream):
                for sitting, start, stop in self._neighbours(sittings, pile):
                    with torch.no_grad():
                        self._load(sitting)
                        self._sit(sitting, pile, start, stop, right, loss)
        finally:
            self.device.join([self.stream])
        return self._scores(pile, right, loss)

    def _neighbours(self, sittings: Iterable[Sitting], pile: Pile) -> Iterator[tuple[Sitting, int, int]]:
        """Sittings with their rows; neighbours that test the very same tensors are one."""
        current: Sitting | None = None
        begun = 0
        for place, sitting in enumerate(sittings):
            start = pile.rows(place)[0]
            if current is not None and self._tensors(current) == self._tensors(sitting):
                continue
            if current is not None:
                yield current, begun, start
            current, begun = sitting, start
        if current is not None:
            yield current, begun, pile.ends[-1]

    def _tensors(self, sitting: Sitting) -> list[int]:
        trees = [sitting.model]
        if self.uses_states:
            trees += [*sitting.mine.values(), *sitting.sent.parts.values()]
        return [id(t) for tree in trees for t in tree.values()]

    def _load(self, sitting: Sitting) -> None:
        """Copy a model, and the parts' states where a test reads them, to where the graphs look for them."""
        given = (sitting.sent.parts, sitting.mine) if self.uses_states else ({}, {})
        if not self.model or shapes_of(*given) != shapes_of(*self.parts):
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
        task, model, (down, mine) = self.task, self.model, self.parts
        context = context_of(task, sitting.sent.round, sitting.client, evaluating=True)
        key = size, pile.x.dtype, tuple(sorted(task.method.path(context).items()))
        if key in self.graphs:
            return self.graphs[key]
        some = torch.arange(size, device=pile.y.device) % len(pile.y)  # any images, to see what the model does
        x, y = pile.x.index_select(0, some), pile.y.index_select(0, some)
        right = torch.zeros(size, dtype=torch.bool, device=y.device)
        loss = torch.zeros(size, dtype=torch.float64, device=y.device)
        sent = Broadcast(sitting.sent.round, Tree(), down)

        def job() -> None:
            images, labels = prepare_test(task, (x, y), context, mine, sent)
            logits, features = task.net.forward(model, images, train=False, batch_statistics=False)
            if self.uses_states:
                logits = answer(task, sent, mine, logits, features)
            hit, nats = Tally.judge(logits, labels)
            right.copy_(hit)
            loss.copy_(nats)

        seen = []
        for _ in range(WARM_UPS):
            job()
            seen.append(loss.clone())
        self.device.settle()
        if not torch.equal(seen[-2], seen[-1]):
            self.apart = True
            raise DrawsInTests(
                "the model draws random numbers in tests, so that sites are tested one by one, each from its own seed"
            )
        self.graphs[key] = Recorded(self.record(job, self.stream, self.pool), x, y, right, loss)
        return self.graphs[key]

    def _scores(self, pile: Pile, right: Tensor, loss: Tensor) -> list[SiteScore]:
        sites, cells = len(pile.ends), pile.site * self.classes + pile.y
        counts = torch.zeros(2, sites * self.classes, dtype=torch.long, device=cells.device)
        counts[0].index_add_(0, cells, right.long())
        counts[1].index_add_(0, cells, torch.ones_like(cells))
        found = counts.view(2, sites, self.classes).cpu()  # here the host waits
        # On the host, where sums have an order.
        losses = torch.zeros(sites, dtype=torch.float64).index_add_(0, pile.site.cpu(), loss.cpu())
        return [Tally(self.classes, found[:, k], losses[k]).score() for k in range(sites)]
