"""Models of the user by name: "mymodule:Net", or the name that another package gave its model."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fednorms.core import plugins
from fednorms.core.errors import BadInput

Make = Callable[..., nn.Module]
_NAME = re.compile(r"(?!(?:custom|torchvision|timm):)([A-Za-z_][\w.]*):([A-Za-z_]\w*)$")
# What a model may call the number of classes, the channels of the images, and their pixels.
_CLASSES, _CHANNELS, _SIZE = ("classes", "num_classes"), ("channels", "in_channels", "in_chans"), ("size", "img_size")


def bare(name: str) -> str:
    """A model's name without the hash of its code, which a run records.

    >>> bare("mymodule:Net@12ab34cd56ef"), bare("cnn-small")
    ('mymodule:Net', 'cnn-small')
    """
    return name if name.startswith("custom:") else name.partition("@")[0]


def find(name: str) -> Make | None:
    """The class or function that makes a custom model; None if the name is not one of a custom model.

    >>> find("cnn-small") is None, find("fednorms.models.lenet:LeNet").__name__
    (True, 'LeNet')
    """
    name = bare(name)
    plugin = plugins.found("models").get(name)
    named = _NAME.match(name)
    if plugin is None and named is None:
        return None
    if plugin is not None:
        make = plugin.load()
    else:
        assert named is not None
        module = plugins.import_named(named[1], f'Model "{name}" names')
        make = getattr(module, named[2], None)
        if make is None:
            raise BadInput(f'Model "{name}": the module "{named[1]}" has no "{named[2]}".')
    is_model = isinstance(make, type) and issubclass(make, nn.Module)
    if not (is_model or (inspect.isfunction(make) and set(_CLASSES) & set(inspect.signature(make).parameters))):
        raise BadInput(
            f'Model "{name}" must be a class derived from nn.Module, or a function of classes, channels and size that '
            f"returns one; got {type(make).__name__}."
        )
    return make  # type: ignore[no-any-return]


def module_of(name: str) -> str:
    """The module that a model's name asks to import; empty if it names none.

    >>> module_of("mymodule:Net@12ab34cd56ef"), module_of("torchvision:resnet18"), module_of("cnn-small")
    ('mymodule', '', '')
    """
    named = _NAME.match(bare(name))
    return named[1] if named and bare(name) not in plugins.found("models") else ""


def refuse_unasked(name: str, where: str) -> None:
    """Refuse to import the model that a stored run names, unless FEDNORMS_MODELS lists its module.

    Whoever types mymodule:Net wants that code to run; whoever opens a run that somebody sent may not.
    """
    module, allowed = module_of(name), os.environ.get("FEDNORMS_MODELS", "").split()
    if not module or module in (*allowed, *sys.modules):
        return
    raise BadInput(
        f'{where} names its model as code, "{bare(name)}", and opening it would import that module. If you trust it, '
        f"set FEDNORMS_MODELS={module}, or pass the model in Python as model=."
    )


def make_model(name: str, make: Make, classes: int, channels: int, size: int | None) -> nn.Module:
    """Call the class or function with the arguments that it takes, by name.

    >>> def mlp(num_classes, width=8): return nn.Linear(width, num_classes)
    >>> make_model("mymodule:mlp", mlp, classes=3, channels=1, size=None).out_features
    3
    """
    given: dict[str, Any] = dict.fromkeys(_CLASSES, classes) | dict.fromkeys(_CHANNELS, channels)
    if size is not None:
        given |= dict.fromkeys(_SIZE, size)
    arguments = plugins.called_with(make, given)
    if isinstance(arguments, str):
        raise BadInput(
            f'Model "{name}" needs the argument "{arguments}", which fednorms does not know. It passes '
            f"{', '.join(given)} to a model that takes them. Give the others a default, or name a function "
            "that takes only these."
        )
    model = make(**arguments)
    if not isinstance(model, nn.Module):
        raise BadInput(f'Model "{name}" returned {type(model).__name__} instead of an nn.Module.')
    return model
