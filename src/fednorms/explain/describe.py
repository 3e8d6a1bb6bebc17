"""describe: what a method does to a model, measured in a trial run instead of declared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.counted import sized
from fednorms.core.individual import view_of
from fednorms.core.markup import html_page, html_table
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.options import few
from fednorms.core.part import HOOKS, Eval, Part, Route, overrides
from fednorms.core.passes import passes
from fednorms.core.reductions import reduce_uploads
from fednorms.core.round import (
    at_server,
    base_phases,
    begin,
    broadcast,
    finish,
    load,
    own_state,
    recipe_phase,
    server_update,
    train,
    train_twin,
)
from fednorms.core.states import Broadcast, Client, ServerState, Task, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.data import Split
from fednorms.engines.joint import exchanges
from fednorms.explain.trial import AVERAGED, IMAGES, NAMES, Trial
from fednorms.methods.registry import method as read_method

# What a part acts on if it implements a hook; hooks that only carry its messages and state are left out.
ACTS_ON = {
    "arrange": "sites",
    "surgery": "layers",
    "route": "routes",
    "plan": "phases",
    "batch": "images",
    "objective": "loss",
    "loss": "loss",
    "twin": "second model",
    "oracle": "gradient",
    "grad": "gradient",
    "decay": "loss",
    "lr_factor": "learning rates",
    "send": "sent update",
    "privacy": "sent update",
    "model_to": "received model",
    "receive": "received updates",
    "weigh": "client weights",
    "aggregate": "aggregation",
    "server": "server step",
    "stats": "server statistics",
    "joint": "exchanges",  # no hook: a step that clients take together
    "evaluation": "test",
}
UNSEEN = {
    "yes": "yes, with the server's model",
    "own statistics": "with statistics measured on their own images",
    "no": "no: clients keep tensors that predictions need",
}


@dataclass(frozen=True)
class PartFacts:
    """What one part adds, per client and round: bytes besides the model, state, and extra exchanges."""

    name: str
    acts_on: tuple[str, ...]
    layers_changed: int
    bytes_down: int
    bytes_up: int
    client_state: int
    server_state: int
    setup_trips: int
    round_trips: int
    test_trips: int
    averaged_only: bool
    addressed: bool  # what the server sends differs by client


@dataclass(frozen=True)
class Description:
    """What a method does to a model. Bytes are per client and round.

    >>> d = describe("scaffold + fedbn", "cnn-small")
    >>> d.routes["norm1.running_mean"].name, d.forward_passes, d.stateless_clients
    ('LOCAL', 1.0, False)
    """

    method: str
    model: str
    weighting: str  # size, uniform, or the part that sets the weights
    routes: dict[str, Route]
    sizes: dict[str, int]
    parts: list[PartFacts]
    changes: dict[str, list[str]]
    model_up: int
    model_down: int
    model_kept: int
    forward_passes: float  # per local step
    extra_passes: float  # over a client's data in a round, besides its steps
    batch_of_one: bool
    mixes_batch: bool  # whether the images of a batch influence each other in training
    weights: int  # parameters of the model before surgery
    lost_weights: tuple[str, ...]  # those that surgery removed or changed
    lost_statistics: tuple[str, ...]  # running statistics that surgery removed
    unseen: Literal["yes", "own statistics", "no"]
    proxy: tuple[str, ...]  # parts for which the server has labeled images of its own

    @property
    def bytes_up(self) -> int:
        """Bytes a client sends in a round."""
        return self.model_up + sum(p.bytes_up for p in self.parts)

    @property
    def bytes_down(self) -> int:
        """Bytes a client receives in a round."""
        return self.model_down + sum(p.bytes_down for p in self.parts)

    @property
    def client_state(self) -> int:
        """Bytes a client keeps between rounds."""
        return self.model_kept + sum(p.client_state for p in self.parts)

    @property
    def server_state(self) -> int:
        """Bytes the server keeps between rounds besides the model."""
        return sum(p.server_state for p in self.parts)

    @property
    def acts_on(self) -> tuple[str, ...]:
        """What the parts change, in the order of a round."""
        said = {what for p in self.parts for what in p.acts_on}
        return tuple(what for what in dict.fromkeys(ACTS_ON.values()) if what in said)

    @property
    def pretrained(self) -> bool:
        """Whether published weights are used as they are: surgery keeps the name and value of every tensor."""
        return not self.lost_weights and not self.lost_statistics

    @property
    def stateless_clients(self) -> bool:
        """Whether clients keep nothing, so the method suits clients that take part once."""
        return self.client_state == 0

    @property
    def averaged_only(self) -> bool:
        """Whether the server only needs sums of uploads, as secure aggregation provides."""
        return all(p.averaged_only for p in self.parts)

    @property
    def addressed(self) -> tuple[str, ...]:
        """The parts whose messages from the server differ by client, so it must know which client it answers."""
        return tuple(p.name for p in self.parts if p.addressed)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "method": self.method,
            "model": self.model,
            "weighting": self.weighting,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "client_state": self.client_state,
            "server_state": self.server_state,
            "acts_on": list(self.acts_on),
            "forward_passes_per_step": self.forward_passes,
            "extra_passes_per_round": self.extra_passes,
            "batch_of_one": self.batch_of_one,
            "mixes_batch": self.mixes_batch,
            "pretrained": self.pretrained,
            "lost_weights": list(self.lost_weights),
            "lost_statistics": list(self.lost_statistics),
            "unseen": self.unseen,
            "stateless_clients": self.stateless_clients,
            "averaged_only": self.averaged_only,
            "addressed": list(self.addressed),
            "proxy": list(self.proxy),
            "parts": [vars(p) for p in self.parts],
            "routes": {n: r.name for n, r in self.routes.items()},
            "changes": self.changes,
        }

    def __repr__(self) -> str:
        lines = [f'Method "{self.method}" on model "{self.model}" (models weighted by {self.weighting})', ""]
        count = Counter(self.routes.values())
        for route in sorted(count):
            names = [n for n, r in self.routes.items() if r is route]
            size = sum(self.sizes[n] for n in names)
            lines.append(f"  {route.name:<7}{count[route]:>4} tensors {sized(size):>10}   {few(names)}")
        lines += ["", "  part         layers changed  down      up       kept by client  kept by server"]
        lines.append(f"  {'model':<29}{sized(self.model_down):<10}{sized(self.model_up):<9}{sized(self.model_kept)}")
        lines += [
            f"  {p.name:<13}{p.layers_changed or '':<16}{sized(p.bytes_down):<10}{sized(p.bytes_up):<9}"
            f"{sized(p.client_state):<16}{sized(p.server_state)}"
            for p in self.parts
        ]
        lines += ["", *(f"  {what:<31} {how}" for what, how in self._facts())]
        return "\n".join(lines)

    def _facts(self) -> list[tuple[str, str]]:
        """Everything that is not in bytes per tensor or part."""
        trips = [f"{p.name}: {p.setup_trips} before the first round" for p in self.parts if p.setup_trips]
        trips += [f"{p.name}: {p.round_trips} in every round" for p in self.parts if p.round_trips]
        trips += [f"{p.name}: {p.test_trips} per evaluation" for p in self.parts if p.test_trips]
        lost = [*self.lost_weights, *self.lost_statistics]
        weights = f"all but {len(lost)} tensors: {few(lost)}" if lost else "all"
        one = "yes" if self.batch_of_one else "no"
        mixes = " (but images of a batch are normalized or changed together)" if self.mixes_batch else ""
        secure = "yes (secure aggregation possible)" if self.averaged_only else "no (secure aggregation impossible)"
        same = f"no (the server must know which client it answers: {', '.join(self.addressed)})"
        same = same if self.addressed else "yes"
        return [
            ("acts on", ", ".join(self.acts_on) or "nothing"),
            ("forward passes per local step", f"{self.forward_passes:g}"),
            ("other passes over the data", f"{self.extra_passes:g} per round"),
            ("extra round trips", "; ".join(trips) or "none"),
            ("clients keep state", sized(self.client_state) if self.client_state else "no"),
            ("trains with batches of one", one + mixes),
            ("uses published weights", weights),
            ("serves sites that never trained", UNSEEN[self.unseen]),
            ("uploads are only averaged", secure),
            ("all clients receive the same", same),
            *([("the server has labeled images", f"yes, for {', '.join(self.proxy)}")] if self.proxy else []),
        ]

    def _repr_html_(self) -> str:
        routes = []
        for route in sorted(set(self.routes.values())):
            names = [n for n, r in self.routes.items() if r is route]
            size = sized(sum(self.sizes[n] for n in names))
            routes.append([route.name, few(names), str(len(names)), size])
        model = ["model", "", sized(self.model_down), sized(self.model_up), sized(self.model_kept), ""]
        parts = [
            [
                p.name,
                str(p.layers_changed or ""),
                *map(sized, (p.bytes_down, p.bytes_up, p.client_state, p.server_state)),
            ]
            for p in self.parts
        ]
        return html_page(
            f'Method "{self.method}" on model "{self.model}" (models weighted by {self.weighting})',
            html_table(["route", "tensors", "number", "size"], routes, numbers_from=2),
            html_table(["part", "layers changed", "down", "up", "kept by client", "kept by server"], [model, *parts]),
            html_table(["", ""], self._facts(), numbers_from=2),
        )


def describe(
    method: str | Method | Part,
    model: str | nn.Module = "cnn-small",
    *,
    classes: int = 10,
    shape: tuple[int, int, int] | None = None,
    head: str | list[str] | None = None,
) -> Description:
    """Describe a method on a model: routes, bytes, state and passes, measured on two tiny clients in two rounds.

    >>> describe("greg", "cnn-small").forward_passes
    2.0
    """
    chosen = read_method(method)
    trial = Trial.of(chosen, model, classes, shape, head)
    task, net = trial.task, trial.task.net
    state = server_update(task, trial.state, trial.engine.train(broadcast(task, trial.state), NAMES).uploads)
    client = trial.client()
    sent = broadcast(task, state).to(client.name)
    with _counting(net) as seen:
        carry, early = begin(task, sent, client)
        before, seen[:] = sum(seen), []
        train(task, carry, base_phases(task, carry.context))
        if task.twin:
            train_twin(task, carry, task.twin)
        in_steps, seen[:] = len(seen), []
        upload, kept = finish(task, replace(carry), early)
        after_steps = sum(seen)
    if task.twin:
        after_steps -= IMAGES  # the second model's steps, counted twice
    uploads = [upload, replace(upload, client=NAMES[1])]
    after = server_update(task, state, uploads)
    sizes = {n: Tree({n: t}).nbytes() for n, t in net.initial.items()}
    lost = [n for n, t in trial.module.state_dict().items() if not _kept(t, net.initial.get(n))]
    weights = dict(trial.module.named_parameters())
    return Description(
        method=str(chosen),
        model=net.name,
        weighting=next((p.name for p in chosen.parts if p.sets_weights), chosen.weighting()),
        routes=net.routes,
        sizes=sizes,
        parts=[
            PartFacts(
                name=p.name,
                acts_on=_acts_on(p, task, state, uploads),
                layers_changed=len(net.changes.get(p.name, [])),
                bytes_down=sent.parts[p.name].nbytes() + _joint(p, net)[1],
                bytes_up=upload.parts.get(p.name, Tree()).nbytes() + _joint(p, net)[1],
                client_state=kept.parts[p.name].nbytes(),
                server_state=after.parts[p.name].nbytes(),
                setup_trips=sum(job.when == "setup" for job in p.passes()),
                round_trips=_joint(p, net)[0],
                test_trips=sum(job.when == "evaluate" for job in p.passes()),
                averaged_only=all(job.reduce in AVERAGED for job in p.passes())
                and p.reduction in AVERAGED
                and p.name not in chosen.individual,
                addressed=p in chosen.addressing,
            )
            for p in chosen.parts
        ],
        changes={k: [str(c) for c in v] for k, v in net.changes.items()},
        model_up=upload.model.nbytes(),
        model_down=sum(sizes[n] for n in net.exchanged),
        model_kept=kept.local.nbytes(),
        forward_passes=in_steps / max(carry.steps, 1),
        extra_passes=(before + after_steps) / IMAGES,
        batch_of_one=not task.needs_two,
        mixes_batch=_mixes_batch(net, client.data.batch(torch.arange(3))[0]),
        weights=len(weights),
        lost_weights=tuple(n for n in lost if n in weights),
        lost_statistics=tuple(n for n in lost if n not in weights),
        unseen=_unseen(task, sent, client),
        proxy=tuple(chosen.using_proxy),
    )


def _joint(p: Part, net: Net) -> tuple[int, int]:
    return exchanges(net) if "joint" in p.requires else (0, 0)


def _kept(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether a tensor still has its value; counters of batches do not matter."""
    if not before.is_floating_point():
        return True
    return after is not None and before.shape == after.shape and torch.equal(before.detach().to(after), after)


