"""Federations from what is already in memory: NumPy or torch arrays, or any torch dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.problems import raise_problems
from fednorms.data.splits import split

Array = Tensor | np.ndarray
Layout = Literal["NHW", "NHWC", "NCHW"]
Pair = tuple[Any, Any]

_CHANNELS = (1, 3, 4)
_PARTS = ("train", "val", "test")


def from_arrays(
    sites: Mapping[str, Pair | Mapping[str, Pair]],
    classes: Sequence[str] | None = None,
    val: float = 0.0,
    test: float = 0.2,
    seed: int = 0,
    layout: Layout | None = None,
    channels: int | None = None,
    groups: Mapping[str, Sequence[object]] | None = None,
    domains: Mapping[str, str] | None = None,
    attributes: Mapping[str, Mapping[str, str]] | None = None,
    preprocessing: Preprocessing | None = None,
    name: str = "arrays",
) -> Federation:
    """Make a federation of arrays: every site is `(x, y)`, split here, or `{"train": (x, y), "test": (x, y)}`.

    Args:
        sites: the data by site name. Given splits are used as they are; a site with only "test" is unseen.
        classes: names of the classes, by default "0", "1", ... up to the largest label.
        val: fraction of a site's `(x, y)` for validation.
        test: fraction for testing.
        seed: decides, together with the site's name, which samples those are.
        layout: the axes of x. By default three axes are N,H,W, and four are N,C,H,W or N,H,W,C, depending on which of
            C is 1, 3 or 4. Set it where this is not clear.
        channels: convert to 1 (luminance) or 3 (repeated gray, alpha dropped); by default unchanged.
        groups: for a site, one group (a patient) per sample; the samples of a group stay in one split.
        domains: the domain of a site, by default its name.
        attributes: free text about a site (a scanner, a modality).
        preprocessing: by default pixels are scaled to [-1, 1]; floats outside [0, 1] are taken as already normalized
            and used as they are.
        name: the federation's name.

    Images of type uint8, float32 and float64 keep their type and are copied only if they are split or their layout
    changes; if only some sites have float64, the others' floats become float64, too.

    >>> x, y = np.zeros((10, 8, 8), np.uint8), np.arange(10) % 2
    >>> from_arrays({"a": (x, y), "b": {"test": (x, y)}}, classes=["cat", "dog"])
    Federation 'arrays': 2 sites, 2 classes, images 1x8x8
    site  domain  train  val  test  classes
    a     a           8    -     2  2/2
    b     b           -    -    10  2/2
    """
    if not isinstance(sites, Mapping):
        raise BadInput(
            f"from_arrays: expected a dictionary of sites, got {type(sites).__name__}. Write from_arrays("
            '{"north": (images, labels), "south": (images, labels)}).'
        )
    if channels not in (None, 1, 3):
        raise BadInput(f'Federation "{name}": channels must be 1 or 3, got {channels}.')
    if layout not in (None, "NHW", "NHWC", "NCHW"):
        raise BadInput(f'Federation "{name}": layout must be NHW, NHWC or NCHW, got "{layout}".')
    problems = [
        f'{what} given for "{site}", which is not a site'
        for what, named in (("groups", groups), ("domain", domains), ("attributes", attributes))
        for site in named or {}
        if site not in sites
    ]
    made: list[Site] = []
    for site, data in sites.items():
        parts: dict[str, Split] = {}
        try:
            pairs = _parts(data, val, test, seed, site, (groups or {}).get(site))
        except BadInput as problem:
            problems.append(f'site "{site}": {problem}')
            continue
        for part, (x, y, whose) in pairs.items():
            try:
                parts[part] = Split(_images(x, layout, channels), _labels(y), whose)
            except BadInput as problem:
                problems.append(f'site "{site}", {part}: {problem}')
        named = (attributes or {}).get(site, {})
        made.append(Site(site, (domains or {}).get(site, site), **parts, attributes=named))
    made = _widened(made)
    held = [part for site in made for part in site.splits.values()]
    if preprocessing is None and not problems:
        problems += _scale_problems(made)
    raise_problems(f'Federation "{name}"', problems)
    if classes is None:
        classes = [str(c) for c in range(max((int(s.y.max()) for s in held), default=0) + 1)]
    source = {"spec": "arrays", "val": val, "test": test, "seed": seed}
    return Federation(name, made, classes, preprocessing or _default_preprocessing(held), source)


def from_datasets(
    sites: Mapping[str, Any],
    classes: Sequence[str] | None = None,
    val: float = 0.0,
    test: float = 0.2,
    seed: int = 0,
    channels: int | None = None,
    groups: Mapping[str, Sequence[object]] | None = None,
    domains: Mapping[str, str] | None = None,
    attributes: Mapping[str, Mapping[str, str]] | None = None,
    preprocessing: Preprocessing | None = None,
    name: str = "datasets",
) -> Federation:
    """Make a federation of map-style torch datasets that yield (image, label).

    A site is one dataset (split as in `from_arrays`), a tuple `(train, test)` or `(train, val, test)`, or a
    mapping of these names. An image may be a tensor (C,H,W or H,W), an array (H,W or H,W,C) or a PIL image.
    Every dataset is read once, in order: a random transform is applied once, not in every epoch.
    The other options are those of `from_arrays`.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.rand(6, 3, 8, 8), torch.arange(6) % 2)
    >>> from_datasets({"a": data, "b": (data, data)}, test=0.5)
    Federation 'datasets': 2 sites, 2 classes, images 3x8x8
    site  domain  train  val  test  classes
    a     a           3    -     3  2/2
    b     b           6    -     6  2/2
    """
    problems: list[str] = []
    arrays: dict[str, Any] = {}
    named: list[tuple[str, ...] | None] = []
    for site, data in sites.items():
        parts = data
        if isinstance(data, tuple):
            if len(data) not in (2, 3):
                problems.append(f'site "{site}": give (train, test) or (train, val, test), got {len(data)} datasets')
                continue
            parts = dict(zip(("train", "test") if len(data) == 2 else _PARTS, data, strict=True))
        read: dict[str, Any] = {}
        for part, dataset in (parts if isinstance(parts, Mapping) else {"": parts}).items():
            words = getattr(dataset, "classes", None)
            named.append(tuple(map(str, words)) if isinstance(words, list | tuple) else None)
            try:
                read[part] = _read(dataset)
            except BadInput as problem:
                problems.append(f'site "{site}"{", " * bool(part)}{part}: {problem}')
        arrays[site] = read.get("") if not isinstance(parts, Mapping) else read
    raise_problems(f'Federation "{name}"', problems)
    if classes is None and named and named[0] is not None and len(set(named)) == 1:
        classes = named[0]
    return from_arrays(
        arrays, classes, val, test, seed, "NCHW", channels, groups, domains, attributes, preprocessing, name
    )


def _parts(
    data: Pair | Mapping[str, Pair],
    val: float,
    test: float,
    seed: int,
    site: str,
    groups: Sequence[object] | None,
) -> dict[str, tuple[Array, Array, np.ndarray | None]]:
    if isinstance(data, Mapping):
        if unknown := [part for part in data if part not in _PARTS]:
            raise BadInput(f"splits are named train, val and test, got {', '.join(map(str, unknown))}.")
        if groups is not None:
            raise BadInput("groups are only for a site without its own splits.")
        pairs = dict(data)
    else:
        pairs = {"": data}
    for part, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadInput(f"{part or 'data'} must be a pair (images, labels), got {type(pair).__name__}.")
    if isinstance(data, Mapping):
        return {part: (_array(x), _array(y), None) for part, (x, y) in pairs.items()}
    x, y = _array(data[0]), _array(data[1])
    if len(x) != len(y):
        raise BadInput(f"{len(x)} images but {len(y)} labels; there must be one label per image.")
    positions = split(_labels(y), {"val": val, "test": test}, seed, site, groups)
    whose = None if groups is None else np.array([str(group) for group in groups])
    if sum(len(at) > 0 for at in positions.values()) == 1:
        return {part: (x, y, whose) for part, at in positions.items() if len(at)}
    return {part: (x[at], y[at], None if whose is None else whose[at]) for part, at in positions.items() if len(at)}


def _array(values: object) -> Array:
    array = values.detach() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim == 0:
        raise BadInput(f"expected an array, got {values!r}.")
    return array


def _labels(y: Array) -> Tensor:
    if isinstance(y, Tensor):
        whole = not (y.is_floating_point() or y.is_complex())
    else:
        whole = y.dtype.kind in "iub"
    if not whole or y.ndim != 1:
        text = not isinstance(y, Tensor) and y.dtype.kind in "OSU"
        fix = " Number them, and name them with classes=." if text else ""
        raise BadInput(f"labels must be whole numbers with one axis, got {y.dtype} of shape {tuple(y.shape)}.{fix}")
    return y.cpu().long() if isinstance(y, Tensor) else torch.from_numpy(y.astype(np.int64))


def _images(x: Array, layout: Layout | None, channels: int | None) -> Tensor:
    """uint8, float32 or float64 of shape N,C,H,W."""
    x = _tensor(x)
    layout = layout or _layout(tuple(x.shape))
    if x.ndim != len(layout):
        raise BadInput(f"layout {layout} has {len(layout)} axes, but the images have shape {tuple(x.shape)}.")
    if layout == "NHW":
        x = x.unsqueeze(1)
    elif layout == "NHWC":
        x = x.permute(0, 3, 1, 2)
    return _recolored(x, channels).contiguous()


def _layout(shape: tuple[int, ...]) -> Layout:
    if len(shape) == 3:
        return "NHW"
    if len(shape) == 4:
        first, last = shape[1] in _CHANNELS, shape[3] in _CHANNELS
        if first != last:
            return "NCHW" if first else "NHWC"
    raise BadInput(f"cannot tell where the channels are in images of shape {shape}; set layout= to NCHW, NHWC or NHW.")


def _tensor(x: Array) -> Tensor:
    if isinstance(x, np.ndarray):
        kind = x.dtype.kind
        if kind == "f":
            x = x.astype(np.float32 if x.dtype.itemsize <= 4 else np.float64, copy=False)
        elif kind == "b":
            x = x.astype(np.uint8) * 255
        elif kind not in "iu":
            raise BadInput(f"images must be numbers, got an array of {x.dtype}.")
        elif x.dtype != np.uint8:
            x = x.astype(np.int64)
        # torch cannot use an array that is read-only, byte-swapped or has negative strides.
        usable = x.flags.writeable and x.dtype.isnative and all(stride >= 0 for stride in x.strides)
        x = torch.from_numpy(x if usable else np.array(x, x.dtype.newbyteorder("="), order="C"))
    x = x.cpu()
    if x.dtype == torch.bool:
        return x.to(torch.uint8) * 255
    if x.is_complex():
        raise BadInput(f"images must be real numbers, got {x.dtype}.")
    if x.is_floating_point():
        return x if x.dtype == torch.float64 else x.float()
    if x.dtype != torch.uint8 and x.numel():
        if int(x.min()) < 0 or int(x.max()) > 255:
            raise BadInput(
                f"whole-number images must be 0 to 255, got {int(x.min())} to {int(x.max())}; "
                "scale them to floats in [0, 1]."
            )
        x = x.to(torch.uint8)
    return x


def _recolored(x: Tensor, channels: int | None) -> Tensor:
    """Convert images N,C,H,W to the wanted number of channels."""
    have = x.shape[1]
    if channels is None or have == channels:
        return x
    if have == 1:
        return x.expand(-1, channels, -1, -1)
    if have in (3, 4) and channels == 3:
        return x[:, :3]
    if have in (3, 4):
        # Luminance of ITU-R BT.601, as Pillow's "L".
        weight = torch.tensor([0.299, 0.587, 0.114], dtype=torch.promote_types(x.dtype, torch.float32)).view(1, 3, 1, 1)
        gray = (x[:, :3] * weight).sum(1, keepdim=True)
        return gray if x.is_floating_point() else gray.round().to(torch.uint8)
    raise BadInput(f"cannot make {channels} channels of {have}.")


def _widened(sites: list[Site]) -> list[Site]:
    """The sites with all floating-point images in float64 if some are: one type, and no value is rounded."""

    def wide(split: Split | None) -> Split | None:
        if split is None or not isinstance(split.x, Tensor) or split.x.dtype != torch.float32:
            return split
        return replace(split, x=split.x.double())

    if not any(split.x.dtype == torch.float64 for site in sites for split in site.splits.values()):
        return sites
    return [replace(s, train=wide(s.train), val=wide(s.val), test=wide(s.test)) for s in sites]


def _range(splits: Sequence[Split]) -> tuple[float, float]:
    values = [s.x for s in splits if isinstance(s.x, Tensor) and s.x.is_floating_point() and s.x.numel()]
    return min((float(x.min()) for x in values), default=0.0), max((float(x.max()) for x in values), default=1.0)


def _scale_problems(sites: Sequence[Site]) -> list[str]:
    found = []
    for site in sites:
        low, high = _range(list(site.splits.values()))
        if low >= 0 and 2 < high <= 255:
            found.append(
                f'site "{site.name}": images are floats from {low:g} to {high:g}, which looks like 0 to 255; '
                "divide by 255, convert to uint8, or pass preprocessing= if this is intended"
            )
    return found


def _default_preprocessing(splits: Sequence[Split]) -> Preprocessing:
    low, high = _range(splits)
    if not splits or splits[0].x.ndim != 4 or not (low >= 0 and high <= 1):
        return Preprocessing()
    return Preprocessing.centered(splits[0].shape[0])


def _read(dataset: Sequence[Any]) -> tuple[Tensor, np.ndarray]:
    """All images and labels of a dataset, read once into one array."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise BadInput(
            f"expected a dataset with __len__ and __getitem__, got {type(dataset).__name__}; "
            "an iterable dataset must be read into a list first."
        )
    images: Tensor | None = None
    labels = np.zeros(len(dataset), dtype=np.int64)
    for i in range(len(dataset)):
        item = dataset[i]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise BadInput(f"item {i} is not a pair (image, label) but {type(item).__name__}.")
        image, label = _image(item[0], i), np.asarray(item[1])
        if label.ndim or label.dtype.kind not in "iub":
            raise BadInput(f"item {i}: the label must be a whole number, got {item[1]!r}.")
        if images is None:
            images = torch.empty((len(dataset), *image.shape), dtype=image.dtype)
        if image.shape != images.shape[1:] or image.dtype != images.dtype:
            raise BadInput(
                f"item {i} is {image.dtype} of shape {tuple(image.shape)}, but item 0 is {images.dtype} "
                f"of shape {tuple(images.shape[1:])}; resize and convert in the dataset's transform."
            )
        images[i] = image
        labels[i] = int(label)
    return (torch.empty(0, 1, 1, 1) if images is None else images), labels


def _image(image: object, i: int) -> Tensor:
    """C,H,W."""
    if isinstance(image, Image.Image):
        image = np.array(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
        return _images(image[None], "NHW" if image.ndim == 2 else "NHWC", None)[0]
    try:
        array = _array(image)
        if array.ndim not in (2, 3):
            raise BadInput(f"images have two or three axes, got shape {tuple(array.shape)}.")
        if array.ndim == 3 and isinstance(array, Tensor):
            return _images(array[None], "NCHW", None)[0]
        return _images(array[None], None, None)[0]
    except BadInput as problem:
        raise BadInput(f"item {i}: {problem}") from None
