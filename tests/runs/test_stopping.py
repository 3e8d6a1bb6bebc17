"""Runs that end early, and runs that train on: all are finished runs, and their bits are those of one run."""

from __future__ import annotations

import pytest
import torch

import fednorms as fn
from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.core.part import REGISTRY, Part, part, reads_rounds
from fednorms.methods.registry import method
from fednorms.runs.driver import execute
from fednorms.runs.store.directory import RunDirectory
from tests.support.after import federation, recipe
from tests.support.tiny import same


def play(text="fedavg", *, rounds=6, out=None, callback=None, sites=None, **values):
    made = recipe(text, rounds=rounds, seed=2, **values)
    return execute(made, out=out, federation=sites or federation(), callback=callback)


def without_time(history):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


def stop_at(number):
    return lambda event: fn.STOP if event.round == number else None


# -- early stopping -------------------------------------------------------------------------------------------------
def test_a_run_stops_when_validation_does_not_improve_and_never_looks_at_test_data(tmp_path):
    whole = play(rounds=12)
    val = [row["scores"]["global/global/val"]["mean"] for row in whole.history]
    best, wanted = 0, len(val)
    for t, value in enumerate(val):  # written out: the first best, then two rounds without a better one
        if value > val[best] + 1e-12:
            best = t
        elif t - best >= 2:
            wanted = t + 1
            break
    assert 2 < wanted < 12  # otherwise this would show nothing
    stopped = play(rounds=12, patience=2, out=tmp_path / "run")
    assert stopped.rounds == wanted
    assert without_time(stopped.history) == without_time(whole.history[:wanted])
    assert f"stopped after round {wanted} of 12" in stopped.notes[-1]
    assert RunDirectory(tmp_path / "run").summary()["rounds"] == wanted
    blind = federation()
    for site in blind.sites:
        site.splits["test"] = site.splits["test"].__class__(*map(torch.zeros_like, (site.test.x, site.test.y)))
    assert play(rounds=12, patience=2, sites=blind).rounds == wanted


def test_stopping_between_tests_and_after_an_interruption_is_the_same(tmp_path):
    def interrupt(event):
        if event.round == 2:
            raise KeyboardInterrupt

    values = {"rounds": 12, "patience": 2, "evaluate_every": 7, "validate_every": 1, "participation": "fixed:2"}
    values["evaluate"] = ["global", "after_local"]
    whole = play(**values)
    assert 2 < whole.rounds < 12
    assert whole.rounds % 7  # not a round with a test
    assert {"global/global/test", "after_local/own/test"} <= whole.history[-1]["scores"].keys()
    with pytest.raises(KeyboardInterrupt):
        play(out=tmp_path / "run", callback=interrupt, **values)
    again = fn.resume(tmp_path / "run", federation=federation())
    assert without_time(again.history) == without_time(whole.history)
    assert again.best == whole.best


def test_stopping_is_asked_for_with_an_object():
    base = recipe("fedavg", rounds=3)
    result = fn.run(federation=federation(), recipe=base, stop=fn.EarlyStopping(patience=7))
    assert result.recipe.patience == 7
    with pytest.raises(BadInput, match='on must be "val"'):
        fn.EarlyStopping(on="test")
    with pytest.raises(BadInput, match="patience must be"):
        fn.EarlyStopping(patience=0)
    with pytest.raises(BadInput, match=r"stop= must be fednorms.EarlyStopping.*got 5"):
        fn.run(federation=federation(), recipe=base, stop=5)


def test_stopping_without_validation_images_is_refused_and_changes_no_file(tmp_path):
    blind, out = federation(val=False), tmp_path / "run"
    with pytest.raises(BadInput, match="validation images, but no site has any"):
        play(patience=1, sites=blind)
    play(sites=blind, out=out, rounds=1)
    before = RunDirectory(out).recipe.read_text()
    with pytest.raises(BadInput, match="validation images, but no site has any"):
        fn.resume(out, federation=blind, rounds=2, stop=fn.EarlyStopping(patience=1))
    assert RunDirectory(out).recipe.read_text() == before
    assert RunDirectory(out).summary() is not None


def test_more_patience_continues_a_run_that_was_stopped(tmp_path):
    out = tmp_path / "run"
    stopped = play(rounds=8, patience=1, out=out)
    assert stopped.rounds < 8
    assert fn.resume(out, federation=federation(), rounds=8).rounds == stopped.rounds  # as a run of 8 rounds would
    more = fn.resume(out, federation=federation(), stop=fn.EarlyStopping(patience=8))
    whole = play(rounds=8, patience=8)
    assert without_time(more.history) == without_time(whole.history)
    assert more.best == whole.best


