"""Net: a model after a method's surgery, with the route of every tensor and a functional forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fednorms.core import checks, noise
from fednorms.core.errors import BadInput, refuse_class
from fednorms.core.head import split_head
from fednorms.core.method import Method
from fednorms.core.norms import is_norm, keeps_statistics, statistics_of
from fednorms.core.options import few
from fednorms.core.part import Part, Route, Slot
from fednorms.core.slots import answers, conflicts, owners, rates_of, slots_of
from fednorms.core.surgery import Change, replace_dropout
from fednorms.core.tree import Tree


class Net:
    """The module that a method trains. The user's own module is copied and never changed.

    Names are grouped once: `exchanged` are sent and averaged, `own` stay in the client's state, `trained` move in local
    training, `sent_params` are what parts' `init`, `finish` and `server` see.

    >>> from fednorms.methods.registry import method
    >>> net = Net(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)), method("fedbn"))
    >>> net.heads, sorted(net.own)[:2]
    (['3'], ['1.bias', '1.num_batches_tracked'])
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        head: str | list[str] | None = None,
        name: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        autocast: bool = False,
    ) -> None:
        refuse_class("model", model)
        self.name = name or type(model).__name__
        self.method = method
        self._autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=autocast)
        self._given: nn.Module | None = model  # until it is probed: then a part's mistakes can be told from the user's
        self.module = copy.deepcopy(model).to(device=device, dtype=dtype)
        self.head_was_found = head is None
        self.heads = self.user_heads = split_head(self.module, head)  # the user's: their names before any surgery
        self.changes: dict[str, list[Change]] = {}  # by part, in the order of surgery
        self.keeping: list[str] = []  # parts that do not share every tensor
        self._refuse_cumulative()
        self._operate()
        replace_dropout(self.module)
        self.slots = dict(slots_of(self.module, self.heads))
        self.routes = self._route()
        self.initial = self._state()
        self._group()
        self.rates = rates_of(
            method.having("lr_factor"), (self.slots[n] for n in self.trainable("all", also_frozen=True))
        )
        for p in method.parts:
            if missing := p.missing(self):
                raise self._nothing(p, f"no {missing}")
        self._watch_module()

    def _refuse_cumulative(self) -> None:
        """Refuse cumulative averages: they depend on counters, which are not averaged."""
        found = [n for n, m in self.module.named_modules() if keeps_statistics(m) and getattr(m, "momentum", 0) is None]
        if found:
            raise BadInput(
                f'Layer "{found[0]}" of model "{self.name}" keeps a cumulative average (momentum=None), whose counter '
                "cannot be averaged over clients. Give it a momentum, 0.1 for example."
            )

    def _watch_module(self) -> None:
        self._norms = [m for m in self.module.modules() if keeps_statistics(m)]
        self._sampling = {m for m in self._norms if (kept := statistics_of(m)) and kept.samples}
        # By module and attribute: timm's `train` puts new dictionaries in their place.
        self._caches = [
            (m, k)
            for m in self.module.modules()
            for k, v in vars(m).items()
            if k[0] != "_" and type(v) is dict and not v
        ]
        self._tied = len(list(self.module.named_parameters())) != len(
            list(self.module.named_parameters(remove_duplicate=False))
        )
        self.module.train()
        self._at_rest = {m for m in self._norms if not m.training}  # by a `train` of the model's own
        self._mode: tuple[bool, bool] | None = None
        self._features: list[Tensor] = []
        self._hook = self.module.get_submodule(self.heads[0]).register_forward_pre_hook(
            partial(_remember, self._features)  # a lambda could not be sent to a worker process
        )

    # -- what the method made of the model ----------------------------------------------------------------------
    def _operate(self) -> None:
        made: dict[str, list[nn.Module]] = {}
        for p in self.method.having("surgery"):
            try:
                found = p.surgery(self.module, self.heads)
            except BadInput as error:
                if not self.changes:
                    raise
                raise BadInput(f"{p.name}, after {' and '.join(self.changes)} changed the model: {error}") from None
            if found is None:  # not asked for
                continue
            found = checks.several(p, "surgery", found, Change)
            if not found:
                raise self._nothing(p, "no layer that it replaces")
            self.changes[p.name] = found
            self.heads = split_head(self.module, self.heads)  # it may have put a block in a head's place
            there = dict(self.module.named_modules())
            for earlier, layers in made.items():
                if not set(layers) <= set(there.values()):
                    raise BadInput(
                        f'{p.name} undoes {earlier} on model "{self.name}": it removes layers that {earlier} added. '
                        "Keep one of them."
                    )
            new = [there[c.name] for c in found if c.name in there]
            made[p.name] = new + [m for layer in new for m in layer.modules() if is_norm(m)]

    def _nothing(self, p: Part, missing: str) -> BadInput:
        """The error for a part that finds nothing, with the other parts that may have removed it."""
        changed = [q for q in self.changes if q != p.name]
        keeping = [q for q in self.keeping if q != p.name]
        others = [f"after {', '.join(changed)} changed it"] * bool(changed)
        others += [f"of which {', '.join(keeping)} keep{'s' * (len(keeping) == 1)} tensors back"] * bool(keeping)
        why = f" ({', '.join(others)})" if others else ""
        removable = " or ".join(dict.fromkeys([p.name, *changed, *keeping]))
        return BadInput(
            f'{p.name} has nothing to act on: model "{self.name}"{why} has {missing}. '
            f"Remove {removable} from the method, or choose a model with such layers."
        )

    def _route(self) -> dict[str, Route]:
        """Ask all parts for the route of every tensor; the most private answer wins."""
        routing = self.method.having("route")
        asked = {slot.name: answers(routing, slot) for slot in self.slots.values()}
        for p in routing:
            if all(said[p.name] is Route.SHARED for said in asked.values()):
                raise self._nothing(p, "no tensor that it would keep back")
        self.keeping = [p.name for p in routing]
        routes = {name: max(said.values(), default=Route.SHARED) for name, said in asked.items()}
        problems = [problem for name, said in asked.items() for problem in conflicts(self.slots[name], said)]
        if self._shares_nothing(routes) and not any(p.keeps_all_local for p in self.method.parts):
            problems.append(f"{' and '.join(self.keeping)} together leave nothing to share")
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise BadInput(f'Method "{self.method}" on model "{self.name}": ' + "; ".join(problems[:5]) + more + ".")
        self.owned_by: dict[str, tuple[str, ...]] = {}
        for name, said in asked.items():
            if routes[name] is Route.OWNED:  # unless another part keeps it from its owner
                owner = owners(said)[0]
                self.owned_by[owner] = (*self.owned_by.get(owner, ()), name)
        return routes

    def _shares_nothing(self, routes: Mapping[str, Route]) -> bool:
        """Whether parts keep back every tensor that is trained."""
        kept = any(r > Route.SHARED for r in routes.values())
        return kept and not any(r <= Route.SENT and self.slots[n].trainable for n, r in routes.items())

    def _group(self) -> None:
        def where(test: Callable[[Slot, Route], bool]) -> list[str]:
            return [n for n, s in self.slots.items() if test(s, self.routes[n])]

        self.exchanged = where(lambda s, r: r <= Route.SENT)
        self.own = where(lambda s, r: r in (Route.SENT, Route.LOCAL))
        self.owned = where(lambda s, r: r is Route.OWNED)
        self.owned_with_trained = frozenset(  # of parts that own tensors which are trained (FedNorm), all that they own
            n for names in self.owned_by.values() if any(self.slots[n].trainable for n in names) for n in names
        )
        self.private = frozenset(where(lambda s, r: r >= Route.OWNED))
        self.trained = where(lambda s, r: s.trainable and r is not Route.FROZEN)
        self.sent_params = [n for n in self.trained if self.routes[n] <= Route.SENT]
        self.shared_params = [n for n in self.sent_params if self.routes[n] is Route.SHARED]
        self.buffers = where(lambda s, r: s.kind == "buffer")
        self.statistics = [n for n in self.exchanged if n in self.buffers and self.initial[n].is_floating_point()]
        self.head_names = frozenset(where(lambda s, r: s.head))

    def seen_by(self, p: Part) -> list[str]:
        """The names that a part's `init` sees: `sent_params`, or only shared ones for `uses_even_mean`.

        Such a part compares clients with the server's model, and the updates of other tensors do not start there.
        """
        return self.shared_params if p.uses_even_mean else self.sent_params

    def _state(self) -> Tree:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return Tree({n: tensors[n].detach().clone() for n in self.slots})

    def trainable(self, which: Literal["all", "head", "body"], *, also_frozen: bool = False) -> list[str]:
        """The names that a phase trains; fine-tuning may also move what federated training froze.

        >>> from fednorms.methods.registry import method
        >>> Net(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), method("fedbabu")).trainable("all")
        ['0.weight', '0.bias']
        """
        frozen = [n for n, s in self.slots.items() if s.trainable and self.routes[n] is Route.FROZEN]
        names = self.trained + frozen if also_frozen else self.trained
        return [n for n in names if which == "all" or self.slots[n].head == (which == "head")]

    # -- running it ---------------------------------------------------------------------------------------------
    def _set_mode(self, train: bool, batch_statistics: bool) -> None:
        mode = (train, batch_statistics)
        if mode == self._mode:
            return
        if self._mode is None or self._mode[0] != train:
            self.module.train(train)
        for m in self._norms:
            m.train(batch_statistics and m not in self._at_rest)
            if m in self._sampling:
                setattr(m, "sampling", train)  # noqa: B010
        self._mode = mode

    def forward(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, train: bool, batch_statistics: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits and penultimate features. With batch statistics, those in `tensors` are updated in place."""
        self._set_mode(train, batch_statistics)
        self._forget()
        self._features.clear()
        with noise.one_pass(), self._autocast:
            logits = functional_call(self.module, dict(tensors), (x,), tie_weights=self._tied)
        if isinstance(logits, tuple):  # networks with auxiliary heads also return those in training
            logits = logits[0]
        if not self._features:
            raise BadInput(
                f'Model "{self.name}" does not call its classifier "{self.heads[0]}" as a module, so its features are '
                "unknown. Call it, or name another layer with head=."
            )
        features = self._features[0]
        self._features.clear()
        return logits.to(x.dtype), features

    def _forget(self) -> None:
        for m, attribute in self._caches:  # LeViT keeps attention biases of the last weights: a leak between clients
            getattr(m, attribute).clear()

    def plain(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A separate module that holds these tensors, in eval mode: what a user keeps.

        >>> from fednorms.methods.registry import method
        >>> net = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), method("fedavg"))
        >>> net.plain({**net.initial, "1.bias": torch.ones(2)})[1].bias.tolist()
        [1.0, 1.0]
        """
        self._forget()
        self._set_mode(train=True, batch_statistics=True)  # the copy can then be trained, too
        module = copy.deepcopy(self.module)
        module.get_submodule(self.heads[0])._forward_pre_hooks.pop(self._hook.id)
        with torch.no_grad():
            for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
                if name in self.slots:
                    tensor.copy_(tensors[name])
        for m in module.modules():
            if (kept := statistics_of(m)) and kept.samples:
                setattr(m, "sampling", None)  # noqa: B010
        return module.eval()

    def duplicate(self) -> Net:
        """The same net with its own copy of the module, so two forward passes can run at the same time.

        >>> from fednorms.methods.registry import method
        >>> net = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), method("fedavg"))
        >>> net.duplicate().module is net.module
        False
        """
        other = copy.copy(self)
        other._autocast = copy.copy(self._autocast)
        other.module = copy.deepcopy(self.module)
        other.module.get_submodule(self.heads[0])._forward_pre_hooks.pop(self._hook.id)
        other._watch_module()
        return other

    def tested(self, tensors: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Logits as a test computes them, and what normalization layers would record of this batch.

        Unlike in torch's layers, gradients also reach the stored means and variances of BatchNorm in `tensors`: terms
        that are zero but have these gradients are added to a layer's input.
        """
        found: dict[str, Tensor] = {}

        def note(name: str, m: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            x, kept = args[0], statistics_of(m)
            assert kept is not None
            own = Tree({k: tensors[k] for k in self.slots if k.rpartition(".")[0] == name})
            leaves = {k.rpartition(".")[2]: t.detach() for k, t in own.items()}
            for leaf, value in zip(kept.names, kept.measure(m, leaves, x.detach()), strict=True):
                found[f"{name}.{leaf}"] = value.to(x)
            mean, var = (own[f"{name}.{leaf}"] for leaf in kept.names)
            if not isinstance(m, _BatchNorm) or not (mean.requires_grad or var.requires_grad):
                return None
            shape = (1, -1) + (1,) * (x.dim() - 2)
            spread = (var - var.detach()) / (2 * (var.detach() + m.eps))
            apart = x.detach() - mean.detach().view(shape)
            return (x - (mean - mean.detach()).view(shape) - apart * spread.view(shape), *args[1:])

        layers = [(name, m) for name, m in self.module.named_modules() if keeps_statistics(m)]
        hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in layers]
        buffers = set(self.buffers)
        fixed = Tree({k: t.detach() if k in buffers else t for k, t in tensors.items()})
        try:
            logits, _ = self.forward(fixed, x, train=False, batch_statistics=False)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, Tree(found)

    @contextmanager
    def watching(self, wanted: Callable[[nn.Module], bool]) -> Iterator[dict[str, Tensor]]:
        """Within this context, the dictionary holds the input of every wanted layer, until it is cleared.

        For a layer that is called several times, it holds all inputs, concatenated.
        """
        seen: dict[str, Tensor] = {}

        def note(name: str, x: Tensor) -> None:
            before = seen.get(name)
            if before is not None and before.shape[1:] != x.shape[1:]:
                raise BadInput(
                    f'Layer "{name}" of model "{self.name}" is called with inputs of different shapes in one pass, '
                    "which have no common statistics. Use one layer for each."
                )
            seen[name] = x if before is None else torch.cat([before, x])

        hooks = [
            m.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
            for name, m in self.module.named_modules()
            if wanted(m)
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def probe(self, shape: tuple[int, ...], classes: int) -> bool:
        """Check that the model takes such images and returns such logits.

        Returns whether batch normalization refuses a batch of one image of this shape (maps of 1x1).
        """
        state = self.initial.clone()
        like = next((t for t in state.values() if t.is_floating_point()), torch.zeros(()))
        images = torch.zeros(2, *shape, dtype=like.dtype, device=like.device)
        size = "x".join(map(str, shape))
        with torch.no_grad():
            try:
                logits, _ = self.forward(state, images, train=False, batch_statistics=False)
            except (RuntimeError, ValueError, AssertionError, IndexError, AttributeError, TypeError, KeyError) as error:
                problem = f"cannot take images of {size}: {type(error).__name__}: {error}"
                advice = "Give the federation another size, or choose another model."
                raise self._misfit(problem, advice, images, classes) from error
            if tuple(logits.shape) != (2, classes):
                problem = f"returns outputs of shape {tuple(logits.shape)} for two images; expected (2, {classes})"
                advice = f"Build it with {classes} outputs."
                raise self._misfit(f"{problem}, one logit per class", advice, images, classes)
            self._given = None
            for head in self.heads if self.head_was_found else []:
                layer = self.module.get_submodule(head)
                width = layer.out_channels if isinstance(layer, nn.Conv2d) else getattr(layer, "out_features", classes)
                if width != classes:
                    raise BadInput(
                        f'Layer "{head}" of model "{self.shown}" was taken for its classifier and has {width} outputs, '
                        f"not {classes}. Name the layer that returns the logits with head=."
                    )
            self._check_pass(state, images)
            try:
                self.forward(state, images[:1], train=True, batch_statistics=True)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                return True
        return False

    @property
    def shown(self) -> str:
        """The model's name in messages: of a custom one, without the hash of its code."""
        return self.name.removeprefix("custom:").partition("@")[0]

    def _misfit(self, problem: str, advice: str, images: Tensor, classes: int) -> BadInput:
        """The error for a model that does not fit the data, or no longer does after a part's surgery."""
        p = self._spoiler(images, classes)
        if p is None:
            return BadInput(f'Model "{self.shown}" {problem}. {advice}')
        did = few([str(change) for change in self.changes.get(p.name, [])])
        return BadInput(
            f'{p.name}: after its surgery ({did}), and not before, model "{self.shown}" {problem}. Give new layers '
            "the channels, dtype and device of those that they replace."
        )

    def _spoiler(self, images: Tensor, classes: int) -> Part | None:
        """The part after whose surgery the user's model no longer returns logits for such images; None: no part."""
        if self._given is None:
            return None
        module, heads = copy.deepcopy(self._given).to(images), self.user_heads

        def fits() -> bool:
            try:
                logits = module.eval()(images)
                return tuple((logits[0] if isinstance(logits, tuple) else logits).shape) == (2, classes)
            except Exception:  # whatever a custom model raises
                return False

        for p in self.method.having("surgery") if fits() else []:
            p.surgery(module, heads)
            heads = split_head(module, heads)
            if not fits():
                return p
        return None

    def _check_pass(self, state: Tree, images: Tensor) -> None:
        """Refuse a model whose forward pass changes what cannot be federated, or normalizes everything to zero."""
        bound: list[str] = []
        loose = {n: b.clone() for n, b in self.module.named_buffers() if n not in self.slots}

        def after(prefix: str, m: nn.Module, *_: object) -> None:
            names = {leaf: f"{prefix}.{leaf}" if prefix else leaf for leaf in m._buffers}
            bound.extend(n for leaf, n in names.items() if n in state and m._buffers[leaf] is not state[n])

        modules = list(self.module.named_modules())
        hooks = [m.register_forward_hook(partial(after, n)) for n, m in modules if m._buffers]
        hooks += [
            m.register_forward_pre_hook(partial(_refuse_single_values, n))
            for n, m in modules
            if isinstance(m, nn.GroupNorm)
        ]
        try:
            self.forward(state, images, train=True, batch_statistics=True)
        finally:
            for hook in hooks:
                hook.remove()
        if bound:
            raise BadInput(
                f'Model "{self.name}" replaces its buffer "{bound[0]}" by a new tensor, which is lost. Write into '
                "it instead: buffer.copy_(new)."
            )
        moved = [n for n, b in self.module.named_buffers() if n in loose and not _same(b, loose[n])]
        if moved:
            raise BadInput(
                f'Model "{self.name}" changes its buffer "{moved[0]}" in a forward pass, and does not save it '
                "(persistent=False): it would leak from client to client. Register it as persistent."
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)))


def _refuse_single_values(name: str, m: nn.GroupNorm, args: tuple[Any, ...]) -> None:
    if args[0].dim() == 2 and m.num_groups == m.num_channels > 1:
        raise BadInput(
            f'Layer "{name}" normalizes vectors in {m.num_groups} groups of one value each, which makes them '
            "zero. Use fewer groups, gn(groups=1) for example."
        )


def _remember(features: list[Tensor], head: nn.Module, args: tuple[Any, ...]) -> None:
    # Before a 1x1 convolution there is one feature vector per position; the image's feature is their mean.
    features.append(args[0].mean((2, 3)) if isinstance(head, nn.Conv2d) else args[0])
