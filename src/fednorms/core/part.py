"""Part: one idea of federated learning, as a frozen dataclass of hyper-parameters with a few pure hooks.

Every hook has one composition rule, so any parts combine; `docs/architecture.md` has the table. A part sees what the
server sent to it (`down`) and its own state (`mine`), never another part's, and keeps nothing on `self`.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeVar, dataclass_transform, get_args

from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.options import did_you_mean, text_of, with_options
from fednorms.core.options import option as option
from fednorms.core.tree import Tree, mean
from fednorms.core.views import Begin, Context, End, Gradient, Local, Privacy, Received, Round, Step, Unlabeled, Weights

if TYPE_CHECKING:
    from fednorms.core.method import Method
    from fednorms.core.net import Net
    from fednorms.core.surgery import Change
    from fednorms.core.training import Training
    from fednorms.data import Federation

Reduction = Literal["weighted", "uniform", "grouped", "sum", "stack", "list"]
Weighting = Literal["size", "uniform"]
PROXY = "proxy"  # in `requires`: the server has labeled images, and its views show them as `proxy`


class Route(IntEnum):
    """Who owns a tensor of the model; exactly one per tensor, ordered by privacy (the most private wins).

    >>> max(Route.SHARED, Route.LOCAL).name
    'LOCAL'
    """

    SHARED = 0  # sent up, averaged, loaded back
    SENT = 1  # sent up and averaged, but the client keeps its own
    OWNED = 2  # supplied and collected by a part, never averaged with the model; parameters are trained
    LOCAL = 3  # stays with the client
    FROZEN = 4  # never moves during training


@dataclass(frozen=True)
class Slot:
    """What a predicate or a route may look at: one tensor of the state dict and the module that owns it."""

    name: str
    leaf: str
    kind: Literal["param", "buffer"]
    module: nn.Module
    head: bool
    trainable: bool
    layer: int = 1  # number of its weight layer from the input on; a norm counts with the layer before it
    layers: int = 1  # how many weight layers there are
    model: str = ""  # class of the whole model


@dataclass(frozen=True)
class Phase:
    """A period of local training: how long, which tensors move, which statistics normalize.

    `lr=None` is the round's rate (in phases of `evaluation`: the first round's); `factor` multiplies it. `draws`
    batches go into one step (only `oracle` sees them). `weight_decay=None` is the recipe's, and `plain` means plain
    gradient steps at the round's rate: no momentum, weight decay or clipping. Only phases of `evaluation` may have
    another weight decay or be plain.

    >>> Phase(epochs=5, train="head").norm
    'batch'
    """

    epochs: int | None = 1
    steps: int | None = None
    train: Literal["all", "head", "body"] = "all"
    norm: Literal["batch", "running"] = "batch"
    lr: float | None = None
    factor: float = 1.0
    draws: int = 1
    weight_decay: float | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        for what, value in (("epochs", self.epochs), ("steps", self.steps), ("draws", self.draws)):
            if value is not None and value < 1:
                raise BadInput(f"A phase needs {what} >= 1, got {value}. Leave out a phase without any.")


@dataclass(frozen=True)
class Pass:
    """An extra computation of the clients: once at the start, before or after each round's training, or to evaluate.

    `client(local) -> keep, upload`; `server(reduced, round) -> mine`. "before" and "after" run in the training call (at
    most one of them per part): `begin` sees what "before" keeps, "after" sees the trained model. What an "evaluate"
    pass returns is broadcast only for that evaluation.
    """

    when: Literal["setup", "before", "after", "evaluate"]
    client: Callable[[Local], tuple[Tree, Tree]]
    server: Callable[[Tree, Round], Tree]
    reduce: Reduction = "weighted"


@dataclass(frozen=True)
class Eval:
    """How a method is tested; each field is set by at most one part.

    `predict(logits, features, down, mine) -> logits` replaces the classifier's answer (prototypes).
    `personal_model(model, mine) -> tensors` are those in which a client's own model differs from what it loaded.
    `adapt(batch, memory) -> tensors, memory` gives the tensors to change before a batch of test images is answered, and
    sees no labels. `memory` is what it returned for the site's previous batch.
    """

    phases: tuple[Phase, ...] = ()
    server_model: Callable[[Tree, Tree], Tree] | None = None
    predict: Callable[[Tensor, Tensor, Tree, Tree], Tensor] | None = None
    statistics: Literal["re-estimated"] | None = None  # with which global, personal and unseen models are tested
    unseen: Literal["re-estimated"] | None = None  # the same for unseen models only
    personal_model: Callable[[Tree, Tree], Tree] | None = None
    adapt: Callable[[Unlabeled, Tree], tuple[Tree, Tree]] | None = None  # the statistics "test-time"


class Part:
    """Base of all parts; a hook that is not overridden costs nothing. `docs/architecture.md` says how hooks combine."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    weighting: ClassVar[Weighting | None] = None  # how models are weighted, if the paper requires it
    reduction: ClassVar[Reduction] = "weighted"  # of what `finish` uploads
    requires: ClassVar[frozenset[str]] = frozenset()  # engine capabilities
    keeps_all_local: ClassVar[bool] = False  # sharing no tensor is intended
    normalizes_input: ClassVar[bool] = False  # `batch` replaces the fixed input normalization
    uses_mean_gradient: ClassVar[bool] = False  # `finish` reads `mean_grad`
    uses_even_mean: ClassVar[bool] = False  # `server` reads `even`
    needs_plain_updates: ClassVar[bool] = False  # only correct for unchanged updates; `uses_even_mean` implies it
    needs_one_model: ClassVar[bool] = False  # only correct if all clients start from the server's model
    divides_updates: ClassVar[bool] = False  # by the weight of a round's gradients, which only SGD has
    uses_rounds: ClassVar[bool] = False  # reads `context.rounds`, so more rounds change even the first
    proximal: ClassVar[float] = 0.0  # mu, if `loss` adds mu/2 |w - w_t|^2 in every step
    uploads: ClassVar[bool] = False  # sends more than the model's update
    writes_state: ClassVar[bool] = False  # `oracle` writes into the tensors of `s.mine`, for later steps and `finish`
    sets_weights: ClassVar[bool] = False  # `weigh` returns the weights themselves, not factors of the usual ones
    tells_class_counts: ClassVar[bool] = False  # its uploads tell how many images of each class a client has
    never_negative: ClassVar[tuple[str, ...]] = ()  # patterns of uploaded entries, such as "count/*"; the server checks
    counts_images: ClassVar[tuple[str, ...]] = ()  # such patterns of entries that sum to at most the client's images

    def settled(self, method: Method, training: Training) -> Self:
        """This part with every option that depends on the rest of the recipe replaced by its value."""
        return self

    # -- model ------------------------------------------------------------------------------------------------
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change] | None:
        """Change layers in place and return the changes; finding nothing is an error (None: nothing was asked for)."""
        return []

    def route(self, slot: Slot) -> Route:
        """Who owns this tensor; the most private answer wins."""
        return Route.SHARED

    def missing(self, net: Net) -> str | None:
        """What this part needs and does not find in a model ("BatchNorm layer"), which is an error."""
        return None

    def arrange(self, federation: Federation) -> Federation:
        """Which sites train (Centralized pools them)."""
        return federation

    # -- local training ---------------------------------------------------------------------------------------
    def plan(self, phases: list[Phase], c: Context) -> list[Phase]:
        """What is trained, in which norm mode; in order."""
        return phases

    def begin(self, model: Tree, b: Begin) -> Tree:
        """Install OWNED tensors, also before evaluation and export; in order, one owner per tensor."""
        return model

    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        """Transform the data of a step (and, with `s.testing`, of a test); in order, `normalizes_input` last."""
        return x, y

    def objective(self, s: Step) -> Tensor:
        """Replace the base loss; at most one part."""
        return s.base(s.logits, s.y)

    def loss(self, s: Step) -> Tensor | float:
        """Add a term to the loss; terms are summed."""
        return 0.0

    def watches(self, module: nn.Module) -> bool:
        """Whether `objective` and `loss` need the input of this layer; it is then in `s.inputs`."""
        return False

    def twin(self, s: Step) -> Tensor | float:
        """Train a second model per client, its personal one, with the base loss and this term; at most one part.

        `s.params` is the second model, `s.start` the received one. It sees the same batches; of other parts only
        surgery, `batch` and `objective` act on it. It is kept in this part's state, never sent, and tested as personal.
        """
        return 0.0

    def oracle(self, gradf: Gradient, s: Step) -> Gradient:
        """Change how a gradient is computed (`s.hessian` is available); nested, first listed innermost."""
        return gradf

    def grad(self, g: Tree, s: Step) -> Tree:
        """Correct the gradient, before clipping and the optimizer; in order."""
        return g

    def decay(self, s: Step) -> Tree:
        """Add to the gradient after clipping, where an optimizer's weight decay goes; summed."""
        return Tree()

    def lr_factor(self, slot: Slot) -> float | None:
        """Train this tensor as if it had its own optimizer: at this multiple of the learning rate, clipped apart.

        None leaves it with the model. Factors multiply; tensors that the same parts claim are clipped together.
        """
        return None

    def path(self, c: Context) -> Hashable:
        """Name the code path of a step in this round; an engine captures again when it changes."""
        return None

    # -- wire -------------------------------------------------------------------------------------------------
    def init(self, w: Weights) -> tuple[Tree, Tree]:
        """Own state at the start: (server's, client's). `w` is a Tree; `w.names` selects tensors by module."""
        return Tree(), Tree()

    def down(self, mine: Tree) -> Tree:
        """Which of the server state is broadcast."""
        return Tree()

    def down_to(self, mine: Tree, client: str) -> Tree:
        """Which of the server state is sent to this client only, besides `down`; nothing for one it does not know."""
        return Tree()

    def model_to(self, model: Tree, mine: Tree, client: str) -> Tree:
        """The exchanged tensors that this client gets instead of the server's; at most one part."""
        return model

    def finish(self, e: End) -> tuple[Tree, Tree]:
        """After local training: (new own state, upload)."""
        return e.mine, Tree()

    def send(self, delta: Tree, e: End) -> Tree:
        """Change the update of the parameters before it leaves; in order."""
        return delta

    def privacy(self) -> Privacy | None:
        """Change all that is sent of the model, after every `send`, and its mean on the server; at most one part."""
        return None

    # -- server -----------------------------------------------------------------------------------------------
    def receive(self, r: Received) -> tuple[Sequence[Tree], Tree]:
        """Change the updates that clients sent (`r.updates`), and the own state; a chain in order."""
        return r.updates, r.mine

    def weigh(self, r: Received) -> tuple[Sequence[float] | Tensor, Tree]:
        """One factor per client for its weight, and the own state; factors multiply, 0 leaves an upload out."""
        return [1.0] * len(r.clients), r.mine

    def aggregate(self, r: Received) -> tuple[Tree, Tree]:
        """Combine `r.models` in another way than by their weighted mean, and the own state; at most one part."""
        return mean(list(r.models), list(r.weights)), r.mine

    def remember(self, r: Received) -> Tree:
        """Return the own state, updated from the uploads as `receive` left them; those of weight 0 are left out."""
        return r.mine

    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        """Transform the mean update of the parameters and the own state; a chain in order."""
        return delta, r.mine

    def stats(self, delta: Tree, r: Round) -> Tree:
        """The same for running statistics only, which no other server step changes; a chain in order."""
        return delta

    # -- other ------------------------------------------------------------------------------------------------
    def passes(self) -> list[Pass]:
        """Extra client computations."""
        return []

    def evaluation(self) -> Eval:
        """How to test."""
        return Eval()

    def __add__(self, other: Part | Method) -> Method:
        """A method of this part and what follows."""
        from fednorms.core.method import Method  # which imports this file

        return Method((self,)) + other

    def __str__(self) -> str:
        return text_of(self)


