"""Scores of clients' models right after their last local training, where a round has only some of the clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.runs.session import Session


class LocalScores:
    """Each client's model, right after it trained last, stays what it is: its score is taken then and kept.

    Which rounds are a client's last before the next test is known beforehand, because cohorts are drawn from seeds:
    only rounds that are somebody's last are scored. Where a client can fail in a round and the run goes on, all rounds
    are, since its last may have been an earlier one. A client that never trained has no such model. What rounds between
    two tests have scored is recorded in their rows, from which a continued run starts.
    """

    def __init__(self, session: Session, history: Iterable[Mapping[str, Any]]) -> None:
        self.mode = next((mode for mode in session.modes if mode.model == "after_local"), None)
        self._session = session
        self._may_fail = session.recipe.on_divergence == "skip" or session.task.deployed
        self._window = range(0)
        self._last: dict[str, int] = {}
        self.latest: dict[str, SiteScore] = {}
        for row in history if self.mode else ():
            tested = row["scores"].get(f"{self.mode}/test", {"sites": {}})["sites"]
            found = tested | row.get("after_local", {})
            self.latest |= {name: SiteScore.from_dict(values) for name, values in found.items()}

    def due(self, t: int) -> bool:
        """Whether the model is tested after round t (the first is 0)."""
        recipe = self._session.recipe
        return t + 1 == recipe.rounds or (t + 1) % recipe.evaluate_every == 0

    def ends_here(self, t: int) -> set[str]:
        """The clients that train in round t and not again before the next test, as far as is known beforehand."""
        if self.mode is None:
            return set()
        if self._may_fail:
            return set(self._cohort(t))
        if t not in self._window:
            end = t
            while not self.due(end):
                end += 1
            self._window = range(t, end + 1)
            self._last = {c: u for u in self._window for c in self._cohort(u)}
        return {client for client, last in self._last.items() if last == t}

    def take(self, t: int, found: Mapping[str, SiteScore]) -> dict[str, SiteScore]:
        """Keep what round t has scored; returns what its row has to record, which a test records by itself."""
        ends = self.ends_here(t)
        kept = {name: score for name, score in found.items() if name in ends}
        self.latest |= kept
        return {} if self.due(t) else kept

    def _cohort(self, t: int) -> list[str]:
        session = self._session
        return session.participation.cohort(session.engine.clients, session.recipe.seed, t)

    def scores(self) -> Scores | None:
        """The scores over all clients that have trained so far."""
        if self.mode is None or not self.latest:
            return None
        sites = {c: self.latest[c] for c in self._session.engine.clients if c in self.latest}
        return Scores(self.mode.model, self.mode.statistics, "test", sites, self._session.facts.domain_of)
