"""The model card of an export: what the model is, what it was trained on, how good it is, and what it is not for."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from fednorms.core.counted import counted
from fednorms.core.part import Route
from fednorms.data.readers import READERS
from fednorms.evaluation.intervals import wilson
from fednorms.evaluation.judgement import Judgement
from fednorms.evaluation.statistics import statistics_names
from fednorms.runs.recipe import Recipe
from fednorms.runs.use.open import OpenRun
from fednorms.runs.use.scored import Scored

CARD = "MODEL_CARD.md"
_UNKNOWN = "not known to fednorms; ask the owners of the images"


def card_data(opened: OpenRun, about: dict[str, Any], whose: str, tested: Scored) -> dict[str, Any]:
    """Everything that the card says, as plain values; `whose` says in words which model of the run it is."""
    facts = opened.facts
    recipe = Recipe.from_toml(opened.directory.read_recipe(), str(opened.directory.recipe))  # as it was recorded
    sites = [
        {
            "site": site.name,
            "domain": site.domain,
            "trained": site.name in facts.clients,
            "images": {split: sum(counts) for split, counts in site.images.items()},
        }
        for site in facts.sites
    ]
    reader = READERS.get(recipe.federation)
    return {
        "model": whose,
        "data": {
            "federation": facts.name,
            "across_machines": recipe.across_machines(facts),
            "fingerprint": recipe.fingerprint,
            "sites": sites,
            "license": (reader.published.license if reader else "") or _UNKNOWN,
            "published": dict(reader.published.links) if reader else {},
        },
        "tested": tested.to_dict(),
        "privacy": _privacy(opened),
        "versions": {
            "fednorms": about["fednorms"],
            "trained_with": recipe.version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "recipe": _portable(recipe).to_toml(),
    }


def _privacy(opened: OpenRun) -> dict[str, Any]:
    """What left the sites, and epsilon of differential privacy at the exported round."""
    task, net = opened.task, opened.task.net
    known = opened.directory.summary() or {}
    rows = [row for row in opened.directory.metrics() if row["round"] == opened.state.round]
    epsilon = rows[-1].get("epsilon") if rows else None
    stated = known.get("privacy") or {}
    kept = [n for n, route in net.routes.items() if route is Route.LOCAL]
    return {
        "sent_tensors": len(net.exchanged),
        "sent_bytes": sum(net.initial[n].nbytes for n in net.exchanged),
        "sent_statistics": [n for n in statistics_names(net) if n in set(net.exchanged)],
        "kept_tensors": len(kept),
        "also_sent_by": [p.name for p in task.method.parts if p.uploads or p.passes()],
        "epsilon": epsilon,
        "delta": stated.get("delta"),
        "neighbours": stated.get("neighbours", ""),
    }


def _portable(recipe: Recipe) -> Recipe:
    """The recipe without this machine's folders, which a card may carry to other places."""
    kind, found, path = recipe.federation.partition(":")
    update: dict[str, Any] = {}
    if found and kind in ("folder", "pack"):
        update["federation"] = f"{kind}:{Path(path).name}"
    elif "/" in recipe.federation:
        update["federation"] = Path(recipe.federation).name
    if recipe.data.root:
        update["data"] = recipe.data.model_copy(update={"root": Path(recipe.data.root).name})
    if recipe.weights:
        update["weights"] = Path(recipe.weights).name
    return recipe.model_copy(update=update)


def card(about: dict[str, Any]) -> str:
    """The text of MODEL_CARD.md, from the content of model.json."""
    told, made, trained = about["card"], about["architecture"], about["trained"]
    sections = {
        "What it is": _what(about),
        "Data": _data(told["data"]),
        "Scores": _scores(told),
        "Intended use": [
            f"Classifying single images into {len(about['classes'])} classes: {', '.join(about['classes'])}. "
            f"Images must come from where the training images came from, and be prepared as model.json says.",
            "Whoever hands the model over completes this section: for whom, for which decision, and who checks it.",
        ],
        "Limits": _limits(about),
        "Privacy": _privacy_text(told["privacy"], made["method"]),
        "Versions": ["; ".join(f"{k.replace('_', ' ')} {v}" for k, v in told["versions"].items()) + "."],
        "How to reproduce": [
            f"{_again(told['data'])} Then export round {trained['round']}.",
            f"```toml\n{told['recipe'].strip()}\n```",
        ],
    }
    title = f"# Model card: {made['model']} trained with {made['method']}"
    body = "\n\n".join(f"## {name}\n\n" + "\n\n".join(parts) for name, parts in sections.items())
    return f"{title}\n\n{body}\n"


