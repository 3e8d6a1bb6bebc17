"""Models right after local training, where a round has some of the clients only."""

import pytest

from fednorms.core import broadcast, initial_state, server_update
from fednorms.engines.loop import Loop
from fednorms.runs.driver import execute, resume
from fednorms.runs.session import Session
from tests.after import federation, recipe

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
    assert (sum(scored) < 7) == (every > 1)  # no round is scored in vain

    def stop(event):
        if event.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(settings, out=tmp_path / "run", federation=federation(), callback=stop)
    assert local(resume(tmp_path / "run", federation=federation())) == local(whole)


def test_nothing_is_scored_where_nobody_asks(monkeypatch):
    train = Loop.train

    def watched(engine, sent, cohort, *, score=False):
        assert not score
        return train(engine, sent, cohort, score=score)

    monkeypatch.setattr(Loop, "train", watched)
    execute(recipe("fedavg", **{**SETTINGS, "evaluate": ["global"]}), federation=federation())