HOOKS = tuple(k for k, v in vars(Part).items() if callable(v) and not k.startswith("_"))
REMOVED = {  # hooks of version 0.1, and what to write instead
    "protect": "Return fn.Privacy(protect=...) from the hook privacy",
    "release": "Return fn.Privacy(protect=..., release=...) from the hook privacy",
    "mechanism": "Return fn.Privacy(protect=..., mechanism=...) from the hook privacy",
    "trips": "Leave it out: fednorms describe takes exchanges of a joint step from the engine",
}
REGISTRY: dict[str, type[Part]] = {}
SUMS: dict[str, Callable[..., tuple[Part, ...]]] = {}

P = TypeVar("P", bound=type[Part])
F = TypeVar("F", bound=Callable[..., tuple[Part, ...]])


_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _check_free(name: str, new: type[Part] | Callable[..., tuple[Part, ...]]) -> None:
    """Refuse a name that is taken; the same code may register again, as when a notebook cell runs twice."""
    old = REGISTRY.get(name) or SUMS.get(name)
    if name == "fedavg" or (old is not None and _place(old) != _place(new)):
        whose = "the library's" if old is None else f"{old.__module__}.{old.__qualname__}"
        raise BadInput(f'The name "{name}" is taken by {whose}. Choose another name.')


