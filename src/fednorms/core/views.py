"""What a part's hooks see: one small view per moment of a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.optim import Rates
from fednorms.core.tree import Tree

if TYPE_CHECKING:
    from fednorms.core.part import Slot


def names_where(slots: Mapping[str, Slot], wanted: Callable[[Slot], bool]) -> tuple[str, ...]:
    """The names of the tensors whose slots are wanted, in the model's order."""
    return tuple(name for name, slot in slots.items() if wanted(slot))


class Weights(Tree):
    """The tree that `Part.init` gets: it can also name its tensors by the modules that hold them."""

    __slots__ = ("slots",)

    def __init__(self, tensors: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
        super().__init__(tensors)
        self.slots = {name: slots[name] for name in tensors}

    def names(self, wanted: Callable[[Slot], bool]) -> tuple[str, ...]:
        """The names of these tensors whose slots are wanted, as `Context.names` gives those of the whole model."""
        return names_where(self.slots, wanted)


@dataclass(frozen=True)
class Context:
    """What every hook may know about the moment in which it runs."""

    round: int
    rounds: int
    lr: float  # this round's rate; in a test, the last trained round's
    lr_0: float  # the first round's rate, without a warm-up
    momentum: float
    keeps_momentum: bool  # from round to round
    batch_size: int
    client: str
    samples: int  # n_k
    relative: float  # u_k = n_k N / sum n_j
    clients: int  # N, all training clients
    attributes: dict[str, str] = field(default_factory=dict)
    evaluating: bool = False
    mean_steps: int = 1  # E ceil(mean n / B): the steps that a client of average size takes in a round
    seed: int = 0  # the run's
    cohort: float = 1.0  # how many clients a round is expected to have
    deployed: bool = False  # across machines, where somebody may know the seed
    slots: Mapping[str, Slot] = field(default_factory=dict, repr=False, compare=False)  # of the whole model
    rates: Rates = field(
        default_factory=dict, repr=False, compare=False
    )  # of tensors that parts claim with `lr_factor`

    def names(self, wanted: Callable[[Slot], bool]) -> tuple[str, ...]:
        """The names of the model's tensors whose slots are wanted: `names(lambda slot: is_batchnorm(slot.module))`.

        `Tree.pick` takes them and leaves out names that a tree does not have. This looks at modules, never at values,
        so it costs microseconds and works in every engine.
        """
        return names_where(self.slots, wanted)

    def effective_steps(self, k: int) -> float:
        """K, or with momentum rho the sum of the weights that K steps give to their gradients."""
        rho = self.momentum
        return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)

    def per_rate(self, update: Tree) -> Tree:
        """An update, of which each tensor is divided by its factor of the learning rate; `lr` is then the rate of all.

        It is the same tree if no part has set rates.
        """
        if not self.rates:
            return update
        factors = {name: rate.factor for name, rate in self.rates.items() if rate.factor}
        return Tree({name: t / factors[name] if name in factors else t for name, t in update.items()})

    def normals(self, what: str, like: Tensor, *, system: bool) -> Tensor:
        """Standard normals of a tensor's shape: keyed by `what`, seed, round and client, or unpredictable ones."""
        drawn = noise.secret_normals(like) if system else noise.normals(like, what, self.seed, self.round, self.client)
        return drawn.to(like)

    def chance(self, what: str) -> float:
        """A number in (0, 1) that depends only on `what`, seed, round and client: the same for every method."""
        return (noise.seed_of(what, self.seed, self.round, self.client) + 0.5) / 2.0**63


class Forward(Protocol):
    """A second forward pass that changes no buffer: `stats="broadcast"` normalizes with what the server sent.

    `mode="evaluate"` runs a model as a test does, with the statistics in `params` (the received ones if it has none).
    """

    def __call__(
        self,
        params: Tree,
        x: Tensor,
        stats: Literal["batch", "broadcast"] = "batch",
        mode: Literal["train", "evaluate"] = "train",
    ) -> tuple[Tensor, Tensor]:
        """Logits and penultimate features."""
        ...


