"""Scores right after local training, if only some clients train in a round."""

import math

import pytest

from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.engines.loop import Loop
from fednorms.evaluation.scores import SiteScore
from fednorms.runs.driver import execute, resume
from fednorms.runs.session import Session
from tests.support.after import federation, recipe

SETTINGS = {"participation": "fixed:1", "rounds": 7, "evaluate": ["global", "after_local"], "seed": 3}


@pytest.fixture(scope="module")
def wanted():
    """By round, the score of each client's model after its own last training so far: every round is scored here."""
    session = Session.open(recipe("fedavg", **SETTINGS), federation())
    state, latest, by_round = session.engine.setup(initial_state(session.task)), {}, {}
    for t in range(7):
        cohort = session.participation.cohort(session.engine.clients, 3, t)
        done = session.engine.train(broadcast(session.task, state), cohort, score=True)
        state = server_update(session.task, state, done.uploads)
        latest |= done.after_local
        by_round[t + 1] = {name: score.to_dict() for name, score in sorted(latest.items())}
    assert len(by_round[1]) == 1
    assert len(by_round[7]) == 3
    return by_round


def local(result):
    return {r["round"]: r["scores"]["after_local/own/test"]["sites"] for r in result.history if r["scores"]}


@pytest.mark.parametrize("every", [1, 3, 7])
def test_each_client_by_its_own_last_training(every, wanted, tmp_path, monkeypatch):
    scored = []
    train = Loop.train

    def watched(engine, sent, cohort, *, score=False):
        scored.append(score)
        return train(engine, sent, cohort, score=score)

    monkeypatch.setattr(Loop, "train", watched)
    settings = recipe("fedavg", evaluate_every=every, **SETTINGS)
    whole = execute(settings, federation=federation())
    assert local(whole) == {t: wanted[t] for t in range(1, 8) if t % every == 0 or t == 7}
    assert (sum(scored) < 7) == (every > 1)  # no round is scored unnecessarily

    def stop(event):
        if event.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(settings, out=tmp_path / "run", federation=federation(), callback=stop)
    assert local(resume(tmp_path / "run", federation=federation())) == local(whole)


def test_a_client_that_fails_in_its_last_round_is_scored_by_the_one_before(monkeypatch):
    """With on_divergence="skip" the run continues without it: its last training was an earlier round."""
    session = Session.open(recipe("fedavg", **SETTINGS), federation())
    cohorts = [session.participation.cohort(session.engine.clients, 3, t) for t in range(7)]
    often = next(c for c in session.engine.clients if sum(c in cohort for cohort in cohorts) > 1)
    rounds = [t for t, cohort in enumerate(cohorts) if often in cohort]
    train, seen = Loop.train, {}

    def failing(engine, sent, cohort, *, score=False):
        done = train(engine, sent, cohort, score=score)
        if sent.round == rounds[-1]:
            done.uploads = [u for u in done.uploads if u.client != often]
            done.after_local.pop(often)
            done.diverged[often] = "it was not finite"
        elif sent.round == rounds[-2]:
            seen.update(done.after_local)
        return done

    monkeypatch.setattr(Loop, "train", failing)
    settings = recipe("fedavg", evaluate_every=7, on_divergence="skip", **SETTINGS)
    assert local(execute(settings, federation=federation()))[7][often] == seen[often].to_dict()


def test_a_loss_that_is_not_finite_survives_a_file():
    score = SiteScore(0.5, 0.5, math.inf, 2, [0.5, math.nan])
    again = SiteScore.from_dict({**score.to_dict(), "loss": None})
    assert math.isnan(again.loss)
    assert math.isnan(again.recall[1])


def test_nothing_is_scored_unless_requested(monkeypatch):
    train = Loop.train

    def watched(engine, sent, cohort, *, score=False):
        assert not score
        return train(engine, sent, cohort, score=score)

    monkeypatch.setattr(Loop, "train", watched)
    execute(recipe("fedavg", **{**SETTINGS, "evaluate": ["global"]}), federation=federation())