def _acts_on(p: Part, task: Task, state: ServerState, uploads: list[Upload]) -> tuple[str, ...]:
    """What a part changes: the hooks that it implements, without those that change nothing here."""
    acts = {hook for hook in ACTS_ON if hook in HOOKS and overrides(p, hook)} | (p.requires & {"joint"})
    one = Client(NAMES[0], Split(torch.zeros(1), torch.zeros(1)))
    phase = [recipe_phase(task, context_of(task, 0, one))]
    idle = {
        "surgery": p.name not in task.net.changes,
        "route": p.name not in task.net.keeping,
        "plan": all(p.plan(phase, context_of(task, t, one)) == phase for t in range(task.rounds)),
        "evaluation": p.evaluation() == Eval(),
    }
    acts -= {hook for hook, nothing in idle.items() if nothing}
    images = at_server(task, state).get(p.name)
    if "server" in acts:  # many only update their state there
        passing = dict([*passes(task, "before"), *passes(task, "after")])
        how = passing[p].reduce if p in passing else p.reduction
        up = reduce_uploads([u.parts.get(p.name, Tree()) for u in uploads], [1.0] * len(uploads), how)
        delta = uploads[0].model.pick(task.net.sent_params) - state.model
        here = context_of(task, state.round, None)
        seen = Round(state.model, up, state.parts[p.name], len(uploads), task.clients, here, delta, images=images)
        acts -= {"server"} if p.server(delta, seen)[0] is delta else set()
    if "receive" in acts:  # a custom part may only look at updates there, as parts did before `remember`
        view = view_of(task, state, p, state.parts[p.name], uploads, [1.0] * len(uploads), images)
        acts -= {"receive"} if p.receive(view)[0] is view.updates else set()
    if (privacy := p.privacy()) and privacy.release:
        acts.add("server")
    return tuple(dict.fromkeys(what for hook, what in ACTS_ON.items() if hook in acts))


