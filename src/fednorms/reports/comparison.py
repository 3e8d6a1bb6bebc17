"""The report of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from shlex import quote
from statistics import fmean

from fednorms.core.counted import counted
from fednorms.core.options import few
from fednorms.evaluation.intervals import Interval, wilson
from fednorms.explain.leaves import SiteUploads
from fednorms.reports.charts import Bar, Line, bar_chart, color_of, line_chart
from fednorms.reports.elements import Child, tag
from fednorms.reports.page import (
    KeyFigure,
    Page,
    Section,
    bullets,
    commands,
    figure,
    listing,
    note,
    paragraph,
    swatch,
)
from fednorms.reports.sections import (
    MOST_SITES,
    calibration_section,
    classes_section,
    confusion_section,
    notes_section,
    sites_section,
    uploads_of,
)
from fednorms.reports.stored import ComparisonRecord, RunRecord
from fednorms.reports.tables import Cell, Row, percent, table
from fednorms.reports.words import between, mode_words, share, size
from fednorms.runs.comparison import TableRow
from fednorms.runs.differences import ACCURACY, MEAN, OVERALL, within_noise
from fednorms.runs.run_names import short

_WHOLE = (
    "Intervals cover 95 %: another sample of test images and, as far as the seeds show it, another training run. With "
    "two or three seeds the second part is rough."
)
_PAIRED = (
    "Behind the best: points, with the interval of a paired bootstrap over test images and seeds. A difference whose "
    "interval holds 0 is within noise. Intervals are not corrected for the number of differences: of equal methods, "
    "about one in twenty seems to differ."
)
_COLUMNS = 8  # methods next to each other in a table


def comparison_page(record: ComparisonRecord, cases: Section | None = None) -> Page:
    """The report of a comparison; `cases` are the best method's worst cases with images, if they were asked for."""
    comparison = record.comparison
    methods, seeds = counted(len(comparison.methods), "method"), counted(len(comparison.seeds), "seed")
    first = next((run for runs in record.runs.values() for run in runs), None)
    data = comparison.about.get("data", "")
    where = short(first.result.recipe.federation if first else data.partition(",")[0])
    tested = {} if first is None or first.headline is None else first.headline.sites
    sections = [
        sites_section(first.facts if first else None, {site: s.samples for site, s in tested.items()}),
        _methods(record),
        _curves(record),
        _sites(record),
        *_best_in_detail(record),
        *([cases] if cases else []),
        _travelled(record),
        _privacy(record),
        _again(record, first),
        notes_section(_notes(record)),
    ]
    about = comparison.about.get("training", "")
    return Page("comparison", f"{methods} on {where}, {seeds}", summary(record), about, _figures(record), sections)


def summary(record: ComparisonRecord) -> list[str]:
    """Two sentences: the best method and how far it is ahead, then where it is weakest and how sure that is."""
    comparison = record.comparison
    ranked = _ranked(record)
    if not ranked:
        return ["No method has a result.", "Every run failed or had no test images."]
    best = ranked[0]
    mean, over = _interval(record, best), counted(len(comparison.seeds), "seed")
    first = f"{best.label} is best of {counted(len(comparison.methods), 'method')}"
    first += f" with a mean {comparison.measure} of {share(mean)}"
    first += f" over sites and {over}" if len(comparison.seeds) > 1 else " over sites with one seed"
    if others := [row for row in ranked if row.label != best.label]:
        ahead = 100 * (mean.value - others[0].entries[comparison.judged_by].mean)
        first += f", {ahead:.1f} points ahead of {others[0].label}{_certainty(record, others[0])}"
    return [first + ".", _weakest(record, best)]


def _gap(record: ComparisonRecord, row: TableRow) -> Interval:
    """By how much the best row is ahead of this one, with the interval of the paired bootstrap if there is one."""
    by = record.comparison.judged_by
    gap = record.comparison.to_best.get((row.label, row.mode), {}).get(by)
    ahead = _ranked(record)[0].entries[by].mean - row.entries[by].mean
    return gap if gap is not None and gap.defined else Interval(ahead, math.nan, math.nan)


def _certainty(record: ComparisonRecord, other: TableRow) -> str:
    gap = _gap(record, other)
    if math.isnan(gap.low):
        return "; without stored predictions, how sure that is cannot be said"
    return f" ({between(gap)})" + (", which is within noise" if within_noise(gap) else "")


