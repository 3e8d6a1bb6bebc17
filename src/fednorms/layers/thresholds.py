"""Where a thresholded linear unit replaces a ReLU: only directly after a norm.

Paper: Filter Response Normalization Layer: Eliminating Batch Dependence in the Training of Deep Neural Networks. Singh
and Krishnan. CVPR 2020. https://arxiv.org/abs/1911.09737
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fednorms.core.norm_act import NormAct
from fednorms.core.norms import is_batchnorm
from fednorms.core.surgery import Change, swap
from fednorms.layers.filter_response_norm import FilterResponseNorm, ReLUWithoutThreshold

SIZES = (32, 224, 64, 28, 299)  # image sizes to try if the model does not give one


def rectified_norms(model: nn.Module) -> tuple[set[str], set[str]]:
    """The normalization layers whose output goes directly to an nn.ReLU module, and those ReLUs.

    Found in a forward pass of a copy (torch's meta device would load its compiler, which takes seconds). If no pass
    works (an unusual size), or the ReLU is a function rather than a module, nothing is found.

    >>> rectified_norms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)))
    ({'1'}, {'2'})
    """
    twin = copy.deepcopy(model).eval()
    like = next((p for p in twin.parameters() if p.is_floating_point()), torch.zeros(()))
    made: dict[int, tuple[str, int, Tensor]] = {}
    before: dict[str, int] = {}  # calls of a norm
    rectified: dict[str, int] = {}  # of which went into a ReLU
    relus: set[str] = set()

    def from_norm(name: str, out: Tensor) -> None:
        made[id(out)] = name, out._version, out  # kept alive: its id must not be reused
        before[name] = before.get(name, 0) + 1

    def into_relu(name: str, x: Tensor) -> None:
        norm, version, _ = made.get(id(x), ("", -1, x))
        if version == x._version:  # otherwise something was added in place, as in torchvision's residual blocks
            rectified[norm] = rectified.get(norm, 0) + 1
            relus.add(name)

    for name, m in twin.named_modules():
        if is_batchnorm(m):
            m.register_forward_hook(lambda _, args, out, name=name: from_norm(name, out))
        elif isinstance(m, nn.ReLU):
            m.inplace = False  # an in-place ReLU would return the norm's own tensor
            m.register_forward_pre_hook(lambda _, args, name=name: into_relu(name, args[0]))
    for shape in _shapes(model):
        for seen in (made, before, rectified, relus):
            seen.clear()
        try:
            with torch.no_grad():
                twin(torch.zeros(2, *shape, dtype=like.dtype, device=like.device))
        except Exception:  # any failure: try another size
            continue
        return {n for n, calls in rectified.items() if calls == before[n]}, relus
    return set(), set()


def _shapes(model: nn.Module) -> list[tuple[int, int, int]]:
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    own = getattr(model, "size", None)
    config = getattr(model, "default_cfg", None)  # timm
    told = config.get("input_size") if isinstance(config, dict) else None
    sizes = [own] if isinstance(own, int) else [told[-1]] if told else []
    return [(channels, side, side) for side in (*sizes, *SIZES)]


def thresholded(model: nn.Module, learn_eps: bool = False) -> list[Change]:
    """Replace batch normalization by filter response normalization, and ReLUs that directly follow by thresholds.

    Before an addition, before another activation, and if it is unknown what follows, the layer has no threshold and the
    network's own activation stays.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    >>> for change in thresholded(net): print(change)
    1: BatchNorm2d(4) -> FilterResponseNorm(4) with threshold
    2: ReLU() -> ReLUWithoutThreshold()
    """
    norms, relus = rectified_norms(model)
    chosen = {id(model.get_submodule(name)) for name in relus}

    def make(norm: nn.Module, name: str) -> nn.Module:
        return FilterResponseNorm.like(norm, tlu=name in norms, learn_eps=learn_eps, name=name)

    changes = swap(model, is_batchnorm, make)
    for at, change in enumerate(changes):
        new = model.get_submodule(change.name)
        inner = new.norm if isinstance(new, NormAct) else new
        if inner.tau is not None:
            changes[at] = replace(change, after=f"{change.after} with threshold")
    if changes and chosen:
        changes += swap(model, lambda m: id(m) in chosen, lambda old, name: ReLUWithoutThreshold().train(old.training))
    return changes
