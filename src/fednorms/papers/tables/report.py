"""A reproduced table on paper: RESULTS.md, results.csv and results.png."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fednorms.papers.analysis.measures import ANALYSES
from fednorms.papers.tables.cell import APART, MISS, UNJUDGED, Entry, number, ours_of, print_of
from fednorms.papers.tables.preflight import duration
from fednorms.papers.tables.summary import Section, Summary, lines_of, numbers_of, order_of, steps_of, winners_of
from fednorms.runs.store.atomic import clear_errors, write_atomic

NO_PICTURE = "no picture: matplotlib is missing; get it with `pip install 'fednorms[report]'`"


def write(summary: Summary, folder: Path) -> list[Path]:
    """Write the three files (the picture, if matplotlib is there) and return their paths."""
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(summary)
    write_atomic(folder / "RESULTS.md", markdown(summary, pictures).encode())
    write_atomic(folder / "results.csv", csv_table(summary).encode())
    for name, image in pictures.items():
        write_atomic(folder / name, image)
    return [folder / name for name in ("RESULTS.md", "results.csv", *pictures)]


def _pictures(summary: Summary) -> dict[str, bytes]:
    """The table as a picture, and one of every setting's analysis; none without matplotlib."""
    try:
        from fednorms.papers.analysis.picture import png as analysis_png
        from fednorms.papers.tables.picture import png

        image = png(summary)
        found = {} if image is None else {"results.png": image}
        for section in summary.sections:
            if section.findings:
                analysis = ANALYSES[summary.table.analysis]
                found[_picture_of(section)] = analysis_png(analysis, section.findings, section.title)
    except ImportError:
        return {}
    return found


def _picture_of(section: Section) -> str:
    return f"analysis-{section.setting.slug}.png"


def markdown(summary: Summary, pictures: Collection[str] = ()) -> str:
    """The whole report as Markdown; `pictures` names the files beside it."""
    table = summary.table
    shown = [section for section in summary.sections if section.shown]
    lines = [f"# {_escape(table.heading)}", "", f"**{summary.verdict[0].upper()}{summary.verdict[1:]}.**", ""]
    lines += [summary.legend, ""]
    if table.analysis:
        analysis = ANALYSES[table.analysis]
        lines += [
            f"The figure's own analysis is {analysis.name} ({analysis.says.rstrip('.')}); the rest are accuracies.",
            "",
        ]
    lines += _ladder(summary) if len(shown) > 1 else []
    for section in shown:
        lines += [f"## {_escape(section.title)}", "", *_grid(section), ""]
        lines += [f"- † {_escape(column)}: {_escape(why)}" for column, why in section.apart.items()]
        if section.setting.ranked:
            lines.append(f"- {_escape(winners_of(section))}")
        if section.order:
            lines.append(f"- {_escape(order_of(section))}")
        lines += [*(f"- {_escape(line)}" for line in facts(section, table.selection)), ""]
        lines += _analysis(section, pictures)
    missing = [section.title for section in summary.sections if not section.shown]
    if missing:
        lines += [f"Not run yet: {_escape('; '.join(missing))}.", ""]
    notes = [*table.notes, *summary.searches, *(_failure(r) for r in summary.failed)]
    if summary.stale:
        notes.append(f"{len(summary.stale)} results of another recipe than the table's now is are not used.")
    if summary.foreign:
        notes.append(f"{len(summary.foreign)} results of other data than those at hand are not used.")
    if notes:
        lines += ["## Notes", "", *(f"- {_escape(note)}" for note in notes), ""]
    lines.append(f"Made with `fednorms reproduce {table.name}`.")
    return "\n".join(lines) + "\n"


def _ladder(summary: Summary) -> list[str]:
    """The figure's axis as one table: lines down, steps across."""
    ladder, steps = summary.table.ladder, steps_of(summary)
    if ladder is None or not steps:
        return []
    section = next(s for s in summary.sections if ladder.column in s.columns)
    title = _escape(f"{ladder.column} over {ladder.label}")
    lines = [["", *map(_escape, steps)], ["---", *["---:"] * len(steps)]]
    for name, line in lines_of(summary).items():
        cells = [_cell(line[step], section, ladder.column) if step in line else "" for step in steps]
        lines.append([_escape(name), *cells])
    return [f"## {title}", "", *("| " + " | ".join(line) + " |" for line in lines), ""]


def _analysis(section: Section, pictures: Collection[str]) -> list[str]:
    """What the figure's analysis found in a setting."""
    numbers = numbers_of(section.findings)
    names = list(dict.fromkeys(name for row in numbers.values() for name in row))
    lines = []
    if names:
        lines += ["| analysis | " + " | ".join(map(_escape, names)) + " |", "| --- |" + " ---: |" * len(names)]
        for row, found in numbers.items():
            cells = [_mean_std(*found[name]) if name in found else "-" for name in names]
            lines.append(f"| {_escape(row)} | " + " | ".join(cells) + " |")
        lines.append("")
    picture = _picture_of(section)
    return lines + ([f"![{_escape(section.title)}]({picture})", ""] if picture in pictures else [])


def _mean_std(mean: float, std: float | None, seeds: int) -> str:
    return f"{mean:.4g}" + ("" if std is None else f" ± {std:.2g}")


