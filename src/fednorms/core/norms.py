"""Which modules are normalization layers, and what the library needs to know about their stored statistics.

Everything that looks at statistics (tests with batch or re-estimated statistics, GReg's second pass, FixBN, SiloBN,
FedBN, HBN, AdaBN) asks this registry, by module type and never by name. A layer registers next to its class; a custom
layer can do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch  # noqa: F401  (for the doctests)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fednorms.core.errors import BadInput
from fednorms.core.moments import instance_moments, raw_moments

Tensors = Mapping[str, Tensor]  # a layer's own parameters and buffers, by their names within the layer
M = TypeVar("M", bound=type[nn.Module])


def unbiased_batch_moments(layer: nn.Module, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance per channel of a batch: what BatchNorm records.

    >>> unbiased_batch_moments(nn.BatchNorm1d(1), {}, torch.tensor([[1.0], [3.0]]))
    (tensor([2.]), tensor([2.]))
    """
    mean, var, count = raw_moments(x)
    return mean, var * (count / max(count - 1, 1))


def _unchanged(layer: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Statistics:
    """How a normalization layer keeps the statistics that it normalizes with in evaluation mode.

    `mean` and `var` name the buffers. In training mode the layer normalizes with the batch. The net switches each layer
    between the two modes on its own, so training can use stored statistics and a test those of the batch.

    - `measure(layer, tensors, x) -> mean, var`: what the layer would record of one batch of its inputs. `tensors` are
      the layer's parameters and buffers by name; use them instead of the layer's attributes.
    - `batch_only(layer, tensors)`: for a layer that mixes batch statistics with others in training mode, the tensors to
      replace so that it uses only the batch's.
    - `batchnorm`: methods that act on BatchNorm layers (FedBN, SiloBN, FixBN, HBN, ...) also act on this one. Those
      that replace it read `num_features`, `weight`, `bias` and `eps` of the layer, as BatchNorm names them. FedTAN
      accepts only the layers of torch.
    - `samples`: the layer has an attribute `sampling`: whether the network trains, whichever statistics are used (None:
      as `training` says). The net sets it.
    """

    mean: str = "running_mean"
    var: str = "running_var"
    measure: Callable[[nn.Module, Tensors, Tensor], tuple[Tensor, Tensor]] = unbiased_batch_moments
    batch_only: Callable[[nn.Module, Tensors], dict[str, Tensor]] = _unchanged
    batchnorm: bool = False
    samples: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The names of the buffers: mean, variance."""
        return self.mean, self.var


_NORMS: dict[type[nn.Module], Statistics | None] = {}
# Normalization classes of timm and torchvision that derive from no torch normalization class. Matched by
# class name, because neither library may be imported here.
_NAMED = ("FrozenBatchNorm", "RmsNorm", "SimpleNorm", "EvoNorm", "FilterResponseNorm")


def norm_layer(statistics: Statistics | None = None) -> Callable[[M], M]:
    """Class decorator: register a module as a normalization layer; subclasses inherit the registration.

    Without `statistics` the layer normalizes the same way in training and evaluation, as GroupNorm does.

    >>> @norm_layer(Statistics(mean="centre", var="spread", batchnorm=True))
    ... class Mine(nn.Module): ...
    >>> is_norm(Mine()), is_batchnorm(Mine()), statistics_of(Mine()).names
    (True, True, ('centre', 'spread'))
    >>> del _NORMS[Mine]
    """

    def register(kind: M) -> M:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise BadInput(f"norm_layer registers a subclass of nn.Module, got {kind!r}.")
        _NORMS[kind] = statistics
        return kind

    return register


def _registered(module: nn.Module) -> tuple[bool, Statistics | None]:
    for kind in type(module).__mro__:
        if kind in _NORMS:
            return True, _NORMS[kind]
    return False, None


def statistics_of(module: nn.Module) -> Statistics | None:
    """How `module` keeps statistics; None if it is not a normalization layer or never keeps any.

    >>> statistics_of(nn.BatchNorm2d(2)).names, statistics_of(nn.GroupNorm(1, 2))
    (('running_mean', 'running_var'), None)
    """
    return _registered(module)[1]


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` is torch's BatchNorm, derives from it (timm's BatchNormAct2d), or is registered as one.

    >>> is_batchnorm(nn.BatchNorm2d(2)), is_batchnorm(nn.GroupNorm(1, 2))
    (True, False)
    """
    found = statistics_of(module)
    return found is not None and found.batchnorm


def is_plain_batchnorm(module: nn.Module) -> bool:
    """Whether `module` evaluates as torch's BatchNorm does: (x - mean) / sqrt(var + eps) with what it stores.

    >>> is_plain_batchnorm(nn.BatchNorm2d(2)), is_plain_batchnorm(nn.BatchNorm2d(2, track_running_stats=False))
    (True, False)
    """
    return isinstance(module, _BatchNorm) and keeps_statistics(module)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalization layer: batch, group, layer, instance, RMS, timm's variants, registered ones.

    >>> is_norm(nn.LayerNorm(2)), is_norm(nn.Conv2d(1, 1, 1))
    (True, False)
    """
    return _registered(module)[0] or any(kind.__name__.startswith(_NAMED) for kind in type(module).__mro__)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` evaluates with stored statistics.

    >>> keeps_statistics(nn.BatchNorm2d(2)), keeps_statistics(nn.BatchNorm2d(2, track_running_stats=False))
    (True, False)
    """
    return stored_statistics(module) is not None


def stored_statistics(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The mean and variance that `module` evaluates with; None if it stores none.

    >>> [t.tolist() for t in stored_statistics(nn.BatchNorm2d(2))]
    [[0.0, 0.0], [1.0, 1.0]]
    """
    found = statistics_of(module)
    mean, var = (getattr(module, name, None) for name in found.names) if found else (None, None)
    return (mean, var) if isinstance(mean, Tensor) and isinstance(var, Tensor) else None


def tests_by_batch(module: nn.Module) -> bool:
    """Whether `module` normalizes with the batch's statistics in a test, too: a BatchNorm that tracks none.

    >>> tests_by_batch(nn.BatchNorm2d(2, track_running_stats=False)), tests_by_batch(nn.BatchNorm2d(2))
    (True, False)
    """
    return is_batchnorm(module) and not keeps_statistics(module)


def _instance_means(layer: nn.Module, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    means, variances = instance_moments(x, unbiased=True)
    return means.mean(0), variances.mean(0)


norm_layer(Statistics(batchnorm=True))(_BatchNorm)
norm_layer(Statistics(measure=_instance_means))(_InstanceNorm)  # one that tracks statistics evaluates with them
for _kind in (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm):
    norm_layer()(_kind)
