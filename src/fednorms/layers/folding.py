"""Fold a trained model into plain torch layers that compute the same in evaluation.

A layer takes part by a method `folded(dims) -> nn.Module`: a torch layer with the same values in evaluation mode, for
inputs with `dims` axes. Layers without it stay, because torch has no equal: their statistics depend on each image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorms.core.norms import tests_by_batch
from fednorms.core.surgery import Change, short, swap
from fednorms.layers.feature_augment import FeatureAugment
from fednorms.layers.feature_generator import Synthesis
from fednorms.layers.replacement import place

_KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def plain_batchnorm(
    dims: int,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    momentum: float = 0.1,
) -> nn.Module:
    """BatchNorm with these statistics, for inputs with `dims` axes: gamma (x - mean) / sqrt(var + eps) + beta.

    >>> plain_batchnorm(4, torch.zeros(3), torch.full((3,), 2.0), None, None, eps=2.0)(torch.ones(1, 3, 1, 1)).unique()
    tensor([0.5000])
    """
    new = _KINDS[dims](len(mean), eps, momentum, affine=weight is not None, device=mean.device, dtype=mean.dtype)
    assert new.running_mean is not None
    assert new.running_var is not None
    with torch.no_grad():
        new.running_mean.copy_(mean)
        new.running_var.copy_(var)
        if weight is not None and bias is not None:
            new.weight.copy_(weight)
            new.bias.copy_(bias)
    return new.eval()


def fold(module: nn.Module, shape: tuple[int, ...]) -> list[Change]:
    """Replace in place every layer that has an equal torch layer in evaluation, and return the changes.

    `shape` is that of an image. Standardized filters become the filters of a plain convolution, statistics that a
    server sends or that are trained become those of BatchNorm, and what acts only in training goes. A BatchNorm without
    running statistics gets some (0 and 1, to be filled in), because a single image has no statistics.

    >>> from fednorms.layers import WSConv2d
    >>> net = nn.Sequential(WSConv2d(3, 4, 3), nn.Flatten())
    >>> [str(change) for change in fold(net, (3, 8, 8))], type(net[0]).__name__
    (['0: WSConv2d(3, 4, 3x3) -> Conv2d(3, 4, 3x3)'], 'Conv2d')
    """
    dims = _axes(module, shape)
    changes = _without_generators(module) + _without_augmentation(module) + _with_statistics(module)
    return changes + swap(module, _folds, lambda old, name: old.folded(dims.get(name, 4)))  # type: ignore[operator]


def _folds(module: nn.Module) -> bool:
    return callable(getattr(type(module), "folded", None))


def _axes(module: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """How many axes the input of each layer has, from one forward pass."""
    seen: dict[str, int] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].dim()))
        for name, m in module.named_modules()
        if _folds(m)
    ]
    if not hooks:
        return seen
    like = next((t for t in module.state_dict().values() if t.is_floating_point()), torch.zeros(()))
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(2, *shape, dtype=like.dtype, device=like.device))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _with_statistics(module: nn.Module) -> list[Change]:
    """Give running statistics to every BatchNorm that has none."""
    changes = []
    for name, m in module.named_modules():
        if not (tests_by_batch(m) and isinstance(m, _BatchNorm)):
            continue
        zeros = torch.zeros(m.num_features, **place(m))
        m.track_running_stats = True
        m.register_buffer("running_mean", zeros)
        m.register_buffer("running_var", torch.ones_like(zeros))
        m.register_buffer("num_batches_tracked", zeros.new_zeros((), dtype=torch.long))
        changes.append(Change(name, f"{short(m)} without running statistics", short(m)))
    return changes


def _without_augmentation(module: nn.Module) -> list[Change]:
    """Remove what FedFA put at the end of a sequence, and the sequence if it was made for that."""
    changes = []
    for name, row in list(module.named_modules()):
        if not (isinstance(row, nn.Sequential) and len(row) and isinstance(row[-1], FeatureAugment)):
            continue
        changes.append(Change(name, short(row), "without FeatureAugment"))
        del row._modules[list(row._modules)[-1]]
        if list(row._modules) == ["0"] and not row.state_dict():
            module.set_submodule(name, row[0])
    return changes


def _without_generators(module: nn.Module) -> list[Change]:
    found = [
        (parent, name) for parent in module.modules() for name, m in parent._modules.items() if type(m) is Synthesis
    ]
    changes = [Change(name, short(parent._modules[name]), "nothing") for parent, name in found]  # type: ignore[arg-type]
    for parent, name in found:
        del parent._modules[name]
    return changes
