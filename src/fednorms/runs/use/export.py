"""Export a trained model: a directory with the tensors, a description, and a README for its user."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fednorms._version import __version__
from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.passes import prepare_test
from fednorms.core.states import Task, context_of
from fednorms.data import Preprocessing, Split
from fednorms.data.facts import Facts
from fednorms.data.folders import Prepared
from fednorms.data.folders.preparations import preparation
from fednorms.engines.devices import repeatable
from fednorms.layers import KeyedDropout, KeyedDropout2d, KeyedStochasticDepth
from fednorms.runs.identity import custom_name
from fednorms.runs.option_names import flag
from fednorms.runs.store.atomic import check_folder
from fednorms.runs.store.seal import hash_of_file, sealed
from fednorms.runs.use.choose import (
    Chosen,
    averaged_statistics,
    check_statistics,
    input_normalizers,
    unknown_preparation,
)
from fednorms.runs.use.load import ABOUT, FORMAT, TENSORS, load_model, site_preprocessing
from fednorms.runs.use.open import OpenRun, Which, open_run

README, ONNX = "README.txt", "model.onnx"
_CHANNELS = {1: "grey", 3: "RGB", 4: "RGBA"}
_SILENT = (KeyedDropout, KeyedDropout2d, KeyedStochasticDepth)  # do nothing in evaluation and hold no tensors


@dataclass(frozen=True)
class Exported:
    """What `export` wrote, and what its user should know.

    >>> Exported([Path("out/model.json")], [])
    Exported to out: model.json
    """

    paths: list[Path]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"paths": [str(p) for p in self.paths], "notes": self.notes}

    def __repr__(self) -> str:
        files = ", ".join(p.name for p in self.paths)
        return "\n".join([f"Exported to {self.paths[0].parent}: {files}", *(f"  note: {n}" for n in self.notes)])


def export(
    path: str | Path,
    out: str | Path,
    site: str | None = None,
    which: Which = "last",
    onnx: bool = False,
    model: nn.Module | None = None,
    averaged: bool = False,
) -> Exported:
    """Write a run's global model (or a site's own) to a directory that `load_model` reads.

    A method whose clients keep tensors has no global model; `averaged` takes the mean over clients.

    The directory holds model.safetensors (a plain `state_dict`), model.json (classes, image shape, preprocessing,
    architecture, how to load) and README.txt; with `onnx` also model.onnx, which takes uint8 images. The export is
    loaded again and compared bit for bit before it gets its final name. The run's data are not needed.

    >>> export("nowhere", "out")
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    opened = open_run(path, which, model=model, device="cpu")
    images = _images(opened.facts.stored_shape)
    data = Split(images, torch.zeros(len(images), dtype=torch.int64))
    chosen = opened.choose(site, data, averaged)
    notes = chosen.notes + averaged_statistics(opened.task, opened.facts, site)
    return write_model(opened, replace(chosen, notes=notes), Path(out), site, onnx, model)