@torch.no_grad()
def _mixes_batch(net: Net, x: torch.Tensor) -> bool:
    """Whether an image's logits in training depend on the other images of its batch."""

    def answer(images: torch.Tensor) -> torch.Tensor:
        with noise.keyed(torch.tensor([0, 0])):
            return net.forward(net.initial.clone(), images, train=True, batch_statistics=True)[0][:2]

    return not torch.allclose(answer(x), answer(torch.cat([x[:2], x[:1] + 0.5])), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def _unseen(task: Task, sent: Broadcast, client: Client) -> Literal["yes", "own statistics", "no"]:
    """Whether the method serves a site that never trained: change the tensors that clients keep, compare logits."""
    net, newcomer = task.net, replace(client, state=None)
    context = context_of(task, sent.round, newcomer, evaluating=True)
    model = load(task, sent, newcomer, context, own_state(task, sent, None))
    x = client.data.batch(torch.arange(2))[0].to(task.like.dtype)

    def answer(changed: set[str]) -> torch.Tensor:
        tensors = {n: t + 1 if n in changed and t.is_floating_point() else t for n, t in model.items()}
        logits, features = net.forward(tensors, x, train=False, batch_statistics=False)
        return torch.cat([logits.flatten(), features.flatten()])

    local = {n for n, r in net.routes.items() if r is Route.LOCAL}
    plain, buffers = answer(set()), set(net.buffers)
    if not torch.equal(answer(local - buffers), plain):
        return "no"
    return "yes" if torch.equal(answer(local & buffers), plain) else "own statistics"


class _counting:
    """Records, while open, the size of every batch that passes forward through a net."""

    def __init__(self, net: Net) -> None:
        self.net, self.seen = net, list[int]()

    def __enter__(self) -> list[int]:
        self.hook = self.net.module.register_forward_pre_hook(self._see)
        return self.seen

    def _see(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen.append(len(args[0]))

    def __exit__(self, *_: object) -> None:
        self.hook.remove()