def _weakest(record: ComparisonRecord, best: TableRow) -> str:
    domains = [c for c in record.comparison.columns if c in best.entries and c not in OVERALL]
    parts = []
    if domains:
        worst = min(domains, key=lambda c: best.entries[c].mean)
        parts.append(f"its weakest site is {worst} at {share(_interval(record, best, worst))}")
    run = _first_run(record, best)
    if run is not None and run.judgement is not None and (name := run.judgement.worst_class) is not None:
        recall = run.judgement.pooled.classes[name].recall
        parts.append(f"its weakest class is {name} with a recall of {share(recall)}")
    seeds = len(record.comparison.seeds)
    sure = "all methods had the same cohorts and batches"
    sure += "" if seeds > 2 else f", but {counted(seeds, 'seed')} tell little about how training varies"
    said = "; ".join([*parts, sure])
    return said[:1].upper() + said[1:] + "."


def _ranked(record: ComparisonRecord) -> list[TableRow]:
    """The rows with numbers, the best first."""
    by = record.comparison.judged_by
    return sorted((r for r in record.comparison.rows if by in r.entries), key=lambda r: -r.entries[by].mean)


def _first_run(record: ComparisonRecord, row: TableRow) -> RunRecord | None:
    return next((run for run in record.runs.get(row.label, []) if run.result.headline == row.mode), None)


def _images(record: ComparisonRecord, row: TableRow) -> dict[str, int]:
    """Test images of each column: of a domain, and of all for an average."""
    for outcome in record.comparison.outcomes:
        if outcome.label == row.label and row.mode in outcome.scores:
            found: dict[str, int] = {}
            for scores in outcome.scores.values():
                if scores.label == row.mode or scores.mode == "unseen":
                    end = " (unseen)" if scores.mode == "unseen" else ""
                    for site, s in scores.sites.items():
                        key = scores.domain_of[site] + end
                        found[key] = found.get(key, 0) + s.samples
            return found
    return {}


def _interval(record: ComparisonRecord, row: TableRow, column: str = "") -> Interval:
    """A cell with an interval over test images (Wilson) and seeds (the standard error of their mean).

    Balanced accuracy has none here: it is no share of images.
    """
    column = column or record.comparison.judged_by
    entry, images = row.entries[column], _images(record, row)
    trained = [d for d in images if not d.endswith(" (unseen)") and d in row.entries]
    parts = trained if column in OVERALL else [column]
    if record.comparison.judged_by != MEAN or not all(images.get(d) for d in parts) or not parts:
        return Interval(entry.mean, math.nan, math.nan)
    each = [wilson(row.entries[d].mean, images[d]) for d in parts]
    variance = sum(((e.high - e.low) / 2) ** 2 for e in each) / len(parts) ** 2
    variance += (1.96 * entry.std) ** 2 / len(row.per_seed) if entry.std is not None else 0.0
    half = math.sqrt(variance)
    low, high = max(0.0, entry.mean - half), min(1.0, entry.mean + half)
    if len(parts) == 1 and entry.std is None:
        low, high = each[0].low, each[0].high  # near 0 and 1, Wilson's interval is not symmetric
    return Interval(entry.mean, low, high)


def _color(record: ComparisonRecord, row: TableRow) -> int:
    return list(record.comparison.methods).index(row.label)


def _figures(record: ComparisonRecord) -> list[KeyFigure]:
    ranked = _ranked(record)
    if not ranked:
        return []
    best = ranked[0]
    mean = _interval(record, best)
    found = [KeyFigure("Best method", best.label, mode_words(best.mode))]
    found.append(KeyFigure(f"Its mean {record.comparison.measure}", f"{100 * mean.value:.1f} %", between(mean)))
    domains = [c for c in record.comparison.columns if c in best.entries and c not in OVERALL]
    if domains:
        worst = min(domains, key=lambda c: best.entries[c].mean)
        at = _interval(record, best, worst)
        found.append(
            KeyFigure("Its worst site", f"{100 * at.value:.1f} %", ", ".join(filter(None, (worst, between(at)))))
        )
    failed = len(record.comparison.failed)
    runs = len(record.comparison.outcomes)
    found.append(KeyFigure("Runs", str(runs), f"{failed} failed" if failed else "none failed"))
    return found


