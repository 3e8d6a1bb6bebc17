"""The report of one run."""

from __future__ import annotations

import math
from shlex import quote

from fednorms.core.counted import counted
from fednorms.evaluation.intervals import wilson
from fednorms.evaluation.scores import Scores
from fednorms.reports.charts import Bar, Line, bar_chart, line_chart
from fednorms.reports.elements import Child, Html, tag
from fednorms.reports.page import KeyFigure, Page, Section, commands, figure, listing, note, paragraph
from fednorms.reports.sections import (
    MOST_SITES,
    calibration_section,
    classes_section,
    confusion_section,
    notes_section,
    privacy_section,
    sites_section,
    travelled_section,
    uploads_of,
)
from fednorms.reports.stored import RunRecord
from fednorms.reports.tables import Cell, Row, percent, table
from fednorms.reports.words import INTERVALS, WILSON, between, mode_words, share, size
from fednorms.runs.progress import duration
from fednorms.runs.run_names import short

_MOST_LINES = 8  # sites with their own learning curve
NO_PREDICTIONS = (
    "The run has not stored its predictions, so confusion matrices, calibration, precision, specificity and AUROC are "
    "missing."
)


def run_page(run: RunRecord, cases: Section | None = None) -> Page:
    """The report of a run; `cases` are its worst cases with images, if they were asked for."""
    result, recipe = run.result, run.result.recipe
    tested = run.headline
    counts = {} if tested is None else {site: score.samples for site, score in tested.sites.items()}
    rounds = counted(result.rounds, "round")
    about = (
        f"{short(recipe.model)}, {rounds} of {recipe.rounds}"
        if result.rounds != recipe.rounds
        else f"{short(recipe.model)}, {rounds}"
    )
    sections = [sites_section(run.facts, counts)]
    if tested is not None:
        sections += [_modes(run), _curves(run), _sites(run)]
    sections += [*_judged(run), *([cases] if cases else [])]
    sections += [
        travelled_section(uploads_of(recipe, run.facts), _traffic(run), recipe.across_machines(run.facts)),
        privacy_section(result.privacy),
        _again(run),
        notes_section([*_missing(run), *result.notes]),
    ]
    return Page(
        "run",
        f"{result.method} on {short(recipe.federation)}",
        summary(run),
        f"{about}, seed {recipe.seed}",
        _figures(run),
        sections,
    )


def summary(run: RunRecord) -> list[str]:
    """Two sentences: how good the model is, and where it is worst and how sure that is."""
    result, tested = run.result, run.headline
    if tested is None:
        said = f"{result.method} was trained for {counted(result.rounds, 'round')} and never tested."
        return [said, "The federation has no test images, so nothing is known about how good the model is."]
    images = counted(sum(s.samples for s in tested.sites.values()), f"{_split(tested)} image")
    where = f"on {images} of {counted(len(tested.sites), 'site')}"
    first = (
        f"{result.method} has a mean {run.metric} of {share(run.mean)} over sites after round {result.rounds}, {where} "
    )
    first += f"with {mode_words(tested.label)}{'' if run.finished else '; the run has not finished'}."
    return [first, _weakest(run, tested)]


def _weakest(run: RunRecord, tested: Scores) -> str:
    parts = []
    if len(tested.sites) > 1:
        worst = run.worst_of(tested)
        n = counted(tested.sites[worst].samples, "image")
        parts.append(f"The weakest site is {worst} at {share(run.at(tested.label, worst))}, {n}")
    if run.judgement is not None and (name := run.judgement.worst_class) is not None:
        c = run.judgement.pooled.classes[name]
        parts.append(f"{'the' if parts else 'The'} weakest class is {name} with a recall of {share(c.recall)}")
    half = 50 * (run.mean.high - run.mean.low)
    fixed = "" if math.isnan(half) else f"this many images fix the mean to about ±{half:.1f} points, and "
    sure = f"{fixed}one seed does not show how training varies"
    return "; ".join([*parts, sure if parts else sure[:1].upper() + sure[1:]]) + "."


def _split(tested: Scores) -> str:
    return "test" if tested.split == "test" else "validation"