def _grid(section: Section) -> list[str]:
    lines = [["", *map(_escape, section.columns)], ["---", *["---:"] * len(section.columns)]]
    for row, name in section.names.items():
        lines.append([_escape(name), *(_cell(section.rows[row][c], section, c) for c in section.columns)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _cell(entry: Entry, section: Section, column: str) -> str:
    selector = section.selectors[column]
    mark = " ✗" if entry.verdict == MISS else " †" if entry.verdict == APART else ""
    text = ours_of(entry, selector) + mark
    if entry.printed is None:
        return text
    text += f"<br>{print_of(entry.printed, selector)}"
    text += "" if entry.printed.std is None else f" ± {number(entry.printed.std, selector)}"
    if entry.difference is not None:
        sign = "+" if entry.difference >= 0 else "−"
        text += f" ({sign}{number(abs(entry.difference), selector)})"
    return text


def facts(section: Section, selection: str) -> list[str]:
    """What stands below a setting's table: data, seeds, selection, hardware, date, versions, time."""
    records = section.records
    if not records:
        return ["every row over the settings in which it stands, seed by seed, where all of them have run"]
    seeds = sorted({r["recipe"]["seed"] for r in records})
    rounds = "in the last round (no selection)"
    if selection == "best-val":
        without = [r for r in records if r["status"] == "done" and not r.get("best")]
        rounds = "in the round with the best validation accuracy"
        rounds += " (in the last round where there are no validation images)" if without else ""
    peaks = [f'"{column}"' for column, selector in section.selectors.items() if selector.kind == "peak"]
    rounds += f"; {', '.join(peaks)}: in the best of the tested rounds, chosen by these images" if peaks else ""
    done = [r for r in records if r["status"] == "done"]
    total = sum(r["seconds"]["total"] for r in done)
    side = sorted({r["jobs"] for r in records})
    dates = sorted({r["date"] for r in records})
    return [
        *dict.fromkeys(data_line(r["data"]) for r in records),
        f"seeds {', '.join(map(str, seeds))}{_division(records)}; accuracy in per cent on test images, {rounds}",
        "made " + _range(dates) + " on " + _all(records, "hardware") + f" ({_range(side)} at a time), fednorms "
        f"{_all(records, 'version')}{_sources(records)}, torch {_all(records, 'torch')}, {_precision(records)}",
        f"{len(records)} runs took {duration(total)} in all"
        + (f", {duration(total / len(done))} each in the mean" if done else ""),
    ]


def data_line(data: dict[str, Any]) -> str:
    """The data of a run in one line."""
    parts = ("train", "val", "test")
    domains = [
        f"{name} {'/'.join(f'{sizes[p]:,}' for p in parts if any(d[p] for d in data['domains'].values()))}"
        for name, sizes in data["domains"].items()
    ]
    have = "/".join(p for p in parts if any(d[p] for d in data["domains"].values()))
    few = "; ".join(domains) if len(domains) <= 12 else f"{len(domains)} domains"
    unseen = f" and {data['unseen']} unseen sites" if data["unseen"] else ""
    notes = "".join(f"; {note}" for note in data["notes"])
    layout = f" ({data['layout']})" if data["layout"] else ""
    return (
        f"data: {data['federation']}{layout}, {data['clients']} clients{unseen}, {' x '.join(map(str, data['shape']))} "
        f"pixels, {data['classes']} classes; {have} images: {few}; fingerprint {data['fingerprint']}{notes}"
    )


def csv_table(summary: Summary) -> str:
    """One line per cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["setting", "row", "column", "selector", "ours", "std", "seeds", "diverged"]
    writer.writerow([*head, "published", "published std", "difference", "verdict"])
    for section in summary.sections:
        for name, row in section.rows.items():
            for column, entry in row.items():
                printed = entry.printed
                numbers = [_digits(entry.ours), _digits(entry.std), entry.seeds, entry.diverged]
                failed = printed is not None and printed.failed
                numbers += ["failed" if failed else _digits(printed and printed.mean), _digits(printed and printed.std)]
                where = [section.setting.name, name, column, section.setting.columns[column]]
                writer.writerow([*where, *numbers, _digits(entry.difference), entry.verdict])
        for name, values in numbers_of(section.findings).items():
            for what, (mean, std, seeds) in values.items():
                where = [section.setting.name, name, what, summary.table.analysis]
                writer.writerow([*where, _digits(mean), _digits(std), seeds, 0, "", "", "", UNJUDGED])
    return text.getvalue()


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}".rstrip("0").rstrip(".")


def _failure(record: dict[str, Any]) -> str:
    return f"{record['row']} ({record['setting']}), seed {record['recipe']['seed']} failed: {record['error']}"


def _all(records: Sequence[dict[str, Any]], key: str) -> str:
    return " and ".join(dict.fromkeys(str(r[key]) for r in records))


def _division(records: Sequence[dict[str, Any]]) -> str:
    same = len({r["data"]["fingerprint"] for r in records}) == 1
    return ", of training alone (clients hold the same images in all)" if same and len(records) > 1 else ""


def _sources(records: Sequence[dict[str, Any]]) -> str:
    """Which states of the library's files; results of before they were written down have none."""
    known = [r for r in records if "sources" in r]
    older = " and earlier" if known and len(known) < len(records) else ""
    return f" (sources {_all(known, 'sources')}{older})" if known else ""


def _precision(records: Sequence[dict[str, Any]]) -> str:
    names = {"float32": "float32", "tf32": "float32 with TF32 products", "bfloat16": "bfloat16"}
    return " and ".join(dict.fromkeys(names[r["recipe"]["precision"]] for r in records))


def _range(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ").replace("<", "&lt;")
