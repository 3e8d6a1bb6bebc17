"""What leaves a site: every tensor of an upload, measured in a trial run instead of declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fednorms.core.accounting import example
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.option_names import option
from fednorms.core.part import Part, overrides
from fednorms.core.passes import LocalView
from fednorms.core.round import broadcast, load, own_state, server_update
from fednorms.core.states import Broadcast, Client, Task, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.explain.deployable import obstacle, pools
from fednorms.explain.trial import AVERAGED, NAMES, Trial
from fednorms.methods.registry import method as read_method

_STATISTICS = [
    "  (!) Such tensors are computed directly from a site's images, not learned. They are a few numbers per channel",
    "  or class, but of that site only, unless they are averaged before anybody sees them.",
]


@dataclass(frozen=True)
class Told:
    """Numbers and words that leave a site besides tensors: when, what, and the keys in its messages."""

    when: str
    what: str
    keys: tuple[str, ...]


_CARD = "its name and domain, classes, image shape and type, preprocessing; images for training, validation, testing"
_DATA = ("site", "domain", "classes", "shape", "dtype", "preprocessing", "protocol", "train", "val", "test", "order")
ONCE = Told("once", _CARD, _DATA)
TRAINED = Told("every round", "training loss, number of steps, images left out", ("loss", "steps", "dropped"))
TESTED = Told(
    "every test",
    "accuracy, balanced accuracy, loss, images (scores in the site's policy)",
    ("accuracy", "balanced_accuracy", "loss", "samples"),
)
COUNTED = Told(
    "if allowed",
    "images per class: with balanced class weights, or as recall per class (class_counts in the site's policy)",
    ("counts", "recall"),
)


@dataclass(frozen=True)
class Leaving:
    """Tensors of one kind that leave a site: when, who sends them, what they are and how many bytes they take."""

    when: str
    sender: str
    what: str
    names: tuple[str, ...]
    nbytes: int
    statistics: bool  # statistics of the data, not learned
    averaged: bool  # the server needs only their sum over sites


@dataclass(frozen=True)
class Received:
    """Tensors that every site receives from the server, by the part whose they are ("model": the averaged model)."""

    sender: str
    names: tuple[str, ...]
    single: bool  # some are exactly what one site sent, not a mean over sites
    mixed: bool = False  # weights of the model that the server mixes for each site from single sites' models


@dataclass(frozen=True)
class SiteUploads:
    """What leaves a site under a method.

    >>> p = what_leaves("fedrdn", "cnn-small")
    >>> [(x.when, x.sender, x.names) for x in p.leaving if x.statistics and x.sender != "model"]
    [('once', 'fedrdn', ('mean', 'std'))]
    >>> p.secure_aggregation
    False
    """

    method: str
    model: str
    leaving: list[Leaving] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0
    obstacle: str = ""
    guarantee: str = ""  # differential privacy, in words
    pooled: bool = False  # the images themselves leave
    class_counts: tuple[str, ...] = ()  # parts whose uploads tell images per class
    individual: tuple[str, ...] = ()  # parts for which the server must see each site's update
    received: list[Received] = field(default_factory=list)  # what the other sites see, through the server
    addressed: tuple[str, ...] = ()  # parts for which the server's messages differ by site
    proxy: tuple[str, ...] = ()  # parts for which the server has labeled images of its own

    @property
    def told(self) -> list[Told]:
        """What leaves besides tensors; with differential privacy, a site does not say how its training went."""
        return [ONCE, *([] if self.guarantee else [TRAINED]), TESTED, COUNTED]

    @property
    def secure_aggregation(self) -> bool:
        """Whether the server only needs sums over sites."""
        return all(x.averaged for x in self.leaving)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "method": self.method,
            "model": self.model,
            "leaves": [vars(x) | {"names": list(x.names)} for x in self.leaving],
            "told": [vars(x) | {"keys": list(x.keys)} for x in self.told],
            "class_counts": list(self.class_counts),
            "received": [vars(x) | {"names": list(x.names)} for x in self.received],
            "stays": list(self.kept),
            "stays_bytes": self.kept_bytes,
            "secure_aggregation": self.secure_aggregation,
            "addressed": list(self.addressed),
            "proxy": list(self.proxy),
            "deployable": not self.obstacle,
            "obstacle": self.obstacle,
            "differential_privacy": self.guarantee,
        }

    def __repr__(self) -> str:
        lines = [f'What leaves a site under "{self.method}" on model "{self.model}"', ""]
        lines.append(f"  {'when':<16}{'sent by':<14}{'bytes':>12}   what")
        for x in self.leaving:
            mark = "  (!) statistics of the data" if x.statistics else ""
            lines.append(f"  {x.when:<16}{x.sender:<14}{x.nbytes:>12,}   {x.what}: {_some(x.names)}{mark}")
        images = "" if self.pooled else "; every other image" if self.proxy else "; every image"
        lines += [
            "",
            *(f"  {x.when:<16}{x.what}" for x in self.told),
            *(f"  (!) The uploads of {name} tell images per class." for name in self.class_counts),
            *(
                f"  (!) {name} needs labeled images at the server: a fraction of each site's training images, or those "
                f"of one site, as {option('proxy').rstrip('=')} says."
                for name in self.proxy
            ),
            *(f"  every site gets {_some(x.names)} ({_origin(x)})" for x in self.received),
            f"  stays           {self.kept_bytes:,} bytes{': ' + _some(self.kept) if self.kept else ''}{images}",
            "",
            *(_STATISTICS if any(x.statistics for x in self.leaving) else []),
            f"  Only sums over sites are needed: {'yes' if self.secure_aggregation else 'no'}"
            f" (secure aggregation {'possible' if self.secure_aggregation else 'impossible'} in principle).",
            *([f"  The server must see each site's update: {', '.join(self.individual)}."] if self.individual else []),
            *(
                [f"  The server must know which site it answers: {', '.join(self.addressed)}."]
                if self.addressed
                else []
            ),
            f"  Runs across machines: {'no: ' + self.obstacle if self.obstacle else 'yes'}.",
        ]
        if self.guarantee:
            lines += ["", *(f"  {line}" for line in self.guarantee.splitlines())]
            lines.append(
                "  Numbers of images, test scores and the choice of the best round are not counted in epsilon."
            )
        return "\n".join(lines)


def what_leaves(
    method: str | Method | Part,
    model: str | nn.Module = "cnn-small",
    *,
    classes: int = 10,
    shape: tuple[int, int, int] | None = None,
    head: str | list[str] | None = None,
) -> SiteUploads:
    """List all tensors that a site sends under a method, by running a round and every extra pass on tiny data.

    `shape` is that of an image (default: the size that the model is made for).

    >>> [x.what for x in what_leaves("scaffold + fedbn").leaving]
    ['weights', 'its upload']
    """
    chosen = read_method(method)
    why = obstacle(chosen)
    trial = Trial.of(chosen, model, classes, shape, head)
    task, net, to_all = trial.task, trial.task.net, broadcast(trial.task, trial.state)
    uploads = trial.engine.train(to_all, NAMES).uploads
    upload = uploads[0]
    client, sent = trial.client(), to_all.to(NAMES[0])
    kinds = {"weights": upload.model.pick(net.sent_params)}
    kinds["running statistics of features"] = upload.model.pick(n for n in net.buffers if n in upload.model)
    leaving = [
        Leaving("every round", "model", what, tuple(tree), tree.nbytes(), what != "weights", not chosen.individual)
        for what, tree in kinds.items()
        if tree
    ]
    for p in chosen.parts:
        jobs = [job for job in p.passes() if job.when in ("before", "after")]
        rule = jobs[0].reduce if jobs else p.reduction
        if up := upload.parts.get(p.name, Tree()):
            reads = any(_measures(task, p, job.when, sent, client)[1] for job in jobs) or _owns_buffers(net, p)
            what = "measured in its pass" if jobs else "its upload"
            leaving.append(Leaving("every round", p.name, what, tuple(up), up.nbytes(), reads, rule in AVERAGED))
        for job in p.passes():
            if job.when in ("setup", "evaluate"):
                up, reads = _measures(task, p, job.when, sent, client)
                when = "once" if job.when == "setup" else "every test"
                what = "measured in its pass"
                leaving.append(Leaving(when, p.name, what, tuple(up), up.nbytes(), reads, job.reduce in AVERAGED))
    kept = client.state.local if client.state else Tree()
    own = {
        f"{part}/{k}": t for part, tree in (client.state.parts if client.state else {}).items() for k, t in tree.items()
    }
    stays = Tree({**kept, **own})
    return SiteUploads(
        str(chosen),
        net.name,
        leaving,
        tuple(stays),
        stays.nbytes(),
        why,
        example(chosen),
        bool(pools(chosen)),
        tuple(p.name for p in chosen.parts if p.tells_class_counts),
        tuple(chosen.individual),
        _received(trial, uploads),
        tuple(p.name for p in chosen.addressing),
        tuple(chosen.using_proxy),
    )


def _received(trial: Trial, uploads: list[Upload]) -> list[Received]:
    """What the next broadcast holds after a round of both clients."""
    task, client = trial.task, trial.client()
    before = broadcast(task, trial.state)
    to_all = broadcast(task, server_update(task, trial.state, uploads))
    sent = to_all.to(NAMES[1])
    shared = tuple(n for n in sent.model if n in task.net.exchanged)
    mixed = sent.model.pick(n for n in shared if sent.model[n] is not to_all.model[n])  # for this site only
    same = tuple(n for n in shared if n not in mixed)
    found = [Received("model", same, single=False)] if same else []
    for p in task.method.parts:
        if mixed and overrides(p, "model_to"):
            one, other = (u.model for u in uploads)
            single = any(_holds(t, one[n]) and not _holds(other[n], one[n]) for n, t in mixed.items())
            found.append(Received(p.name, tuple(mixed), single, mixed=True))
        if tree := sent.parts.get(p.name):
            own = [uploads[0].parts.get(p.name, Tree())]
            own += [_measures(task, p, job.when, before, client)[0] for job in p.passes()]
            single = any(_holds(t, u) for t in tree.values() for one in own for u in one.values())
            found.append(Received(p.name, tuple(tree), single))
    return found


def _holds(received: Tensor, sent: Tensor) -> bool:
    """Whether a tensor, or one of its rows, is exactly what one site sent; whole numbers (counts, masks) do not count.

    >>> import torch
    >>> pool, mine = torch.tensor([[1.0, 2.0], [3.0, 4.5]]), torch.tensor([3.0, 4.5])
    >>> _holds(pool, mine), _holds(pool.mean(0), mine), _holds(torch.ones(2), torch.ones(2))
    (True, False, False)
    """
    if not sent.is_floating_point() or bool((sent == sent.round()).all()):
        return False
    rows = [received, *(received if received.dim() == sent.dim() + 1 else ())]
    return any(row.shape == sent.shape and bool((row == sent).all()) for row in rows)


def _origin(x: Received) -> str:
    if x.sender == "model":
        return "the averaged model"
    combined = "mixed for it from single sites' models" if x.mixed else "combined over sites"
    return f"{x.sender}, {'some are what a single site sent' if x.single else combined}"


def _owns_buffers(net: Net, p: Part) -> bool:
    """Whether a part owns tensors that layers record instead of learn, so its uploads come from the data."""
    return any(name in net.buffers for name in net.owned_by.get(p.name, ()))


def _measures(task: Task, p: Part, when: str, sent: Broadcast, client: Client) -> tuple[Tree, bool]:
    """What a pass uploads, and whether it read the data for it."""
    job = next(job for job in p.passes() if job.when == when)
    mine = own_state(task, sent, client.state)
    context = context_of(task, sent.round, client)
    view = _Watched(task, p, client, load(task, sent, client, context, mine), context, sent, mine)
    sent_up = job.client(view)[1]
    return sent_up, view.reads_data or (view.takes_batches and not view.takes_losses)


@dataclass
class _Watched(LocalView):
    """A site's data as a pass sees them; it records whether the pass reads them for more than a model's loss."""

    reads_data: bool = False
    takes_batches: bool = False
    takes_losses: bool = False

    def images(self, *, augmented: bool = False) -> Iterator[Tensor]:
        self.reads_data = True
        return super().images(augmented=augmented)

    def features(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.reads_data = True
        return super().features()

    def epoch(self, number: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self.takes_batches = True
        return super().epoch(number)

    def loss(self, model: Tree, x: Tensor, y: Tensor, draw: int) -> Tensor:
        self.takes_losses = True
        return super().loss(model, x, y, draw)

    def layer_inputs(
        self, wanted: Callable[[nn.Module], bool], batch_size: int | None = None, *, shuffled: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        self.reads_data = True
        return super().layer_inputs(wanted, batch_size, shuffled=shuffled)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)} tensors)" if len(names) > 4 else "")
