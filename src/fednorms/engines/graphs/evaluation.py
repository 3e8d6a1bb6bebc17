"""Tests as graphs: the forward pass over a batch of images is recorded once and used for all models and sites.

Sites that test the same tensors share batches: a thousand sites with four images each cost as much as one site with
four thousand. The host does not wait for the device until all sites are done.
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

SIZES = (32, 128, 512, 2048)  # images per recorded batch; the smallest that holds the remaining images is used
CACHED = 4  # sets of sites whose images stay on the device


class RandomOutputs(Exception):
    """A model gives different outputs for the same images."""


@dataclass(frozen=True)
class SiteModel:
    """A model that is tested on one site's images, with the parts' states of that site."""

    sent: Broadcast
    client: Client
    model: Tree
    mine: dict[str, Tree]


@dataclass
class SiteImages:
    """Test images of several sites on the device, one site after the other."""

    splits: list[Split]  # kept alive, because their ids are the key of a cache
    x: Tensor
    y: Tensor
    site: Tensor  # per image: the index of its site
    ends: list[int]

    @classmethod
    def of(cls, splits: list[Split], device: torch.device) -> SiteImages:
        """Copy the images of splits to the device."""
        both = [split.batch(torch.arange(len(split))) for split in splits]
        sizes = torch.tensor([len(y) for _, y in both])
        whose = torch.repeat_interleave(torch.arange(len(both)), sizes)
        x, y = torch.cat([b[0] for b in both]), torch.cat([b[1] for b in both])
        return cls(splits, x.to(device), y.to(device), whose.to(device), sizes.cumsum(0).tolist())

    def start(self, index: int) -> int:
        """The first row of a site."""
        return self.ends[index - 1] if index else 0


@dataclass
class Recorded:
    """The forward pass of a batch as a graph, with the memory of its inputs and outputs."""

    run: Job
    x: Tensor
    y: Tensor
    right: Tensor
    loss: Tensor


class Evaluator:
    """Tests models on the images of sites with recorded forward passes.

    `record` makes a graph of a job, or returns the job itself if that is impossible.
    """

    def __init__(
        self, task: Task, layout: Layout, device: Device, classes: int, record: Callable[[Job, object, object], Job]
    ) -> None:
        self.task, self.layout, self.device, self.classes, self.record = task, layout, device, classes, record
        self.uses_states = bool(task.hooks["batch"]) or any(
            p.evaluation().predict for p in task.method.having("evaluation")
        )
        self.images_on_device: dict[tuple[int, ...], SiteImages] = {}
        self.stream, self.pool = device.stream(0), device.pool()  # training waits while sites are tested
        self.block = layout.block(task.like)
        self.model = Tree()
        self.parts: tuple[dict[str, Tree], dict[str, Tree]] = {}, {}  # what parts broadcast, and have at the site
        self.graphs: dict[tuple[object, ...], Recorded] = {}
        self.sizes: tuple[int, ...] = SIZES
        self.one_by_one = depends_on_batch(task)  # sites cannot share batches, so they are not tested here

    def images(self, splits: list[Split]) -> SiteImages | None:
        """The images of these splits, kept on the device after their first use.

        None if they would take too much memory, or if an output depends on the other images of a batch or on random
        numbers.
        """
        if self.one_by_one:
            return None
        key, cache = tuple(map(id, splits)), self.images_on_device
        if key in cache:
            cache[key] = cache.pop(key)  # the most recently used is the last
        else:
            pixels = sum(len(split) for split in splits) * splits[0].batch(torch.arange(1))[0][0].nbytes
            if 16 * pixels > self.device.free_memory():
                return None
            cache[key] = SiteImages.of(splits, self.task.like.device)
            if len(cache) > CACHED:  # cohorts that are tested right after training differ from round to round
                self.device.synchronize()
                del cache[next(iter(cache))]
        return cache[key]

    def shared(self, mode: Mode) -> bool:
        """Whether a mode tests the server's tensors at every site, without anything of the sites."""
        task = self.task
        same = mode.model in ("global", "unseen", "averaged") or (mode.model == "personal" and not task.personal)
        return same and mode.statistics == "global" and not self.uses_states and not task.method.having("begin")

    def scores(self, models: Iterable[SiteModel], images: SiteImages) -> list[SiteScore]:
        """Test one model per site, in the order of the images; models are created when needed, on our stream."""
        right = torch.zeros(len(images.y), dtype=torch.bool, device=images.y.device)
        loss = torch.zeros(len(images.y), dtype=torch.float64, device=images.y.device)
        self.device.fork([self.stream])
        try:
            with self.device.on(self.stream):
                for model, start, stop in self._grouped(models, images):
                    with torch.no_grad():
                        self._load(model)
                        self._test(model, images, start, stop, right, loss)
        finally:
            self.device.join([self.stream])
        return self._scores(images, right, loss)

    def close(self) -> None:
        """Free all graphs and images."""
        for recorded in self.graphs.values():
            self.device.forget(recorded.run)
        self.graphs.clear()
        self.images_on_device.clear()

    def _grouped(self, models: Iterable[SiteModel], images: SiteImages) -> Iterator[tuple[SiteModel, int, int]]:
        """Models with their first and last (exclusive) rows; consecutive ones with the same tensors become one."""
        current: SiteModel | None = None
        first = 0
        for index, model in enumerate(models):
            start = images.start(index)
            if current is not None and self._ids(current) == self._ids(model):
                continue
            if current is not None:
                yield current, first, start
            current, first = model, start
        if current is not None:
            yield current, first, images.ends[-1]

    def _ids(self, tested: SiteModel) -> list[int]:
        trees = [tested.model]
        if self.uses_states:
            trees += [*tested.mine.values(), *tested.sent.parts.values()]
        return [id(t) for tree in trees for t in tree.values()]

    def _load(self, tested: SiteModel) -> None:
        """Copy a model, and the parts' states if a test reads them, into the memory that the graphs read."""
        given = (tested.sent.parts, tested.mine) if self.uses_states else ({}, {})
        if not self.model or shapes_of(*given) != shapes_of(*self.parts):
            integers = Tree({n: tested.model[n].clone() for n in self.layout.integers})
            self.model = Tree({**self.layout.views(self.block), **integers})
            down, mine = ({name: tree.clone() for name, tree in group.items()} for group in given)
            self.parts = down, mine
            for recorded in self.graphs.values():
                self.device.forget(recorded.run)
            self.graphs.clear()
        for names in (self.layout.names, self.layout.integers):
            copy_tree(self.model.pick(names), tested.model)
        for mine, theirs in zip(self.parts, given, strict=True):
            for name, tree in theirs.items():
                copy_tree(mine[name], tree)

    def _test(self, tested: SiteModel, images: SiteImages, start: int, stop: int, right: Tensor, loss: Tensor) -> None:
        while start < stop:
            size = next((s for s in self.sizes if s >= stop - start), self.sizes[-1])
            n = min(size, stop - start)
            try:
                recorded = self._recorded(tested, images, size)
            except torch.OutOfMemoryError:
                if len(self.sizes) == 1:
                    raise
                self.sizes = self.sizes[:-1]
                self.device.synchronize()
                self.device.empty_cache()
                continue
            # Beyond row n are older images, whose outputs are not read.
            recorded.x[:n].copy_(images.x[start : start + n])
            recorded.y[:n].copy_(images.y[start : start + n])
            recorded.run()
            right[start : start + n].copy_(recorded.right[:n])
            loss[start : start + n].copy_(recorded.loss[:n])
            start += n

    def _recorded(self, tested: SiteModel, images: SiteImages, size: int) -> Recorded:
        task, model, (down, mine) = self.task, self.model, self.parts
        context = context_of(task, tested.sent.round, tested.client, evaluating=True)
        key = size, images.x.dtype, tuple(sorted(task.method.path(context).items()))
        if key in self.graphs:
            return self.graphs[key]
        some = torch.arange(size, device=images.y.device) % len(images.y)  # any images, for the warm-up
        x, y = images.x.index_select(0, some), images.y.index_select(0, some)
        right = torch.zeros(size, dtype=torch.bool, device=y.device)
        loss = torch.zeros(size, dtype=torch.float64, device=y.device)
        sent = Broadcast(tested.sent.round, Tree(), down)

        def job() -> None:
            inputs, labels = prepare_test(task, (x, y), context, mine, sent)
            logits, features = task.net.forward(model, inputs, train=False, batch_statistics=False)
            if self.uses_states:
                logits = answer(task, sent, mine, logits, features)
            hit, nats = Tally.judge(logits, labels)
            right.copy_(hit)
            loss.copy_(nats)

        seen = []
        for _ in range(WARM_UPS):
            job()
            seen.append(loss.clone())
        self.device.synchronize()
        if not torch.equal(seen[-2], seen[-1]):
            self.one_by_one = True
            raise RandomOutputs(
                "the model draws random numbers in tests, so sites are tested one by one, each from its own seed"
            )
        self.graphs[key] = Recorded(self.record(job, self.stream, self.pool), x, y, right, loss)
        return self.graphs[key]

    def _scores(self, images: SiteImages, right: Tensor, loss: Tensor) -> list[SiteScore]:
        sites, cells = len(images.ends), images.site * self.classes + images.y
        counts = torch.zeros(2, sites * self.classes, dtype=torch.long, device=cells.device)
        counts[0].index_add_(0, cells, right.long())
        counts[1].index_add_(0, cells, torch.ones_like(cells))
        found = counts.view(2, sites, self.classes).cpu()  # here the host waits
        # On the host, where sums have a fixed order.
        losses = torch.zeros(sites, dtype=torch.float64).index_add_(0, images.site.cpu(), loss.cpu())
        return [Tally(self.classes, found[:, k], losses[k]).score() for k in range(sites)]
