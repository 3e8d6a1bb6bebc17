"""Load an exported model: a plain module with its classes and its preprocessing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.part import Part
from fednorms.core.paths import given_path
from fednorms.core.views import Local
from fednorms.data import Preprocessing
from fednorms.data.folders import read_image
from fednorms.data.folders.preparations import preparation
from fednorms.layers.folding import fold
from fednorms.models.weights import plain
from fednorms.runs.assemble import build_net
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.seal import hash_of_file, unsealed

TENSORS, ABOUT, FORMAT = "model.safetensors", "model.json", 2


@dataclass(frozen=True)
class LoadedModel:
    """A trained model that takes images and gives probabilities.

    Called on a batch N x C x H x W, uint8 or floats in [0, 1], it returns N x classes probabilities; `logits` are the
    values before the softmax. `read` reads an image file as the training images were read. Where training images were
    larger than the network's input, both sizes are accepted; the larger one is cropped to its center. `module` takes
    images that `prepare` has cropped, scaled and normalized. `about` is the content of the export's model.json.

    >>> model = LoadedModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), ("cat", "dog"), Preprocessing(), (1, 2, 2))
    >>> model(torch.zeros(3, 1, 2, 2, dtype=torch.uint8)).shape
    torch.Size([3, 2])
    """

    module: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    shape: tuple[int, int, int]
    measures: Part | None = None  # normalizes with statistics of the images it is given
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape in which files are read: larger than `shape` where training images were cropped."""
        channels, height, width = self.about.get("preprocessing", {}).get("stored") or self.shape
        return channels, height, width

    def read(self, file: str | Path) -> Tensor:
        """Read an image file as uint8, C x H x W, prepared and resized as the training images were."""
        prepared = preparation(self.about.get("preprocessing", {}).get("prepared", ""))
        return read_image(file, self.stored_shape, prepared)

    def prepare(self, images: Tensor) -> Tensor:
        """Images as `module` takes them: cropped, scaled to [0, 1] and normalized."""
        sizes = dict.fromkeys((self.shape, self.stored_shape))
        want = " or N x ".join(" x ".join(map(str, size)) for size in sizes)
        if not isinstance(images, Tensor):
            raise BadInput(
                f"Images must be a tensor of N x {want}, uint8 or floats in [0, 1], got {type(images).__name__}. "
                "fednorms.predict(folder, files) reads image files."
            )
        if images.dim() != 4 or tuple(images.shape[1:]) not in sizes:
            raise BadInput(f"Images must be a batch of N x {want}, got {tuple(images.shape)}.")
        of_bytes = self.about.get("dtype") == "uint8"  # otherwise floating-point images have their own scale
        if of_bytes and images.is_floating_point() and images.numel() and float(images.max()) > 1.5:
            raise BadInput(
                f"Floating-point images must be on the scale from 0 to 1, got values up to {float(images.max()):g}. "
                "Divide by 255, or give uint8."
            )
        like = next(self.module.parameters(), torch.zeros(()))
        images = self.preprocessing.cropped(images)
        x = self.preprocessing.unit(images.to(like.device), dtype=like.dtype)
        fixed = self.measured(images).preprocessing if self.measures else self.preprocessing
        return fixed.normalize(x)

    def measured(self, images: Tensor) -> LoadedModel:
        """The model with the input statistics of these images, for parts that normalize with a site's own (FedRDN)."""
        if self.measures is None:
            return self
        like = next(self.module.parameters(), torch.zeros(()))
        job = next(job for job in self.measures.passes() if job.when == "setup")
        images = self.preprocessing.cropped(images)
        unit = self.preprocessing.unit(images.to(like.device), dtype=like.dtype)
        pair, _ = job.client(cast(Local, _Images(unit)))
        fixed = replace(site_preprocessing(pair["mean"], pair["std"]), crop=self.preprocessing.crop)
        return replace(self, preprocessing=fixed, measures=None)

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Logits of a batch of images, N x classes."""
        return logits_of(self.module, self.prepare(images))

    def __call__(self, images: Tensor) -> Tensor:
        """Probabilities of a batch of images, N x classes."""
        return self.logits(images).softmax(1)

    def __repr__(self) -> str:
        trained = self.about.get("trained", {})
        of = f"site {trained['site']!r}" if trained.get("site") else "all sites"
        shape = "x".join(map(str, self.shape))
        name = self.about.get("architecture", {}).get("model", type(self.module).__name__)
        return f"LoadedModel({name}, {len(self.classes)} classes, {shape}, {of})"


def logits_of(module: nn.Module, x: Tensor) -> Tensor:
    """A network's logits; some return them together with features.

    >>> logits_of(nn.Identity(), torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def load_model(folder: str | Path, model: nn.Module | None = None) -> LoadedModel:
    """Read a model that `export` or `adapt` wrote; a custom architecture must be passed as `model`.

    >>> load_model("nowhere")
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not an exported model: it has no readable model.json ...
    """
    folder = given_path("folder", folder)
    about = _about(folder)
    shape = tuple(about["shape"])
    made = about["architecture"]
    if model is None and made["custom"]:
        raise BadInput(
            f"{folder} holds a custom model ({made['model']}). Pass the same model: load_model(folder, model=...)."
        )
    recipe = Recipe.make({k: made[k] for k in ("model", "method", "head", "precision")}, str(folder / ABOUT))
    net = build_net(recipe, len(about["classes"]), (shape[0], made["size"], made["size"]), model)
    module = net.plain(net.initial)
    if about["format"] > 1:  # before, tensors were those of the layers that were trained
        fold(module, shape)
    try:
        known = about.get("files", {}).get(TENSORS)  # version 0.1 wrote no hashes
        if known is not None and hash_of_file(folder / TENSORS) != known:
            raise BadInput(f"{folder / TENSORS} is damaged: its content hash differs. Copy or export the model again.")
        module.load_state_dict(plain(load_file(folder / TENSORS), str(folder / TENSORS)))
    except (OSError, SafetensorError) as error:
        raise BadInput(f"Cannot read {folder / TENSORS}: {error}.") from error
    except RuntimeError as error:
        raise BadInput(f'{folder / TENSORS} does not fit the model "{made["model"]}": {error}') from error
    done = about["preprocessing"]
    measures = next((p for p in net.method.parts if p.name == done["measure"]), None)
    preprocessing = Preprocessing.from_dict({k: done[k] for k in ("mean", "std", "crop") if k in done})
    return LoadedModel(module, tuple(about["classes"]), preprocessing, shape, measures, about)


def site_preprocessing(mean: Tensor, std: Tensor) -> Preprocessing:
    """A site's own input statistics as a fixed normalization, bit for bit the same.

    >>> site_preprocessing(torch.tensor([0.5]), torch.tensor([0.0])).std[0] > 0
    True
    """
    return Preprocessing(tuple(mean.tolist()), tuple(std.clamp(min=1e-6).tolist()))


@dataclass(frozen=True)
class _Images:
    """Images as a part's setup pass reads them."""

    unit: Tensor

    def images(self, *, augmented: bool = False) -> Iterator[Tensor]:  # images of a test are never augmented
        yield from self.unit.split(256)


def _about(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads((folder / ABOUT).read_bytes())
        version = stored["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{folder} is not an exported model: it has no readable {ABOUT} ({reason}).") from error
    if version not in (1, FORMAT):
        raise BadInput(f"{folder / ABOUT} has format {version}; this version of fednorms reads 1 to {FORMAT}.")
    try:
        return unsealed(stored)
    except ValueError:
        raise BadInput(
            f"{folder / ABOUT} is damaged: its content hash differs. Copy or export the model again; if you have "
            'changed the file yourself, remove its entry "hash".'
        ) from None
