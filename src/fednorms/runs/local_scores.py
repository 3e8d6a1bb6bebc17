"""Scores of clients' models right after their last local training, if only some clients train in a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fednorms.data.on_demand import Numbered
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.runs.session import Session


class LocalScores:
    """Collects each client's score right after its last local training before a test.

    Cohorts are drawn from seeds, so a client's last round before the next test is known in advance, and only such
    rounds are scored. If a client can fail without ending the run, or the run can end early, all rounds are scored,
    because the last successful round may be an earlier one. A client that never trained has no score. Rounds
    between two tests record their scores in their rows, from which a resumed run starts.
    """

    def __init__(self, session: Session, history: Iterable[Mapping[str, Any]]) -> None:
        self.mode = next((mode for mode in session.modes if mode.model == "after_local"), None)
        self._session = session
        recipe = session.recipe
        self.every_round = recipe.on_divergence == "skip" or session.task.deployed or recipe.patience is not None
        self._window = range(0)
        self._last: dict[str, int] = {}
        self.latest: dict[str, SiteScore] = {}
        for row in history if self.mode else ():
            tested = row["scores"].get(f"{self.mode}/test", {"sites": {}})["sites"]
            found = tested | row.get("after_local", {})
            self.latest |= {name: SiteScore.from_dict(values) for name, values in found.items()}

    def due(self, t: int) -> bool:
        """Whether the model is tested after round t, counted from 0."""
        recipe = self._session.recipe
        return t + 1 == recipe.rounds or (t + 1) % recipe.evaluate_every == 0

    def ends_here(self, t: int) -> set[str]:
        """The clients that train in round t and, as far as is known, not again before the next test."""
        if self.mode is None:
            return set()
        if self.every_round:
            return set(self._session.cohort(t))
        if t not in self._window:
            end = t
            while not self.due(end):
                end += 1
            self._window = range(t, end + 1)
            self._last = {c: u for u in self._window for c in self._session.cohort(u)}
        return {client for client, last in self._last.items() if last == t}

    def take(self, t: int, found: Mapping[str, SiteScore]) -> dict[str, SiteScore]:
        """Keep the scores of round t; returns those that its row must record, because no test records them."""
        ends = self.ends_here(t)
        kept = {name: score for name, score in found.items() if name in ends}
        self.latest |= kept
        return {} if self.due(t) else kept

    def scores(self) -> Scores | None:
        """The scores over all clients that have trained so far."""
        if self.mode is None or not self.latest:
            return None
        clients = self._session.engine.clients
        order = sorted(self.latest, key=clients.index) if isinstance(clients, Numbered) else clients
        sites = {c: self.latest[c] for c in order if c in self.latest}
        return Scores(self.mode.model, self.mode.statistics, "test", sites, self._session.facts.domain_of)
