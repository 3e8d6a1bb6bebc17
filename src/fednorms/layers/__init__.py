"""Layers: each file is one idea, a function with the formula and a Module that replaces a torch layer."""

from __future__ import annotations

from fednorms.core.dropout import KeyedDropout, KeyedDropout2d, KeyedStochasticDepth, keyed_dropout
from fednorms.core.moments import raw_moments
from fednorms.core.norm_act import NormAct
from fednorms.core.norms import is_batchnorm, is_norm, keeps_statistics
from fednorms.core.surgery import Change, replace_dropout, swap, swap_convolutions, swap_heads
from fednorms.layers.adaptive_group_norm import AdaptiveGroupNorm, mixed_normalize
from fednorms.layers.agc import adaptive_clip, unitwise_norm
from fednorms.layers.assembled_norm import AssembledNorm
from fednorms.layers.feature_augment import FeatureAugment, feature_augment
from fednorms.layers.feature_generator import Synthesis
from fednorms.layers.filter_response_norm import FilterResponseNorm, filter_response
from fednorms.layers.gaussian_linear import GaussianFeatures, GaussianLinear, with_gaussian
from fednorms.layers.global_norm import GlobalNorm, merged_moments
from fednorms.layers.group_norm import group_norm_like, paper_groups
from fednorms.layers.hybrid_norm import HybridNorm
from fednorms.layers.instance_norm import instance_norm_like
from fednorms.layers.mixed_norm import MixedNorm, mixed_statistics
from fednorms.layers.nf_residual import scale_residuals
from fednorms.layers.no_norm import no_norm_like
from fednorms.layers.personal_linear import PersonalLinear
from fednorms.layers.population_norm import PopulationNorm
from fednorms.layers.projection import with_projection
from fednorms.layers.representative_norm import RepresentativeNorm
from fednorms.layers.scaled_ws import WSConv2d, scaled_weight
from fednorms.layers.shifted_linear import ShiftedLinear
from fednorms.layers.skew_eraser import SkewEraser
from fednorms.layers.switchable_norm import SwitchableNorm
from fednorms.layers.thresholds import thresholded
from fednorms.layers.unit_norm import UnitNormLinear, unit_norm
from fednorms.layers.weight_norm import WNConv2d, weight_norm

__all__ = [
    "AdaptiveGroupNorm",
    "AssembledNorm",
    "Change",
    "FeatureAugment",
    "FilterResponseNorm",
    "GaussianFeatures",
    "GaussianLinear",
    "GlobalNorm",
    "HybridNorm",
    "KeyedDropout",
    "KeyedDropout2d",
    "KeyedStochasticDepth",
    "MixedNorm",
    "NormAct",
    "PersonalLinear",
    "PopulationNorm",
    "RepresentativeNorm",
    "ShiftedLinear",
    "SkewEraser",
    "SwitchableNorm",
    "Synthesis",
    "UnitNormLinear",
    "WNConv2d",
    "WSConv2d",
    "adaptive_clip",
    "feature_augment",
    "filter_response",
    "group_norm_like",
    "instance_norm_like",
    "is_batchnorm",
    "is_norm",
    "keeps_statistics",
    "keyed_dropout",
    "merged_moments",
    "mixed_normalize",
    "mixed_statistics",
    "no_norm_like",
    "paper_groups",
    "raw_moments",
    "replace_dropout",
    "scale_residuals",
    "scaled_weight",
    "swap",
    "swap_convolutions",
    "swap_heads",
    "thresholded",
    "unit_norm",
    "unitwise_norm",
    "weight_norm",
    "with_gaussian",
    "with_projection",
]
