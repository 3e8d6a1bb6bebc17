"""Write load.py: a short program that loads an exported model without fednorms, from torch's own layers."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednorms.core.dropout import KeyedDropout, KeyedStochasticDepth
from fednorms.data import Preprocessing
from fednorms.data.folders import Prepared, preparations
from fednorms.data.folders.decode import MODES
from fednorms.layers import UnitNormLinear
from fednorms.models import sizes
from fednorms.models.registry import models
from fednorms.models.zoo import LIBRARIES, zoo_options
from fednorms.runs.use.load import logits_of

LOADER = "load.py"
_SILENT = (KeyedDropout, KeyedStochasticDepth)  # do nothing in evaluation and hold no tensors
_UNIT_NORM = '''
class UnitNormLinear(nn.Linear):
    """A linear classifier of features that are divided by their norm, as FedFN has it."""

    def forward(self, x):
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min({eps!r})
        return nn.functional.linear(x, self.weight, self.bias)

'''
_READ = '''

def tensors():
    """The weights in model.safetensors by name, as `safetensors.torch.load_file` reads them."""
    data = bytearray(Path(__file__).with_name("model.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
    found = json.loads(data[8:start])
    found.pop("__metadata__", None)
    for name, a in found.items():
        flat = torch.frombuffer(data, dtype=torch.uint8)[start + a["data_offsets"][0] : start + a["data_offsets"][1]]
        found[name] = flat.clone().view(kinds[a["dtype"]]).view(a["shape"])
    return found
'''


_READ_FILE = '''


def read(file):
    """An image file as bytes, C x H x W, as the training images were read; needs Pillow."""
    import numpy as np
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(file))PREPARED
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    pixels = np.array(image.convert(MODE).resize(SIZE, Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)
'''


class NotPlain(Exception):
    """Why a model cannot be loaded without fednorms, in words."""


def own_layers(module: nn.Module) -> list[str]:
    """The layers of a folded model that torch does not have and load.py cannot define.

    >>> from fednorms.layers import SwitchableNorm
    >>> own_layers(nn.Sequential(SwitchableNorm(2), nn.ReLU()))
    ['fednorms.layers.SwitchableNorm']
    """
    kinds = {type(m) for m in module.modules()} - {UnitNormLinear}
    ours = [k for k in kinds if k.__module__.startswith(("fednorms.layers", "fednorms.core"))]
    return sorted(f"fednorms.layers.{k.__name__}" for k in ours if not issubclass(k, _SILENT))


def loader(
    name: str,
    module: nn.Module,
    bare: nn.Module,
    classes: list[str],
    shape: tuple[int, int, int],
    size: int,
    preprocessing: Preprocessing,
    measured: bool,
    steps: list[str],
    files: tuple[tuple[int, int, int], Prepared | None] | None,
) -> str:
    """The text of load.py for a folded `module` that methods made of the model `name`, as built: `bare`.

    It defines load(), prepare(images), read(file) and CLASSES. `files` is how image files become images; without it
    there is no read. If the input's statistics are `measured`, they are those of the images given to prepare.
    `NotPlain` says why there can be no load.py.
    """
    if layers := own_layers(module):
        raise NotPlain(f"torch has no equal of {', '.join(layers)}, whose statistics depend on each image")
    imports, source, make = _architecture(name, len(classes), shape[0], size)
    replaced = _replacements(bare, module)
    lines = [f"    model = {make}"] if make else []
    for text, names in replaced.items():
        if len(names) == 1:
            lines.append(f'    model.set_submodule("{names[0]}", {text})')
        else:
            listed = textwrap.wrap(" ".join(names), 90)
            quoted = f'"{listed[0]}"' if len(listed) == 1 else '"""' + "\n        ".join(["", *listed]) + '\n    """'
            lines += [f"    for name in {quoted}.split():", f"        model.set_submodule(name, {text})"]
    double = next((t.dtype for t in module.parameters()), torch.float32) is torch.float64
    lines += [f"    model{'.double()' if double else ''}.load_state_dict(tensors())", "    return model.eval()"]
    units = [m for m in module.modules() if isinstance(m, UnitNormLinear)]
    needs = " and ".join(["torch", *imports])
    parts = [
        f'"""Load this model without fednorms; needs only {needs}.\n\n'
        f"    from load import CLASSES, load, prepare\n    model = load({'' if make else 'YourModel()'})\n"
        f'    probabilities = model(prepare(images)).softmax(1)\n"""\n\n',
        "from __future__ import annotations\n\nimport json\nfrom pathlib import Path\n\nimport torch\n",
        *(f"import {library}\n" for library in imports),
        "from torch import nn\n",
        "from collections import OrderedDict\n" if "OrderedDict(" in "".join(lines) else "",
        source,
        f"\nCLASSES = {classes!r}\n\n",
        _UNIT_NORM.format(eps=units[0].eps) if units else "",
        _READ,
        f"\n\ndef load({'' if make else 'model'}):\n"
        f'    """The trained network, in evaluation mode{"" if make else f": pass a new {name}"}."""\n',
        "\n".join(lines),
        _prepare(preprocessing, measured, steps, double),
        _read(*files) if files else "",
    ]
    return re.sub(r"\n{4,}", "\n\n\n", "".join(parts))


