"""Validation between tests: the best round is found as if every round were tested."""

import pytest

from fednorms import open_run
from fednorms.runs.driver import execute, resume
from tests.support.after import federation, recipe
from tests.support.tiny import same

MODES = ["global", "global/batch", "after_local"]


def settings(**values):
    return recipe("fedavg", rounds=8, seed=2, evaluate=MODES, participation="fixed:2", **values)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    out = tmp_path_factory.mktemp("every") / "run"
    result = execute(settings(), out=out, federation=federation())
    assert 1 < result.best["round"] < 8  # otherwise the tests below would show nothing
    return out, result


def test_the_best_round_is_found_between_tests(every, tmp_path):
    there, whole = every
    rare = execute(settings(evaluate_every=8, validate_every=1), out=tmp_path / "run", federation=federation())
    assert rare.best == whole.best
    assert same(open_run(tmp_path / "run", "best").state.model, open_run(there, "best").state.model)
    tested = {row["round"]: row["scores"] for row in rare.history if row["scores"]}
    best_so_far, wanted = -1.0, []
    for row in whole.history:
        reached = row["scores"]["global/global/val"]["mean"]
        if reached > best_so_far + 1e-12:
            best_so_far = reached
            wanted.append(row["round"])
    assert sorted(tested) == sorted({*wanted, 8})  # the best so far, and the last
    for number, scores in tested.items():
        there = whole.history[number - 1]["scores"]
        assert scores == {k: v for k, v in there.items() if number == 8 or not k.startswith("after_local")}


def test_validating_every_other_round_and_resuming(every, tmp_path):
    _, whole = every

    def stop(event):
        if event.round == 5:
            raise KeyboardInterrupt

    values = settings(evaluate_every=8, validate_every=2)
    with pytest.raises(KeyboardInterrupt):
        execute(values, out=tmp_path / "run", federation=federation(), callback=stop)
    again = resume(tmp_path / "run", federation=federation())
    even = {r["round"]: r["scores"]["global/global/val"]["mean"] for r in whole.history if r["round"] % 2 == 0}
    assert again.best["val"] == max(even.values())
    assert next(k for k, v in even.items() if v == again.best["val"]) == again.best["round"]


def test_without_validation_data_nothing_happens():
    given = {"federation": federation(val=False)}
    rare = execute(settings(evaluate_every=8, validate_every=1), **given)
    assert [row["round"] for row in rare.history if row["scores"]] == [8]
    assert rare.best is None
