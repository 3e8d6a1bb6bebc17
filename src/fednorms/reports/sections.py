"""Sections that reports of runs and of comparisons share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote

from fednorms.core.counted import counted
from fednorms.core.errors import FednormsError
from fednorms.core.options import few
from fednorms.data.facts import Facts, SiteFacts
from fednorms.evaluation.judgement import Judgement, SiteJudgement
from fednorms.explain.leaves import Leaving, SiteUploads, what_leaves
from fednorms.models.custom import refuse_unasked
from fednorms.reports.charts import SPLIT_COLORS, class_bars, confusion_matrix, reliability_diagram
from fednorms.reports.elements import Child, Html, tag
from fednorms.reports.page import Section, bullets, figure, legend, note, paragraph, side_by_side
from fednorms.reports.tables import Cell, Row, count, percent, table
from fednorms.reports.words import between, size
from fednorms.runs.recipe import Recipe

MOST_SITES = 30  # that a chart or table names one by one
MOST_CLASSES = 40  # of a confusion matrix that can be read
_MATRICES = 3  # confusion matrices of single sites
_SPLITS = {"train": "training", "val": "validation", "test": "test"}


def sites_section(facts: Facts | None, tested: Mapping[str, int]) -> Section:
    """Sites and what they see: images per split and class. `tested` counts test images where facts do not."""
    title, short = "Sites and what they see", "Sites"
    if facts is None:
        return Section(title, [note("This run stored no facts of its federation (federation.json).")], short)
    sites = [site for site in facts.sites if site.images or site.name in facts.clients or site.name in tested]
    shown = sorted(sites, key=lambda s: -s.samples)[:MOST_SITES] if len(sites) > MOST_SITES else sites
    splits = [s for s in _SPLITS if any(s in site.images for site in sites)]
    domains = any(site.domain != site.name for site in sites)
    rows = [_site_row(site, facts, splits, domains, tested) for site in shown]
    known = bool(splits)
    header = ["site", *(["domain"] if domains else []), *(splits if known else ["test"])]
    header += ["images per class"] if known else []
    shape = " x ".join(map(str, facts.shape))
    trains = len(facts.clients)
    about = f"{counted(trains, 'site')} trained; images are {shape} (channels x height x width)."
    if unseen := [s.name for s in sites if s.name in facts.unseen]:
        about += f" Not in training, only tested: {few(unseen)}."
    blocks: list[Child] = [paragraph(about)]
    if known:
        blocks.append(legend([(SPLIT_COLORS[split], _SPLITS[split]) for split in splits]))
    blocks.append(table(header, rows))
    if known:
        names = ", ".join(facts.classes[:MOST_CLASSES]) + (", ..." if len(facts.classes) > MOST_CLASSES else "")
        blocks.append(note(f"Classes, from left to right: {names}. Bars are relative to the largest class of a site."))
    else:
        blocks.append(note("The sites did not say how many images of each class they have, so none are shown."))
    if len(sites) > len(shown):
        blocks.append(note(f"The {len(shown)} largest of {counted(len(sites), 'site')}."))
    return Section(title, blocks, short)


def _site_row(site: SiteFacts, facts: Facts, splits: Sequence[str], domains: bool, tested: Mapping[str, int]) -> Row:
    row: list[Cell | Child] = [site.name, *([site.domain] if domains else [])]
    row += [count(sum(site.images.get(split, []))) for split in splits]
    if not splits:
        return [*row, count(tested[site.name]) if site.name in tested else Cell("-")]
    images = {split: site.images[split] for split in splits if split in site.images}
    return [*row, class_bars(images, facts.classes, f"Images per class at {site.name}") if images else None]


def classes_section(judgement: Judgement) -> Section:
    """Every class against the rest, over the images of all sites."""
    worst = judgement.worst_class
    rows: list[Row] = []
    for name, c in judgement.pooled.classes.items():
        rates = (c.recall, c.specificity, c.precision, c.f1, c.auroc)
        cells = [percent(r, "bad" if name == worst and r is c.recall else "") for r in rates]
        rows.append([name, count(c.n), *cells])
    header = ["class", "images", "recall", "specificity", "precision", "F1", "AUROC"]
    said = (
        "Each class against the rest, in percent, over the test images of all sites. Recall is also called sensitivity."
    )
    return Section("Classes", [paragraph(said), table(header, rows[:200])])


def confusion_section(judgement: Judgement) -> Section:
    """The confusion matrix over all sites, and those of the worst sites."""
    classes, pooled = judgement.classes, judgement.pooled
    title = "Which classes are confused"
    if len(classes) > MOST_CLASSES:
        return Section(title, [paragraph("The most frequent confusions:"), _confusions(pooled, classes)], "Confusion")
    blocks: list[Child] = [
        paragraph(
            "Rows are true classes, columns predictions. Shades are shares of a row: correct in blue, errors in orange."
        )
    ]
    worst = sorted(judgement.sites, key=lambda s: judgement.sites[s].accuracy.value)[:_MATRICES]
    if len(judgement.sites) == 1:
        return Section(title, [*blocks, _matrix(pooled, classes, "All images", 400)], "Confusion")
    blocks.append(_matrix(pooled, classes, "All sites", 400))
    made = [_matrix(judgement.sites[site], classes, site, 212) for site in worst]
    blocks += [tag("h3", "The sites with the lowest accuracy" if len(judgement.sites) > len(worst) else "Single sites")]
    return Section(title, [*blocks, side_by_side(made)], "Confusion")


def _matrix(judged: SiteJudgement, classes: Sequence[str], name: str, wide: float) -> Html:
    about = f"{100 * judged.accuracy.value:.1f} % of {counted(judged.n, 'image')} correct"
    return figure(confusion_matrix(judged.confusion, classes, f"Confusion matrix, {name}", size=wide), name, about)


def _confusions(judged: SiteJudgement, classes: Sequence[str]) -> Html:
    wrong = [
        (n, classes[i], classes[j]) for i, row in enumerate(judged.confusion) for j, n in enumerate(row) if i != j and n
    ]
    rows: list[Row] = [[true, said, count(n)] for n, true, said in sorted(wrong, reverse=True)[:20]]
    return table(["true class", "predicted as", "images"], rows)


def calibration_section(judgement: Judgement) -> Section:
    """Reliability diagrams over all sites and of the sites with the largest calibration errors."""
    pooled = judgement.pooled
    said = (
        "A calibrated model that is 80 % confident is correct in 80 % of cases: points on the dashed line. The "
        f"expected calibration error (ECE) is {100 * pooled.ece.value:.1f} points"
        + (f" ({between(pooled.ece)})" if between(pooled.ece) else "")
        + f", the Brier score {pooled.brier.value:.3f} ({pooled.brier.low:.3f} to {pooled.brier.high:.3f})."
    )
    made = [
        figure(
            reliability_diagram(pooled.bins, "Calibration, all sites"), "All sites", f"ECE {100 * pooled.ece.value:.1f}"
        )
    ]
    if len(judgement.sites) > 1:
        worst = max(judgement.sites, key=lambda s: judgement.sites[s].ece.value)
        one = judgement.sites[worst]
        about = f"ECE {100 * one.ece.value:.1f}, the largest of all sites"
        made.append(figure(reliability_diagram(one.bins, f"Calibration, {worst}"), worst, about))
    return Section("Calibration", [paragraph(said), side_by_side(made)])


def uploads_of(recipe: Recipe, facts: Facts | None) -> SiteUploads | str:
    """What leaves a site in a run, measured in a trial on tiny data; or why it could not be measured."""
    if recipe.model.startswith("custom:"):
        return "The model is a custom object, so what leaves a site could not be measured here."
    try:
        refuse_unasked(recipe.model, "The recipe")
        shape = None if facts is None else facts.shape
        classes = 10 if facts is None else facts.num_classes
        return what_leaves(recipe.method, recipe.model, classes=classes, shape=shape, head=recipe.head or None)
    except FednormsError as error:
        return f"What leaves a site could not be measured here: {error}"


def travelled_section(found: SiteUploads | str, traffic: Html, flower: bool = False) -> Section:
    """What leaves a site and what stays, and how many bytes that were in the run."""
    title = "What travelled and what stayed"
    if isinstance(found, str):
        return Section(title, [note(found), traffic], "What travelled")
    rows: list[Row] = [
        [_sender(x), x.when, f"{x.what}: {few(x.names)}", Cell(size(x.nbytes), x.nbytes)] for x in found.leaving
    ]
    told = "Sites also tell numbers of images, training loss and test scores; "
    if not flower:
        told = "Across machines, sites also tell numbers of images, training loss and test scores; "
    blocks: list[Child] = [
        paragraph("What leaves a site, measured by running the method once on tiny data:"),
        table(["sent by", "when", "what leaves a site", "size"], rows, sort=False),
        bullets(_stays(found)),
        traffic,
        note([told, tag("code", f"fednorms describe {quote(found.method)} --privacy"), " lists all of it."]),
    ]
    return Section(title, blocks, "What travelled")


def _sender(x: Leaving) -> Child:
    return x.sender if not x.statistics else [x.sender, tag("span", " statistics of the data", class_="note")]


def _stays(found: SiteUploads) -> list[Child]:
    kept = f"{size(found.kept_bytes)} of tensors ({few(found.kept)}) and " if found.kept else ""
    stays = "The images themselves leave the sites." if found.pooled else f"What stays: {kept}every image."
    secure = "possible in principle, because the server needs only sums over sites"
    lines: list[Child] = [stays, f"Secure aggregation is {secure if found.secure_aggregation else 'impossible'}."]
    if found.individual:
        lines.append(f"The server must see each site's update: {', '.join(found.individual)}.")
    lines += [f"The uploads of {name} tell images per class." for name in found.class_counts]
    return lines


def privacy_section(privacy: Mapping[str, object] | None) -> Section:
    """Epsilon, or that there is no differential privacy."""
    if privacy is None:
        said = "Trained without differential privacy: no epsilon bounds what updates can reveal about a site's data."
        return Section("Privacy", [paragraph(said)])
    bound = f"Epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g} after the last round"
    said = f"{bound}, by {privacy['part']} ({privacy['neighbours']})."
    more = "Numbers of images, test scores and the choice of the best round are not counted in epsilon."
    return Section("Privacy", [paragraph(said), note(more)])


def notes_section(notes: Sequence[str]) -> Section:
    """What the run noted, and what this report lacks."""
    return Section("Notes", [bullets(list(dict.fromkeys(notes)))] if notes else [])
