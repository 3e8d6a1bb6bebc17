"""compare: run several methods with several seeds on the same cohorts and batches, and make one table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace as with_changes
from datetime import datetime
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn

from fednorms._version import __version__
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.optim import MakeOptimizer
from fednorms.core.options import nearest, quoted
from fednorms.core.part import Part
from fednorms.core.paths import given_path
from fednorms.core.training import Training
from fednorms.data import Federation
from fednorms.methods.registry import method as read_method
from fednorms.runs.callables import Callables, Epochs, Schedule
from fednorms.runs.cells import Cell, CellEvent, Watch, run_cells
from fednorms.runs.comparison import Comparison
from fednorms.runs.device import device_of, unused_gpu
from fednorms.runs.identity import Custom, recipe_keys, training_keys
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import option
from fednorms.runs.progress import CellWatch, Reporter, is_wanted
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import folders_of, short
from fednorms.runs.session import Session, data_notes, open_federation
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.tracking.tracker import TrackedRun
from fednorms.runs.tracking.tracking import Tracking, asked_for
from fednorms.runs.unknown_options import refuse_unknown

_SAME_START = (
    "first weights: those of your model in every seed; seeds vary only the order of images, who takes part in a round, "
    "and what is drawn in training"
)


def compare(
    methods: str | Method | Part | Sequence[str | Method | Part],
    federation: str | Path | Federation | None = None,
    model: str | nn.Module | None = None,
    rounds: int | None = None,
    *,
    loss: str | Loss | None = None,
    seeds: int | Sequence[int] = 3,
    lr: float | Mapping[str, float] | None = None,
    epochs: Epochs | None = None,
    batch_size: int | None = None,
    participation: str | None = None,
    training: Training | None = None,
    evaluate: list[str] | None = None,
    device: str | None = None,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    watch: Watch = lambda event: None,
    progress: bool | None = None,
    track: str | Sequence[str] = (),
    optimizer: str | MakeOptimizer | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: str | Schedule | None = None,
    warmup: int | None = None,
    **unknown: Never,
) -> Comparison:
    """Run every method with every seed; the same seed means the same cohorts, batches and (where it fits) weights.

    `seeds=3` means 0, 1, 2. `lr` may be a dictionary {method: rate}; methods that it leaves out keep the recipe's rate.
    `epochs`, `optimizer`, `momentum`, `weight_decay`, `schedule` and `warmup` are those of `run`.
    What is not given comes from `recipe`, or from its defaults: cnn-small on digits-shift for 30 rounds. `device` is
    cpu, cuda or auto (a GPU if there is one). With `out`, every run is stored in OUT/METHOD-SEED, calling again
    continues where it stopped, and the table is written as Markdown, CSV and JSON, with a picture of the learning
    curves. `jobs` is the number of runs in parallel processes. A run uses one thread unless the recipe says otherwise,
    so results do not depend on `jobs`. `progress` shows a progress bar (default: on a terminal and in a notebook).
    `track` names trackers that log every round of every run: "tensorboard", "wandb", "mlflow".

    A custom model starts every seed from the weights it has, and the table says so. A custom loss is a function of
    logits and labels. With `jobs`, code that a new process cannot import (from a notebook, or inside a function) is
    sent with cloudpickle.

    >>> compare(["fedavg", "fedbn"], rounds=1, seeds=2).seeds
    [0, 1]
    """
    several = [methods] if isinstance(methods, str | Method | Part) else methods
    refuse_unknown(compare, unknown, *several)
    given = [m if isinstance(m, str) else str(read_method(m)) for m in several]
    chosen = {text.strip(): str(read_method(text)) for text in given}
    if isinstance(seeds, str) or not isinstance(seeds, int | Sequence):
        raise BadInput(f"seeds= must be a number of seeds or a list of different integers, got {quoted(seeds)}.")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    _check_request(given, chosen, numbers, jobs)
    trackers = asked_for(track)
    base = Recipe.given(recipe, training)
    short = {"batch_size": batch_size, "momentum": momentum, "weight_decay": weight_decay, "warmup": warmup}
    changed = {k: v for k, v in short.items() if v is not None} | training_keys(optimizer, schedule, epochs)
    settings: dict[str, Any] = vars(training or base.training) | changed
    if lr is not None and not isinstance(lr, Mapping):
        settings["lr"] = lr
    custom = Custom.of(federation, model, loss, Callables.of(optimizer, schedule, epochs))
    shared = base.model_dump() | {
        "rounds": base.rounds if rounds is None else rounds,
        "participation": participation or base.participation,
        "evaluate": evaluate or base.evaluate,
        "device": device or base.device,
        "threads": base.threads or 1,
        **recipe_keys(federation, model, loss, base.data.model_dump()),
    }
    rates = _rates(lr, chosen) if isinstance(lr, Mapping) else {}
    root = given_path("out", out) if out is not None else None
    if root is not None and (root / "recipe.toml").exists():
        raise BadInput(f"compare: {root} holds a run. Choose another directory for the comparison ({option('out')}).")
    cells = []
    for (label, text), folder in zip(chosen.items(), folders_of(chosen), strict=True):
        own = settings | ({"lr": rates[label]} if label in rates else {})
        for seed in numbers:
            made = Recipe.make(shared | {"method": text, "seed": seed, "training": own})
            cells.append(Cell(label, made, root / f"{folder}-{seed}" if root else None, answers=True))
    asked = cells[0].recipe.device
    device = device_of(asked, [RunDirectory(cell.path) for cell in cells if cell.path is not None])
    cells = [with_changes(c, recipe=c.recipe.model_copy(update={"device": device})) for c in cells]
    data = custom.federation if custom.federation is not None else open_federation(cells[0].recipe)
    cells = _checked(cells, data, custom)
    if jobs == 1:  # worker processes open a named federation themselves
        custom = with_changes(custom, federation=data)
    total = sum(cell.recipe.rounds for cell in cells)
    with Reporter("compare", total, silent=not is_wanted(progress)) as reporter, Tracking(trackers) as tracking:
        shown, tracked = CellWatch(reporter), _tracked(tracking, cells, root)

        def tell(event: CellEvent) -> None:
            for told in (watch, shown, tracked):
                told(event)

        outcomes = run_cells(cells, jobs, custom, tell)
    about = _about(cells, data, numbers)
    notes = [_SAME_START] * (custom.model is not None and len(numbers) > 1) + data_notes(data)
    notes += tracking.notes + ([note] if (note := unused_gpu(asked)) else [])
    comparison = Comparison(chosen, numbers, outcomes, about, root, notes=notes, metric=cells[0].recipe.metric)
    if root is not None:
        comparison.notes += _replaced(root, chosen)
        from fednorms.runs.comparison_files import write

        write(comparison, root)
    return comparison


def _tracked(tracking: Tracking, cells: Sequence[Cell], root: Path | None) -> Watch:
    """Log the rounds of all runs, each under the name of its directory."""
    folders = folders_of(dict.fromkeys(cell.label for cell in cells))
    names = dict(zip(dict.fromkeys(cell.label for cell in cells), folders, strict=True))
    runs = {
        (cell.label, seed): TrackedRun(f"{names[cell.label]}-{seed}", cell.recipe, cell.path, root)
        for cell in cells
        for seed in [cell.recipe.seed]
    }

    def watch(event: CellEvent) -> None:
        run = runs[event.label, event.seed]
        if event.outcome is None:
            tracking.log(run, event.row, event.scores)
        else:
            tracking.close(run.name, finished=not event.outcome.error)

    return watch


def _replaced(root: Path, chosen: Mapping[str, str]) -> list[str]:
    """A note if a table of other methods was here: their runs stay, and naming all methods makes one table."""
    try:
        before = list(json.loads((root / "comparison.json").read_bytes())["methods"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    others = [m for m in before if m not in chosen]
    return [f"replaced an earlier table, which also had {', '.join(others)}; its runs are kept"] if others else []


def _check_request(methods: Sequence[str], chosen: Mapping[str, str], seeds: Sequence[int], jobs: int) -> None:
    problems = []
    if not methods:
        problems.append("name at least one method")
    texts = list(chosen.values())
    given = [m.strip() for m in methods]
    twice = sorted({t for t in texts if texts.count(t) > 1} | {m for m in given if given.count(m) > 1})
    if twice:
        problems.append(f"a method is given twice: {', '.join(twice)}")
    if not seeds or len(set(seeds)) != len(seeds):
        problems.append(f"seeds must be a number >= 1 or different integers, got {list(seeds) or 'none'}")
    if jobs < 1:
        problems.append(f"jobs must be an integer >= 1, got {jobs}")
    if problems:
        raise BadInput("compare: " + "; ".join(problems) + ".")


def _rates(lr: Mapping[str, float], chosen: Mapping[str, str]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for name, rate in lr.items():
        found = [label for label, text in chosen.items() if name.strip() in (label, text)]
        if not found:
            raise BadInput(f'compare: lr names "{name}", which is not compared: {nearest(name, chosen)}')
        rates[found[0]] = rate
    return rates


def _checked(cells: list[Cell], federation: Federation, custom: Custom) -> list[Cell]:
    """Find bad input before the first run: methods that do not fit the model, directories of other recipes.

    Returns the cells with their recipes as they run: nothing is "auto" any more.
    """
    problems: dict[str, str] = {}
    resolved: dict[str, Recipe] = {}
    for label in dict.fromkeys(cell.label for cell in cells):
        try:
            first = next(c.recipe for c in cells if c.label == label)
            resolved[label] = Session.open(first, federation, custom.model, custom.loss, own=custom.training).recipe
        except BadInput as error:
            problems[label] = str(error)
    if problems:
        alike = len(set(problems.values())) == 1
        raise BadInput(next(iter(problems.values())) if alike else "\n".join(f"{k}: {v}" for k, v in problems.items()))
    recorded = {} if cells[0].path is None else {"fingerprint": federation.fingerprint()}
    checked = [
        with_changes(c, recipe=resolved[c.label].model_copy(update={"seed": c.recipe.seed, **recorded})) for c in cells
    ]
    for cell in checked:
        if cell.path is not None:
            RunDirectory(cell.path).create(cell.recipe.to_toml(), resume=True)
    return checked


def _about(cells: list[Cell], federation: Federation, seeds: list[int]) -> dict[str, str]:
    recipe = cells[0].recipe
    training = recipe.training
    sizes = {part: sum(len(s.splits.get(part, ())) for s in federation.sites) for part in ("train", "val", "test")}
    default = Training(lr=training.lr, batch_size=training.batch_size, epochs=training.epochs)
    more = [f"{k} {v}" for k, v in vars(training).items() if v != getattr(default, k) and k != "client_epochs"]
    rates = {c.recipe.training.lr for c in cells}
    epochs = [training.epochs_of(s.name) for s in federation.clients]
    least, most = min(epochs), max(epochs)
    each = counted(training.steps, "step") if training.steps else counted(most, "epoch")
    if not training.steps and least < most:
        each = f"{least} to {most} epochs, as each client has them"
    return {
        "data": (
            f"{short(recipe.federation)}, {counted(len(federation.clients), 'client')}"
            + (f" and {counted(len(federation.unseen), 'unseen site')}" if federation.unseen else "")
            + f", {' x '.join(map(str, federation.shape))} pixels, {federation.num_classes} classes, "
            + ", ".join(f"{n:,} {part}" for part, n in sizes.items() if n)
        ),
        "training": (
            f"{recipe.model}, {counted(recipe.rounds, 'round')} of {each}, batch {training.batch_size}, "
            + ("lr as listed" if len(rates) > 1 else f"lr {training.lr:g}")
            + (", " + ", ".join(more) if more else "")
            + f", participation {recipe.participation}"
        ),
        "accuracy": (
            "% on test data after the last round (no selection), "
            + (f"mean ± sample standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else "one seed")
            + f" ({', '.join(map(str, seeds))})"
            + ("; balanced accuracy, but for the column accuracy" if recipe.metric == "balanced_accuracy" else "")
        ),
        "made": (
            f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}, fednorms {__version__}, torch {torch.__version__}, "
            f"{hardware(recipe.device)}, {recipe.threads} thread{'s' * (recipe.threads > 1)} per run"
        ),
    }


def hardware(device: str) -> str:
    """Describe the machine: the GPU, if it is used, and the processor.

    >>> "cores" in hardware("cpu")
    True
    """
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux
    cpu = f"{name} ({os.cpu_count()} cores)"
    if device != "cpu" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {cpu}"
    return cpu
