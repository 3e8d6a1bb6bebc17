"""Which modules are normalisation layers, decided by their type and never by the letters of a name."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fednorms.layers.adaptive_group_norm import AdaptiveGroupNorm
from fednorms.layers.filter_response_norm import FilterResponseNorm
from fednorms.layers.global_norm import GlobalNorm
from fednorms.layers.hybrid_norm import HybridNorm
from fednorms.layers.mixed_norm import MixedNorm
from fednorms.layers.population_norm import PopulationNorm
from fednorms.layers.representative_norm import RepresentativeNorm
from fednorms.layers.switchable_norm import SwitchableNorm

WITH_STATISTICS = (AdaptiveGroupNorm, GlobalNorm, HybridNorm, MixedNorm, RepresentativeNorm, SwitchableNorm)
OURS = (*WITH_STATISTICS, FilterResponseNorm, PopulationNorm)
_TORCH = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Normalisation classes of timm and torchvision that derive from no torch normalisation class. Matched by
# class name, because neither library may be imported here.
_NAMED = ("FrozenBatchNorm", "RmsNorm", "SimpleNorm", "EvoNorm", "FilterResponseNorm")


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` is torch's BatchNorm or derives from it (SyncBatchNorm, timm's BatchNormAct2d).

    >>> is_batchnorm(nn.BatchNorm2d(2)), is_batchnorm(nn.GroupNorm(1, 2))
    (True, False)
    """
    return isinstance(module, _BatchNorm)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalisation layer: batch, group, layer, instance, RMS, timm's variants, ours.

    >>> is_norm(nn.LayerNorm(2)), is_norm(nn.Conv2d(1, 1, 1))
    (True, False)
    """
    if isinstance(module, (*_TORCH, *OURS)):
        return True
    return any(kind.__name__.startswith(_NAMED) for kind in type(module).__mro__)


def tests_by_batch(module: nn.Module) -> bool:
    """Whether `module` normalises with the batch's statistics in a test, too: a BatchNorm that tracks none.

    >>> tests_by_batch(nn.BatchNorm2d(2, track_running_stats=False)), tests_by_batch(nn.BatchNorm2d(2))
    (True, False)
    """
    return isinstance(module, _BatchNorm) and module.running_mean is None


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` evaluates with stored statistics: tracked BatchNorm, and ours that mix or
    replace what it measures.

    >>> keeps_statistics(nn.BatchNorm2d(2)), keeps_statistics(nn.BatchNorm2d(2, track_running_stats=False))
    (True, False)
    """
    if isinstance(module, WITH_STATISTICS):
        return True
    # An instance norm that tracks statistics also evaluates with them.
    return isinstance(module, (_BatchNorm, _InstanceNorm)) and module.running_mean is not None
