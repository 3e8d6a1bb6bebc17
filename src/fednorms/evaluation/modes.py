"""Evaluation modes: which model is tested, and with which normalization statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fednorms.core import checks
from fednorms.core.errors import BadInput
from fednorms.core.options import shortened
from fednorms.core.part import Route
from fednorms.core.passes import depends_on_batch, mixed_rows, prepare_test, shuffled_rows
from fednorms.core.round import carry_of, load, site_state, train, twin_model
from fednorms.core.states import Broadcast, Client, ClientState, ServerState, Task, context_of
from fednorms.core.tree import Tree, mean
from fednorms.core.views import Context, Unlabeled
from fednorms.data import Split
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import SiteScore, Tally
from fednorms.evaluation.statistics import by_batch, re_estimated, statistics_names

Model = Literal["global", "personal", "after_local", "adapted", "unseen", "averaged"]
Statistics = Literal["auto", "global", "own", "batch", "re-estimated", "test-time"]
BY_BATCH = ("batch", "test-time")  # may have a size
MEASURED = "@test"  # suffix, in a saved server state, of what a part's "evaluate" pass measured


@dataclass(frozen=True)
class Mode:
    """A model and the statistics it normalizes with, written "personal", "global/batch" or "unseen/re-estimated".

    - global: the server's model. personal: the server's shared tensors with the client's own ones.
    - after_local: the client's model right after its last local training, before averaging (only clients that trained).
    - adapted: the personal model after the method's fine-tuning on the client's training data.
    - unseen: for sites that never trained, the server's model. Tensors that clients keep (as in FedBN) are averaged
      over the clients that trained.
    - averaged: that model of a method without a global one, at all sites. `predict` and `export` hand it out.

    Statistics: global (the server's running ones), own (the client's), batch (of each test batch, as large as in
    training; "batch:32": of 32 images), re-estimated (from the site's own images, without labels), test-time (the
    method adapts the model to each test batch, without labels; "test-time:32": of 32 images). "auto" is the method's
    choice: those that its model holds, unless its `evaluation` names others.

    >>> Mode.read("global/batch")
    Mode(model='global', statistics='batch')
    """

    model: Model
    statistics: str = "auto"  # one of `Statistics`, or "batch:SIZE"

    @classmethod
    def read(cls, text: str) -> Mode:
        """Read a mode from its text form."""
        model, _, statistics = text.partition("/")
        kind, sized, size = (statistics or "auto").partition(":")
        known = [m for m in get_args(Model) if m == model]
        usable = kind in BY_BATCH and size.isdecimal() and len(size) < 10 and int(size) > 1  # one has no variance
        if not known or kind not in get_args(Statistics) or (sized and not usable):
            raise BadInput(
                f'Unknown evaluation mode "{shortened(text)}". Expected MODEL or MODEL/STATISTICS with MODEL one of '
                f"{', '.join(get_args(Model))} and STATISTICS one of {', '.join(get_args(Statistics))}, or batch:SIZE "
                "or test-time:SIZE with a size of at least 2, as in global/batch:32."
            )
        return cls(known[0], f"{kind}:{int(size)}" if sized else kind)

    def batch_size(self, task: Task) -> int | None:
        """How many test images are answered together; None if each image is answered separately."""
        kind, _, size = self.statistics.partition(":")
        if kind not in BY_BATCH:
            return None
        return int(size) if size else task.training.batch_size

    def received(self, sent: Broadcast, site: str) -> Broadcast:
        """What a site gets for this test: the model made for it, the server's, or what a new site gets."""
        if self.model in ("unseen", "averaged"):  # one model for all sites
            return sent.to_all
        return sent.to(site, model=self.model != "global")

    def resolved(self, task: Task) -> Mode:
        """With "auto" replaced by what the model holds, after checking that the method has such a model."""
        what = f'Method "{task.method}"'
        if missing := self._missing_model(task):
            raise BadInput(f"{what} {missing}")
        mode = replace(self, statistics=self._default_statistics(task)) if self.statistics == "auto" else self
        if missing := mode._missing_statistics(task):
            raise BadInput(f'{what} cannot be tested as "{mode}": {missing}.')
        return mode

    def _missing_model(self, task: Task) -> str:
        """Why the method has no such model, and what to do; empty if it has one."""
        kept = [n for n in task.net.trained if task.net.routes[n] is Route.LOCAL]
        if self.model == "global" and kept:
            return (
                f"has no global model: clients keep {kept[0]} and {len(kept) - 1} more tensors. "
                'Evaluate "personal", or "averaged" for the mean over clients.'
            )
        if self.model == "averaged" and not averages(task):
            return 'has a global model, which is the same at all sites. Evaluate "global".'
        if self.model == "adapted" and not task.method.evaluation().phases:
            return 'does not adapt. Add "+ finetune" to evaluate "adapted".'
        if self.model == "after_local" and (changing := task.method.changing):
            return (
                f"has no model right after local training to test, because {changing[0]} changes updates "
                'before they are sent. Evaluate "global" or "personal".'
            )
        return ""

    def _default_statistics(self, task: Task) -> str:
        """What "auto" means: the method's own rule, or the statistics that the model holds."""
        asked = task.method.evaluation()
        rule = "test-time" if asked.adapt else asked.statistics or (asked.unseen if self.model == "unseen" else None)
        if rule and self.model in ("global", "personal", "unseen"):
            return rule
        own = self.model in ("after_local", "adapted") or (self.model == "personal" and keeps_statistics(task))
        return "own" if own else "global"

    def _missing_statistics(self, task: Task) -> str:
        """Why the model cannot be tested with these statistics, and what to write instead; empty if it can."""
        names = statistics_names(task.net)
        if self.model == "after_local" and self.statistics != "own":
            return 'a model right after local training is tested with its own statistics. Write "after_local"'
        kind = self.statistics.partition(":")[0]
        if kind == "test-time" and not task.method.evaluation().adapt:
            return f'no part of it adapts to test images. Write "{self.model}", or add "+ atp" to the method'
        if kind == "test-time" and self.model not in ("global", "personal", "unseen"):
            return f'only global, personal and unseen models adapt to test images. Write "{self.model}"'
        if kind in ("batch", "re-estimated") and not names:
            return f'model "{task.net.name}" has no layer with stored statistics. Write "{self.model}"'
        if self.statistics == "own" and self.model in ("unseen", "averaged"):
            return f'it belongs to no site that trained. Write "{self.model}" or "{self.model}/re-estimated"'
        if self.statistics == "own" and self.model in ("global", "personal") and not keeps_statistics(task):
            return f'its clients keep no statistics. Write "{self.model}" or "{self.model}/re-estimated"'
        never_sent = any(task.net.routes[n] is Route.LOCAL for n in names)
        from_server = self.statistics == "global" or (kind == "test-time" and self.model == "global")
        if from_server and self.model not in ("unseen", "averaged") and never_sent:
            return (
                f'its clients never send statistics, so the server has none. Write "{self.model}/own", '
                f'"{self.model}/batch" or "{self.model}/re-estimated"'
            )
        return ""

    def __str__(self) -> str:
        return self.model if self.statistics == "auto" else f"{self.model}/{self.statistics}"