def _place(thing: type[Part] | Callable[..., tuple[Part, ...]]) -> tuple[str, str]:
    file = getattr(sys.modules.get(thing.__module__), "__file__", None)  # a script is also __main__ and __mp_main__
    return file or thing.__module__, thing.__qualname__


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def part(name: str) -> Callable[[P], P]:
    """Class decorator: make a Part a frozen, validated dataclass and register it under `name`.

    >>> @part("shrink")
    ... class Shrink(Part):
    ...     by: float = option(0.5, above=0.0, at_most=1.0)
    ...     def server(self, delta, r): return self.by * delta, r.mine
    >>> str(Shrink(by=0.25))
    'shrink(by=0.25)'
    >>> _ = REGISTRY.pop("shrink")
    """
    if not _NAME.fullmatch(name):
        raise BadInput(f'Part names use lowercase letters, digits and underscores, as in "fedprox"; got {name!r}.')

    def decorate(cls: P) -> P:
        if not (isinstance(cls, type) and issubclass(cls, Part)):
            who = getattr(cls, "__name__", cls)
            raise BadInput(f'Part "{name}": {who} is not a subclass of fn.Part. Write `class {who}(fn.Part):`.')
        _check_free(name, cls)
        _check_declared(name, cls)
        if "normalises_input" in vars(cls):  # the spelling of version 0.1
            cls.normalizes_input = vars(cls)["normalises_input"]
        REGISTRY[name] = made = with_options(name, cls)
        return made

    return decorate


