"""What a part's hooks see: one small view per moment of a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fednorms import noise
from fednorms.tree import Tree


@dataclass(frozen=True)
class Context:
    """What every hook may know about the moment it runs in."""

    round: int
    rounds: int
    lr: float  # this round's rate
    lr_0: float  # the first round's rate
    momentum: float
    batch_size: int
    client: str
    samples: int  # n_k
    relative: float  # u_k = n_k N / sum n_j
    clients: int  # N, all training clients
    attributes: dict[str, str] = field(default_factory=dict)
    evaluating: bool = False


class Forward(Protocol):
    """A second forward pass that touches no buffer: `stats="broadcast"` normalises with what the server sent."""

    def __call__(
        self, params: Tree, x: Tensor, stats: Literal["batch", "broadcast"] = "batch"
    ) -> tuple[Tensor, Tensor]:
        """Logits and penultimate features."""
        ...


@dataclass
class Step:
    """What a hook sees inside one local step; `logits` and `features` are there from `objective` on."""

    params: Tree
    start: Tree
    x: Tensor
    y: Tensor
    context: Context
    head: frozenset[str]  # names of the classifier's tensors
    path: dict[str, Hashable]
    forward: Forward
    base: Callable[[Tensor, Tensor], Tensor]  # the recipe's loss of (logits, y)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    part: str = ""
    down: Tree = field(default_factory=Tree)
    mine: Tree = field(default_factory=Tree)

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in (0, 1) from this part's own stream: the same numbers in every engine."""
        return noise.uniform(shape, noise.stream(f"part {self.part}"), self.x)


class Gradient(Protocol):
    """The gradient of the local loss at `params` on batch number `draw` of this step."""

    def __call__(self, params: Tree, draw: int, /) -> Tree:
        """The gradient tree."""
        ...


@dataclass(frozen=True)
class Begin:
    """What a part sees when a client (or an evaluation, or an export) loads the broadcast model."""

    context: Context
    down: Tree
    mine: Tree
    owned: tuple[str, ...]  # the tensors that this part routes OWNED, found by module type


@dataclass(frozen=True)
class End:
    """What a part sees when a client's local training is over.

    `params`, `start`, `delta` and `mean_grad` hold exactly the trainable tensors that are sent. `mean_grad` is the mean
    of the raw gradients, per tensor over the steps that trained it; `gradient(params)` is the exact gradient of the
    base loss over all local data.
    """

    params: Tree
    start: Tree
    delta: Tree
    mean_grad: Tree
    buffers: Tree
    steps: int
    gradient: Callable[[Tree], Tree]
    context: Context
    down: Tree
    mine: Tree


@dataclass(frozen=True)
class Round:
    """What a part sees on the server: `up` is its reduced upload, `model` the server's model before the round."""

    model: Tree
    up: Tree
    mine: Tree
    sampled: int
    total: int
    context: Context


class Local(Protocol):
    """A client's data and the broadcast model, as an extra pass sees them; nothing in it changes a model."""

    model: Tree
    context: Context

    @property
    def down(self) -> Tree:
        """What the server sent to this part."""
        ...

    @property
    def mine(self) -> Tree:
        """This part's own state at the client."""
        ...

    def images(self) -> Iterator[Tensor]:
        """Training images in [0, 1], in batches, before any normalisation."""
        ...

    def layer_inputs(
        self, wanted: Callable[[nn.Module], bool], batch_size: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Per training batch, in order, the input of every wanted layer (train mode, buffers untouched)."""
        ...