def _figures(run: RunRecord) -> list[KeyFigure]:
    result, tested, judgement = run.result, run.headline, run.judgement
    if tested is None:
        return []
    worst = run.worst_of(tested)
    found = [KeyFigure(f"Mean {run.metric} over sites", f"{100 * run.mean.value:.1f} %", between(run.mean))]
    if len(tested.sites) > 1:
        at = run.at(tested.label, worst)
        found.append(KeyFigure("Worst site", f"{100 * at.value:.1f} %", f"{worst}, {between(at)}"))
    if judgement is not None and (name := judgement.worst_class) is not None:
        recall = judgement.pooled.classes[name].recall
        found.append(KeyFigure("Worst class, recall", f"{100 * recall.value:.1f} %", f"{name}, {between(recall)}"))
    if judgement is not None:
        ece = judgement.pooled.ece
        found.append(KeyFigure("Calibration error", f"{100 * ece.value:.1f}", between(ece)))
    sent = sum(r["bytes_up"] + r["bytes_down"] for r in result.history)
    found.append(KeyFigure("Sent in all", size(sent), counted(result.rounds, "round")))
    if result.privacy:
        found.append(KeyFigure("Epsilon", f"{result.privacy['epsilon']:.3g}", f"delta {result.privacy['delta']:g}"))
    return found


def _modes(run: RunRecord) -> Section:
    """All tested modes."""
    rows: list[Row] = []
    for label, s in run.tests.items():
        judged = run.judgements.get(label)
        worst = run.worst_of(s)
        row: list[Cell | Child] = [label, mode_words(label)]
        known = run.mean if label == run.result.headline and run.score == "accuracy" else s.mean
        row.append(percent(judged.mean if judged else known))
        row += [percent(s.std), percent(run.at(label, worst)), worst, percent(s.balanced_accuracy)]
        rows.append([*row, Cell(f"{s.loss:.3f}", s.loss)])
    header = [
        "mode",
        "which model",
        "accuracy",
        "std over sites",
        f"worst site, {run.metric}",
        "which",
        "balanced",
        "loss",
    ]
    first = next(iter(run.tests.values()))
    said = f"{_split(first).capitalize()} images, last round that was tested, in percent: means over sites."
    blocks: list[Child] = [paragraph(said), table(header, rows), note(INTERVALS if run.judgement else WILSON)]
    if run.result.best and (best := run.result.best.get("round")):
        blocks.append(
            note(f"The best validation accuracy was in round {best}; the numbers here are of the last round.")
        )
    return Section("Scores", blocks)


def _curves(run: RunRecord) -> Section:
    result, label = run.result, run.result.headline
    tested = run.headline
    assert tested is not None
    name = f"{label}/{tested.split}"
    rows = [r for r in result.history if name in r["scores"]]
    sites = sorted(tested.sites, key=lambda s: getattr(tested.sites[s], run.score))[: _MOST_LINES - 1]
    whole = "mean" if run.score == "accuracy" else run.score
    lines = [Line("mean over sites", [(r["round"], r["scores"][name][whole]) for r in rows])]
    if len(tested.sites) > 1:
        for site in sites:
            values = [(r["round"], r["scores"][name]["sites"].get(site)) for r in rows]
            lines.append(Line(site, [(t, v[run.score]) for t, v in values if v]))
    left = len(tested.sites) - len(sites)
    more = f"the {len(sites)} sites that end worst" if left > 0 and len(tested.sites) > 1 else ""
    blocks: list[Child] = [
        figure(
            line_chart(lines, f"{run.metric.capitalize()} over rounds"),
            f"{_split(tested).capitalize()} {run.metric} (%)",
            more,
        )
    ]
    losses = [(r["round"], r["train_loss"]) for r in result.history if r["train_loss"] is not None]
    if losses:
        chart = line_chart([Line("training loss", losses)], "Training loss over rounds", scale=1, height=200)
        blocks.append(figure(chart, "Training loss", "mean over the images of the sites that trained"))
    return Section("Learning curves", blocks)