def _check_declared(name: str, cls: type[Part]) -> None:
    """Check the attributes that a class declares, and names that look like hooks."""
    known = {"reduction": get_args(Reduction), "weighting": (None, *get_args(Weighting))}
    for what, words in known.items():
        said = getattr(cls, what)
        if not isinstance(said, property) and said not in words:  # a property depends on options
            raise BadInput(f'Part "{name}": {what} must be one of {", ".join(map(repr, words))}, got {said!r}.')
    for own in [k for k, v in vars(cls).items() if inspect.isfunction(v) and k[0] != "_" and not hasattr(Part, k)]:
        if own in REMOVED:
            raise BadInput(f'Part "{name}": the hook {own} was removed after version 0.1. {REMOVED[own]}.')
        if question := did_you_mean(own, HOOKS, alike=0.66):  # a helper's name may look a little like a hook's
            text = f'Part "{name}": {own} is not a hook and will never be called; {question.rstrip()}'
            warnings.warn(text, stacklevel=3)


def sum_of_parts(name: str) -> Callable[[F], F]:
    """Function decorator: register a method that is the sum of other parts (FedWon = nonorm + wsconv + agc)."""

    def decorate(make: F) -> F:
        _check_free(name, make)
        SUMS[name] = make
        return make

    return decorate


def reads_rounds(cls: type[Part]) -> bool:
    """Whether a part depends on how many rounds a run has: it says so, or its code reads `context.rounds`."""
    own = (f for kind in cls.__mro__ if issubclass(kind, Part) and kind is not Part for f in vars(kind).values())
    codes = (getattr(getattr(f, "fget", f), "__code__", None) for f in own)
    return cls.uses_rounds or any("rounds" in code.co_names for code in codes if code is not None)


def overrides(part: Part, hook: str) -> bool:
    """Whether a part implements a hook.

    >>> overrides(Part(), "loss")
    False
    """
    return getattr(type(part), hook) is not getattr(Part, hook)