def _methods(record: ComparisonRecord) -> Section:
    """Methods and modes with their means, worst sites and costs."""
    comparison = record.comparison
    ranked = _ranked(record)
    best = ranked[0] if ranked else None
    rates = len({row.lr for row in comparison.rows if not math.isnan(row.lr)}) > 1
    balanced = comparison.judged_by != MEAN
    rows: list[Row] = []
    for row in [*ranked, *(r for r in comparison.rows if r not in ranked)]:
        name = [swatch(color_of(_color(record, row))), row.label, tag("span", row.mode, class_="range")]
        line: list[Cell | Child] = [name]
        line += [Cell(f"{row.lr:g}", row.lr)] if rates else []
        if not row.entries:
            rows.append([*line, Cell("failed", mark="bad"), *[Cell("-")] * (4 + balanced)])
            continue
        mean = _interval(record, row)
        domains = [c for c in comparison.columns if c in row.entries and c not in OVERALL]
        worst = min(domains, key=lambda c: row.entries[c].mean)
        at, std = _interval(record, row, worst), row.entries[comparison.judged_by].std
        line.append(percent(mean, "best" if row is best else ""))
        if balanced:
            line.append(percent(row.entries[ACCURACY].mean))
        line.append(_behind(record, row))
        line.append(Cell("-") if std is None else percent(std))
        line.append(Cell(f"{100 * at.value:.1f}", at.value, worst))
        line.append(_sent(record, row))
        rows.append(line)
    header = ["method", *(["lr"] if rates else []), *(["balanced", "accuracy"] if balanced else ["mean"])]
    header += ["behind the best", "std over seeds", "worst site", "sent per site and round"]
    said = f"{comparison.measure.capitalize()} in percent on test images after the last round, best first; means over "
    said += "sites that trained."
    blocks: list[Child] = [paragraph(said), table(header, rows), note(f"{_PAIRED} {_WHOLE}")]
    if not rates and "rates" not in comparison.about and len(comparison.methods) > 1 and best is not None:
        said = f"All methods used the learning rate {best.lr:g}; one that needs another rate is at a disadvantage here."
        blocks.append(note(said))
    return Section("Methods", blocks)


def _behind(record: ComparisonRecord, row: TableRow) -> Cell:
    """The difference to the best row in points, and whether it is within noise."""
    first = _ranked(record)[0]
    if (row.label, row.mode) == (first.label, first.mode):
        return Cell("best", 0.0)
    gap = _gap(record, row)
    noise = " (noise)" if within_noise(gap) else ""
    return Cell(f"{100 * gap.value:.1f}", gap.value, between(gap) + noise)


def _sent(record: ComparisonRecord, row: TableRow) -> Cell:
    sent = [t.bytes for o in record.comparison.outcomes if o.label == row.label for t in o.rounds]
    return Cell(size(fmean(sent)), fmean(sent)) if sent else Cell("-")


def _curves(record: ComparisonRecord) -> Section:
    comparison = record.comparison
    lines = []
    for label in comparison.methods:
        curve = comparison.curve(label)
        band = [(max(0.0, e.mean - (e.std or 0.0)), min(1.0, e.mean + (e.std or 0.0))) for e in curve.values()]
        several = len(comparison.seeds) > 1
        lines.append(Line(label, [(t, e.mean) for t, e in curve.items()], band if several else ()))
    more = "mean and standard deviation over seeds" if len(comparison.seeds) > 1 else "one seed"
    chart = line_chart(lines, "Learning curves", height=340)
    return Section("Learning curves", [figure(chart, "Mean test accuracy over domains (%)", more)] if chart else [])


def _sites(record: ComparisonRecord) -> Section:
    """Every domain with a bar per method, and the same as a table."""
    comparison = record.comparison
    rows = [row for row in comparison.rows if row.entries]
    domains, what = [c for c in comparison.columns if c not in OVERALL], comparison.measure.capitalize()
    if not rows or not domains:
        return Section(f"{what} per site", [])
    hardest = sorted(domains, key=lambda d: max(r.entries[d].mean for r in rows if d in r.entries))
    shown = hardest[:MOST_SITES] if len(domains) > MOST_SITES else domains
    blocks: list[Child] = []
    several = len({row.mode for row in rows}) > 1 and len({row.label for row in rows}) < len(rows)
    if len(rows) * len(shown) <= 120:
        groups = {}
        for domain in shown:
            bars = []
            for row in rows:
                if domain in row.entries:
                    name = f"{row.label} ({row.mode})" if several else row.label
                    bars.append(Bar(name, _interval(record, row, domain), _color(record, row)))
            groups[domain] = bars
        blocks.append(figure(bar_chart(groups, f"{what} per site"), f"{what} on test images per site (%)"))
    for start in range(0, len(rows), _COLUMNS):
        part = rows[start : start + _COLUMNS]
        lines: list[Row] = [[d, *(_cell(record, row, d, rows) for row in part)] for d in shown]
        blocks.append(table(["site", *(f"{r.label} ({r.mode})" if several else r.label for r in part)], lines))
    if len(shown) < len(domains):
        blocks.append(note(f"The {len(shown)} hardest of {counted(len(domains), 'site')}."))
    blocks.append(note(f"The best of each site is marked. {_WHOLE}"))
    return Section(f"{what} per site", blocks, "Per site")


def _cell(record: ComparisonRecord, row: TableRow, domain: str, rows: Sequence[TableRow]) -> Cell:
    if domain not in row.entries:
        return Cell("-")
    at = _interval(record, row, domain)
    best = max(r.entries[domain].mean for r in rows if domain in r.entries)
    return percent(at, "best" if at.value == best else "")