def _sites(run: RunRecord) -> Section:
    """Accuracy per site, with intervals."""
    blocks: list[Child] = []
    for label, s in run.tests.items():
        worst = sorted(s.sites, key=lambda site: getattr(s.sites[site], run.score))[:MOST_SITES]
        order = worst if len(s.sites) > MOST_SITES else list(s.sites)
        bars = [Bar(site, run.at(label, site), note=f"n = {s.sites[site].samples:,}") for site in order]
        left = len(s.sites) - len(order)
        more = f"the worst {len(order)} of {counted(len(s.sites), 'site')}" if left else ""
        blocks.append(
            figure(
                bar_chart({"": bars}, f"{run.metric.capitalize()} per site, {label}"),
                mode_words(label).capitalize(),
                more,
            )
        )
    return Section(f"{run.metric.capitalize()} per site", blocks, "Per site")


def _judged(run: RunRecord) -> list[Section]:
    """What stored predictions show; without them, recall per class where the sites told it."""
    if run.judgement is not None:
        return [classes_section(run.judgement), confusion_section(run.judgement), calibration_section(run.judgement)]
    tested, facts = run.headline, run.facts
    if tested is None or facts is None or not all(len(s.recall) == facts.num_classes for s in tested.sites.values()):
        return []
    bars = []
    for c, name in enumerate(facts.classes):
        here = [(s.recall[c], facts.site(n)) for n, s in tested.sites.items() if s.recall[c] == s.recall[c]]
        counts = [(r, site.images[tested.split][c]) for r, site in here if site and tested.split in site.images]
        if n := sum(m for _, m in counts):
            recall = wilson(sum(r * m for r, m in counts) / n, n)
            bars.append(Bar(name, recall, note=f"n = {n:,}"))
    worst = sorted(bars, key=lambda bar: bar.share.value)[:MOST_SITES] if len(bars) > MOST_SITES else bars
    more = f"the worst {len(worst)} of {counted(len(bars), 'class', 'classes')}" if len(worst) < len(bars) else ""
    return (
        [Section("Classes", [figure(bar_chart({"": worst}, "Recall per class"), "Recall (%)", more)])] if bars else []
    )


def _traffic(run: RunRecord) -> Html:
    history = run.result.history
    up, down = (sum(r[key] for r in history) for key in ("bytes_up", "bytes_down"))
    visits = sum(r["clients"] for r in history) or 1
    rows: list[Row] = [
        ["from sites to the server", Cell(size(up), up), Cell(size(up / visits), up / visits)],
        ["from the server to sites", Cell(size(down), down), Cell(size(down / visits), down / visits)],
    ]
    return table(["sent in this run", "in all", "per site and round"], rows, sort=False)


def _again(run: RunRecord) -> Section:
    """Commands, versions and the recipe."""
    result, recipe = run.result, run.result.recipe
    seconds = sum(r["seconds"] for r in result.history)
    rows: list[Row] = [
        ["made with", f"fednorms {recipe.version or '(version not recorded)'}"],
        ["data", f"{recipe.federation}, fingerprint {recipe.fingerprint or 'not recorded'}"],
        ["device", f"{recipe.device}, {recipe.precision}, {counted(recipe.threads, 'thread')}"],
        ["time", f"{duration(seconds) if seconds >= 1 else 'under 1 s'} in rounds"],
    ]
    path = None if result.path is None else str(result.path)
    lines = ["fednorms run recipe.toml --out AGAIN    # the recipe below"]
    if recipe.across_machines(run.facts):
        lines = ["flwr run PROJECT here    # with the same sites, and another deploy.out"]
        lines += [] if path is None else [f"fednorms verify {quote(path)}"]
    elif path is not None:
        lines = [
            f"fednorms run {quote(f'{path}/recipe.toml')} --out AGAIN",
            f"fednorms verify {quote(path)}",
            f"fednorms evaluate {quote(path)}    # needs the data",
        ]
    blocks = [commands(lines), tag("h3", "Versions"), table(["", ""], rows, sort=False)]
    return Section("How to reproduce", [*blocks, tag("h3", "Recipe"), listing(recipe.to_toml())], "Reproduce")


def _missing(run: RunRecord) -> list[str]:
    found = []
    if run.headline is not None and run.judgement is None:
        found.append(NO_PREDICTIONS)
    if not run.finished:
        found.append("The run has not finished: all numbers are of the rounds so far.")
    return found