def averages(task: Task) -> bool:
    """Whether a method has no global model, so one for all sites has the mean of tensors that clients keep."""
    return any(route is Route.LOCAL for route in task.net.routes.values())


def keeps_statistics(task: Task) -> bool:
    """Whether clients have their own normalization statistics."""
    names = statistics_names(task.net)
    return bool(names) and (
        task.twin is not None or any(task.net.routes[n] in (Route.LOCAL, Route.SENT) for n in names)
    )


def headline(task: Task) -> Mode:
    """The mode that a method is judged by: personal if clients keep tensors, otherwise global.

    A method that fine-tunes is judged by its global or personal model in every round, and by "adapted" at the end.
    """
    return Mode("personal" if task.personal else "global").resolved(task)


def tested_state(task: Task, state: ServerState) -> ServerState:
    """The server with the model that is tested: a part may test another model than it trains from."""
    model = state.model
    for p in task.method.having("evaluation"):
        if rule := p.evaluation().server_model:
            model = rule(model, state.parts[p.name])
    return replace(state, model=model)


def unseen_broadcast(task: Task, sent: Broadcast, states: Iterable[ClientState]) -> Broadcast:
    """The model of a site that never trained: local tensors are averaged over the clients that trained."""
    kept = [n for n, r in task.net.routes.items() if r is Route.LOCAL]
    local = [s.local.pick(kept) for s in states if s.local]
    if not kept or not local:
        return sent
    return replace(sent, model=Tree({**sent.model, **mean(local, [1.0] * len(local))}))


def model_for(task: Task, sent: Broadcast, client: Client, mode: Mode) -> tuple[Tree, dict[str, Tree]]:
    """The tensors that a mode tests at a site, and the parts' state there; changes nothing."""
    kept = client.state.local if client.state else Tree()
    if client.state and mode.model in ("global", "unseen", "averaged"):
        client = replace(client, state=replace(client.state, local=Tree()))
    context = context_of(task, sent.round, client, evaluating=True)
    mine = site_state(task, sent, client)
    model = load(task, sent, client, context, mine)
    if mode.model in ("personal", "adapted"):
        model = Tree({**model, **twin_model(task, mine)})
        for p in task.method.having("evaluation"):
            if rule := p.evaluation().personal_model:
                model = Tree({**model, **rule(model, mine[p.name])})
    if mode.model == "adapted":
        carry = carry_of(task, sent, client, context, mine, model)
        train(task, carry, task.method.evaluation().phases)
        model = carry.model()
    return Tree({**model, **_statistics(task, sent, client, model, mine, kept, mode)}), mine


