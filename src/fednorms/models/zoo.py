"""Networks of torchvision and timm by name; both libraries are optional, and only `pretrained` may download.

Papers of the networks in the reproduced tables:
    He et al., Deep Residual Learning for Image Recognition, CVPR 2016, https://arxiv.org/abs/1512.03385
    Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018, https://arxiv.org/abs/1801.04381
    Tan, Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, ICML 2019,
    https://arxiv.org/abs/1905.11946
    Huang et al., Densely Connected Convolutional Networks, CVPR 2017, https://arxiv.org/abs/1608.06993
    Graham et al., LeViT: a Vision Transformer in ConvNet's Clothing for Faster Inference, ICCV 2021,
    https://arxiv.org/abs/2104.01136
    Mehta, Rastegari, MobileViT: Light-weight, General-purpose, and Mobile-friendly Vision Transformer, ICLR 2022,
    https://arxiv.org/abs/2110.02178
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.options import did_you_mean
from fednorms.models.weights import load_tensors

LIBRARIES = ("torchvision", "timm")


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module({"torchvision": "torchvision.models", "timm": "timm"}[name])
    except ImportError as error:
        raise BadInput(
            f'Models "{name}:..." need {name}, which is not installed: pip install "fednorms[zoo]".'
        ) from error


def zoo_names(library: str) -> list[str]:
    """The names of a library's classification networks.

    >>> "resnet18" in zoo_names("torchvision")
    True
    """
    module = _library(library)
    names = module.list_models(module=module) if library == "torchvision" else module.list_models()
    return sorted(names)


def build_zoo(
    library: str,
    name: str,
    classes: int,
    channels: int = 3,
    size: int | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """Build a network of torchvision or timm with a head for `classes`; `pretrained` may download weights.

    >>> build_zoo("torchvision", "resnet18", classes=7).fc
    Linear(in_features=512, out_features=7, bias=True)
    """
    known = zoo_names(library)
    # timm names may carry a tag for the weights: "levit_128s.fb_dist_in1k".
    if name.split(".")[0] not in known:
        question = did_you_mean(name, known, prefix=f"{library}:")
        raise BadInput(
            f'Unknown model "{library}:{name}"; {question}{len(known)} names are listed by '
            f'fednorms.models.zoo.zoo_names("{library}").'
        )
    build = _torchvision if library == "torchvision" else _timm
    try:
        return build(name, classes, channels, size, pretrained)
    except BadInput:
        raise
    except Exception as problem:  # the libraries that download raise almost anything without a network
        if not pretrained:
            raise
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise BadInput(
            f'Model "{library}:{name}": its pretrained weights cannot be downloaded ({reason}). Check the network, or '
            "download the file elsewhere and pass weights=FILE (--weights FILE; `reproduce` takes MODEL=FILE) instead "
            "of pretrained."
        ) from problem


def input_normalization(library: str, name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of the input with which the published weights were trained; None if not known.

    >>> input_normalization("torchvision", "resnet18")
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    """
    module = _library(library)
    try:
        if library == "torchvision":
            config = module.get_model_weights(name).DEFAULT.transforms()
        else:
            config = module.get_pretrained_cfg(name)
        return tuple(config.mean), tuple(config.std)
    except (AttributeError, ValueError, RuntimeError):  # weights of other kinds, or none
        return None


def _torchvision(name: str, classes: int, channels: int, size: int | None, pretrained: bool) -> nn.Module:
    if channels != 3:
        raise BadInput(
            f'Model "torchvision:{name}" takes 3 channels, got {channels}. Convert the images to RGB or use '
            f'a "timm:" model, which can be built for {channels}.'
        )
    models = _library("torchvision")
    options = zoo_options("torchvision", name, channels, size)
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    if pretrained:
        weights = models.get_model_weights(name).DEFAULT
        tensors = weights.get_state_dict(progress=False, check_hash=True)
        # The published file has the auxiliary heads that are left out above.
        load_tensors(model, {k: v for k, v in tensors.items() if not k.lower().startswith("aux")}, name)
    return model


def _timm(name: str, classes: int, channels: int, size: int | None, pretrained: bool) -> nn.Module:
    options = zoo_options("timm", name, channels, size)
    model: nn.Module = _library("timm").create_model(name, pretrained=pretrained, num_classes=classes, **options)
    return model


def zoo_options(library: str, name: str, channels: int, size: int | None) -> dict[str, Any]:
    """What a library's own constructor is given besides the number of classes.

    >>> zoo_options("torchvision", "vit_b_16", 3, 64)
    {'image_size': 64}
    """
    if library == "timm":
        config = _library("timm").get_pretrained_cfg(name)
        # Only networks tied to one input size take it as an argument; the others accept any.
        fixed = size is not None and config is not None and getattr(config, "fixed_input_size", False)
        return {"in_chans": channels, **({"img_size": size} if fixed else {})}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads change what forward returns in training.
        return {"aux_logits": False, "init_weights": True}
    return {"image_size": size} if name.startswith("vit_") and size is not None else {}
