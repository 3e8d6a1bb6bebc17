"""Export a trained model: a directory with the tensors, how to load them, and a card that says what the model is."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.passes import depends_on_batch, prepare_test
from fednorms.core.paths import given_path
from fednorms.core.states import Client, context_of
from fednorms.data import Federation, Split
from fednorms.data.folders.preparations import preparation
from fednorms.engines.devices import repeatable
from fednorms.models.registry import build
from fednorms.runs.store.atomic import check_folder
from fednorms.runs.store.seal import hash_of_file, sealed
from fednorms.runs.use.about import about_model, how_to_load, readme
from fednorms.runs.use.card import CARD, card, card_data
from fednorms.runs.use.choose import Chosen, averaged_statistics
from fednorms.runs.use.graphs import ONNX, PROGRAM, check_graphs, write_onnx, write_program
from fednorms.runs.use.load import ABOUT, TENSORS, LoadedModel, load_model, logits_of
from fednorms.runs.use.loader import LOADER, NotPlain, loader, own_layers, run_loader, takes_model
from fednorms.runs.use.open import OpenRun, Which, open_run
from fednorms.runs.use.plain import Plain, clients_with_data, plain_model
from fednorms.runs.use.scored import Scored, scored

README = "README.txt"


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
    torch_export: bool = False,
    federation: Federation | None = None,
) -> Exported:
    """Write a run's global model (or a site's own) to a directory that needs no fednorms to be used.

    A method whose clients keep tensors has no global model; `averaged` takes the mean over clients.

    - model.safetensors: a plain `state_dict`. Layers that torch does not have are folded into its own where they are
      equal in evaluation: standardized filters into plain ones, sent or trained statistics into BatchNorm.
    - load.py loads it with torch only (and torchvision or timm, if the network is theirs). Not written if a layer has
      no equal in torch; model.pt2 is then written instead.
    - model.pt2 (`torch_export`) and model.onnx (`onnx`) take uint8 images and need no Python code.
    - MODEL_CARD.md: data, method, scores, intended use, limits, privacy. model.json: the same and more as data, for
      `load_model`. README.txt: how to load it.

    Everything is loaded again and compared with the run's own model before the directory gets its final name. The run's
    data (`federation`, if they were an object) are only needed for a model with BatchNorm that keeps no statistics:
    these are then measured.

    >>> export("nowhere", "out")
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    target = given_path("out", out)
    check_target(target)
    opened = open_run(path, which, federation, model, device="cpu")
    images = _images(opened.facts.stored_shape)
    data = Split(images, torch.zeros(len(images), dtype=torch.int64))
    chosen = opened.choose(site, data, averaged)
    notes = chosen.notes + averaged_statistics(opened.task, opened.facts, site)
    clients, tested = [], scored(opened, chosen, exported=True)
    if depends_on_batch(opened.task):
        clients = clients_with_data(opened, site)
        why = (
            "its normalization statistics were measured for this export, and the run's tests used those of each batch."
        )
        tested = Scored(chosen.mode, chosen.site, opened.state.round, never=why)
    graphs = Graphs(onnx, torch_export)
    chosen = replace(chosen, notes=notes)
    return write_model(opened, chosen, target, site, tested, graphs, model, clients=clients)


@dataclass(frozen=True)
class Graphs:
    """Which graphs to write besides the weights; without a request, model.pt2 only where load.py cannot be."""

    onnx: bool = False
    program: bool = False


