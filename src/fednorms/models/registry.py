"""Build a model by its name and a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fednorms.core import noise, plugins
from fednorms.core.errors import BadInput
from fednorms.core.options import did_you_mean
from fednorms.models.alexnet import AlexNet
from fednorms.models.cnn4 import CNN4
from fednorms.models.cnn_small import SmallCNN
from fednorms.models.custom import bare, find, make_model
from fednorms.models.digits_cnn import DigitsCNN
from fednorms.models.lenet import LeNet
from fednorms.models.mobilenet_v1 import MobileNetV1
from fednorms.models.resnet_cifar import CifarResNet
from fednorms.models.vgg11 import VGG11
from fednorms.models.weights import load_weights
from fednorms.models.zoo import LIBRARIES, build_zoo, zoo_names


@dataclass(frozen=True)
class ModelInfo:
    """A named model: a description, the image size it is made for, and whether it takes other sizes.

    >>> models()["lenet"].size
    32
    """

    name: str
    description: str
    size: int
    any_size: bool
    make: Callable[[int, int, int], nn.Module]  # classes, channels, size


_MODELS = (
    ModelInfo(
        "cnn-small",
        "three 3x3 convolutions with BN, 16k parameters, any size from 8 pixels",
        16,
        True,
        SmallCNN,
    ),
    ModelInfo("lenet", "LeNet with BN of FedDyn, FedDC and FedNN, 798k parameters", 32, False, LeNet),
    ModelInfo(
        "digits-cnn",
        "six-layer digits CNN with BN and dropout of FedWon, 14.2M parameters",
        28,
        False,
        DigitsCNN,
    ),
    ModelInfo(
        "digits-cnn-fedbn",
        "six-layer digits CNN of FedBN, BN after the linear layers too, 14.2M parameters",
        28,
        False,
        partial(DigitsCNN, between="norm"),
    ),
    ModelInfo("alexnet", "AlexNet with BN and dropout of FedWon, 57M parameters, from 63 pixels", 256, True, AlexNet),
    ModelInfo(
        "alexnet-fedbn",
        "AlexNet of FedBN, BN after the linear layers too, 57M parameters, from 63 pixels",
        256,
        True,
        partial(AlexNet, between="norm"),
    ),
    ModelInfo("cnn4", "four 3x3 convolutions of FedBABU, BN without running statistics, 116k", 32, False, CNN4),
    ModelInfo("vgg11", "VGG11 without normalization of FedNTD and FedFN, 9.8M parameters", 32, False, VGG11),
    ModelInfo(
        "mobilenet-v1",
        "MobileNet of FedBABU and FedFN, BN without running statistics, 3.2M parameters",
        32,
        False,
        MobileNetV1,
    ),
    ModelInfo("resnet20", "ResNet-20 for CIFAR, option A, 270k parameters, any size from 8", 32, True, CifarResNet),
    ModelInfo(
        "resnet20-b",
        "ResNet-20 for CIFAR, option B (convolutions in the shortcuts), any size from 8",
        32,
        True,
        partial(CifarResNet, option="B"),
    ),
    ModelInfo(
        "resnet18-cifar",
        "ResNet-18 with a 3x3 stem of FedBABU, 11.2M parameters, any size from 8",
        32,
        True,
        partial(CifarResNet, widths=(64, 128, 256, 512), blocks=2, option="B"),
    ),
    ModelInfo(
        "resnet18-cifar-untracked",
        "the same with BN without running statistics, of FedNTD",
        32,
        True,
        partial(CifarResNet, widths=(64, 128, 256, 512), blocks=2, option="B", tracked=False),
    ),
)


def models() -> dict[str, ModelInfo]:
    """The models of this library by name; `build` also takes "torchvision:NAME", "timm:NAME" and "mymodule:Net".

    >>> list(models())
    ['cnn-small', 'lenet', 'digits-cnn', 'digits-cnn-fedbn', 'alexnet', ...]
    """
    return {info.name: info for info in _MODELS}


def build(
    name: str,
    classes: int,
    channels: int = 3,
    size: int | None = None,
    seed: int = 0,
    pretrained: bool = False,
    weights: str | Path | None = None,
) -> nn.Module:
    """Build a model with batch normalization (methods change it by surgery); the same seed gives the same weights.

    `weights` names a file with a state dict to start from. A head of another size keeps its new values; the model's
    `loaded_weights` lists what was loaded. `pretrained` takes the weights of torchvision or timm, which may be
    downloaded. torch's global random generators do not change.

    >>> a, b = build("cnn-small", 10, seed=1), build("cnn-small", 10, seed=1)
    >>> torch.equal(a.head.weight, b.head.weight)
    True
    """
    if classes < 1 or channels < 1 or (size is not None and size < 1):
        raise BadInput(
            f'Model "{name}": classes, channels and size must be positive, got {classes}, {channels}, {size}.'
        )
    name = bare(name)
    library, _, rest = name.partition(":")
    ours = models()
    custom = None if name in ours else find(name)
    if name not in ours and custom is None and (library not in LIBRARIES or not rest):
        known = [*ours, *(f"{prefix}:" for prefix in LIBRARIES), *plugins.found("models")]
        elsewhere = [f'"{prefix}:{name}"' for prefix in LIBRARIES if name in _names_of(prefix)]
        question = f"did you mean {' or '.join(elsewhere)}? " if elsewhere else did_you_mean(name, known)
        raise BadInput(
            f'Unknown model "{name}": {question}expected one of {", ".join(ours)}, torchvision:NAME, timm:NAME or '
            "a custom mymodule:Net."
        )
    if pretrained and (name in ours or custom is not None):
        raise BadInput(f'Model "{name}" has no pretrained weights. Leave out pretrained or pass weights=FILE.')
    if pretrained and weights is not None:
        raise BadInput(f'Model "{name}": pass either pretrained or weights=, not both.')
    # Only the CPU's generator is forked and seeded: torch.manual_seed would also seed every GPU.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(noise.seed_of("model", seed, name))
        if name in ours:
            info = ours[name]
            model = info.make(classes, channels, info.size if size is None else size)
        elif custom is not None:
            model = make_model(name, custom, classes, channels, size)
        else:
            model = build_zoo(library, rest, classes, channels, size, pretrained)
        if weights is not None:
            model.loaded_weights = load_weights(model, weights)  # type: ignore[assignment]  # a report, for notes
    return model


def _names_of(library: str) -> list[str]:
    """The models of torchvision or timm; none if it is not installed."""
    try:
        return zoo_names(library)
    except BadInput:
        return []