def _statistics(
    task: Task, sent: Broadcast, client: Client, model: Tree, mine: dict[str, Tree], kept: Tree, mode: Mode
) -> Tree:
    """The statistics that a mode asks for, if the model does not hold them already."""
    names = statistics_names(task.net)
    if mode.statistics == "re-estimated":
        return re_estimated(task, sent, client, model, mine).pick(names)
    if mode.statistics == "own":
        return kept.pick(names) if mode.model == "global" else Tree()
    if mode.statistics == "global" and mode.model in ("personal", "adapted"):
        return sent.model.pick(n for n in names if task.net.routes[n] <= Route.SENT)
    return Tree()


def answer(task: Task, sent: Broadcast, mine: dict[str, Tree], logits: Tensor, features: Tensor) -> Tensor:
    """The logits that a site predicts with: the classifier's, or a part's own from the features."""
    for p in task.method.having("evaluation"):
        if rule := p.evaluation().predict:
            logits = rule(logits, features, sent.parts[p.name], mine[p.name])
    return logits


def score_site(
    task: Task,
    sent: Broadcast,
    client: Client,
    data: Split,
    classes: int,
    model: Tree,
    mine: dict[str, Tree],
    mode: Mode,
) -> SiteScore:
    """Test a model on a site's data."""
    tally = Tally(classes)
    for _, logits, y in site_logits(task, sent, client, data, model, mine, mode):
        tally.add(logits, y)
    return tally.score()


def predict_site(
    task: Task, sent: Broadcast, client: Client, data: Split, model: Tree, mine: dict[str, Tree], mode: Mode
) -> Predictions:
    """What a model predicts for a site's images, in the order of the data."""
    rows, logits = zip(*((r, z) for r, z, _ in site_logits(task, sent, client, data, model, mine, mode)), strict=True)
    at = torch.cat(rows).cpu()
    found = torch.cat(logits).double().softmax(1).cpu()
    probabilities = torch.empty_like(found).index_copy_(0, at, found)
    return Predictions(data.y.cpu().numpy(), probabilities.numpy(), data.groups, data.files)


def _adapted(
    task: Task, sent: Broadcast, context: Context, model: Tree, mine: dict[str, Tree], x: Tensor, memory: Tree
) -> tuple[Tree, Tree]:
    """The model after the method's part has adapted it to a batch of test images without labels, and the memory."""
    (p, rule) = next((p, rule) for p in task.method.having("evaluation") if (rule := p.evaluation().adapt))
    seen = Unlabeled(x, model, context, sent.parts[p.name], mine[p.name], task.net.tested)
    changed, memory = checks.two_trees(p, "adapt of evaluation", rule(seen, memory))
    return Tree({**model, **checks.update(p, "adapt of evaluation", changed, model)}).detach(), memory


@torch.no_grad()
def site_logits(
    task: Task, sent: Broadcast, client: Client, data: Split, model: Tree, mine: dict[str, Tree], mode: Mode
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Positions, logits and labels of a site's images by batch, in stored order.

    If images of a batch share statistics, they come in `shuffled_rows`. A last batch of one image has no variance for
    a network that needs two: it is normalized with the stored one, and no model adapts to it.
    """
    size = mode.batch_size(task)
    kind = mode.statistics.partition(":")[0]
    batch_mode, memory = kind == "batch", Tree()
    context = context_of(task, sent.round, client, evaluating=True)
    everything = torch.arange(len(data))
    if size is not None:
        plan = shuffled_rows(client.name, len(data)).split(size)
    elif depends_on_batch(task):  # batches are then the same on every device
        plan = tuple(mixed_rows(client.name, len(data)))
    else:
        plan = everything.split(256 if task.like.device.type == "cpu" else 2048)
    stored = size is None and not depends_on_batch(task)
    batches = data.batches(len(plan[0])) if stored else data.stream([rows.to(data.y.device) for rows in plan])
    for rows, batch in zip(plan, batches, strict=True):
        alone = len(batch[1]) == 1 and task.needs_two
        x, y = prepare_test(task, batch, context, mine, sent)
        tensors = by_batch(task.net, model) if batch_mode else model
        if kind == "test-time" and not alone:
            tensors, memory = _adapted(task, sent, context, model, mine, x, memory)
        logits, features = task.net.forward(tensors, x, train=False, batch_statistics=batch_mode and not alone)
        yield rows, answer(task, sent, mine, logits, features), y