def _what(about: dict[str, Any]) -> list[str]:
    made, trained, needs = about["architecture"], about["trained"], about["needs"]
    lines = [
        f"- Model: {about['card']['model']}, after round {trained['round']} of {trained['rounds']} "
        f"({'the best on validation images' if trained['which'] == 'best' else 'the last of the run'}).",
        f'- Network: {made["model"]}; method: "{made["method"]}", seed {trained["seed"]}.',
        f"- Input: {about['preprocessing']['channels']} images of {about['shape'][1]} x {about['shape'][2]} pixels. "
        "README.txt lists all steps of preparation.",
        f"- Output: one logit per class, {len(about['classes'])} classes.",
        f"- Without fednorms: `{needs['load_without_fednorms']}`"
        if needs["load_without_fednorms"]
        else f"- Needs fednorms, because {needs['why']}.",
    ]
    return ["\n".join(lines)]


def _again(data: dict[str, Any]) -> str:
    if data.get("across_machines"):
        return "Run `flwr run PROJECT here` with this recipe and the same sites."
    return "Store this recipe as recipe.toml, adjust its folders, and run `fednorms run recipe.toml`."


def _data(data: dict[str, Any]) -> list[str]:
    splits = ("train", "val", "test")
    rows = ["| site | trained | training images | validation images | test images |", "|---|---|---:|---:|---:|"]
    for site in data["sites"]:
        counts = " | ".join(f"{site['images'].get(s, 0):,}" if site["images"] else "not told" for s in splits)
        rows.append(f"| {site['site']} | {'yes' if site['trained'] else 'no'} | {counts} |")
    whose = "Trained across machines" if data.get("across_machines") else f'Federation "{data["federation"]}"'
    links = "".join(f" [{name}]({link})" for name, link in data["published"].items())
    where = f" Published at:{links}." if links else ""
    return [
        f"{whose}, {counted(len(data['sites']), 'site')}.",
        "\n".join(rows),
        f"License of the data: {data['license']}.{where} The model may be a derived work of the data.",
    ]


def _scores(told: dict[str, Any]) -> list[str]:
    tested = told["tested"]
    if tested["never_scored"]:
        return [f"**Never scored**: {tested['never_scored']}"]
    said = f'Of exactly this model, in mode "{tested["mode"]}", on test images. Intervals are of 95 %.'
    if tested["judgement"]:
        return [said, Judgement.from_dict(tested["judgement"]).to_markdown().strip()]
    rows = ["| site | accuracy in %, with 95 % interval | balanced accuracy in % | images |", "|---|---:|---:|---:|"]
    for name, site in tested["scores"]["sites"].items():
        found = wilson(site["accuracy"], site["samples"])
        rows.append(f"| {name} | {found} | {100 * site['balanced_accuracy']:.1f} | {site['samples']} |")
    return [said, "\n".join(rows)]


def _limits(about: dict[str, Any]) -> list[str]:
    told = about["card"]
    lines = [
        "- It always answers with one of its classes, also for images that show something else.",
        "- Scores hold for the sites and images of the table. For another site, evaluate it first: "
        "`fednorms evaluate RUN --data FOLDER`, or `fednorms adapt` to fit it to the site.",
    ]
    small = [s["site"] for s in told["data"]["sites"] if 0 < s["images"].get("test", 0) < 30]
    if small:
        lines.append(f"- Fewer than 30 test images, too few to judge: {', '.join(small)}.")
    return ["\n".join([*lines, *(f"- {note}" for note in about["notes"])])]


def _privacy_text(p: dict[str, Any], method: str) -> list[str]:
    lines = [
        f"- In every round a site sent {counted(p['sent_tensors'], 'tensor')} ({p['sent_bytes']:,} bytes) and kept "
        f"{counted(p['kept_tensors'], 'tensor')} of the model, and all images.",
    ]
    if p["sent_statistics"]:
        lines.append(f"- Of these, {counted(len(p['sent_statistics']), 'tensor')} are statistics of the site's images.")
    if p["also_sent_by"]:
        lines.append(f"- Besides the model, {', '.join(p['also_sent_by'])} sent tensors of their own.")
    lines.append(f'- Everything that leaves a site: `fednorms describe "{method}" --privacy`.')
    if p["epsilon"] is None:
        lines.append(
            "- No differential privacy: updates, and this model itself, may reveal something about training images."
        )
    else:
        delta = f" at delta {p['delta']:g}" if p["delta"] else ""
        what = f" (two cases that must look alike: {p['neighbours']})" if p["neighbours"] else ""
        lines.append(f"- Differential privacy: epsilon {p['epsilon']:.3g}{delta}{what}. Test scores are not covered.")
    return ["\n".join(lines)]
