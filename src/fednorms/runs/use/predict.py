"""Predict the classes of image files with a run's model or an exported one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.passes import prepare_test
from fednorms.core.paths import given_path
from fednorms.core.states import context_of
from fednorms.data import Split
from fednorms.data.folders import EXTENSIONS, read_image
from fednorms.data.folders.preparations import preparation
from fednorms.engines.devices import repeatable
from fednorms.evaluation.modes import answer
from fednorms.runs.option_names import flag, option
from fednorms.runs.use.choose import Chosen, averaged_statistics, check_statistics, unknown_preparation
from fednorms.runs.use.load import ABOUT, LoadedModel, load_model
from fednorms.runs.use.open import OpenRun, Which, open_run
from fednorms.runs.use.scored import in_words, scored

_BATCH, _NAMED = 256, 10


@dataclass(frozen=True)
class Prediction:
    """The class of one image; `note` is what a user of the model should know, the same for all images.

    >>> Prediction(Path("rex.png"), "dog", 0.9, {"cat": 0.1, "dog": 0.9})
    rex.png: dog (90.0 %)
    """

    file: Path
    label: str
    probability: float
    probabilities: dict[str, float]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**vars(self), "file": str(self.file)}

    def __repr__(self) -> str:
        return f"{self.file}: {self.label} ({100 * self.probability:.1f} %)"


def predict(
    path: str | Path,
    inputs: str | Path | Sequence[str | Path],
    site: str | None = None,
    which: Which = "last",
    model: nn.Module | None = None,
    skip_broken: bool = False,
    device: str = "auto",
    averaged: bool = False,
) -> list[Prediction]:
    """Classify image files, and all images in folders and below, with a run's global model or a site's own.

    A method whose clients keep tensors, such as FedBN, has no global model: name a site, or take the mean over clients
    with `averaged`. A note says how good the model was in the run's tests.

    Images are decoded, resized and normalized as the training images were. The run's data are not needed. `path` may
    also be a model that `export` or `adapt` wrote; it holds one model, so there is no site or round to choose. If
    images cannot be read, one error names them all; with `skip_broken` they are skipped and named in a note.
    `device` is cpu, cuda or auto (the run's own, or the CPU if that is not here). An exported model runs on the CPU.

    >>> predict("nowhere", ["rex.png"])
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    path = given_path("path", path)
    if (path / ABOUT).is_file():
        if site is not None or which != "last" or averaged:
            asked = f'site "{site}"' if site is not None else f'round "{which}"' if which != "last" else "clients"
            raise BadInput(f"{path} is one exported model and has no {asked}. Leave that out, or name the run.")
        if device not in ("auto", "cpu"):
            raise BadInput(f"{path} is an exported model, which runs on the CPU. Leave out {option('device')}.")
        return _predict_exported(load_model(path, model), _Images(image_files(inputs), skip_broken))
    opened = open_run(path, which, model=model, device=device)
    facts = opened.facts
    check_statistics(opened.task.net.module, opened.task.net.name)
    images = _Images(image_files(inputs), skip_broken)
    chosen = opened.choose(site, averaged=averaged)
    notes = opened.notes + chosen.notes + averaged_statistics(opened.task, facts, site) + unknown_preparation(facts)
    batches = images.decoded(partial(read_image, shape=facts.stored_shape, prepared=preparation(facts.prepared)))
    if chosen.measured_here:  # a part that normalizes with the site's statistics measures these images
        read = list(batches)
        x = torch.cat([some for _, some in read])
        data = Split(x, torch.zeros(len(x), dtype=torch.int64))
        chosen = opened.choose(site, data, averaged)
        notes.append(f"The input is normalized with statistics of these {len(x)} images. Name a site to use its own.")
        batches = iter(read)
    if facts.dtype != "uint8":
        notes.append("The model was trained on floating-point images; pixels of files are scaled to [0, 1].")
    notes.append(str(scored(opened, chosen)))
    rows = [(paths, _probabilities(opened, chosen, some)) for paths, some in batches]
    return _named(rows, facts.classes, notes + images.left_out)


def _predict_exported(model: LoadedModel, images: _Images) -> list[Prediction]:
    check_statistics(model.module, model.about["architecture"]["model"])
    batches = images.decoded(model.read)
    if model.measures:
        read = list(batches)
        model, batches = model.measured(torch.cat([some for _, some in read])), iter(read)
    rows = []
    for paths, some in batches:
        with repeatable(torch.get_num_threads(), "predict"):
            rows.append((paths, model.logits(some).double().softmax(1)))
    tested = model.about.get("card", {}).get("tested")  # older exports have no card
    return _named(
        rows, model.classes, [*model.about["notes"], *([in_words(tested)] if tested else []), *images.left_out]
    )


def _named(rows: list[tuple[list[Path], Tensor]], classes: Sequence[str], notes: list[str]) -> list[Prediction]:
    found = []
    for files, probabilities in rows:
        for file, row in zip(files, probabilities.tolist(), strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            every = dict(zip(classes, row, strict=True))
            found.append(Prediction(file, classes[best], row[best], every, " ".join(notes)))
    return found


@torch.no_grad()
def _probabilities(opened: OpenRun, chosen: Chosen, images: Tensor) -> Tensor:
    task = opened.task
    context = context_of(task, chosen.sent.round, chosen.client, evaluating=True)
    with repeatable(torch.get_num_threads(), "predict", task.seed):
        batch = images, torch.zeros(len(images), dtype=torch.int64)
        x, _ = prepare_test(task, batch, context, chosen.mine, chosen.sent)
        logits, features = task.net.forward(chosen.tensors, x, train=False, batch_statistics=False)
        logits = answer(task, chosen.sent, chosen.mine, logits, features)
    return logits.double().softmax(1).cpu()


def image_files(inputs: str | Path | Sequence[str | Path]) -> list[Path]:
    """The named files, and the images in named folders and below, sorted; hidden files are left out.

    >>> image_files(["nowhere.png"])
    Traceback (most recent call last):
    fednorms.BadInput: nowhere.png: no such file or folder.
    """
    found: list[Path] = []
    problems: list[str] = []
    several = inputs if isinstance(inputs, Sequence) and not isinstance(inputs, str) else [inputs]
    for given in (given_path("inputs", one) for one in several):
        if given.is_dir():
            inside = sorted(
                p
                for p in given.rglob("*")
                if p.suffix.lower() in EXTENSIONS
                and p.is_file()
                and not any(part.startswith(".") or part == "__MACOSX" for part in p.relative_to(given).parts)
            )
            if not inside:
                problems.append(f"{given}: no images in this folder or below ({', '.join(EXTENSIONS)}).")
            found += inside
        elif given.is_file():
            found.append(given)
        else:
            problems.append(f"{given}: no such file or folder.")
    if not inputs:
        problems.append("No images given. Name files or folders.")
    if problems:
        raise BadInput("\n".join(problems))
    return found


def _count(images: int) -> str:
    return f"{images} image{'s' * (images != 1)}"


@dataclass
class _Images:
    """Image files to decode; collects those that cannot be read."""

    files: list[Path]
    skip_broken: bool
    broken: list[str] = field(default_factory=list)

    def decoded(self, read_one: Callable[[Path], Tensor]) -> Iterator[tuple[list[Path], Tensor]]:
        """Files and their images, in batches; at the end an error names all that could not be read."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, len(self.files), _BATCH):
                chunk = self.files[start : start + _BATCH]
                images = pool.map(partial(self._read, read_one), chunk)
                read = [(f, x) for f, x in zip(chunk, images, strict=True) if x is not None]
                if read and (self.skip_broken or not self.broken):
                    yield [f for f, _ in read], torch.stack([x for _, x in read])
        if self.broken and not (self.skip_broken and len(self.broken) < len(self.files)):
            advice = [] if self.skip_broken else [f"Fix or remove them, or skip them with {flag('skip_broken')}."]
            raise BadInput("\n".join([f"{_count(len(self.broken))} cannot be used:", *self._some, *advice]))

    def _read(self, read_one: Callable[[Path], Tensor], file: Path) -> Tensor | None:
        try:
            return read_one(file)
        except BadInput as error:
            self.broken.append(str(error))
            return None

    @property
    def _some(self) -> list[str]:
        more = [f"and {len(self.broken) - _NAMED} more"] if len(self.broken) > _NAMED else []
        return [*sorted(self.broken)[:_NAMED], *more]

    @property
    def left_out(self) -> list[str]:
        """A note about images that were skipped."""
        return [f"{_count(len(self.broken))} skipped: {' '.join(self._some)}"] if self.broken else []
