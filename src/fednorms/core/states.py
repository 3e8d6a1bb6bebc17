"""The values of a round: the task, the messages, the states, and a client's training in progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fednorms.core import checks
from fednorms.core.addressing import Addressing
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.optim import MakeOptimizer, Optimizer
from fednorms.core.part import Part, Weighting
from fednorms.core.preprocessing import Preprocessing
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.core.views import Context

if TYPE_CHECKING:
    from fednorms.data import Split

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What the server and every client agree on before the first round."""

    net: Net
    training: Training
    rounds: int
    seed: int
    clients: int  # N
    samples: int  # sum of n_k
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    weighting: Weighting | None = None
    needs_two: bool = False  # batch normalization cannot use a batch of one
    trains_twin: bool = False  # trains the clients' second models: see `Part.twin`
    cohort: float = 0.0  # how many clients a round is expected to have; 0: all
    deployed: bool = False  # across machines: see `Context`
    factors: tuple[float, ...] = ()  # of a custom schedule: what multiplies the learning rate in each round
    optimizer: MakeOptimizer | None = None  # a custom one: makes an optimizer of parameters and a learning rate
    proxy: Split | None = None  # the server's own images: see `AtServer.proxy`

    def __post_init__(self) -> None:
        self.method.check_optimizer(self.training)

    @property
    def method(self) -> Method:
        """The method that the net was built for."""
        return self.net.method

    @cached_property
    def hooks(self) -> dict[str, list[Part]]:
        """The parts that implement each hook of a step, found once."""
        hooks = ("batch", "objective", "loss", "watches", "oracle", "grad", "decay")
        found = {h: self.method.having(h) for h in hooks}
        found["batch"].sort(key=lambda p: p.normalizes_input)  # transforms work on images in [0, 1]
        if self.trains_twin:
            found |= {"loss": self.method.having("twin"), "oracle": [], "grad": [], "decay": []}
        return found

    def watches(self, module: nn.Module) -> bool:
        """Whether any part asks for what this layer gets as input."""
        return any(checks.one(p, "watches", p.watches(module), bool) for p in self.hooks["watches"])

    @cached_property
    def twin(self) -> Part | None:
        """The part that gives every client a second model, if there is one."""
        return next(iter(self.method.having("twin")), None)

    @cached_property
    def for_twin(self) -> Task:
        """The same task as the clients' second models see it."""
        return replace(self, trains_twin=True)

    def rate(self, t: int) -> float:
        """The learning rate of round t, counted from 0."""
        return self.training.warmed(t, self.full_rate(t))

    def full_rate(self, t: int) -> float:
        """The learning rate of round t without a warm-up."""
        if self.factors:
            return self.training.lr * self.factors[min(t, len(self.factors) - 1)]  # tests after the last round ask, too
        return self.training.full_rate(t, self.rounds)

    def loss_of(self, logits: Tensor, y: Tensor) -> Tensor:
        """The recipe's loss, which may be a custom function."""
        found: object = self.loss(logits, y)
        if not isinstance(found, Tensor) or found.dim():
            raise BadInput(
                f"The loss {loss_name(self.loss)} must return one number as a tensor, got {checks.kind(found)}. Return "
                "its mean over the batch."
            )
        return found

    @property
    def personal(self) -> bool:
        """Whether clients have a model that differs from the server's."""
        return bool(self.net.own or self.method.doubling or self.method.having("model_to"))

    @cached_property
    def uses_mean_gradient(self) -> bool:
        """Whether any part reads the mean of a round's raw gradients."""
        return not self.trains_twin and any(p.uses_mean_gradient for p in self.method.parts)

    @cached_property
    def like(self) -> Tensor:
        """A scalar with the floating type and device that the model trains in."""
        floats = (t for t in self.net.initial.values() if t.is_floating_point())
        return torch.zeros_like(next(floats, torch.zeros(())).flatten()[:1].sum())


def loss_name(loss: Callable[..., Tensor]) -> str:
    """A loss as error messages name it.

    >>> loss_name(nn.functional.cross_entropy), loss_name(nn.CrossEntropyLoss())
    ('"cross_entropy"', '"CrossEntropyLoss"')
    """
    return f'"{getattr(loss, "__name__", type(loss).__name__)}"'