def takes_model(text: str) -> bool:
    """Whether the user of a load.py must pass the model as it is built, because its code is not known here."""
    return "\ndef load(model):\n" in text


def run_loader(text: str, folder: Path, bare: nn.Module, images: Tensor) -> Tensor:
    """Logits of images, from a load.py in `folder`."""
    space: dict[str, Any] = {"__name__": "load", "__file__": str(folder / LOADER)}
    exec(compile(text, LOADER, "exec"), space)
    model = space["load"](*([copy.deepcopy(bare)] if takes_model(text) else []))
    with torch.no_grad():
        return logits_of(model, space["prepare"](images))


def _architecture(name: str, classes: int, channels: int, size: int) -> tuple[list[str], str, str]:
    """Libraries to import, source text to define, and the expression that builds the model; empty: the user's own."""
    library, _, rest = name.partition(":")
    if name in models():
        return [], *_ours(name, classes, channels, size)
    if library not in LIBRARIES or not rest:
        return [], "", ""
    options = {"num_classes": classes, **zoo_options(library, rest, channels, size)}
    make = "torchvision.models.get_model" if library == "torchvision" else "timm.create_model"
    return [library], "", f"{make}({', '.join([repr(rest), *(f'{k}={v!r}' for k, v in options.items())])})"


def _ours(name: str, classes: int, channels: int, size: int) -> tuple[str, str]:
    """The source of one of our networks with what it needs of fednorms, and the expression that builds it."""
    made: Any = models()[name].make
    options: dict[str, Any] = {}
    if isinstance(made, functools.partial):
        made, options = made.func, made.keywords
    source = _body(inspect.getsource(sys.modules[made.__module__]))
    if "require_size" in source:
        source = f"{_body(inspect.getsource(sizes))}\n\n\n{source}"
    if "BadInput" in source:
        source = f"class BadInput(ValueError):\n    pass\n\n\n{source}"
    call = [classes, channels, size, *(f"{k}={v!r}" for k, v in options.items())]
    return f"\n\n{source}\n", f"{made.__name__}({', '.join(map(str, call))})"


def _body(source: str) -> str:
    """The source of a module without its docstring and without imports from fednorms."""
    text = re.sub(r'\A""".*?"""\n', "", source, count=1, flags=re.DOTALL)
    return re.sub(r"^from (fednorms|__future__)\S* import .*\n", "", text, flags=re.MULTILINE).strip()


def _replacements(bare: nn.Module, module: nn.Module) -> dict[str, list[str]]:
    """The layers of `module` that differ from the model as built: expressions that make them, with their places."""
    found: dict[str, list[str]] = {}

    def visit(built: nn.Module, now: nn.Module, path: str) -> None:
        if isinstance(now, _SILENT):
            return
        same = type(built) is type(now) and list(built._modules) == list(now._modules)
        if same and built.extra_repr() == now.extra_repr():
            for name, child in now._modules.items():
                before = built._modules[name]
                if child is not None and before is not None:
                    visit(before, child, f"{path}.{name}" if path else name)
        elif path:
            found.setdefault(_expression(now), []).append(path)
        else:
            raise NotPlain(f"its layers are arranged in another way than those of {type(built).__name__}")

    visit(bare, module, "")
    return found


