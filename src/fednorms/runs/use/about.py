"""What an exported model says about itself: model.json, and the README for its user."""

from __future__ import annotations

from typing import Any

from fednorms._version import __version__
from fednorms.core.surgery import Change
from fednorms.data import Preprocessing
from fednorms.data.folders import Prepared
from fednorms.data.folders.preparations import preparation
from fednorms.runs.identity import custom_name
from fednorms.runs.use.graphs import PROGRAM
from fednorms.runs.use.load import FORMAT
from fednorms.runs.use.loader import LOADER
from fednorms.runs.use.open import OpenRun

_CHANNELS = {1: "grey", 3: "RGB", 4: "RGBA"}


def about_model(
    opened: OpenRun,
    preprocessing: Preprocessing,
    measure: str | None,
    stored: tuple[int, int, int],
    site: str | None,
    folded: list[Change],
    notes: list[str],
) -> dict[str, Any]:
    """The content of model.json, except for what depends on the files."""
    recipe, net, state = opened.recipe, opened.task.net, opened.state
    channels = stored[0]
    shape = (channels, *preprocessing.window(*stored[1:]))
    height, width = shape[1:]
    prepared = preparation(opened.facts.prepared)
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
        "architecture": {
            "model": custom_name(recipe.model),
            "custom": recipe.model.startswith("custom:"),
            "size": opened.facts.shape[1],
            "method": recipe.method,
            "head": net.user_heads,
            "precision": recipe.precision,
            "changes": [str(change) for changes in net.changes.values() for change in changes],
            "folded": [str(change) for change in folded],
        },
        "trained": {
            "federation": opened.facts.name,
            "site": site,
            "round": state.round,
            "rounds": recipe.rounds,
            "which": opened.which,
            "seed": recipe.seed,
        },
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


def how_to_load(custom: bool, given: bool, layers: list[str], why_no_loader: str, program: bool) -> dict[str, Any]:
    """How to load the model with fednorms and without, or why the latter is not possible.

    A `custom` model must be passed to `load_model`; one that is `given` to load.py may also be known by its module.

    >>> how_to_load(False, False, [], "", False)["load_without_fednorms"]
    'from load import CLASSES, load, prepare; model = load()'
    """
    without: str | None = None
    if not why_no_loader:
        without = f"from {LOADER[:-3]} import CLASSES, load, prepare; model = load({'YourModel()' if given else ''})"
    elif program:
        without = (
            f"import torch; model = torch.export.load({PROGRAM!r}).module()  # model(images): logits, probabilities"
        )
    model = ", model=YourModel()" if custom else ""
    return {
        "fednorms": without is None,
        "why": why_no_loader,
        "layers": layers,
        "load": f"import fednorms; model = fednorms.load_model('.'{model})  # model(images) gives probabilities",
        "load_without_fednorms": without,
    }


def readme(about: dict[str, Any]) -> str:
    """The text of README.txt."""
    trained, needs = about["trained"], about["needs"]
    whose = f"site {trained['site']}" if trained["site"] else "all sites"
    lines = [
        f"A classifier of images into {len(about['classes'])} classes ({', '.join(about['classes'][:12])}"
        f"{', ...' if about['classes'][12:] else ''}), for {whose}. MODEL_CARD.md says how good it is, and its limits.",
        f"Made by fednorms {about['fednorms']}: {about['architecture']['method']} on {about['architecture']['model']}, "
        f"federation {trained['federation']}, round {trained['round']} of {trained['rounds']}.",
        f"Load: {needs['load']}",
        f"Without fednorms: {needs['load_without_fednorms'] or 'not possible, because ' + needs['why']}",
        f"Images: {'; '.join(about['preprocessing']['steps'])}.",
    ]
    return "\n".join(lines) + "\n"