def _no_hessian(params: Tree, v: Tree, draw: int) -> Tree:
    raise RuntimeError("The Hessian is available only in `oracle`.")


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
    testing: bool = False  # in `batch`: these images are tested, not trained or fine-tuned on
    window: tuple[int, int] = (0, 0)  # height and width that the network takes of an image, see `Preprocessing.crop`
    hessian: Callable[[Tree, Tree, int], Tree] = _no_hessian
    """In `oracle`: (params, v, draw) -> the Hessian of the local loss at `params` on that batch, times v."""
    buffers: Tree = field(default_factory=Tree)
    """From `objective` on: the model's buffers as this pass left them."""
    start_buffers: Tree = field(default_factory=Tree)
    """The model's buffers at the start of the round."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """In `objective` and `loss`: the inputs of the layers for which a part's `watches` is true, by layer name."""
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    """In `loss`: the base loss of this pass, which another part may have replaced."""

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
    """What a part sees when a client (or an evaluation, or an export) loads the received model."""

    context: Context
    down: Tree
    mine: Tree
    owned: tuple[str, ...]  # the tensors that this part routes OWNED, found by module type
    received: Tree = field(default_factory=Tree)  # the exchanged tensors as the server sent them


NOT_ASKED_FOR = Tree()
"""The value of a view's field that a part did not request."""
_ASK = {"mean_grad": "uses_mean_gradient", "even": "uses_even_mean"}


class _OnRequest:
    """A view with fields that cost something: reading one that the part did not request is an error."""

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401
        value = super().__getattribute__(name)
        if value is NOT_ASKED_FOR:
            raise BadInput(f"`{name}` is only for parts that request it. Set {_ASK[name]} = True in the part's class.")
        return value


@dataclass(frozen=True)
class End(_OnRequest):
    """What a part sees after a client's local training.

    `params`, `start`, `delta` and `mean_grad` hold exactly the trainable tensors that are sent. `mean_grad` is the mean
    of the raw gradients, per tensor over the steps that trained it. `gradient(params)` is the exact gradient of the
    base loss over all local data. `model` is the client's whole model: a part may keep it, but never send it.
    """

    params: Tree
    start: Tree
    delta: Tree
    mean_grad: Tree = field(repr=False)
    buffers: Tree
    steps: int
    gradient: Callable[[Tree], Tree]
    context: Context
    down: Tree
    mine: Tree
    model: Tree = field(default_factory=Tree)
    owned: tuple[str, ...] = ()  # the tensors of `model` that this part owns, and may send under other names

    @property
    def effective_steps(self) -> float:
        """K, or with momentum rho the sum of the weights that K steps give to their gradients: the K' of FedNTD.

        It is right for SGD whose momentum starts fresh; a part that divides by it sets `divides_updates`.
        """
        return self.context.effective_steps(self.steps)


@dataclass(frozen=True)
class AtServer:
    """What server hooks share: the server's own labeled images, if the run gives it any."""

    images: Local | None = field(default=None, repr=False, kw_only=True)

    @property
    def proxy(self) -> Local:
        """The server's own images, as a client's with the model of the round: for parts that require "proxy"."""
        if self.images is None:
            raise BadInput(
                '`proxy` is only for parts that request it. Set requires = frozenset({"proxy"}) in the class.'
            )
        return self.images


@dataclass(frozen=True)
class Round(AtServer, _OnRequest):
    """What a part sees on the server: `up` is its reduced upload, `model` the server's model before the round."""

    model: Tree
    up: Tree
    mine: Tree
    sampled: int
    total: int
    context: Context
    even: Tree = field(default_factory=lambda: NOT_ASKED_FOR, repr=False)
    """The unweighted mean update, for parts with `uses_even_mean`."""


