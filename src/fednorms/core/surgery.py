"""Replace layers of any model in place, by module type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from fednorms.core import noise
from fednorms.core.dropout import KeyedDropout, KeyedDropout2d, KeyedStochasticDepth
from fednorms.core.errors import BadInput
from fednorms.core.norm_act import keep_act
from fednorms.core.norms import is_norm

Matches = Callable[[nn.Module], bool] | type[nn.Module] | tuple[type[nn.Module], ...]


@dataclass(frozen=True)
class Change:
    """One replaced layer: its name in the model, and the layers before and after.

    >>> print(Change("norm1", "BatchNorm2d(64)", "GroupNorm(32, 64)"))
    norm1: BatchNorm2d(64) -> GroupNorm(32, 64)
    """

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        """One line for a report."""
        return f"{self.name}: {self.before} -> {self.after}"


def short(module: nn.Module) -> str:
    """A layer in a few words: its class and its sizes.

    >>> short(nn.BatchNorm2d(64)), short(nn.Conv2d(3, 8, 5)), short(nn.Sequential(nn.ReLU(), nn.ReLU()))
    ('BatchNorm2d(64)', 'Conv2d(3, 8, 5x5)', 'Sequential(ReLU, ReLU)')
    """
    kind = type(module).__name__
    if isinstance(module, nn.Conv2d):
        kernel = "x".join(map(str, module.kernel_size))
        return f"{kind}({module.in_channels}, {module.out_channels}, {kernel})"
    for attributes in (
        ("in_features", "out_features"),
        ("num_groups", "num_channels"),
        ("groups", "channels"),
        ("num_features",),
        ("channels",),
        ("normalized_shape",),
        ("p",),
        ("drop_prob",),
    ):
        values = [getattr(module, attribute, None) for attribute in attributes]
        if None not in values:
            return f"{kind}({', '.join(map(str, values))})"
    return f"{kind}({', '.join(type(child).__name__ for child in module.children())})"


def swap(model: nn.Module, matches: Matches, make: Callable[[nn.Module, str], nn.Module]) -> list[Change]:
    """Replace every module of `model` that `matches` by `make(module, name)`, in place, and return the changes.

    A module used in several places is replaced once and stays shared. Nothing inside a replacement is visited. The drop
    layer and activation of a fused normalization layer are kept. The root itself cannot be replaced.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> [str(change) for change in swap(net, nn.BatchNorm2d, lambda old, name: nn.GroupNorm(2, 4))]
    ['1: BatchNorm2d(4) -> GroupNorm(2, 4)']
    """

    def wanted(module: nn.Module) -> bool:
        if isinstance(matches, (type, tuple)):
            return isinstance(module, matches)
        return matches(module)

    if wanted(model):
        raise BadInput(
            f"Cannot replace the whole model ({short(model)}) in place; expected a model that contains the layer. Wrap "
            "it: nn.Sequential(model)."
        )
    # All replacements are made before any is put in place: an error leaves the model unchanged.
    made: dict[nn.Module, nn.Module] = {}
    places: list[tuple[nn.Module, str, nn.Module]] = []
    changes: list[Change] = []
    seen: set[nn.Module] = set()

    def visit(parent: nn.Module, prefix: str) -> None:
        # `_modules` and not named_children(): the latter hides the second place of a shared child.
        for child_name, child in parent._modules.items():
            if child is None:
                continue
            name = f"{prefix}{child_name}"
            if child not in made:
                if not wanted(child):
                    if child not in seen:
                        seen.add(child)
                        visit(child, f"{name}.")
                    continue
                _refuse_losses(child, name)
                new = make(child, name)
                made[child] = keep_act(child, new) if is_norm(child) else new
                changes.append(Change(name, short(child), short(made[child])))
            places.append((parent, child_name, made[child]))

    visit(model, "")
    for parent, child_name, new in places:
        parent._modules[child_name] = new
    return changes


def swap_convolutions(
    model: nn.Module, head: Sequence[str], make: Callable[[nn.Conv2d, str], nn.Module]
) -> list[Change]:
    """Replace every convolution except classifiers (`head`).

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    >>> [change.name for change in swap_convolutions(net, ["1"], lambda old, name: nn.Conv2d(3, 4, 3))]
    ['0']
    """
    heads = [model.get_submodule(name) for name in head]

    def made(module: nn.Module, name: str) -> nn.Module:
        assert isinstance(module, nn.Conv2d)
        return make(module, name)

    return swap(model, lambda m: isinstance(m, nn.Conv2d) and not any(m is h for h in heads), made)


def swap_heads(
    part: str, model: nn.Module, head: Sequence[str], make: Callable[[nn.Linear, str], nn.Module]
) -> list[Change]:
    """Replace the classifiers, for a part that changes linear ones; another kind is an error that names the part.

    >>> swap_heads("fedfn", nn.Sequential(nn.Conv2d(4, 2, 1)), ["0"], lambda old, name: old)
    Traceback (most recent call last):
    fednorms.BadInput: fedfn changes a linear classifier, but "0" is a Conv2d(4, 2, 1x1). Choose a model whose
    last layer is an nn.Linear.
    """
    heads = [model.get_submodule(name) for name in head]

    def made(module: nn.Module, name: str) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise BadInput(
                f'{part} changes a linear classifier, but "{name}" is a {short(module)}. Choose a model whose last '
                "layer is an nn.Linear."
            )
        return make(module, name)

    return swap(model, lambda m: any(m is h for h in heads), made)


def _refuse_losses(module: nn.Module, name: str) -> None:
    if parametrize.is_parametrized(module):
        what = "a parametrization"
    elif module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        what = "hooks"
    else:
        return
    raise BadInput(
        f'Layer "{name}" ({short(module)}) has {what}, which its replacement would lose. Remove {what} first and '
        "register again afterwards."
    )


def _keyed(module: nn.Module, name: str) -> nn.Module:
    stream = noise.stream(name)
    new: nn.Module
    if isinstance(module, nn.Dropout):
        new = KeyedDropout(module.p, stream)
    elif isinstance(module, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        new = KeyedDropout2d(module.p, stream)
    elif type(module).__name__ == "DropPath":
        scale = bool(getattr(module, "scale_by_keep", True))
        new = KeyedStochasticDepth(float(getattr(module, "drop_prob", 0)), stream, "row", scale)
    else:
        new = KeyedStochasticDepth(float(getattr(module, "p", 0)), stream, getattr(module, "mode", "row"))
    new.train(module.training)
    return new


def _drops(module: nn.Module) -> bool:
    if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return module.p > 0
    # timm's and torchvision's stochastic depth, by class name: neither library may be imported here.
    rate = {"DropPath": "drop_prob", "StochasticDepth": "p"}.get(type(module).__name__)
    return rate is not None and float(getattr(module, rate, 0) or 0) > 0


def replace_dropout(model: nn.Module) -> list[Change]:
    """Swap dropout and stochastic depth for layers with keyed masks (stream from the module's name); p=0 stays.

    >>> net = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))
    >>> [str(change) for change in replace_dropout(net)]
    ['0: Dropout(0.5) -> KeyedDropout(0.5)']
    """
    return swap(model, _drops, _keyed)