def write_model(
    opened: OpenRun,
    chosen: Chosen,
    out: Path,
    site: str | None,
    onnx: bool = False,
    model: nn.Module | None = None,
    stored: tuple[int, int, int] | None = None,
    extra: dict[str, Any] | None = None,
) -> Exported:
    """Write chosen tensors (all on the CPU) as an exported model, atomically; `stored` is the size of its images."""
    check_target(out)
    check_statistics(opened.task.net.module, opened.task.net.name)
    if onnx:
        _check_onnx(opened.facts)
    stored = stored or opened.facts.stored_shape
    task, notes = opened.task, opened.notes + chosen.notes + unknown_preparation(opened.facts)
    part = next(iter(input_normalizers(task)), None)
    crop = opened.facts.preprocessing.crop
    preprocessing = opened.facts.preprocessing
    if part and chosen.measured_here:
        preprocessing = Preprocessing(crop=crop)
        notes.append(
            f"{part.name} normalizes images with a site's own statistics. This model measures them on the images it is "
            "given. To fix them, export the model of a site, or call measured(images) once after loading."
        )
    elif part:
        fixed = site_preprocessing(chosen.mine[part.name]["mean"], chosen.mine[part.name]["std"])
        preprocessing = replace(fixed, crop=crop)
    if opened.facts.dtype != "uint8":
        notes.append("The model was trained on floating-point images. Give it images on that scale, not bytes.")
    if task.method.evaluation().predict:
        notes.append(f'"{task.method}" is tested with prototypes, but the exported model predicts with its classifier.')
    module = task.net.plain(chosen.tensors)
    measure = part.name if part and chosen.measured_here else None
    about = _about(opened, module, preprocessing, measure, stored, site, notes) | (extra or {})
    if onnx:
        what = "images normalized as `preprocessing` says" if measure else f"images as {opened.facts.dtype}, unscaled"
        about["onnx"] = {"file": ONNX, "input": f"images: {what}", "outputs": ["logits", "probabilities"]}

    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        save_file({k: v.detach().clone().contiguous() for k, v in module.state_dict().items()}, temporary / TENSORS)
        (temporary / README).write_text(_readme(about), encoding="utf-8")
        if onnx:
            _write_onnx(temporary / ONNX, module, None if measure else preprocessing, _example(about))
        about["files"] = {p.name: hash_of_file(p) for p in sorted(temporary.iterdir())}
        text = json.dumps(sealed(about), indent=2, ensure_ascii=False) + "\n"
        (temporary / ABOUT).write_text(text, encoding="utf-8")
        _verify(temporary, task, chosen, model, stored)
        if out.exists():
            out.rmdir()  # it is empty
        os.replace(temporary, out)
    except OSError as error:
        raise RunFailed(f"Cannot write {out}: {error.strerror or error}. Nothing was written.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported([out / name for name in (TENSORS, ABOUT, README, *([ONNX] if onnx else []))], notes)


def check_target(out: Path) -> None:
    """Refuse an output directory that cannot be used."""
    if out.is_dir() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty. Choose another directory to export to, or empty it first.")
    check_folder(out)


def _check_onnx(facts: Facts) -> None:
    if facts.prepared:
        raise BadInput(
            f"The training images were prepared ({facts.prepared}), which an ONNX graph cannot do. Export without "
            f"{flag('onnx')}: `fednorms predict` and load_model(...).read prepare image files the same way."
        )
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise BadInput(f"ONNX export needs {' and '.join(missing)}. Install with: pip install 'fednorms[onnx]'")


def _images(shape: tuple[int, int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (4, *shape), generator=generator, dtype=torch.uint8)


def _verify(folder: Path, task: Task, chosen: Chosen, model: nn.Module | None, stored: tuple[int, int, int]) -> None:
    """Load the export again: on random images its logits must equal those of the run's evaluation, bit for bit."""
    images = _images(stored)
    context = context_of(task, chosen.sent.round, chosen.client, evaluating=True)
    with torch.no_grad():
        with repeatable(1, "verify"):
            batch = images, torch.zeros(len(images), dtype=torch.int64)
            x, _ = prepare_test(task, batch, context, chosen.mine, chosen.sent)
            expected, _ = task.net.forward(chosen.tensors, x, train=False, batch_statistics=False)
        with repeatable(1, "verify"):
            got = load_model(folder, model).logits(images)
    if torch.equal(got, expected):
        return
    parts = [p.name for p in task.method.having("batch") if not p.normalizes_input]
    if parts:
        raise BadInput(f"{' and '.join(parts)} changes images also in evaluation, which an exported model cannot do.")
    raise RunFailed(
        f"The exported model's logits differ from the run's by up to {float((got - expected).abs().max()):g}, so "
        "nothing was written. Does the model draw random numbers in evaluation, or keep state outside its tensors?"
    )


def _about(
    opened: OpenRun,
    module: nn.Module,
    preprocessing: Preprocessing,
    measure: str | None,
    stored: tuple[int, int, int],
    site: str | None,
    notes: list[str],
) -> dict[str, Any]:
    recipe, net, state = opened.recipe, opened.task.net, opened.state
    channels = stored[0]
    shape = (channels, *preprocessing.window(*stored[1:]))
    height, width = shape[1:]
    prepared = preparation(opened.facts.prepared)
    name = custom_name(recipe.model)
    made = {
        "model": name,
        "custom": recipe.model.startswith("custom:"),
        "size": opened.facts.shape[1],
        "method": recipe.method,
        "head": net.user_heads,
        "precision": recipe.precision,
        "changes": [str(change) for changes in net.changes.values() for change in changes],
    }
    return {
        "format": FORMAT,
        "fednorms": __version__,
        "classes": list(opened.facts.classes),
        "shape": list(shape),
        "dtype": opened.facts.dtype,
        "preprocessing": {
            "channels": _CHANNELS.get(channels, str(channels)),
            "height": height,
            "width": width,
            "resize": "bilinear, each side on its own" if prepared is None else "as `prepared` says",
            "prepared": opened.facts.prepared,
            "stored": list(stored),
            **preprocessing.to_dict(),
            "measure": measure,
            "steps": _steps(stored, preprocessing, measure, opened.facts.dtype, prepared),
        },
        "architecture": made,
        "trained": {
            "federation": opened.facts.name,
            "site": site,
            "round": state.round,
            "rounds": recipe.rounds,
            "which": opened.which,
            "seed": recipe.seed,
        },
        "needs": _needs(module, made, len(opened.facts.classes), channels),
        "notes": notes,
    }


def _steps(
    stored: tuple[int, int, int], fixed: Preprocessing, measure: str | None, dtype: str, prepared: Prepared | None
) -> list[str]:
    channels, height, width = stored
    resized = f"height {height} and width {width}, ignoring aspect ratio, with Pillow's bilinear (antialiased)"
    window = fixed.window(height, width)
    steps = [
        f"decode to {_CHANNELS.get(channels, f'{channels} channels')}, uint8, EXIF rotation applied; 16 bits / 257",
        *(prepared.steps if prepared else ()),
        f"resize to {resized}{', unless it has that size' if prepared else ''}",
        *([f"crop the middle {window[0]} x {window[1]} pixels (height x width)"] if window != (height, width) else []),
        "arrange as batch x channels x height x width",
        "divide by 255",
    ]
    if dtype != "uint8":
        steps[:] = [f"arrange floating-point images as batch x {channels} x {window[0]} x {window[1]}, unscaled"]
    if measure:
        steps.append("per channel, subtract the mean over the site's images of the image mean, and divide by the mean")
        steps[-1] += " over the site's images of the image standard deviation (n - 1)"
    elif fixed.mean is not None and fixed.std is not None:
        steps.append(f"subtract {list(fixed.mean)} and divide by {list(fixed.std)}, per channel")
    return [*steps, "the output has one logit per class, in the order of `classes`; softmax gives probabilities"]


def _needs(module: nn.Module, made: dict[str, Any], classes: int, channels: int) -> dict[str, Any]:
    """Whether the tensors fit a module made without fednorms, and how to load them."""
    own = {type(m) for m in module.modules() if type(m).__module__.startswith("fednorms.layers")}
    layers = sorted(f"fednorms.layers.{kind.__name__}" for kind in own if not issubclass(kind, _SILENT))
    library, _, name = made["model"].partition(":")
    how = "import fednorms; model = fednorms.load_model('.')  # model(images) gives probabilities"
    if made["custom"]:
        how = "import fednorms; model = fednorms.load_model('.', model=YourModel())"
    plain, why = None, f"the architecture {made['model']} is part of fednorms"
    if layers:
        why = f"the model has layers of fednorms: {', '.join(layers)}"
    elif made["changes"]:
        why = f"layers of {made['model']} were replaced by other torch layers: see architecture.changes"
    if not made["changes"] and (made["custom"] or library in ("torchvision", "timm")):
        make = "model = YourModel()"
        if library == "torchvision":
            make = f"import torchvision; model = torchvision.models.get_model({name!r}, num_classes={classes})"
        elif library == "timm":
            make = f"import timm; model = timm.create_model({name!r}, num_classes={classes}, in_chans={channels})"
        plain = (
            f"from safetensors.torch import load_file; {make}; model.load_state_dict(load_file({TENSORS!r})); "
            "model.eval()  # prepare images as `preprocessing` says"
        )
    return {
        "fednorms": plain is None,
        "why": why if plain is None else "",
        "layers": layers,
        "load": how,
        "load_without_fednorms": plain,
    }


def _readme(about: dict[str, Any]) -> str:
    trained, needs = about["trained"], about["needs"]
    whose = f"site {trained['site']}" if trained["site"] else "all sites"
    lines = [
        f"A classifier of images into {len(about['classes'])} classes ({', '.join(about['classes'][:12])}"
        f"{', ...' if about['classes'][12:] else ''}), for {whose}.",
        f"Made by fednorms {about['fednorms']}: {about['architecture']['method']} on {about['architecture']['model']}, "
        f"federation {trained['federation']}, round {trained['round']} of {trained['rounds']}.",
        f"Load: {needs['load']}",
        f"Without fednorms: {needs['load_without_fednorms'] or 'not possible, ' + needs['why']}",
        f"Images: {'; '.join(about['preprocessing']['steps'])}.",
    ]
    return "\n".join(lines) + "\n"


class _FromImages(nn.Module):
    """A module with its preprocessing in front, so a deployed graph takes raw images."""

    def __init__(self, module: nn.Module, preprocessing: Preprocessing | None) -> None:
        super().__init__()
        self.module, self.preprocessing = module, preprocessing

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.preprocessing is not None:
            like = next(self.module.parameters())
            images = self.preprocessing.cropped(images)
            mean, std = self.preprocessing.mean or (0.0,), self.preprocessing.std or (1.0,)
            center, scale = (torch.tensor(v, dtype=like.dtype).view(-1, 1, 1) for v in (mean, std))
            images = images.to(like.dtype) / 255 if images.dtype == torch.uint8 else images.to(like.dtype)
            images = (images - center) / scale
        logits = self.module(images)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits, logits.softmax(1)


def _example(about: dict[str, Any]) -> Tensor:
    """A batch as the graph gets it: bytes; or floats, if the run had those or the input must be normalized first."""
    measure = about["preprocessing"]["measure"]
    images = _images(about["shape"] if measure else about["preprocessing"]["stored"])
    raw = measure is None and "uint8" in about["onnx"]["input"]
    return images if raw else images.to(getattr(torch, about["architecture"]["precision"])) / 255


def _write_onnx(path: Path, module: nn.Module, fixed: Preprocessing | None, images: Tensor) -> None:
    whole = _FromImages(module, fixed).eval()
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        whole,
        (images,),
        str(path),
        input_names=["images"],
        output_names=["logits", "probabilities"],
        dynamic_shapes={"images": {0: batch}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
