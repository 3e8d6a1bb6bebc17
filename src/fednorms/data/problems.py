"""What is wrong with a federation: everything is checked, and all problems are raised together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.data.mapped import MappedImages

if TYPE_CHECKING:
    from fednorms.data.federation import Federation, Site, Split

_CHUNK = 256  # images that are searched for NaN at once
_SHOWN = 20  # problems in a message


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """Raise one `BadInput` with all problems, or do nothing if there are none.

    >>> raise_problems('Federation "f"', [])
    """
    if not problems:
        return
    if len(problems) == 1:
        raise BadInput(f"{where}: {_sentence(problems[0])}")
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    lines = "".join(f"\n  - {_sentence(problem)}" for problem in [*problems[:_SHOWN], *more])
    raise BadInput(f"{where}: {len(problems)} problems.{lines}")


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def problems_of(federation: Federation) -> list[str]:
    """Everything that is wrong with a federation; of clients that are made on demand, a few are looked at."""
    sites = federation.examined
    own = [replace(s, name="the server", train=federation.proxy, val=None, test=None) for s in sites[:1]]
    holders = [*sites, *own] if federation.proxy is not None else sites
    named = [(site.name, split) for site in holders for split in site.splits.values()]
    shapes = _where((split.shape, name) for name, split in named if _holds_images(split) and split.x.ndim == 4)
    return [
        *_class_problems(federation.classes),
        *_site_problems(sites),
        *(problem for site in holders for problem in data_problems(site, len(federation.classes))),
        *_differences(shapes, _where((split.x.dtype, name) for name, split in named if _holds_images(split))),
        *_preparation_problems(federation, next(iter(shapes)) if len(shapes) == 1 else None),
    ]


def _class_problems(classes: Sequence[str]) -> list[str]:
    found = [] if classes else ["the list of classes is empty; name at least one class"]
    if twice := [c for c, n in Counter(classes).items() if n > 1]:
        found.append(f"class names given twice: {some(twice)}")
    return found


def _site_problems(sites: Sequence[Site]) -> list[str]:
    found = []
    if not sites:
        found.append("it has no sites; give at least one with training data")
    elif all(site.train is None for site in sites):
        found.append("no site has training data; at least one site needs a train split")
    counts = Counter(site.name for site in sites)
    return found + [
        f'{n} sites are named "{name}"; give every site its own name' for name, n in counts.items() if n > 1
    ]


def data_problems(site: Site, classes: int) -> list[str]:
    """What is wrong with the data of one site."""
    found = []
    if not site.name or not site.domain:
        found.append(f'site "{site.name}" needs a name and a domain, got domain "{site.domain}"')
    if not site.splits:
        found.append(f'site "{site.name}" has no data; give it a train or test split, or leave it out')
    for part, split in site.splits.items():
        found += [f'site "{site.name}", {part}: {problem}' for problem in _split_problems(split, classes)]
    return found


def _differences(shapes: Mapping[Any, list[str]], dtypes: Mapping[Any, list[str]]) -> list[str]:
    """Shapes and types that are not the same at all sites."""
    found = []
    if len(shapes) > 1:
        listed = "; ".join(f"{by(shape)} at {some(sites)}" for shape, sites in shapes.items())
        found.append(f"sites have images of different shapes (C x H x W): {listed}; resize them to one shape")
    if len(dtypes) > 1 and all(_image_type(dtype) for dtype in dtypes):
        listed = "; ".join(f"{dtype} at {some(sites)}" for dtype, sites in dtypes.items())
        found.append(f"sites have images of different types: {listed}; convert them to one")
    return found


def _preparation_problems(federation: Federation, shape: tuple[int, ...] | None) -> list[str]:
    """What preprocessing and protocol expect of the images (if they have one shape) and the classes."""
    found = []
    mean, crop = federation.preprocessing.mean, federation.preprocessing.crop
    if crop is not None and shape and crop > min(shape[1:]):
        found.append(f"preprocessing crops {crop} pixels but the images are {by(shape)}")
    weights, classes = federation.protocol.class_weights, len(federation.classes)
    if weights and len(weights) != classes:
        found.append(f"its protocol has {len(weights)} class weights for {classes} classes")
    if mean is not None and shape and len(mean) not in (1, shape[0]):
        found.append(f"preprocessing has {len(mean)} channels but the images are {by(shape)}")
    return found


def _where(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """The sites of every value, each named once."""
    found: dict[Any, list[str]] = {}
    for value, site in pairs:
        if site not in found.setdefault(value, []):
            found[value].append(site)
    return found


def _holds_images(split: Split) -> bool:
    return isinstance(split.x, Tensor | MappedImages)


def _split_problems(split: Split, classes: int) -> list[str]:
    found = []
    x, y = split.x, split.y
    if not _holds_images(split) or not isinstance(y, Tensor):
        kinds = f"{type(x).__name__} and {type(y).__name__}"
        return [f"images and labels must be torch tensors, got {kinds}; from_arrays converts other arrays"]
    if x.ndim != 4:
        found.append(f"images must have four axes (N, C, H, W), got shape {tuple(x.shape)}")
    if not _image_type(x.dtype):
        found.append(f"images must be uint8 or floating point, got {x.dtype}")
    if y.dtype != torch.int64 or y.ndim != 1:
        found.append(f"labels must be int64 with one axis, got {y.dtype} of shape {tuple(y.shape)}")
    elif len(y) and classes and (int(y.min()) < 0 or int(y.max()) >= classes):
        at = int(((y < 0) | (y >= classes)).nonzero()[0])
        found.append(
            f"labels must be 0 to {classes - 1} for {classes} classes, got {int(y[at])} at position {at} "
            f"(range {int(y.min())} to {int(y.max())})"
        )
    if len(x) != len(y):
        found.append(f"{len(x)} images but {len(y)} labels; there must be one label per image")
    if isinstance(x, Tensor) and x.is_floating_point():
        bad = [i + start for start in range(0, len(x), _CHUNK) for i in _not_finite(x[start : start + _CHUNK])]
        if bad:
            found.append(
                f"{len(bad)} images have values that are not finite (NaN or infinity), the first at position {bad[0]}"
            )
    return found


def _image_type(dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 or dtype.is_floating_point


def _not_finite(x: Tensor) -> list[int]:
    return (~torch.isfinite(x).flatten(1).all(dim=1)).nonzero().flatten().tolist() if x.ndim > 1 else []


def by(shape: Sequence[int]) -> str:
    """A shape as text.

    >>> by((3, 32, 32))
    '3x32x32'
    """
    return "x".join(map(str, shape))


def some(names: Sequence[object], most: int = 8) -> str:
    """The first few names, quoted.

    >>> some(["a", "b", "c"], most=2)
    '"a", "b" and 1 more'
    """
    listed = ", ".join(f'"{n}"' if isinstance(n, str) else str(n) for n in names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