def _expression(module: nn.Module) -> str:
    """Code that makes a layer like this one.

    >>> _expression(nn.Conv2d(1, 2, 3, padding="same")), _expression(nn.Sequential(nn.ReLU()))
    ("nn.Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1), padding='same')", 'nn.Sequential(nn.ReLU())')
    """
    kind, where = type(module).__name__, type(module).__module__.partition(".")[0]
    prefix = {"torch": "nn.", "timm": "timm.layers."}.get(where, "")
    if isinstance(module, _SILENT):
        return "nn.Identity()"
    if type(module) is nn.Sequential:
        inner = [(name, _expression(child)) for name, child in module.named_children()]
        if all(name == str(i) for i, (name, _) in enumerate(inner)):
            return f"nn.Sequential({', '.join(text for _, text in inner)})"
        pairs = ", ".join(f'("{name}", {text})' for name, text in inner)
        return f"nn.Sequential(OrderedDict([{pairs}]))"
    if (where not in ("torch", "timm") and not isinstance(module, UnitNormLinear)) or list(module.children()):
        raise NotPlain(f"{type(module).__module__}.{kind} is neither a layer of torch nor of the model as built")
    arguments = re.sub(r"\b(padding|padding_mode)=([a-z]+)", r"\1='\2'", module.extra_repr())
    if "affine=" in arguments:  # older norms have no argument `bias`, and it says nothing without a weight
        arguments = re.sub(r"(, affine=False.*), bias=\w+", r"\1", arguments)
    return f"{prefix}{kind}({arguments.replace(', bias=True', '')})"


def _read(stored: tuple[int, int, int], prepared: Prepared | None) -> str:
    """The text of read(file)."""
    channels, height, width = stored
    made = ""
    if prepared is not None:
        sources = [inspect.getsource(f) for f in (preparations.shades_of_gray, preparations.lesion)]
        made = "\n\n\nimport math\nimport numpy as np\nfrom PIL import Image\n\n\n" + "\n\n".join(sources).rstrip()
        assert isinstance(prepared.pixels, functools.partial)
        options = ", ".join(f"{k}={v!r}" for k, v in prepared.pixels.keywords.items())
        made += _READ_FILE.replace("PREPARED", f"\n    image = {prepared.pixels.func.__name__}(image, {options})")
    text = made or _READ_FILE.replace("PREPARED", "")
    return text.replace("MODE", repr(MODES[channels])).replace("SIZE", f"({width}, {height})")


def _prepare(fixed: Preprocessing, measured: bool, steps: list[str], double: bool) -> str:
    """The text of prepare(images)."""
    told = "\n".join(textwrap.wrap("; ".join(steps) + ".", 110, initial_indent="    ", subsequent_indent="    "))
    said = "Images N x C x H x W, bytes or floats, as the network takes them. All steps, from a file on:"
    head = f'\n\n\ndef prepare(images):\n    """{said}\n\n{told}\n    """\n'
    dtype = "torch.float64" if double else "torch.float32"
    lines = [f"    x = images.to({dtype}) / 255 if images.dtype == torch.uint8 else images.to({dtype})"]
    if fixed.crop is not None:
        lines += [
            f"    height, width = (min({fixed.crop}, n) for n in x.shape[-2:])",
            "    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2",
            "    x = x[..., top : top + height, left : left + width]",
        ]
    if measured:
        lines.append(
            "    mean, std = x.mean((2, 3)).mean(0), x.flatten(2).std(2).mean(0).clamp(min=1e-6)  # of these images"
        )
        lines.append("    x = (x - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)")
    elif fixed.mean is not None and fixed.std is not None:
        if len(set(fixed.mean)) == 1 and len(set(fixed.std)) == 1:
            lines.append(f"    x = (x - {fixed.mean[0]}) / {fixed.std[0]}")
        else:
            pair = f"({list(fixed.mean)}, {list(fixed.std)})"
            lines.append(f"    mean, std = (torch.tensor(v, dtype=x.dtype).view(-1, 1, 1) for v in {pair})")
            lines.append("    x = (x - mean) / std")
    return head + "\n".join([*lines, "    return x"]) + "\n"
