"""Which model is tested, and with which normalisation statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from fednorms.core import begin, load, own_state, train
from fednorms.data import Split
from fednorms.errors import BadInput
from fednorms.evaluation.scores import SiteScore, Tally
from fednorms.layers.hybrid_norm import HybridNorm, raw_moments
from fednorms.layers.norms import keeps_statistics
from fednorms.part import Route
from fednorms.passes import LocalView, layer_inputs, passes, prepare_test
from fednorms.states import Broadcast, Client, ClientState, ServerState, Task, context_of
from fednorms.tree import Tree, mean

Model = Literal["global", "personal", "after_local", "adapted", "unseen"]
Statistics = Literal["auto", "global", "own", "batch", "re-estimated"]


@dataclass(frozen=True)
class Mode:
    """A model and the statistics it normalises with, written "personal", "global/batch" or "unseen/re-estimated".

    - global: the server's model. personal: the server's shared tensors with the client's own ones.
    - after_local: the client's model right after local training, before averaging.
    - adapted: the personal model after the method's fine-tuning on the client's training data.
    - unseen: for sites that never trained: the server's model, with tensors that clients keep to themselves (FedBN's)
      averaged over the clients that trained.

    Statistics: global (the server's running ones), own (the client's), batch (of each test batch), re-estimated (from
    the site's own images, without labels). "auto" is what the method's model holds.

    >>> Mode.read("global/batch")
    Mode(model='global', statistics='batch')
    """

    model: Model
    statistics: Statistics = "auto"

    @classmethod
    def read(cls, text: str) -> Mode:
        """Read a mode from its text form."""
        model, _, statistics = text.partition("/")
        known = [m for m in get_args(Model) if m == model]
        chosen = [s for s in get_args(Statistics) if s == (statistics or "auto")]
        if not known or not chosen:
            raise BadInput(
                f'Unknown evaluation mode "{text}". Expected MODEL or MODEL/STATISTICS with MODEL one of '
                f"{', '.join(get_args(Model))} and STATISTICS one of {', '.join(get_args(Statistics))}."
            )
        return cls(known[0], chosen[0])

    def resolved(self, task: Task) -> Mode:
        """With "auto" replaced by what the model holds, after checking that the method has such a model."""
        kept = [n for n in task.net.trained if task.net.routes[n] is Route.LOCAL]
        if self.model == "global" and kept:
            raise BadInput(
                f'Method "{task.method}" has no global model: clients keep {kept[0]} and {len(kept) - 1} more to '
                'themselves. Evaluate "personal", or "unseen" for the mean over clients.'
            )
        if self.model == "adapted" and not task.method.evaluation().phases:
            raise BadInput(f'Method "{task.method}" does not adapt. Add "+ finetune" to evaluate "adapted".')
        if self.statistics != "auto":
            return self
        stats = [n for n in task.net.buffers if task.net.initial[n].is_floating_point()]
        own = any(task.net.routes[n] in (Route.LOCAL, Route.SENT) for n in stats)
        mine = self.model in ("after_local", "adapted") or (self.model == "personal" and own)
        return replace(self, statistics="own" if mine else "global")

    def __str__(self) -> str:
        return self.model if self.statistics == "auto" else f"{self.model}/{self.statistics}"


def headline(task: Task) -> Mode:
    """The mode a method is judged by: personal if clients keep tensors of their own, else global.

    A method that fine-tunes is judged by its global or personal model round by round, and "adapted" at the end.
    """
    return Mode("personal" if task.net.own else "global").resolved(task)


def sent_for_test(task: Task, state: ServerState, sent: Broadcast) -> Broadcast:
    """The broadcast of an evaluation: parts may test another server model than the one they train from."""
    model = sent.model
    for p in task.method.having("evaluation"):
        if rule := p.evaluation().server_model:
            model = rule(model, state.parts[p.name])
    return replace(sent, model=model)


def unseen_broadcast(task: Task, sent: Broadcast, states: Iterable[ClientState]) -> Broadcast:
    """The model of a site that never trained: local tensors are the mean over the clients that did."""
    kept = [n for n, r in task.net.routes.items() if r is Route.LOCAL]
    local = [s.local.pick(kept) for s in states if s.local]
    if not kept or not local:
        return sent
    return replace(sent, model=Tree({**sent.model, **mean(local, [1.0] * len(local))}))


def model_for(task: Task, sent: Broadcast, client: Client, mode: Mode) -> tuple[Tree, dict[str, Tree]]:
    """The tensors that a mode tests at a site, and the parts' own state there."""
    state = client.state
    if state and mode.model in ("global", "unseen"):
        state = replace(state, local=Tree())
    client = replace(client, state=state)
    if mode.model == "adapted":
        carry, _ = begin(task, sent, client, evaluating=True)
        train(task, carry, task.method.evaluation().phases)
        return carry.model(), carry.mine
    context = context_of(task, sent.round, client, evaluating=True)
    mine = own_state(task, sent, state)
    if state is None or not state.parts:
        for p, job in passes(task, "setup"):  # a site that was not there at the start measures for itself
            mine[p.name], _ = job.client(LocalView(task, p, client, sent.model, context, sent, mine))
    model = load(task, sent, client, context, mine)
    if mode.statistics == "re-estimated":
        model = re_estimated(task, sent, client, model, mine)
    return model, mine


def re_estimated(task: Task, sent: Broadcast, client: Client, model: Tree, mine: dict[str, Tree]) -> Tree:
    """Replace running statistics by those of the site's own images (no labels used): the mean over batches.

    m = sum n_b m_b / n, v = sum n_b v_b / n with unbiased batch variances, as BatchNorm with momentum=None measures.
    """
    sums: dict[str, torch.Tensor] = {}
    rows = 0
    for inputs in layer_inputs(task, sent, client, model, mine, keeps_statistics):
        n = len(next(iter(inputs.values())))
        rows += n
        for layer, x in inputs.items():
            m, v, count = raw_moments(x)
            hybrid = isinstance(task.net.module.get_submodule(layer), HybridNorm)
            names = ("mean", "var") if hybrid else ("running_mean", "running_var")
            for leaf, value in zip(names, (m, v * count / max(count - 1, 1)), strict=True):
                name = f"{layer}.{leaf}"
                sums[name] = sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + n * value.double()
    return Tree({**model, **{k: (s / rows).to(model[k].dtype) for k, s in sums.items()}})


@torch.no_grad()
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
    """Test a model on a site's data. Batch statistics are those of batches of the training batch size."""
    batch_mode = mode.statistics == "batch"
    context = context_of(task, sent.round, client, evaluating=True)
    tally = Tally(classes)
    for rows in torch.arange(len(data)).split(task.training.batch_size if batch_mode else 256):
        alone = len(rows) == 1 and task.needs_two
        x, y = prepare_test(task, data.batch(rows), context, mine, sent)
        tensors = model.clone() if batch_mode else model  # batch statistics would update the running ones
        logits, _ = task.net.forward(tensors, x, train=False, batch_statistics=batch_mode and not alone)
        tally.add(logits, y)
    return tally.score()
