"""The run's own scores of exactly the model that is handed out; None if it was never scored."""

from __future__ import annotations

from dataclasses import replace

from fednorms.core.part import Route
from fednorms.evaluation.modes import Mode, averages
from fednorms.evaluation.scores import Scores
from fednorms.evaluation.statistics import statistics_names
from fednorms.runs.use.choose import Chosen
from fednorms.runs.use.open import OpenRun


def handed_out_mode(opened: OpenRun, site: str | None) -> Mode:
    """The mode that tests the model of a site, or (None) the one for all, with the statistics that it holds."""
    task = opened.task
    if site not in opened.facts.clients or not task.personal:
        return Mode("averaged" if averages(task) else "global", "global")
    names = statistics_names(task.net)
    own = task.twin is not None or any(task.net.routes[n] in (Route.LOCAL, Route.SENT) for n in names)
    return Mode("personal", "own" if names and own else "global")


def recorded_scores(opened: OpenRun, chosen: Chosen, site: str | None, given: bool) -> tuple[Scores | None, str]:
    """The test scores of this model in the run's metrics, or None and why there are none."""
    task, mode = opened.task, handed_out_mode(opened, site)
    if given:
        return None, "Its normalization statistics were measured for this export."
    if chosen.measured_here:
        return None, "It normalizes images with the statistics of those that it is given, and was tested with a site's."
    if task.method.evaluation().predict:
        return None, "The run's tests predict with prototypes, this model with its classifier."
    rows = [row for row in opened.directory.metrics() if row["round"] == opened.state.round]
    found = rows[-1]["scores"].get(f"{mode}/test") if rows else None
    if found is None:
        return (
            None,
            f'The run has no test of mode "{mode}" in round {opened.state.round}. `fednorms evaluate` tests it.',
        )
    scores = Scores.from_dict(found, opened.facts.domain_of)
    if mode.model == "personal":
        scores = replace(scores, sites={k: s for k, s in scores.sites.items() if k == site})
    if not scores.sites:
        return None, f'The run has no test of mode "{mode}" at site "{site}".'
    return scores, ""