@dataclass(frozen=True)
class Received(AtServer):
    """What a part sees of each client's upload, before they are combined: one entry per client, ordered by name.

    `models` and `updates` hold the floating tensors that are sent: parameters and running statistics. `weights` are
    p_k before the division by their sum, after the parts that come earlier.
    """

    clients: tuple[str, ...]
    samples: tuple[float, ...]  # n_k
    losses: tuple[float, ...]  # mean training loss of the round
    models: tuple[Tree, ...]
    weights: tuple[float, ...]
    ups: tuple[Tree, ...]  # what clients sent for this part
    model: Tree  # the server's before the round
    mine: Tree
    total: int
    context: Context

    @cached_property
    def updates(self) -> tuple[Tree, ...]:
        """Each client's model minus the server's."""
        return tuple(model - self.model for model in self.models)


@dataclass(frozen=True)
class Mechanism:
    """A Gaussian mechanism: updates no longer than `clip`, noise of std `noise * clip` on their sum, or on each."""

    clip: float
    noise: float
    delta: float
    where: Literal["server", "client"]


@dataclass(frozen=True)
class Privacy:
    """How a part protects what clients send of the model: parameters and statistics together, as one update.

    `protect(update, e)` changes it last, at the client. `release(update, r)` changes the mean of the protected updates
    before any other step of the server, also in a round without clients. `mechanism` tells the accountant which
    differential privacy this gives; without one, none is claimed.
    """

    protect: Callable[[Tree, End], Tree]
    release: Callable[[Tree, Round], Tree] | None = None
    mechanism: Mechanism | None = None


@dataclass(frozen=True)
class Unlabeled:
    """A batch of test images without labels; `model` is the tested model, and `tested` works as that of `Local`."""

    x: Tensor
    model: Tree
    context: Context
    down: Tree
    mine: Tree
    tested: Callable[[Tree, Tensor], tuple[Tensor, Tree]]


class Local(Protocol):
    """A client's data and the received model, as an extra pass sees them; nothing in it changes a model."""

    model: Tree
    context: Context

    @property
    def received(self) -> Tree:
        """The exchanged tensors as the server sent them."""
        ...

    @property
    def kept(self) -> Tree:
        """The client's own tensors as its last round left them; none before its first."""
        ...

    @property
    def classes(self) -> int:
        """How many logits the model has."""
        ...

    @property
    def class_counts(self) -> Tensor:
        """How many training images of each class the client has."""
        ...

    @property
    def down(self) -> Tree:
        """What the server sent to this part."""
        ...

    @property
    def mine(self) -> Tree:
        """This part's own state at the client."""
        ...

    def images(self, *, augmented: bool = False) -> Iterator[Tensor]:
        """Training images in [0, 1], in batches, before any normalization.

        `augmented`: as the parts' `batch` transform them for training.
        """
        ...

    def layer_inputs(
        self, wanted: Callable[[nn.Module], bool], batch_size: int | None = None, *, shuffled: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Per batch of training data, shuffled again each round, the input of every wanted layer.

        Layers run in train mode, buffers unchanged. `shuffled=False` uses the stored order.
        """
        ...

    def features(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Penultimate features and labels of the training data, in batches, as a test sees them."""
        ...

    def epoch(self, number: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The training data in shuffled batches, transformed as in a training step."""
        ...

    def batches(self, size: int, number: int = 0, *, held_out: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """The training data in shuffled batches, as a test sees them.

        `held_out`: the validation data instead, if the client has any.
        """
        ...

    def logits(self, model: Tree, x: Tensor, draw: int) -> Tensor:
        """Logits in train mode, with a gradient; running statistics are recorded into the buffers of `model`."""
        ...

    def tested(self, model: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Logits as a test computes them, and what normalization layers would record of this batch.

        Gradients also reach the stored means and variances of BatchNorm in `model`.
        """
        ...

    def base(self, logits: Tensor, y: Tensor) -> Tensor:
        """The recipe's loss."""
        ...

    def loss(self, model: Tree, x: Tensor, y: Tensor, draw: int) -> Tensor:
        """The base loss of a model on a batch (train mode, buffers unchanged), with a gradient.

        It is the recipe's, or that of the part that replaces it.
        """
        ...

    def test_loss(self, model: Tree) -> Tensor:
        """The recipe's mean loss of a model over the training data, as a test sees them."""
        ...

    def uniform(self, draw: int, *shape: int) -> Tensor:
        """Uniforms in (0, 1) of this client, round and part."""
        ...
