"""Other uses of a client's data than a training step: extra passes, and the batches of a test."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fednorms.core import checks, noise
from fednorms.core.batches import batch_plan
from fednorms.core.norms import tests_by_batch
from fednorms.core.part import Part, Pass, Phase, overrides
from fednorms.core.states import Batch, Broadcast, Client, Task, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Context, Step


def prepare(
    task: Task, s: Step, seen_by: Callable[[Part], Step], watch: Callable[[Part, Tensor], None] | None = None
) -> Batch:
    """A raw batch as the model gets it: scaled to [0, 1], through the parts' `batch`, cropped, normalized.

    `watch` sees the images after each part.
    """
    x, y = _transformed(task, s, task.hooks["batch"], seen_by, watch)
    if not any(p.normalizes_input for p in task.hooks["batch"]):
        x = task.preprocessing.normalize(x)
    return x, y


def _transformed(
    task: Task,
    s: Step,
    parts: Sequence[Part],
    seen_by: Callable[[Part], Step],
    watch: Callable[[Part, Tensor], None] | None = None,
) -> Batch:
    s.x = x = task.preprocessing.unit(s.x, dtype=task.like.dtype)
    y, s.window = s.y, task.preprocessing.window(*x.shape[-2:])
    for p in parts:
        x, y = checks.images_and_labels(p, p.batch(x, y, seen_by(p)), s.x)
        if watch:
            watch(p, x)
    return task.preprocessing.cropped(x), y  # what no part has cut out


def passes(task: Task, when: Literal["setup", "before", "after", "evaluate"]) -> list[tuple[Part, Pass]]:
    """The parts' extra passes of one kind, in order.

    First come those of the parts on which the others' measurements depend: the one that normalizes the images, then the
    one that replaces the loss (FedLC counts classes before FedIIR takes gradients).
    """
    parts = sorted(task.method.having("passes"), key=lambda p: (not p.normalizes_input, not overrides(p, "objective")))
    return [(p, job) for p in parts for job in p.passes() if job.when == when]


@dataclass
class LocalView:
    """A client's data and a model as an extra pass sees them (`views.Local`); it changes nothing."""

    task: Task
    part: Part
    client: Client
    model: Tree
    context: Context
    sent: Broadcast
    everyone: dict[str, Tree]

    @property
    def received(self) -> Tree:
        """The exchanged tensors as the server sent them."""
        return self.sent.model.pick(self.task.net.exchanged)

    @property
    def kept(self) -> Tree:
        """The client's own tensors as its last round left them; none before its first."""
        return self.client.state.local if self.client.state else Tree()

    @property
    def classes(self) -> int:
        """How many logits the model has."""
        return int(self.task.net.module.get_submodule(self.task.net.heads[0]).get_parameter("weight").shape[0])

    @property
    def class_counts(self) -> Tensor:
        """How many training images of each class the client has."""
        return torch.bincount(self.client.data.y, minlength=self.classes).to(self.task.like)

    @property
    def down(self) -> Tree:
        """What the server sent to this part."""
        return self.sent.parts[self.part.name]

    @property
    def mine(self) -> Tree:
        """This part's own state at the client."""
        return self.everyone[self.part.name]

    def images(self, *, augmented: bool = False) -> Iterator[Tensor]:
        """Training images in [0, 1], in batches, before any normalization.

        `augmented`: as the parts' `batch` transform them for training; images of a test stay as they are.
        """
        augmented &= not self.context.evaluating
        parts = [p for p in self.task.hooks["batch"] if augmented and not p.normalizes_input]
        for number, rows in enumerate(torch.arange(len(self.client.data)).split(256)):
            s = self._step(self.client.data.batch(rows))
            with noise.keyed(self._key(number)):
                x, _ = _transformed(self.task, s, parts, partial(self._seen_by, s=s))
            yield x

    def layer_inputs(
        self, wanted: Callable[[nn.Module], bool], batch_size: int | None = None, *, shuffled: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """The input of every wanted layer, per batch of training data, shuffled again each round; buffers stay."""
        n = len(self.client.data)
        rows = noise.permutation(n, "order of a pass", self._word()) if shuffled else torch.arange(n)
        return layer_inputs(self.task, self.sent, self.client, self.model, self.everyone, wanted, rows, batch_size)

    @torch.no_grad()
    def features(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Penultimate features and labels of the training data, in batches, as a test sees them."""
        for rows in rows_of_test(self.task, self.client.name, len(self.client.data)):
            x, y = self._prepared(rows)
            yield self.task.net.forward(self.model, x, train=False, batch_statistics=False)[1].flatten(1), y

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """The training data in shuffled batches, transformed as in a training step."""
        n, seed = len(self.client.data), noise.seed_of("pass", self._word(), number)
        for i, rows in enumerate(batch_plan(n, self.task.training, Phase(), seed, needs_two=self.task.needs_two)[0]):
            s = self._step(self.client.data.batch(rows))
            with noise.keyed(torch.tensor([seed & 0xFFFFFFFF, i], device=self.task.like.device)):
                batch = prepare(self.task, s, partial(self._seen_by, s=s))
            yield batch

    def batches(self, size: int, number: int = 0, *, held_out: bool = False) -> Iterator[Batch]:
        """The training data in shuffled batches, as a test sees them.

        `held_out`: the validation data instead, if the client has any.
        """
        data = (self.client.val if held_out else None) or self.client.data
        order = noise.permutation(len(data), "order of a pass", self._word(), number)
        for rows in order.split(size):
            if len(rows) == 1 and self.task.needs_two:
                continue
            yield prepare_test(self.task, data.batch(rows), self.context, self.everyone, self.sent)

    def logits(self, model: Tree, x: Tensor, draw: int) -> Tensor:
        """Logits in train mode, with a gradient; running statistics are recorded into the buffers of `model`."""
        with noise.keyed(self._key(draw)):
            return self.task.net.forward(model, x, train=True, batch_statistics=True)[0]

    def tested(self, model: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Logits as a test computes them, and what normalization layers would record of this batch."""
        return self.task.net.tested(model, x)

    def base(self, logits: Tensor, y: Tensor) -> Tensor:
        """The recipe's loss."""
        return self.task.loss_of(logits, y)

    def loss(self, model: Tree, x: Tensor, y: Tensor, draw: int) -> Tensor:
        """The base loss of a model on a batch (train mode, buffers unchanged), with a gradient.

        It is the recipe's, or that of the part that replaces it.
        """
        net, s = self.task.net, self._step((x, y))
        trained, sent = net.trainable("all"), self.model.pick(net.buffers)

        def again(params: Tree, x: Tensor, stats: str = "batch", mode: str = "train") -> tuple[Tensor, Tensor]:
            if mode == "evaluate":
                return net.forward({**model, **sent, **params}, x, train=False, batch_statistics=False)
            buffers = sent if stats == "broadcast" else model.pick(net.buffers)
            tensors = {**model, **params, **buffers.clone()}
            return net.forward(tensors, x, train=True, batch_statistics=stats == "batch")

        s.forward, s.params, s.start = again, model.pick(trained), self.model.pick(trained)
        with noise.keyed(self._key(draw)):
            s.logits, s.features = again(s.params, x)
            if replaced := self.task.hooks["objective"]:
                return checks.objective(replaced[0], replaced[0].objective(self._seen_by(replaced[0], s)))
        return self.task.loss_of(s.logits, y)

    @torch.no_grad()
    def test_loss(self, model: Tree) -> Tensor:
        """The recipe's mean loss of a model over the training data, as a test sees them."""
        total, n = torch.zeros_like(self.task.like, dtype=torch.float64), len(self.client.data)
        for rows in rows_of_test(self.task, self.client.name, n):
            x, y = self._prepared(rows)
            logits, _ = self.task.net.forward(model, x, train=False, batch_statistics=False)
            total += self.task.loss_of(logits, y).double() * (len(rows) / n)
        return total.to(self.task.like)

    def uniform(self, draw: int, *shape: int) -> Tensor:
        """Uniforms in (0, 1) of this client, round and part."""
        with noise.keyed(self._key(draw)):
            return noise.uniform(shape, noise.stream(f"part {self.part.name}"), self.task.like)

    def _step(self, batch: Batch) -> Step:
        return _step_without_model(self.task, batch, self.context, self.task.method.path(self.context))

    def _seen_by(self, p: Part, s: Step) -> Step:
        return _seen_by(p, s, self.sent, self.everyone)

    def _prepared(self, rows: Tensor) -> Batch:
        return prepare_test(self.task, self.client.data.batch(rows), self.context, self.everyone, self.sent)

    def _word(self) -> int:
        who = (self.task.seed, self.context.round, self.client.name, self.part.name)
        return noise.seed_of("noise of a pass", *who) & 0xFFFFFFFF

    def _key(self, draw: int) -> Tensor:
        return torch.tensor([self._word(), draw], device=self.task.like.device)


def layer_inputs(
    task: Task,
    sent: Broadcast,
    client: Client,
    model: Tree,
    mine: dict[str, Tree],
    wanted: Callable[[nn.Module], bool],
    rows: Tensor,
    batch_size: int | None = None,
    *,
    train: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Run a client's data, in the order of `rows`, through a model without changing it; show what layers receive.

    Layers normalize with the statistics of the batch; `train=False` switches dropout and other noise off. Noise is
    keyed by round, client and batch, so every engine measures the same.
    """
    context = context_of(task, sent.round, client, evaluating=True)
    word = noise.seed_of("noise of layer inputs", task.seed, sent.round, client.name) & 0xFFFFFFFF
    with task.net.watching(wanted) as seen, torch.no_grad():
        for number, some in enumerate(rows.split(batch_size or task.training.batch_size)):
            if len(some) == 1 and task.needs_two:
                continue
            seen.clear()
            x, _ = prepare_test(task, client.data.batch(some), context, mine, sent)
            with noise.keyed(torch.tensor([word, number], device=task.like.device)):
                task.net.forward(model.clone(), x, train=train, batch_statistics=True)
            yield dict(seen)


def depends_on_batch(task: Task) -> bool:
    """Whether a model's answer to an image depends on the others in its batch: BatchNorm that keeps no statistics."""
    return any(tests_by_batch(m) for m in task.net.module.modules())


def shuffled_rows(site: str, images: int) -> Tensor:
    """The order of a site's images when a batch shares statistics: a permutation hashed from name and number.

    Many readers sort images by class, and statistics of one class are not those that a model was trained with. The
    order depends on neither round nor seed, so scores stay comparable.

    >>> shuffled_rows("clinic", 4).sort().values.tolist()
    [0, 1, 2, 3]
    """
    return noise.permutation(images, "test order", site, images)


def mixed_rows(site: str, images: int, size: int = 256) -> list[Tensor]:
    """`shuffled_rows` in batches; a single last image, which has no variance, joins the batch before.

    >>> [len(rows) for rows in mixed_rows("clinic", 513)], [len(rows) for rows in mixed_rows("clinic", 514)]
    ([256, 257], [256, 256, 2])
    """
    batches = list(shuffled_rows(site, images).split(size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def rows_of_test(task: Task, site: str, images: int) -> Sequence[Tensor]:
    """The batches in which a site's images go through a model with stored statistics: in order, or `mixed_rows`.

    `mixed_rows` are used if the images of a batch share statistics anyway.
    """
    return mixed_rows(site, images) if depends_on_batch(task) else torch.arange(images).split(256)


def prepare_test(task: Task, batch: Batch, context: Context, mine: dict[str, Tree], sent: Broadcast) -> Batch:
    """A raw batch as a tested model gets it: parts that transform data see `s.testing`."""
    s = _step_without_model(task, batch, replace(context, evaluating=True), {})
    s.testing = True
    return prepare(task, s, lambda p: _seen_by(p, s, sent, mine))


def _step_without_model(task: Task, batch: Batch, context: Context, path: dict[str, Hashable]) -> Step:
    x, y = batch[0].to(task.like.device), batch[1].to(task.like.device)
    return Step(Tree(), Tree(), x, y, context, task.net.head_names, path, _no_pass, task.loss_of)


def _seen_by(p: Part, s: Step, sent: Broadcast, mine: dict[str, Tree]) -> Step:
    view = copy.copy(s)
    view.part, view.down, view.mine = p.name, sent.parts[p.name], mine[p.name]
    return view


def _no_pass(params: Tree, x: Tensor, stats: str = "batch", mode: str = "train") -> tuple[Tensor, Tensor]:
    raise RuntimeError("A transform of the data cannot run the model.")
