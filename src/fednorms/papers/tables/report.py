"""The report of a table: RESULTS.md, results.csv and results.png."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fednorms.core.markup import markdown_table
from fednorms.core.options import few
from fednorms.papers.analysis.measures import ANALYSES
from fednorms.papers.tables.cell import UNJUDGED, TableCell, mark, number, ours_text, published_text
from fednorms.papers.tables.summary import Section, Summary, axis_lines, axis_steps, numbers_of, winners_of
from fednorms.papers.tables.table import Setting
from fednorms.runs.progress import duration
from fednorms.runs.store.atomic import clear_errors, write_atomic

ANALYSIS = "analysis.png"
NO_PICTURE = "No picture, because matplotlib is not installed: pip install 'fednorms[report]'"


def write(summary: Summary, folder: Path) -> list[Path]:
    """Write the report into a folder and return its files; without matplotlib there is no picture."""
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(summary)
    write_atomic(folder / "RESULTS.md", markdown(summary, pictures).encode())
    write_atomic(folder / "results.csv", csv_table(summary).encode())
    for name, image in pictures.items():
        write_atomic(folder / name, image)
    return [folder / name for name in ("RESULTS.md", "results.csv", *pictures)]


def _pictures(summary: Summary) -> dict[str, bytes]:
    """The picture of the table, and that of its analysis; none without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return {}
    from fednorms.papers.analysis.picture import png as analysis_png
    from fednorms.papers.tables.picture import png

    image = png(summary)
    found = {} if image is None else {"results.png": image}
    settings = {section.title: section.findings for section in summary.sections if section.findings}
    if settings:
        found[ANALYSIS] = analysis_png(ANALYSES[summary.table.analysis], settings, summary.table.heading)
    return found


def markdown(summary: Summary, pictures: Collection[str] = ()) -> str:
    """The report as Markdown; `pictures` are the names of the files in the same folder."""
    table = summary.table
    shown = [section for section in summary.sections if section.shown]
    lines = [f"# {_escape(table.heading)}", "", f"**{summary.share}** {summary.verdict} {summary.legend}", ""]
    lines += [d.sentence(), ""] if (d := summary.differences) else []
    lines += [f"![{_escape(table.heading)}](results.png)", ""] if "results.png" in pictures else []
    if table.analysis:
        analysis = ANALYSES[table.analysis]
        says = f"{analysis.says[0].lower()}{analysis.says[1:].rstrip('.')}"
        lines += [f"The figure shows the analysis {analysis.name}: {says}. The tables also list accuracies.", ""]
        lines += [f"![{_escape(table.heading)}, {analysis.name}]({ANALYSIS})", ""] if ANALYSIS in pictures else []
    lines += _axis(summary) if len(shown) > 1 else []
    for section in shown:
        lines += [f"## {_escape(section.title)}", "", *_grid(section), ""]
        lines += [f"- † {_escape(column)}: {_escape(why)}" for column, why in section.not_comparable.items()]
        if section.setting.ranked:
            lines.append(f"- {_escape(winners_of(section))}")
        if section.order:
            lines.append(f"- {_escape(section.order.sentence(section.main))}")
        lines += [*(f"- {_escape(line)}" for line in facts(section, table.selection)), ""]
        lines += _analysis(section)
    missing = [section.title for section in summary.sections if not section.shown]
    if missing:
        lines += [f"Not run yet: {_escape('; '.join(missing))}.", ""]
    for why in (*table.explanations, *summary.searches.tables):
        lines += [f"## {_escape(why.title)}", "", markdown_table(why.header, why.rows), ""]
        lines += [*(f"- {_escape(note)}" for note in why.notes), ""]
    notes = [*table.notes, *summary.searches.others, *(_failure(r) for r in summary.failed)]
    if summary.stale:
        notes.append(f"Not used, because the table's recipe has changed since: {few(summary.stale)}.")
    if summary.foreign:
        notes.append(f"Not used, because they were made with other data: {few(summary.foreign)}.")
    if notes:
        lines += ["## Notes", "", *(f"- {_escape(note)}" for note in notes), ""]
    lines.append(f"Written by `fednorms reproduce {table.name}`.")
    return "\n".join(lines) + "\n"


def _axis(summary: Summary) -> list[str]:
    """A figure with an axis as one table, with a line per row and a step per column."""
    axis, steps = summary.table.ladder, axis_steps(summary)
    if axis is None or not steps:
        return []
    section = next(s for s in summary.sections if axis.column in s.columns)
    title = _escape(f"{axis.column} over {axis.label}")
    lines = [["", *map(_escape, steps)], ["---", *["---:"] * len(steps)]]
    for name, line in axis_lines(summary).items():
        cells = [_cell(line[step], section, axis.column) if step in line else "" for step in steps]
        lines.append([_escape(name), *cells])
    return [f"## {title}", "", *("| " + " | ".join(line) + " |" for line in lines), ""]


