"""The report of an advice, from the plain values that `Advice.to_dict` gives and advice.json holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fednorms.advice.advice import points
from fednorms.core.errors import BadInput
from fednorms.evaluation.intervals import wilson
from fednorms.reports.charts import Bar, Line, bar_chart, line_chart
from fednorms.reports.elements import Child, tag
from fednorms.reports.page import KeyFigure, Page, Section, bullets, commands, figure, listing, note, paragraph
from fednorms.reports.sections import MOST_SITES, notes_section
from fednorms.reports.tables import Cell, Row, percent, table
from fednorms.reports.words import size
from fednorms.runs.recipe import Recipe
from fednorms.runs.run_names import short

FILE = "advice.json"
_MOST_LINES = 6

Values = Mapping[str, Any]


def read_advice(folder: Path) -> Values:
    """The plain values of a stored advice."""
    try:
        values: Values = json.loads((folder / FILE).read_bytes())
        if values["kind"] != "advice":
            raise ValueError(f'its kind is "{values["kind"]}"')
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(
            f"{folder / FILE} is not readable ({error}). Run `fednorms advise` again to write it."
        ) from error
    return values


def advice_page(values: Values) -> Page:
    """The report of an advice."""
    answer = values["answer"]
    sections = [_tried(values), _curves(values), _sites(values), _measures(values), _why(values), _costs(values)]
    sections += [_again(values), notes_section(list(values["notes"]))]
    where = f"{short(values['model'])} on {short(values['federation'])}"
    about = f"{where}, {values['budget']['rounds']:g} rounds of training in all"
    sure = "All scores are on validation images; test images were not read."
    title = f"{answer['method']} for {short(values['federation'])}"
    return Page("advice", title, [answer["sentence"], sure], about, _figures(values), sections)


def _figures(values: Values) -> list[KeyFigure]:
    answer, finalists = values["answer"], values["finalists"]
    found = [KeyFigure("Recommended", answer["method"], f"learning rate {answer['lr']:g}")]
    if finalists:
        found.append(KeyFigure("Validation accuracy", f"{100 * finalists[0]['mean']:.1f} %", _seeds(finalists[0])))
    if gap := answer["difference"]:
        more = f"{gap['low']:+.1f} to {gap['high']:+.1f} over {answer['runner_up']}"
        found.append(KeyFigure("Ahead by", f"{gap['mean']:.1f} points", more))
    verdicts = {
        "clear": "clear",
        "no difference": "no difference shown",
        "alone": "sites alone",
        "untested": "untested",
    }
    if gap or answer["verdict"] == "untested":
        found.append(KeyFigure("How sure", verdicts.get(answer["verdict"], answer["verdict"])))
    return found


def _seeds(finalist: Values) -> str:
    n = len(finalist["scores"])
    return f"{n} seed{'s' * (n != 1)}, {finalist['rounds']} rounds"


def _setting(values: Values) -> str:
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())


def _tried(values: Values) -> Section:
    """Every method that was tried, as far as it came."""
    rows: dict[str, Row] = {}
    for i, f in enumerate(values["finalists"]):
        gap, noise = f["behind"], False
        if gap:
            noise = gap["low"] <= 0 <= gap["high"]
        said = "best" if not i else "" if not gap else points(-gap["mean"])
        below = f"{points(-gap['high'])} to {points(-gap['low'])}" + (", within noise" if noise else "") if gap else ""
        score = Cell(f"{100 * f['mean']:.1f}", f["mean"], mark="" if i else "best")
        value = -gap["mean"] if gap else 0.0
        line = [f["arm"], _setting(f["values"]), Cell(str(f["rounds"]), f["rounds"]), Cell(str(len(f["scores"])))]
        rows[f["arm"]] = [*line, score, Cell(said, value, below)]
    for rung in reversed(values["rungs"]):
        for p in sorted(rung["played"], key=lambda p: -(p["score"] or 0.0)):
            score = Cell("failed", mark="bad") if p["score"] is None else percent(p["score"])
            line = [p["arm"], _setting(p["values"]), Cell(str(p["rounds"]), p["rounds"]), Cell("1", 1)]
            last = rung is values["rungs"][-1] and values["finalists"] and p["score"] is not None
            behind = 100 * (p["score"] - values["finalists"][0]["mean"]) if last else None
            rows.setdefault(p["arm"], [*line, score, Cell("out") if behind is None else Cell(points(behind), behind)])
    header = ["method", "values", "rounds", "seeds", "validation (%)", "points to the best"]
    said = "Methods were trained briefly at several learning rates, and the best ones longer."
    more = '"Out" means that a method did not reach the last rung; its score is of fewer rounds or seeds.'
    made = [paragraph(said), table(header, list(rows.values())), note(more)] if rows else []
    return Section("Methods that were tried", made, "Methods")


def _curves(values: Values) -> Section:
    curves = {name: [(float(t), float(a)) for t, a in points] for name, points in values["curves"].items() if points}
    last = [", ".join([f["arm"], *([_setting(f["values"])] if f["values"] else [])]) for f in values["finalists"]]
    others = sorted(curves, key=lambda name: (-len(curves[name]), -curves[name][-1][1]))
    best = list(dict.fromkeys([*(name for name in last if name in curves), *others]))[:_MOST_LINES]
    chart = line_chart([Line(name, curves[name]) for name in best], "Validation accuracy over rounds")
    more = f"seed 0; {len(best)} of {len(curves)} trials" if len(best) < len(curves) else "seed 0"
    return Section("Learning curves", [figure(chart, "Validation accuracy (%)", more)] if chart else [])


def _sites(values: Values) -> Section:
    """Validation accuracy of the best two at every site."""
    if not values["rungs"] or not values["finalists"]:
        return Section("Accuracy per site", [])
    names = [(f["arm"], f["values"]) for f in values["finalists"][:3]]
    groups: dict[str, list[Bar]] = {}
    for color, (arm, chosen) in enumerate(names):
        played = [p for p in values["rungs"][-1]["played"] if p["arm"] == arm and p["values"] == chosen]
        for site in played[0]["sites"] if played else ():
            counts = [p["sites"][site] for p in played if site in p["sites"]]
            right, n = fmean(c[0] for c in counts), counts[0][1]
            if n:
                groups.setdefault(site, []).append(Bar(arm, wilson(right / n, n), color, f"n = {n:,}"))
    worst = sorted(groups, key=lambda site: max(bar.share.value for bar in groups[site]))[:MOST_SITES]
    shown = {site: bars for site, bars in groups.items() if site in worst}
    more = "mean over seeds; intervals follow from the number of images"
    chart = bar_chart(shown, "Validation accuracy per site")
    return Section("Accuracy per site", [figure(chart, "Validation accuracy (%)", more)] if chart else [], "Per site")


def _measures(values: Values) -> Section:
    rows: list[Row] = [
        [m["says"], Cell("-") if m["value"] is None else Cell(f"{m['value']:.3g}", m["value"]), m["reveals"]]
        for m in values["measures"]
    ]
    header = ["measure", "value", "what a site reveals for it"]
    return Section("How the sites differ", [table(header, rows)] if rows else [], "Sites")


def _why(values: Values) -> Section:
    lines: list[Child] = []
    for arm in values["arms"]:
        prior = arm["prior"]
        known = "" if prior is None else f"; on similar federations it lost {prior:.1f} points to the best"
        lines.append([tag("b", arm["name"]), f": {arm['reason']}{known}."])
    left = [[tag("b", name), f": {why}"] for name, why in values["excluded"].items()]
    blocks: list[Child] = [bullets(lines)]
    if left:
        blocks += [tag("h3", "Left out"), bullets(left)]
    return Section("Why these methods", blocks, "Why")


def _costs(values: Values) -> Section:
    rows: list[Row] = []
    for arm in values["arms"]:
        cost = arm["cost"]
        sizes = [Cell(size(cost[key]), cost[key]) for key in ("bytes_up", "bytes_down", "client_state")]
        rows.append([arm["name"], *sizes, Cell(f"{cost['passes']:.2g}", cost["passes"])])
    header = ["method", "up", "down", "kept at a site", "passes over the data"]
    said = "Per site and round; passes are relative to FedAvg."
    return Section("What it costs", [paragraph(said), table(header, rows)] if rows else [], "Costs")


def _again(values: Values) -> Section:
    blocks: list[Child] = [commands([values["answer"]["command"]])]
    blocks.append(note(f"Advised by fednorms {values['version']}."))
    answer, asked = values["answer"], values["recipe"]
    method = next(arm["method"] for arm in values["arms"] if arm["name"] == answer["method"])
    advised = {**asked, "method": method, "training": {**asked["training"], "lr": answer["lr"]}}
    blocks += [tag("h3", "Recipe"), listing(Recipe.make(advised).to_toml())]
    return Section("Run it for real", blocks, "Run it")
