"""The summary of a table's stored runs; no data are opened."""

from __future__ import annotations

from pathlib import Path

from fednorms.papers.tables.plan import found_in, pairs
from fednorms.papers.tables.search import open_search, with_searches
from fednorms.papers.tables.search_table import told
from fednorms.papers.tables.store import ResultStore
from fednorms.papers.tables.summary import Summary, summarize
from fednorms.papers.tables.table import Table, as_recipe


def stored_summary(table: Table, folder: Path) -> Summary:
    """Judge the runs of a table that are stored in a folder."""
    store = ResultStore(folder)
    searches = {(s.name, r.name): open_search(store, table, s, r) for s, r in pairs(table) if r.search}
    chosen = {key: as_recipe(search.chosen) for key, search in searches.items() if search.chosen is not None}
    return summarize(table, with_searches(found_in(store, table, chosen), searches), told(searches.values()))