def _analysis(section: Section) -> list[str]:
    """What the figure's analysis found in a setting."""
    numbers = numbers_of(section.findings)
    names = list(dict.fromkeys(name for row in numbers.values() for name in row))
    if not names:
        return []
    lines = ["| analysis | " + " | ".join(map(_escape, names)) + " |", "| --- |" + " ---: |" * len(names)]
    for row, found in numbers.items():
        cells = [_mean_std(*found[name]) if name in found else "-" for name in names]
        lines.append(f"| {_escape(row)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _mean_std(mean: float, std: float | None, seeds: int) -> str:
    return f"{mean:.4g}" + ("" if std is None else f" ± {std:.2g}")


def _grid(section: Section) -> list[str]:
    lines = [["", *map(_escape, section.columns)], ["---", *["---:"] * len(section.columns)]]
    for row, name in section.names.items():
        lines.append([_escape(name), *(_cell(section.rows[row][c], section, c) for c in section.columns)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _cell(cell: TableCell, section: Section, column: str) -> str:
    selector = section.selectors[column]
    text = ours_text(cell, selector) + mark(cell)
    if cell.published is None:
        return text
    text += f"<br>{published_text(cell.published, selector)}"
    text += "" if cell.published.std is None else f" ± {number(cell.published.std, selector)}"
    if cell.difference is not None:
        sign = "+" if cell.difference >= 0 else "−"
        text += f" ({sign}{number(abs(cell.difference), selector)})"
    return text


def facts(section: Section, selection: str) -> list[str]:
    """The lines below a setting's table: data, seeds, reported round, hardware, date, versions, time."""
    records = section.records
    if not records:
        return ["Each row is averaged seed by seed over its settings, for seeds that have run in all of them."]
    seeds = sorted({r["recipe"]["seed"] for r in records})
    rounds = "in the last round"
    if selection == "best-val":
        without = [r for r in records if r["status"] == "done" and not r.get("best")]
        rounds = "in the round with the best validation accuracy"
        rounds += " (in the last round where there are no validation images)" if without else ""
    peaks = [f'"{column}"' for column, selector in section.selectors.items() if selector.kind == "peak"]
    rounds += f"; {', '.join(peaks)}: in the best tested round, chosen on the same images" if peaks else ""
    done = [r for r in records if r["status"] == "done"]
    total = sum(r["seconds"]["total"] for r in done)
    side = sorted({r["jobs"] for r in records})
    dates = sorted({r["date"] for r in records})
    return [
        *dict.fromkeys(data_line(r["data"]) for r in records),
        f"Seeds: {', '.join(map(str, seeds))}{_division(records, section.setting)}. Accuracy in percent on test "
        f"images, {rounds}.",
        f"Made {_range(dates)} on {_all(records, 'hardware')} ({_range(side)} at a time), fednorms "
        f"{_all(records, 'version')}{_sources(records)}, torch {_all(records, 'torch')}, {_precision(records)}.",
        f"{len(records)} {'run' if len(records) == 1 else 'runs'} took {duration(total)} in total"
        + (f", {duration(total / len(done))} on average." if done else "."),
    ]


def data_line(data: dict[str, Any]) -> str:
    """The data of a run in one line."""
    parts = ("train", "val", "test")
    domains = [
        f"{name} {'/'.join(f'{sizes[p]:,}' for p in parts if any(d[p] for d in data['domains'].values()))}"
        for name, sizes in data["domains"].items()
    ]
    have = "/".join(p for p in parts if any(d[p] for d in data["domains"].values()))
    named = "; ".join(domains) if len(domains) <= 12 else f"{len(domains)} domains"
    unseen = f" and {data['unseen']} unseen sites" if data["unseen"] else ""
    notes = "".join(f"; {note}" for note in data["notes"])
    layout = f" ({data['layout']})" if data["layout"] else ""
    return (
        f"Data: {data['federation']}{layout}, {data['clients']} clients{unseen}, {' x '.join(map(str, data['shape']))} "
        f"pixels, {data['classes']} classes; {have} images: {named}; fingerprint {data['fingerprint']}{notes}."
    )


def csv_table(summary: Summary) -> str:
    """One line per cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["setting", "row", "column", "selector", "ours", "std", "seeds", "diverged"]
    writer.writerow([*head, "published", "published std", "difference", "verdict"])
    for section in summary.sections:
        for name, row in section.rows.items():
            for column, cell in row.items():
                published = cell.published
                numbers = [_digits(cell.ours), _digits(cell.std), cell.seeds, cell.diverged]
                failed = published is not None and published.failed
                numbers += ["failed" if failed else _digits(published and published.mean)]
                numbers += [_digits(published and published.std)]
                where = [section.setting.name, name, column, section.setting.columns[column]]
                writer.writerow([*where, *numbers, _digits(cell.difference), cell.verdict])
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


def _division(records: Sequence[dict[str, Any]], setting: Setting) -> str:
    same = len({r["data"]["fingerprint"] for r in records}) == 1
    if setting.split_per_seed and not same:
        return " (each with its own drawn split, so ± is the spread over splits and training)"
    return " (of training; the clients' images are the same in all)" if same and len(records) > 1 else ""


def _sources(records: Sequence[dict[str, Any]]) -> str:
    """The digests of the library's files; the oldest results have none."""
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
