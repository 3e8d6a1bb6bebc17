"""Progress of runs in Python: on a terminal, in a notebook, and nowhere else unless asked for."""

from __future__ import annotations

import io
import re
import sys

import pytest

import fednorms as fn
from fednorms.runs.progress import Reporter
from tests.runs.test_compare import small

QUICK = {"rounds": 2, "batch_size": 6, "lr": 0.1}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())  # not in a fixture: pytest's own capture would replace it again
    return sys.stderr


def shown(terminal):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def test_a_pipe_gets_no_progress_unless_asked_for(capsys):
    fn.run("fedavg", small(), **QUICK)
    fn.compare(["fedavg"], small(), seeds=1, **QUICK)
    fn.run("fedavg", small(), progress=False, **QUICK)
    assert capsys.readouterr().err == ""
    fn.run("fedavg", small(), progress=True, **QUICK)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["fedavg", "round 1/2"], ["fedavg", "round 2/2"]]
    assert "accuracy" in lines[0]


def test_a_terminal_gets_a_bar_unless_not_wanted(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    fn.run("fedavg", small(), progress=False, **QUICK)
    assert shown(terminal) == ""
    fn.run("fedavg", small(), **QUICK)
    assert re.search(r"fedavg .*2/2 rounds", shown(terminal))


def test_a_comparison_counts_the_rounds_of_all_runs(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    fn.compare(["fedavg", "fedbn"], small(), seeds=2, **QUICK)
    assert re.search(r"compare .*8/8 rounds", shown(terminal))
    assert "fedbn, seed 1: accuracy" in shown(terminal)


def test_resuming_and_evaluating_show_progress(tmp_path, capsys):
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fn.run("fedavg", small(), out=tmp_path / "run", callback=stop, **QUICK)
    fn.resume(tmp_path / "run", federation=small(), progress=True)
    assert "round 2/2" in capsys.readouterr().err
    fn.evaluate_run(tmp_path / "run", ["global", "global/batch"], federation=small(), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["evaluate", "mode 1/2"], ["evaluate", "mode 2/2"]]


def test_the_bar_of_a_resumed_run_starts_where_it_was(tmp_path, monkeypatch):
    def stop(event):
        if event.round == 2:
            raise KeyboardInterrupt

    recipe = fn.Recipe(rounds=3, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        fn.run("fedavg", small(), recipe=recipe, out=tmp_path / "run", callback=stop)
    terminal = on_a_terminal(monkeypatch)
    fn.resume(tmp_path / "run", federation=small())
    assert re.findall(r"(\d)/3 rounds", shown(terminal))[0] == "2"


def test_what_a_callback_returns_reaches_the_driver():
    from fednorms.runs.watch import watching

    recipe = fn.Recipe(rounds=1)
    with watching(recipe, None, lambda event: "an answer", False, ()) as watch:
        seen = []
        fn.run("fedavg", small(), rounds=1, callback=seen.append)
        assert watch.callback(seen[0]) == "an answer"
    assert seen[0].round == 1
    assert seen[0].recipe.model == "cnn-small"
    assert seen[0].recipe.device != "auto"


def test_a_notebook_gets_one_output_that_is_replaced(tmp_path):
    pytest.importorskip("IPython")
    from tests.support.notebook import kernel

    with kernel(tmp_path) as notebook:
        notebook.shell.user_ns |= {"fn": fn, "small": small, "QUICK": QUICK}
        outputs = notebook.run("result = fn.run('fedavg', small(), **QUICK)")
    first, *later = outputs
    assert not first["update"]
    assert all(output["update"] for output in later)
    assert {output["transient"]["display_id"] for output in outputs} == {first["transient"]["display_id"]}
    text = re.sub(r"<[^>]+>", "", later[-1]["data"]["text/html"])
    assert re.search(r"fedavg .*2/2 rounds", text)
    assert "accuracy" in text


def test_an_error_leaves_no_live_display_behind(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError), Reporter("a", 2):
        raise ZeroDivisionError
    with Reporter("b", 1) as reporter:  # a second live display would be refused if the first were still open
        reporter.advance(1, "done")
    assert "1/1" in shown(terminal)
