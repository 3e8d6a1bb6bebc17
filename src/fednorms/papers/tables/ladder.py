"""Figures whose axis is a quantity that settings or rows step through: 5, 10, ... clients; thresholds of clipping."""

from __future__ import annotations

from fednorms.papers.tables.entry import Entry
from fednorms.papers.tables.summary import Summary

Lines = dict[str, dict[str, Entry]]
"""By what a line is of, by step: the cell of the ladder's column."""


def lines_of(summary: Summary) -> Lines:
    """The lines over the ladder's steps that have run: one per row over settings, or one per setting over rows."""
    ladder = summary.table.ladder
    if ladder is None:
        return {}
    shown = {section.setting.name: section for section in summary.sections if section.shown}
    if ladder.settings:
        steps = [(shown[name], step) for name, step in ladder.settings.items() if name in shown]
        lines = {
            row.name: {
                step: section.rows[row.name][ladder.column] for section, step in steps if row.name in section.rows
            }
            for row in summary.table.rows
        }
    else:
        lines = {
            section.title: {
                step: section.rows[row][ladder.column] for row, step in ladder.rows.items() if row in section.rows
            }
            for section in shown.values()
            if ladder.column in section.columns
        }
    return {name: line for name, line in lines.items() if any(e.ours is not None for e in line.values())}


def steps_of(summary: Summary) -> list[str]:
    """The steps at which any line has a number, in the ladder's order."""
    ladder = summary.table.ladder
    lines = lines_of(summary).values()
    names = [] if ladder is None else (ladder.settings or ladder.rows).values()
    return [step for step in names if any(step in line and line[step].ours is not None for line in lines)]