@dataclass(frozen=True)
class Broadcast:
    """What the server sends: the model, and what each part sends down; `to` is what one client gets of it."""

    round: int
    model: Tree
    parts: dict[str, Tree]
    addressing: Addressing | None = None  # of parts whose messages differ by client

    def to(self, client: str, *, model: bool = True) -> Broadcast:
        """What one client gets: this very broadcast if all get the same. Without `model`, the server's model."""
        if self.addressing is None:
            return self
        own = self.addressing.model(self.model, client) if model else self.model
        return Broadcast(self.round, own, self.addressing.trees(self.parts, client))

    @property
    def to_all(self) -> Broadcast:
        """What all clients get, and all that a site gets which the server does not know."""
        return self if self.addressing is None else replace(self, addressing=None)


@dataclass(frozen=True)
class Upload:
    """What a client sends: its exchanged tensors, and what each part sends up."""

    client: str
    weight: float
    model: Tree
    parts: dict[str, Tree]
    metrics: dict[str, float | Tensor] = field(default_factory=dict)  # tensors: a number would wait for the GPU


@dataclass(frozen=True)
class Combined:
    """What the server needs from a round's uploads: mean models, and what clients sent for each part, reduced."""

    model: Tree
    parts: dict[str, Tree]
    sampled: int  # how many clients sent something
    even: Tree  # the mean model with equal weights, if a part requests it


@dataclass(frozen=True)
class ServerState:
    """All that the server remembers between rounds."""

    round: int
    model: Tree
    parts: dict[str, Tree]
    seed: int


@dataclass(frozen=True)
class ClientState:
    """All that a client remembers between its rounds; it never leaves the engine."""

    round: int
    local: Tree
    parts: dict[str, Tree]
    velocity: Tree = field(default_factory=Tree)


@dataclass(frozen=True)
class Client:
    """A client as the core sees it: name, data, and state (None before its first round)."""

    name: str
    data: Split
    state: ClientState | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    val: Split | None = None  # validation images, for passes only


def context_of(task: Task, t: int, client: Client | None, *, evaluating: bool = False) -> Context:
    """What hooks may know in round t, at a client or (client=None) on the server."""
    n = len(client.data) if client else task.samples
    training = task.training
    return Context(
        round=t,
        rounds=task.rounds,
        lr=task.rate(max(t - 1, 0) if evaluating else t),
        lr_0=task.full_rate(0),
        momentum=training.momentum if training.optimizer == "sgd" else 0.0,
        keeps_momentum=training.keep_momentum and training.momentum > 0,
        batch_size=training.batch_size,
        client=client.name if client else "server",
        samples=n,
        relative=n * task.clients / max(task.samples, 1) if client else 1.0,
        clients=task.clients,
        attributes=client.attributes if client else {},
        evaluating=evaluating,
        mean_steps=training.steps
        or (training.epochs_of(client.name) if client else training.epochs)
        * math.ceil(task.samples / max(task.clients, 1) / training.batch_size),
        seed=task.seed,
        cohort=task.cohort or task.clients,
        deployed=task.deployed,
        slots=task.net.slots,
        rates=task.net.rates,
    )


@dataclass
class Carry:
    """A client's training in progress. `begin` copies everything into it, so `step` may work in place."""

    client: Client
    context: Context
    broadcast: Broadcast
    params: Tree  # all that local training may move
    fixed: Tree  # parameters that stay as they are
    buffers: Tree
    start: Tree  # params at the start
    start_buffers: Tree
    mine: dict[str, Tree]
    path: dict[str, Hashable]
    key: Tensor  # (hash of seed, round and client; step number): all randomness inside a step
    loss_sum: Tensor
    active: list[str] = field(default_factory=list)
    optimizer: Optimizer | None = None
    velocity: Tree = field(default_factory=Tree)  # from earlier phases and rounds, if momentum is kept
    grad_sum: Tree = field(default_factory=Tree)
    grad_steps: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    exchanged_steps: int = 0  # steps that moved something that is sent
    dropped: int = 0
    fresh: bool = True  # before the first step of a phase, in which hooks' results are checked in full
    derivative: Callable[..., Sequence[Tensor | None]] | None = None  # in place of torch.autograd.grad
    watch: bool = False  # check every hook's result, to name the one that diverged

    def model(self) -> Tree:
        """The client's whole model at this moment."""
        return Tree({**self.fixed, **self.params, **self.buffers}).detach()
