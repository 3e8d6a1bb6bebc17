"""Which model is tested, and with which normalisation statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fednorms.core import carry_of, load, own_state, second_model, train
from fednorms.data import Split
from fednorms.errors import BadInput
from fednorms.evaluation.scores import SiteScore, Tally
from fednorms.evaluation.statistics import by_batch, re_estimated, statistics_names
from fednorms.layers.norms import tests_by_batch
from fednorms.noise import seed_of
from fednorms.part import Route
from fednorms.passes import LocalView, passes, prepare_test
from fednorms.states import Broadcast, Client, ClientState, ServerState, Task, context_of
from fednorms.tree import Tree, mean

Model = Literal["global", "personal", "after_local", "adapted", "unseen"]
Statistics = Literal["auto", "global", "own", "batch", "re-estimated"]
MEASURED = "@test"  # marks, in a saved server state, what a part's "evaluate" pass measured


@dataclass(frozen=True)
class Mode:
    """A model and the statistics it normalises with, written "personal", "global/batch" or "unseen/re-estimated".

    - global: the server's model. personal: the server's shared tensors with the client's own ones.
    - after_local: the client's model right after local training, before averaging.
    - adapted: the personal model after the method's fine-tuning on the client's training data.
    - unseen: for sites that never trained: the server's model, with tensors that clients keep to themselves (FedBN's)
      averaged over the clients that trained.

    Statistics: global (the server's running ones), own (the client's), batch (of each test batch, as large as in
    training; "batch:32": of 32 images), re-estimated (from the site's own images, without labels). "auto" is what the
    method's model holds.

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
        usable = kind == "batch" and size.isdecimal() and int(size) > 1  # one image has no variance
        if not known or kind not in get_args(Statistics) or (sized and not usable):
            raise BadInput(
                f'Unknown evaluation mode "{text}". Expected MODEL or MODEL/STATISTICS with MODEL one of '
                f"{', '.join(get_args(Model))} and STATISTICS one of {', '.join(get_args(Statistics))}, or batch:SIZE "
                "with a size of at least 2, as in global/batch:32."
            )
        return cls(known[0], f"{kind}:{int(size)}" if sized else kind)

    def batch_size(self, task: Task) -> int | None:
        """How many test images are normalised together; None: a test uses stored statistics."""
        kind, _, size = self.statistics.partition(":")
        if kind != "batch":
            return None
        return int(size) if size else task.training.batch_size

    def resolved(self, task: Task) -> Mode:
        """With "auto" replaced by what the model holds, after checking that the method has such a model."""
        net, what = task.net, f'Method "{task.method}"'
        names = statistics_names(net)
        routes = {net.routes[n] for n in names}
        own = bool(routes & {Route.LOCAL, Route.SENT}) or (bool(names) and task.twin is not None)
        kept = [n for n in net.trained if net.routes[n] is Route.LOCAL]
        if self.model == "global" and kept:
            raise BadInput(
                f"{what} has no global model: clients keep {kept[0]} and {len(kept) - 1} more to "
                'themselves. Evaluate "personal", or "unseen" for the mean over clients.'
            )
        if self.model == "adapted" and not task.method.evaluation().phases:
            raise BadInput(f'{what} does not adapt. Add "+ finetune" to evaluate "adapted".')
        if self.model == "after_local" and task.method.changes_updates:
            senders = [*task.method.having("send"), *task.method.having("protect")]
            raise BadInput(
                f"{what} has no model right after local training to test: {senders[0].name} changes updates before "
                'they are sent. Evaluate "global" or "personal".'
            )
        statistics = self.statistics
        rule = task.method.evaluation().statistics
        if statistics == "auto" and rule and self.model in ("global", "personal", "unseen"):
            statistics = rule
        elif statistics == "auto":
            mine = self.model in ("after_local", "adapted") or (self.model == "personal" and own)
            statistics = "own" if mine else "global"
        wrong = ""
        if self.model == "after_local" and statistics != "own":
            wrong = 'a model right after local training is tested with the statistics it has then: write "after_local"'
        elif statistics.partition(":")[0] in ("batch", "re-estimated") and not names:
            wrong = f'model "{net.name}" has no layer with stored statistics: write "{self.model}"'
        elif statistics == "own" and self.model == "unseen":
            wrong = 'a site that never trained has none of its own: write "unseen" or "unseen/re-estimated"'
        elif statistics == "own" and self.model in ("global", "personal") and not own:
            wrong = f'its clients keep none of their own: write "{self.model}" or "{self.model}/re-estimated"'
        elif statistics == "global" and self.model != "unseen" and Route.LOCAL in routes:
            wrong = (
                f'its clients never send them, so that the server has none: write "{self.model}/own", '
                f'"{self.model}/batch" or "{self.model}/re-estimated"'
            )
        if wrong:
            raise BadInput(f'{what} cannot be tested as "{self.model}/{statistics}": {wrong}.')
        return replace(self, statistics=statistics)

    def __str__(self) -> str:
        return self.model if self.statistics == "auto" else f"{self.model}/{self.statistics}"


def headline(task: Task) -> Mode:
    """The mode a method is judged by: personal if clients keep tensors of their own, else global.

    A method that fine-tunes is judged by its global or personal model round by round, and "adapted" at the end.
    """
    return Mode("personal" if task.personal else "global").resolved(task)


def tested_state(task: Task, state: ServerState) -> ServerState:
    """The server with the model that is tested: parts may test another one than they train from."""
    model = state.model
    for p in task.method.having("evaluation"):
        if rule := p.evaluation().server_model:
            model = rule(model, state.parts[p.name])
    return replace(state, model=model)


def unseen_broadcast(task: Task, sent: Broadcast, states: Iterable[ClientState]) -> Broadcast:
    """The model of a site that never trained: local tensors are the mean over the clients that did."""
    kept = [n for n, r in task.net.routes.items() if r is Route.LOCAL]
    local = [s.local.pick(kept) for s in states if s.local]
    if not kept or not local:
        return sent
    return replace(sent, model=Tree({**sent.model, **mean(local, [1.0] * len(local))}))


def model_for(task: Task, sent: Broadcast, client: Client, mode: Mode) -> tuple[Tree, dict[str, Tree]]:
    """The tensors that a mode tests at a site, and the parts' own state there. Changes nothing."""
    kept = client.state.local if client.state else Tree()
    if client.state and mode.model in ("global", "unseen"):
        client = replace(client, state=replace(client.state, local=Tree()))
    context = context_of(task, sent.round, client, evaluating=True)
    mine = site_state(task, sent, client)
    model = load(task, sent, client, context, mine)
    if task.twin and mode.model in ("personal", "adapted"):
        model = Tree({**model, **second_model(task, mine)})
    if mode.model == "adapted":
        carry = carry_of(task, sent, client, context, mine, model)
        train(task, carry, task.method.evaluation().phases)
        model = carry.model()
    return Tree({**model, **_statistics(task, sent, client, model, mine, kept, mode)}), mine


def site_state(task: Task, sent: Broadcast, client: Client) -> dict[str, Tree]:
    """Each part's state at a site; a site that was not there at the start runs the setup passes on its own data."""
    context = context_of(task, sent.round, client, evaluating=True)
    mine = own_state(task, sent, client.state)
    for p, job in passes(task, "setup"):
        if client.state is None or p.name not in client.state.parts:
            mine[p.name], _ = job.client(LocalView(task, p, client, sent.model, context, sent, mine))
    return mine


def _statistics(
    task: Task, sent: Broadcast, client: Client, model: Tree, mine: dict[str, Tree], kept: Tree, mode: Mode
) -> Tree:
    """The statistics a mode asks for, where they are not those that the model holds."""
    names = statistics_names(task.net)
    if mode.statistics == "re-estimated":
        return re_estimated(task, sent, client, model, mine).pick(names)
    if mode.statistics == "own":
        return kept.pick(names) if mode.model == "global" else Tree()
    if mode.statistics == "global" and mode.model in ("personal", "adapted"):
        return sent.model.pick(n for n in names if task.net.routes[n] <= Route.SENT)
    return Tree()


def answer(task: Task, sent: Broadcast, mine: dict[str, Tree], logits: Tensor, features: Tensor) -> Tensor:
    """The logits by which a site predicts: the classifier's, or what a part makes of the features."""
    for p in task.method.having("evaluation"):
        if rule := p.evaluation().predict:
            logits = rule(logits, features, sent.parts[p.name], mine[p.name])
    return logits


def depends_on_batch(task: Task) -> bool:
    """Whether a model's answer to an image depends on the images beside it: BatchNorm that keeps no statistics."""
    return any(tests_by_batch(m) for m in task.net.module.modules())


def shuffled_rows(site: str, images: int) -> Tensor:
    """The order in which a site's images are tested with batch statistics: a permutation hashed from name and number.

    Many readers sort images by class, and statistics of one class are not those a model was trained with. The order
    depends on neither round nor seed, so that scores stay comparable.

    >>> shuffled_rows("clinic", 4).sort().values.tolist()
    [0, 1, 2, 3]
    """
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed_of("test order", site, images)))


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
    """Test a model on a site's data, in stored order; with batch statistics, in batches of `shuffled_rows`.

    Of those, a last batch of one image is normalised with the stored statistics.
    """
    size = mode.batch_size(task)
    batch_mode = size is not None
    context = context_of(task, sent.round, client, evaluating=True)
    tally = Tally(classes)
    # Where an image's answer depends on its batch, batches are the same on every device.
    large = 256 if task.like.device.type == "cpu" or depends_on_batch(task) else 2048
    if size is None:
        batches = data.batches(large)
    else:
        batches = data.stream(shuffled_rows(client.name, len(data)).to(data.y.device).split(size))
    for batch in batches:
        alone = len(batch[1]) == 1 and task.needs_two
        x, y = prepare_test(task, batch, context, mine, sent)
        tensors = by_batch(task.net, model) if batch_mode else model
        logits, features = task.net.forward(tensors, x, train=False, batch_statistics=batch_mode and not alone)
        tally.add(answer(task, sent, mine, logits, features), y)
    return tally.score()