# -- a callback says stop -------------------------------------------------------------------------------------------
def test_more_rounds_alone_do_not_continue_a_run_without_patience(tmp_path):
    stopped = play(rounds=12, patience=2, out=tmp_path / "run")
    before = (tmp_path / "run" / "recipe.toml").read_bytes()
    with pytest.raises(BadInput, match=f"stopped after round {stopped.rounds}: .* would stop again at once"):
        fn.resume(stopped, federation=federation(), rounds=20)  # a stored result is a path, too
    assert (tmp_path / "run" / "recipe.toml").read_bytes() == before
    longer = fn.resume(stopped, federation=federation(), rounds=20, stop=fn.EarlyStopping(patience=19))
    assert longer.rounds > stopped.rounds
    assert not any("has changed since" in note for note in longer.notes)


def test_a_result_that_was_not_stored_cannot_be_opened():
    with pytest.raises(BadInput, match="was not stored"):
        fn.resume(play(rounds=1))


def test_a_callback_ends_a_run_that_is_then_finished(tmp_path):
    text, modes = "fedbn + finetune", ["auto", "adapted"]
    out = tmp_path / "run"
    result = play(text, out=out, evaluate=modes, evaluate_every=4, callback=stop_at(3))
    assert result.rounds == 3
    assert "stopped after round 3 of 6: the callback returned STOP" in result.notes
    short = play(text, rounds=3, evaluate=modes, evaluate_every=4)  # is tested after its last round
    assert without_time(result.history) == without_time(short.history)
    assert without_time(RunDirectory(out).metrics()) == without_time(short.history)
    opened = fn.open_run(out, federation=federation())
    assert same(opened.state.model, short._state.model)
    trained = []
    again = fn.resume(out, federation=federation(), callback=trained.append)
    assert (again.rounds, trained) == (3, [])
    on = fn.resume(out, federation=federation(), rounds=6)
    assert same(on._state.model, play(text, evaluate=modes)._state.model)


def test_a_stop_in_the_last_round_changes_nothing():
    assert not any("stopped" in note for note in play(rounds=2, callback=stop_at(2)).notes)


# -- training on ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["scaffold", "fedbn", "hbn", "ditto", "fedavgm + fedprox"])
def test_more_rounds_give_the_bits_of_a_long_run(text, tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    values = {"training": {"batch_size": 4, "lr": 0.05, "schedule": "exp", "momentum": 0.5}}
    play(text, rounds=2, out=short, **values)
    more = fn.resume(short, federation=federation(), rounds=4)
    whole = play(text, rounds=4, out=long, **values)
    assert without_time(more.history) == without_time(whole.history)
    one, two = (fn.open_run(path) for path in (short, long))
    assert same(one.state.model, two.state.model)
    assert one.state.parts.keys() == two.state.parts.keys()
    assert all(same(one.state.parts[name], two.state.parts[name]) for name in two.state.parts)
    for name, state in two.clients.items():
        assert same(one.clients[name].local, state.local)
        assert all(same(one.clients[name].parts[k], tree) for k, tree in state.parts.items())
    assert RunDirectory(short).recipe.read_text() == RunDirectory(long).recipe.read_text()
    assert RunDirectory(short).summary()["rounds"] == 4


def test_the_command_line_trains_on(tmp_path, capsys):
    given = ["--method", "fedavg", "--rounds", "1", "--size", "8", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["run", *given]) == 0
    assert main(["resume", str(tmp_path / "run"), "--rounds", "2", "--quiet"]) == 0
    assert "2 rounds" in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "run"), "--rounds", "1"]) == 2
    assert (
        "has reached round 2, so it cannot end after round 1. Choose 2 or more (--rounds)." in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "schedule", "words"),
    [
        ("fixbn", "const", "the method fixbn depends on the number of rounds"),
        ("fednn", "const", "the method agn depends on the number of rounds"),
        ("fedavg", "cosine", 'the schedule "cosine" depends'),
        ("fedavg", "step", 'the schedule "step" depends'),
    ],
)
def test_what_depends_on_the_number_of_rounds_is_refused_by_name(text, schedule, words, tmp_path):
    play(text, rounds=1, out=tmp_path / "run", training={"batch_size": 4, "schedule": schedule})
    before = RunDirectory(tmp_path / "run").recipe.read_text()
    with pytest.raises(BadInput, match=words):
        fn.resume(tmp_path / "run", federation=federation(), rounds=2)
    assert RunDirectory(tmp_path / "run").recipe.read_text() == before
    assert RunDirectory(tmp_path / "run").summary() is not None


@pytest.mark.usefixtures("parts_as_before")
def test_every_part_that_reads_the_number_of_rounds_declares_it():
    undeclared = [name for name, cls in REGISTRY.items() if reads_rounds(cls) and not cls.uses_rounds]
    assert undeclared == []
    assert method("fednn + fraug + fedbn").bound_to_rounds == ["agn", "fraug"]

    @part("late")
    class Late(Part):  # a custom part need not declare it
        def server(self, delta, r):
            return delta * (r.context.round / r.context.rounds), r.mine

    assert method("late").bound_to_rounds == ["late"]
