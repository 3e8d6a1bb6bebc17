"""One call of `reproduce`: what is left of a table, its searches, its runs, and the report."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednorms.core.errors import FednormsError
from fednorms.core.options import few
from fednorms.papers.analysis.measures import ANALYSES
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.tables.dry_run import Planned, PlannedSetting
from fednorms.papers.tables.observer import Observer
from fednorms.papers.tables.plan import Found, Job, OtherTables, counts_tests, found_in, pairs, recipe_for
from fednorms.papers.tables.preflight import Checked, checked, estimate, seconds_of
from fednorms.papers.tables.record import Values, is_analyzed, record, stored
from fednorms.papers.tables.reproduction import Reproduction
from fednorms.papers.tables.search import (
    Point,
    Search,
    open_search,
    point_slug,
    shown,
    with_searches,
    without_validation,
)
from fednorms.papers.tables.search_table import told
from fednorms.papers.tables.sources import check_columns, missing_data, needs
from fednorms.papers.tables.store import ResultStore, remove
from fednorms.papers.tables.summary import summarize
from fednorms.papers.tables.table import Row, Setting, Table, as_recipe
from fednorms.papers.tables.table_data import Fingerprint, TableData
from fednorms.papers.tables.time_budget import Clock, fitting
from fednorms.runs.cells import Cell, CellEvent, Outcome, run_cells
from fednorms.runs.compare import hardware as hardware_of
from fednorms.runs.progress import duration
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.directory import same_recipe

Keep = Callable[[Cell, Outcome], bool]
Choices = dict[tuple[str, str], dict[str, Any]]  # by setting and row: what a search on validation images has chosen


@dataclass
class Work:
    """One call of `reproduce`."""

    table: Table
    settings: list[Setting]
    rows: list[Row]
    seeds: list[int]
    store: ResultStore
    data: TableData
    jobs: int
    observer: Observer
    minutes: float | None = None
    began: float = field(default_factory=time.monotonic)
    planned: int = 0
    finished: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def carry_out(self, search_only: bool, report_only: bool) -> Reproduction:
        """Run what is left: searches first, then rows; or only report what has run."""
        self.observer.say(self.table.heading)
        searches = self._searches()
        found = found_in(self.store, self.table, self._chosen(searches))
        self._find_data(with_searches(found, searches))
        searches = self._searches(self.data.fingerprint)
        if foreign := [" / ".join(key) for key, search in searches.items() if search.foreign]:
            self.observer.say(f"Not used, because they were made with other data: searches of {few(foreign)}.")
        pending = self._pending(searches, search_only)
        self._check(pending, rows=not report_only)
        if not report_only:
            self._run_searches(searches)
        if not search_only:
            self._run_rows(searches, run=not report_only)
        self.store.fold()
        return self.report()

    def dry_run(self) -> Reproduction:
        """Say what would run; stored runs are counted without opening the data."""
        searches = self._searches()
        chosen = self._chosen(searches)
        found = found_in(self.store, self.table, chosen)
        self.data.look()
        entries: list[PlannedSetting] = []
        here: list[Job] = []
        elsewhere: list[Job] = []
        for setting in self.settings:
            rows = [row for row in self.rows if row.runs_in(setting)]
            missing = {row.name: s.missing for row in rows if (s := searches.get((setting.name, row.name)))}
            jobs: list[Job] = []
            finished = 0
            for row in rows:
                done = self._done(found, setting, row) & set(self.seeds)
                finished += len(done)
                first = {k: grid[0] for k, grid in row.search.items()}  # as good as any for an estimate
                best = chosen.get((setting.name, row.name), as_recipe(first))
                recipes = [searches[setting.name, row.name].recipe(*t) for t in missing.get(row.name, [])]
                recipes += [recipe_for(self.table, setting, row, s, best) for s in self.seeds if s not in done]
                jobs += [Job(setting, row, recipe) for recipe in recipes]
            name = needs(setting, self.table) or ""
            tries = sum(map(len, missing.values()))
            rounds = sorted({self.table.recipe_of(setting, row, {}).rounds for row in rows})
            counts = (len(rows), rounds, finished, len(jobs) - tries, tries)
            entries.append(PlannedSetting(setting.name, name, self.data.roots.get(name, ""), *counts))
            if setting.name in self.data.skipped:
                elsewhere += jobs
            else:
                here += [Job(j.setting, j.row, self.data.here(setting, j.recipe)) for j in jobs]
        records = found.every
        if self.table.results is not None and self.table.results != self.store.out:
            records += found_in(ResultStore(self.table.results), self.table, {}).every
        measure = self.observer.wants_estimate and bool(here)
        time = estimate(here or elsewhere, records, self.hardware, self.jobs, measure=measure)
        planned = Planned(self.table.heading, str(self.store.out), entries, self.hardware, self.jobs, time)
        return Reproduction(self.table, self.store.out, summarize(self.table, found), planned=planned)

    # -- data and stored results ---------------------------------------------------------------------------------------
    @property
    def hardware(self) -> str:
        """What the runs are made on."""
        return hardware_of(self.data.device)

    def _pairs(self) -> list[tuple[Setting, Row]]:
        return list(pairs(self.table, self.settings, self.rows))

    def _searches(self, fingerprint: Fingerprint = lambda setting, recipe: None) -> dict[tuple[str, str], Search]:
        return {
            (setting.name, row.name): open_search(self.store, self.table, setting, row, fingerprint)
            for setting, row in pairs(self.table)
            if row.search
        }

    def _chosen(self, searches: dict[tuple[str, str], Search]) -> Choices:
        return {key: as_recipe(s.chosen) for key, s in searches.items() if s.chosen is not None}

    def _find_data(self, found: Found) -> None:
        """Look for the data; raise an error if nothing is left to run or to show."""
        self.data.look()
        if len(self.data.skipped) == len(self.settings):
            if not found.done:
                raise missing_data(self.table, self.settings, self.data.given)
            self.observer.say("No data were found: nothing runs, stored results are reported.")
        for name, federation in self.data.skipped.items():
            self.observer.say(f'Setting "{name}" is skipped: it needs {federation} (--data ROOT).')

    # -- before the first run -------------------------------------------------------------------------------------
    def _pending(self, searches: dict[tuple[str, str], Search], search_only: bool) -> list[Job]:
        """What has not run yet and has its data: every value of a search, or every seed of a row."""
        chosen = self._chosen(searches)
        found = found_in(self.store, self.table, chosen, self.data.fingerprint)
        jobs = []
        for setting, row in self._pairs():
            key = (setting.name, row.name)
            if setting.name in self.data.skipped:
                continue
            if (search := searches.get(key)) and search.missing:
                tests = {"evaluate": self.table.recipe_of(setting, row, {}).evaluate}  # as the row will be tested
                recipes = [search.recipe(point, seed).model_copy(update=tests) for point, seed in search.missing]
            elif search_only or (row.search and key not in chosen):
                continue
            else:
                recipes = self._left(setting, row, self._done(found, setting, row), chosen)
            jobs += [Job(setting, row, self.data.here(setting, recipe)) for recipe in recipes]
        return jobs

    def _done(self, found: Found, setting: Setting, row: Row) -> set[int]:
        """The seeds of a row that have run and, if the table has an analysis, were analyzed."""
        return {r["recipe"]["seed"] for r in found.records(setting, row) if is_analyzed(r, self.table.analysis)}

    def _left(self, setting: Setting, row: Row, done: set[int], chosen: Choices) -> list[Recipe]:
        """The recipes of the other seeds, with the values that a search has chosen."""
        best = chosen.get((setting.name, row.name), {})
        return [recipe_for(self.table, setting, row, seed, best) for seed in self.seeds if seed not in done]

    def _check(self, pending: list[Job], rows: bool) -> None:
        """Refuse runs that cannot work, all at once and before anything runs; `rows` opens every run for that."""
        settings = {job.setting.name: job for job in pending}.values()
        columns = [problem for job in settings for problem in check_columns(job.setting, self.data.source(job.recipe))]
        found = checked(pending) if rows else Checked()
        found.refuse(self.table.name, columns)
        for note in found.notes:
            self.observer.say(note)

    # -- searches -------------------------------------------------------------------------------------------------
    def _run_searches(self, searches: dict[tuple[str, str], Search]) -> None:
        cells: list[Cell] = []
        pending: list[Job] = []
        doing: dict[tuple[str, int], tuple[Search, Point]] = {}
        for setting, row in self._pairs():
            search = searches.get((setting.name, row.name))
            if search is None or setting.name in self.data.skipped:
                continue
            for point, seed in search.missing:
                recipe = self.data.final(setting, search.recipe(point, seed))
                if not self.data.source(recipe).validated:
                    raise without_validation(setting, row, recipe)
                search.about = self._about(setting, row, recipe)
                path = self.store.search_directory(setting, row, point_slug(point, seed))
                label = f"{setting.name} / {row.name}, {shown(point)}"
                cells.append(self._cell(label, recipe, path))
                pending.append(Job(setting, row, recipe))
                doing[label, seed] = (search, point)

        def keep(cell: Cell, outcome: Outcome) -> bool:
            search, point = doing[cell.label, cell.recipe.seed]
            search.add(point, cell.recipe.seed, outcome, cell.recipe)
            if outcome.status == "failed":
                self.failed[f"{cell.label}, seed {cell.recipe.seed}"] = outcome.error
            return outcome.status != "failed"

        if cells:
            self.observer.say(f"Search on validation images: {_runs(len(cells))}.")
            self._say_time(pending, Found())
            self._run("search", cells, pending, Found(), keep)
        for setting, row in self._pairs():
            if (search := searches.get((setting.name, row.name))) and search.begun:
                self.observer.say(search.sentence())

    # -- the table's own runs -------------------------------------------------------------------------------------
    def _run_rows(self, searches: dict[tuple[str, str], Search], run: bool) -> None:
        chosen = self._chosen(searches)
        found = found_in(self.store, self.table, chosen, self.data.fingerprint)
        for names, why in ((found.stale, "the recipe has changed"), (found.foreign, "they were made with other data")):
            if names:
                self.observer.say(f"Not used, because {why}: {_runs(len(names))} ({few(names)}).")
        pending: list[Job] = []
        total, others = 0, OtherTables(self.store.out)
        if broken := others.broken:
            self.observer.say(f"Not reused, because they cannot be read: results of other tables ({few(broken)}).")
        for setting, row in self._pairs():
            done = self._done(found, setting, row)
            if setting.name in self.data.skipped:
                total += len(done)
                continue
            if row.search and (setting.name, row.name) not in chosen:
                continue
            total += len(self.seeds)
            for recipe in self._left(setting, row, done, chosen):
                job = Job(setting, row, self.data.final(setting, recipe))
                if not self._reused(job, others):
                    pending.append(job)
        self.observer.say(f"{_runs(total)}: {total - len(pending)} finished, {len(pending)} to go.")
        if not pending or not run:
            return
        self._say_time(pending, found)
        by_name = {(job.label, job.seed): job for job in pending}
        cells = [self._cell(j.label, j.recipe, self.store.directory(j.setting, j.row, j.seed)) for j in pending]

        def keep(cell: Cell, outcome: Outcome) -> bool:
            job = by_name[cell.label, cell.recipe.seed]
            about = self._about(job.setting, job.row, cell.recipe)
            sites = self.data.source(cell.recipe).sites
            values = record(outcome, cell.recipe, sites, curve=job.setting.keeps_curve, about=about)
            if self.table.analysis and outcome.status == "done":
                values |= self._analyzed(cell)
            self.store.save_run(job.setting, job.row, job.seed, values)
            if values["status"] == "failed":
                self.failed[f"{cell.label}, seed {job.seed}"] = values["error"]
            return values["status"] != "failed" and not job.setting.keeps_run

        self._run(self.table.name, cells, pending, found, keep)

    def _analyzed(self, cell: Cell) -> Values:
        """The findings of the analysis in a finished run; if it fails, the run counts as failed and is kept."""
        assert cell.path is not None
        self.observer.say(f"{cell.label}, seed {cell.recipe.seed}: {self.table.analysis}.")
        try:
            return stored(self.table.analysis, ANALYSES[self.table.analysis].measure(StoredRun(cell.path)))
        except Exception as error:
            if not isinstance(error, FednormsError):  # an unexpected error: show where it came from
                self.observer.say(traceback.format_exc().rstrip())
            why = f"the run is finished, but its analysis failed: {error or type(error).__name__}"
            self.observer.say(f"{cell.label}, seed {cell.recipe.seed}: {why}")
            return {"status": "failed", "error": why.replace(str(cell.path), "RUN")}  # no path of this machine

    def _reused(self, job: Job, others: OtherTables) -> bool:
        """Reuse a run of another table; a model that is kept or analyzed must be trained here."""
        if job.setting.keeps_run or self.table.analysis:
            return False
        about = {"table": self.table.name, "setting": job.setting.name, "row": job.row.name}
        curve, same_tests = job.setting.keeps_curve, counts_tests(self.table, job.setting)
        values = others.find(job.recipe, curve=curve, same_tests=same_tests, about=about)
        if values is not None:
            self.store.save_run(job.setting, job.row, job.seed, values)
        return values is not None

    def _say_time(self, pending: list[Job], found: Found) -> None:
        measure = self.observer.wants_estimate
        guess = estimate(pending, found.every, self.hardware, self.jobs, measure=measure)
        if guess.seconds is not None:
            self.observer.say(f"About {duration(guess.seconds)} on {self.hardware} (from {guess.basis}).")

    # -- running --------------------------------------------------------------------------------------------------
    def _cell(self, label: str, recipe: Recipe, path: Path) -> Cell:
        """A run in its directory; what another recipe has left there cannot be continued and is removed."""
        file = path / "recipe.toml"
        try:
            other = not same_recipe(file.read_text(encoding="utf-8"), recipe.to_toml())
        except OSError:
            other = path.exists() and any(path.iterdir())
        if other:
            shutil.rmtree(path, ignore_errors=True)
        return Cell(label, recipe, path)

    def _run(self, title: str, cells: list[Cell], pending: list[Job], found: Found, keep: Keep) -> None:
        """Run cells; with `minutes`, only those expected to end in time, the most informative first."""
        if self.minutes is None:
            self._together(title, cells, keep, lambda cell: True)
            return
        clock = Clock(self.began + 60 * self.minutes)
        known = seconds_of(pending, found.every, self.hardware, measure=True)
        seconds = {_key(cell): expected for cell, (expected, _) in zip(cells, known, strict=True)}
        begun: set[tuple[str, int]] = set()

        def starts(cell: Cell) -> bool:
            fits = clock.starts(_key(cell), seconds[_key(cell)])
            if fits:
                begun.add(_key(cell))
            return fits

        def timed(cell: Cell, outcome: Outcome) -> bool:
            clock.ended(_key(cell))
            return keep(cell, outcome)

        while rest := [i for i, cell in enumerate(cells) if _key(cell) not in begun]:
            expected = [seconds[_key(cells[i])] for i in rest]
            chosen = fitting([pending[i] for i in rest], expected, clock.left, self.jobs)
            before = len(begun)
            if chosen:
                self._together(title, [cells[rest[i]] for i in chosen], timed, starts)
            if len(begun) == before:
                self.observer.say(f"{_runs(len(rest))} left: too long for {self.minutes:g} minutes. Call again later.")
                return

    def _together(self, title: str, cells: list[Cell], keep: Keep, starts: Callable[[Cell], bool]) -> None:
        """Run cells; `keep` stores each outcome at once, and returns whether the run's directory can be removed."""
        by_name = {_key(cell): cell for cell in cells}
        self.planned += len(cells)

        def watch(event: CellEvent) -> None:
            if event.outcome is not None:
                cell = by_name[event.label, event.seed]
                if keep(cell, event.outcome) and cell.path is not None:
                    remove(cell.path, self.store.out)
                self.finished += 1
            self.observer.watch(event)

        self.observer.begin(title, sum(cell.recipe.rounds for cell in cells))
        try:
            run_cells(cells, self.jobs, watch=watch, starts=starts)
        finally:
            self.observer.end()

    def _about(self, setting: Setting, row: Row, recipe: Recipe) -> dict[str, Any]:
        return {
            "table": self.table.name,
            "setting": setting.name,
            "row": row.name,
            "hardware": self.hardware,
            "jobs": self.jobs,
            "data": self.data.source(recipe).stored,
        }

    # -- the end --------------------------------------------------------------------------------------------------
    def report(self, interrupted: bool = False) -> Reproduction:
        """Summarize what has run, and write the report; after an interruption, no more data are opened."""
        from fednorms.papers.tables.report import write

        fingerprint = self.data.seen_fingerprint if interrupted else self.data.fingerprint
        searches = self._searches(fingerprint)
        found = with_searches(found_in(self.store, self.table, self._chosen(searches), fingerprint), searches)
        summary = summarize(self.table, found, told(searches.values()))
        done = Reproduction(
            self.table, self.store.out, summary, self.finished, dict(self.data.skipped), dict(self.failed)
        )
        if found.every or found.failed:
            done.files = write(summary, self.store.out)
        return done


def _key(cell: Cell) -> tuple[str, int]:
    return cell.label, cell.recipe.seed


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"