def best_run(record: ComparisonRecord) -> RunRecord | None:
    """The first run of the best method, if it was stored."""
    ranked = _ranked(record)
    return _first_run(record, ranked[0]) if ranked else None


def _best_in_detail(record: ComparisonRecord) -> list[Section]:
    """Classes, confusions and calibration of the best method's first run."""
    ranked, run = _ranked(record), best_run(record)
    if run is None or run.judgement is None:
        return []
    whose = note(
        f"Of the best method, {ranked[0].label}, with seed {run.result.recipe.seed} ({mode_words(ranked[0].mode)})."
    )
    made = [classes_section(run.judgement), confusion_section(run.judgement), calibration_section(run.judgement)]
    return [Section(s.title, [whose, *s.content], s.short) for s in made]


def _travelled(record: ComparisonRecord) -> Section:
    rows: list[Row] = []
    reasons = []
    for label, runs in record.runs.items():
        if not runs:
            continue
        found = uploads_of(runs[0].result.recipe, runs[0].facts)
        if isinstance(found, str):
            reasons.append(f"{label}: {found}")
            continue
        rows.append([label, *_uploads(found)])
    header = [
        "method",
        "leaves a site every round",
        "of it, statistics of the data",
        "also",
        "stays",
        "only sums needed",
    ]
    if not rows and not reasons:
        return Section("What travelled and what stayed", [])
    said = "Measured by running each method once on tiny data, not declared by it."
    more = "If the server needs only sums over sites, secure aggregation is possible in principle."
    return Section(
        "What travelled and what stayed",
        [paragraph(said), table(header, rows) if rows else None, note(more), bullets(reasons)],
        "What travelled",
    )


def _uploads(found: SiteUploads) -> Row:
    often = [x for x in found.leaving if x.when == "every round"]
    total, read = (sum(x.nbytes for x in often if x.statistics or not only) for only in (False, True))
    also = "; ".join(f"{x.when}: {x.sender} {x.what} ({size(x.nbytes)})" for x in found.leaving if x not in often)
    stays = (
        "nothing: images leave"
        if found.pooled
        else "images" + (f", {size(found.kept_bytes)} of tensors" if found.kept else "")
    )
    return [
        Cell(size(total), total),
        Cell(size(read) if read else "none", read),
        also or "-",
        stays,
        "yes" if found.secure_aggregation else "no",
    ]


def _privacy(record: ComparisonRecord) -> Section:
    known = {label: runs[0].result.privacy for label, runs in record.runs.items() if runs}
    found = [
        f"{label}: epsilon {p['epsilon']:.3g} at delta {p['delta']:g} ({p['neighbours']})"
        for label, p in known.items()
        if p
    ]
    without = [label for label, p in known.items() if not p]
    if without and not found:
        return Section(
            "Privacy",
            [paragraph("No method was trained with differential privacy: no epsilon bounds what updates can reveal.")],
        )
    lines = [*found, *([f"Without differential privacy: {few(without)}"] if without else [])]
    return Section("Privacy", [bullets(lines)] if lines else [])


def _again(record: ComparisonRecord, first: RunRecord | None) -> Section:
    comparison = record.comparison
    blocks: list[Child] = []
    if first is not None and comparison.path is not None:
        shown = " ".join(quote(label) for label in comparison.methods)
        recipe = quote(f"{first.result.path}/recipe.toml")
        lines = [
            f"fednorms compare --methods {shown} --seeds {len(comparison.seeds)} --recipe {recipe} --out AGAIN",
            f"fednorms verify {quote(str(comparison.path))}",
        ]
        if len({row.lr for row in comparison.rows if not math.isnan(row.lr)}) > 1:
            rates = {row.label: row.lr for row in comparison.rows}
            lines[0] += " --lrs " + " ".join(quote(f"{label}={lr:g}") for label, lr in rates.items())
        blocks.append(commands(lines))
    blocks.append(bullets([f"{key}: {value}" for key, value in comparison.about.items()]))
    if first is not None:
        blocks += [tag("h3", "Recipe of the first run"), listing(first.result.recipe.to_toml())]
    return Section("How to reproduce", blocks, "Reproduce")


def _notes(record: ComparisonRecord) -> list[str]:
    comparison = record.comparison
    found = [f"{o.label}, seed {o.seed} failed: {o.error}" for o in comparison.failed]
    ranked, run = _ranked(record), best_run(record)
    if run is not None and run.judgement is None:
        found.append(
            f"The runs of {ranked[0].label} have not stored their predictions, so confusion matrices, calibration "
            "and numbers per class are missing."
        )
    return found + comparison.notes