def write_model(
    opened: OpenRun,
    chosen: Chosen,
    out: Path,
    site: str | None,
    tested: Scored,
    graphs: Graphs = Graphs(),  # noqa: B008  (frozen)
    model: nn.Module | None = None,
    stored: tuple[int, int, int] | None = None,
    extra: dict[str, Any] | None = None,
    clients: list[Client] | None = None,
) -> Exported:
    """Write chosen tensors (all on the CPU) as an exported model, atomically; `stored` is the size of its images.

    `tested` are the scores of exactly this model. `clients` have the images on which statistics are measured that the
    model does not keep.
    """
    check_target(out)
    check_graphs(opened.facts, graphs.onnx, graphs.program)
    plain = plain_model(opened, chosen, stored or opened.facts.stored_shape, clients or [])
    about = about_model(opened, plain.preprocessing, plain.measure, plain.stored, site, plain.folded, plain.notes) | (
        extra or {}
    )
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        _write_files(temporary, opened, plain, chosen, tested, graphs, model, about)
        if out.exists():
            out.rmdir()  # it is empty
        os.replace(temporary, out)
    except OSError as error:
        raise RunFailed(f"Cannot write {out}: {error.strerror or error}. Nothing was written.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported([out / name for name in [*about["files"], ABOUT, CARD]], about["notes"])


def _write_files(
    folder: Path,
    opened: OpenRun,
    plain: Plain,
    chosen: Chosen,
    tested: Scored,
    graphs: Graphs,
    model: nn.Module | None,
    about: dict[str, Any],
) -> None:
    """Write all files of an export into `folder` and complete `about`."""
    made, module = about["architecture"], plain.module
    save_file({k: v.detach().clone().contiguous() for k, v in module.state_dict().items()}, folder / TENSORS)
    why = _write_loader(folder, opened, plain, model, about)
    raw = _images(plain.stored) if not plain.measure else _images(tuple(about["shape"]))
    images = raw if not plain.measure and about["dtype"] == "uint8" else _floats(raw, module)
    program = graphs.program or (bool(why) and not opened.facts.prepared)
    if program:
        try:
            write_program(folder / PROGRAM, module, plain.fixed, images)
        except BadInput as problem:
            if graphs.program:
                raise
            program, why = False, f"{why}; {problem}"
    what = "images normalized as `preprocessing` says" if plain.measure else f"images as {about['dtype']}, unscaled"
    graph = {"input": f"images: {what}", "outputs": ["logits", "probabilities"]}
    if program:
        about["torch_export"] = {"file": PROGRAM, **graph}
    if graphs.onnx:
        difference = write_onnx(folder / ONNX, module, plain.fixed, images)
        about["onnx"] = {"file": ONNX, **graph, "largest_difference": difference}
        if difference is None:
            about["notes"].append(f"{ONNX} was not run, because onnxruntime is not installed.")
    given = not why and takes_model((folder / LOADER).read_text(encoding="utf-8"))
    about["needs"] = how_to_load(made["custom"], given, own_layers(module), why, program)
    (folder / README).write_text(readme(about), encoding="utf-8")
    about["files"] = {p.name: hash_of_file(p) for p in sorted(folder.iterdir())}
    about["card"] = card_data(opened, about, _whose(chosen, about), tested)
    (folder / CARD).write_text(card(about), encoding="utf-8")  # without a hash: a person completes it
    text = json.dumps(sealed(about), indent=2, ensure_ascii=False) + "\n"
    (folder / ABOUT).write_text(text, encoding="utf-8")
    mode = (folder / ABOUT).stat().st_mode & 0o777  # what the user's umask gives
    for file in folder.iterdir():
        file.chmod(mode)
    _verify(folder, opened, plain, chosen, model)


def _whose(chosen: Chosen, about: dict[str, Any]) -> str:
    """Which model of the run it is, in words."""
    site, adapted = about["trained"]["site"], about.get("adapted")
    if adapted:
        return f'the model adapted to site "{site}" with {counted(adapted["images"], "image")}'
    names = {"personal": f'the personal model of site "{site}"', "global": "the global model"}
    return names.get(chosen.mode.model, "the mean of the clients' personal models")


def check_target(out: Path) -> None:
    """Refuse an output directory that cannot be used."""
    if out.is_dir() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty. Choose another directory to export to, or empty it first.")
    check_folder(out)


def _images(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (4, *shape), generator=generator, dtype=torch.uint8)


def _floats(images: Tensor, module: nn.Module) -> Tensor:
    return images.to(next((p.dtype for p in module.parameters()), torch.float32)) / 255


def _write_loader(folder: Path, opened: OpenRun, plain: Plain, model: nn.Module | None, about: dict[str, Any]) -> str:
    """Write load.py, after running it; returns why there is none, empty if there is."""
    facts, name = opened.facts, about["architecture"]["model"]
    bare = model
    if bare is None:
        bare = build(name, facts.num_classes, facts.shape[0], facts.shape[1])
    prepared = preparation(facts.prepared)
    readable = facts.dtype == "uint8" and plain.stored[0] in (1, 3, 4) and bool(prepared or not facts.prepared)
    files = (plain.stored, prepared) if readable else None
    try:
        text = loader(
            name,
            plain.module,
            bare,
            list(facts.classes),
            plain.stored,
            facts.shape[1],
            plain.preprocessing,
            plain.measure is not None,
            about["preprocessing"]["steps"],
            files,
        )
    except NotPlain as reason:
        return str(reason)
    images = _images(plain.stored)
    part = next((p for p in opened.task.method.parts if p.name == plain.measure), None)
    classes, shape = tuple(facts.classes), tuple(about["shape"])
    expected = LoadedModel(plain.module, classes, plain.preprocessing, shape, part, about).logits(images)
    try:
        found = run_loader(text, folder, bare, images)
    except Exception as problem:  # whatever another library's constructor raises
        return f"a program that loads it failed ({type(problem).__name__}: {problem})"
    if not (torch.allclose(found, expected, 1e-3, 1e-4) if part else torch.equal(found, expected)):
        return "a program that loads it gave other logits"
    (folder / LOADER).write_text(text, encoding="utf-8")
    return ""


def _verify(folder: Path, opened: OpenRun, plain: Plain, chosen: Chosen, model: nn.Module | None) -> None:
    """Load the export again: on random images its logits must be those of the run's evaluation.

    They are equal bit for bit unless folded layers round differently.
    """
    task, images = opened.task, _images(plain.stored)
    context = context_of(task, chosen.sent.round, chosen.client, evaluating=True)
    with torch.no_grad():
        with repeatable(1, "verify"):
            batch = images, torch.zeros(len(images), dtype=torch.int64)
            x, _ = prepare_test(task, batch, context, chosen.mine, chosen.sent)
            if plain.given:
                expected = logits_of(plain.module, x)
            elif opened.recipe.precision == "bfloat16":
                expected = logits_of(task.net.plain(chosen.tensors), x)
            else:
                expected, _ = task.net.forward(chosen.tensors, x, train=False, batch_statistics=False)
        with repeatable(1, "verify"):
            got = load_model(folder, model).logits(images)
    apart = float((got - expected).abs().max())
    rounding = (1e-9 if got.dtype == torch.float64 else 1e-3) * max(1.0, float(expected.abs().max()))
    if torch.equal(got, expected) or (plain.folded and apart <= rounding):
        return
    parts = [p.name for p in task.method.having("batch") if not p.normalizes_input]
    if parts:
        raise BadInput(f"{' and '.join(parts)} changes images also in evaluation, which an exported model cannot do.")
    raise RunFailed(
        f"The exported model's logits differ from the run's by up to {apart:g}, so nothing was written. Does the model "
        "draw random numbers in evaluation, or keep state outside its tensors?"
    )
