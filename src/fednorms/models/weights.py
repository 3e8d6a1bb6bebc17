"""Load a state dict from a file; nothing is downloaded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.head import split_head


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a torch file (read with weights_only: no code in it runs).

    A torch file may hold the state dict itself or under "state_dict" or "model".

    >>> read_state_dict("missing.pt")
    Traceback (most recent call last):
    fednorms.BadInput: Weights: no file "missing.pt"; expected a .safetensors or .pt file with a state dict.
    """
    file = Path(path)
    if not file.is_file():
        raise BadInput(f'Weights: no file "{path}"; expected a .safetensors or .pt file with a state dict.')
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return plain(load_file(file), str(path))
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f'Weights: cannot read "{path}" ({type(error).__name__}: {error}); '
            "expected a .safetensors or .pt file with a state dict."
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()):
        raise BadInput(f'Weights: "{path}" is not a state dict; expected names with tensors.')
    return plain(loaded, str(path))


def plain(tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """The same tensors; refuse those that cannot be a model's weights: sparse, complex, quantized or without values.

    >>> plain({"w": torch.zeros(2, dtype=torch.complex64)}, "w.pt")
    Traceback (most recent call last):
    fednorms.BadInput: Weights: "w.pt" has a complex tensor, "w"; expected dense tensors of real numbers. ...
    """
    for name, tensor in tensors.items():
        kinds = {
            "meta": tensor.is_meta,
            "sparse": tensor.layout != torch.strided,
            "nested": tensor.is_nested,
            "complex": tensor.is_complex(),
            "quantized": tensor.is_quantized,
        }
        if found := [kind for kind, true in kinds.items() if true]:
            raise BadInput(
                f'Weights: "{source}" has a {found[0]} tensor, "{name}"; expected dense tensors of real numbers. '
                "Convert it before you save it."
            )
    return tensors


@dataclass(frozen=True)
class Loaded:
    """A report of loaded weights: which tensors were loaded, and which kept their new values and why.

    >>> print(Loaded("w.pt", ("body.weight",), {"head.weight": "10x8 here, 1000x8 in the file"}))
    w.pt: 1 of 2 tensors loaded; fresh: head.weight (10x8 here, 1000x8 in the file)
    """

    source: str
    loaded: tuple[str, ...]
    fresh: Mapping[str, str]

    def __str__(self) -> str:
        fresh = ", ".join(f"{name} ({why})" for name, why in self.fresh.items())
        count = f"{self.source}: {len(self.loaded)} of {len(self.loaded) + len(self.fresh)} tensors loaded"
        return f"{count}; fresh: {fresh}" if fresh else count


def load_weights(model: nn.Module, path: str | Path) -> Loaded:
    """Load a state dict into `model` and report what was loaded; a head of another size keeps its values.

    >>> import tempfile
    >>> a, b = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, n)) for n in (10, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(a.state_dict(), f"{folder}/a.pt")
    ...     list(load_weights(b, f"{folder}/a.pt").fresh)
    ['1.weight', '1.bias']
    """
    return load_tensors(model, read_state_dict(path), str(path))


def load_tensors(model: nn.Module, tensors: dict[str, Tensor], source: str) -> Loaded:
    """Load named tensors into `model` and report what was loaded; a head of another size keeps its values.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    >>> print(load_tensors(net, net.state_dict(), "itself"))
    itself: 4 of 4 tensors loaded
    """
    own = model.state_dict()
    heads = tuple(f"{name}." for name in split_head(model))
    fresh: dict[str, str] = {}
    problems: list[str] = []
    for name, value in own.items():
        if name not in tensors:
            if name.startswith(heads) or not value.is_floating_point():
                fresh[name] = "not in the file"
            else:
                problems.append(f"{name} is missing")
        elif tensors[name].shape != value.shape:
            if name.startswith(heads):
                fresh[name] = f"{_by(value)} here, {_by(tensors[name])} in the file"
            else:
                problems.append(f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(value.shape)}")
    problems += [f"{name} is not in the model" for name in tensors if name not in own]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise BadInput(
            f'Weights: "{source}" does not fit {type(model).__name__}: {"; ".join(problems[:5])}{more}; '
            "expected the state dict of the same architecture."
        )
    chosen = {name: tensors[name] for name in own if name not in fresh}
    model.load_state_dict(chosen, strict=False)
    return Loaded(source, tuple(chosen), fresh)


def _by(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
