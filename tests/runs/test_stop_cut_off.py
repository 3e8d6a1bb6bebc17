"""A kill between any two file operations of an early stop: the run resumes, and stops again at the same bits."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import pytest

import fednorms as fn
from fednorms.runs import rounds
from fednorms.runs.driver import execute
from fednorms.runs.store import checkpoint
from tests.support.after import federation, recipe
from tests.support.system_calls import Calls, Killed

pytestmark = pytest.mark.slow
STOP = rounds._Run.stop


def stored(run) -> dict[str, object]:
    """What equal runs have in common: the last checkpoint, the best model, and the metrics without times."""
    root = run / "checkpoints"
    last, best = (
        json.loads(p.read_bytes()) for p in (max(root.glob("round-*/manifest.json")), root / "best/manifest.json")
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, object] = {"rows": [{k: v for k, v in row.items() if k != "seconds"} for row in rows]}
    found["extra"] = {k: v for k, v in last["extra"].items() if k in ("best", "stopped")}
    for folder, manifest in ((root, last), (root / "best", best)):
        for entry in (manifest["server"], *manifest["clients"].values()):
            found[f"{folder.name}/{entry['path']}"] = (folder / entry["path"]).read_bytes()
    return found


def interrupt(at):
    def callback(event):
        if event.round == at:
            raise KeyboardInterrupt

    return callback


def cut_at_every_operation(before, sites, monkeypatch, callback=None):
    """Resume copies of the run `before`, whose stop is killed at operation 1, 2, ...; yields each after the kill."""
    made = [0]
    for k in range(1, 200):
        run = shutil.copytree(before, before.with_name("run"))

        def killed(self, why, k=k):
            with pytest.MonkeyPatch.context() as patch:
                calls = Calls(patch, k)
                try:
                    STOP(self, why)
                finally:
                    made[0] = calls.count

        with monkeypatch.context() as patch:
            patch.setattr(rounds._Run, "stop", killed)
            checkpoint._trusted.clear()  # a new process
            with suppress(Killed):
                fn.resume(run, federation=sites, callback=callback)
        checkpoint._trusted.clear()
        yield k, run
        assert not fn.verify(run).damaged
        shutil.rmtree(run)
        if made[0] < k:  # it was not killed
            assert k > 20
            return
    raise AssertionError("never ended")


def test_a_kill_at_any_file_operation_of_early_stopping(tmp_path, monkeypatch):
    sites = federation()
    modes = {"evaluate": ["global", "after_local"], "evaluate_every": 7, "validate_every": 1}
    made = recipe("scaffold", rounds=12, seed=2, patience=2, participation="fixed:2", **modes)
    whole = execute(made, out=tmp_path / "whole", federation=sites)
    assert 2 < whole.rounds < 12
    expected = stored(tmp_path / "whole")
    assert "not improved" in expected["extra"]["stopped"]
    with pytest.raises(KeyboardInterrupt):
        execute(made, out=tmp_path / "before", federation=sites, callback=interrupt(whole.rounds))
    for k, run in cut_at_every_operation(tmp_path / "before", sites, monkeypatch):
        again = fn.resume(run, federation=sites)
        assert again.rounds == whole.rounds
        assert stored(run) == expected, f"killed at operation {k}"


def test_a_kill_while_a_callback_stops_a_run(tmp_path, monkeypatch):
    """The run is stopped or not: it then ends as one that was stopped, or as one that never was."""
    sites, made = federation(), recipe("scaffold", rounds=4, seed=2, evaluate_every=4)

    def callback(event):
        return fn.STOP if event.round == 3 else None

    execute(made, out=tmp_path / "stopped", federation=sites, callback=callback)
    execute(made, out=tmp_path / "whole", federation=sites)
    stopped, whole = stored(tmp_path / "stopped"), stored(tmp_path / "whole")
    assert stopped["extra"]["best"]["round"] == 3  # its stop also writes the best model
    with pytest.raises(KeyboardInterrupt):
        execute(made, out=tmp_path / "before", federation=sites, callback=interrupt(2))
    ends = []
    for k, run in cut_at_every_operation(tmp_path / "before", sites, monkeypatch, callback):
        ends.append(fn.resume(run, federation=sites).rounds)
        last = {name: value for name, value in stored(run).items() if str(name).startswith("checkpoints/")}
        assert last.items() <= (stopped if ends[-1] == 3 else whole).items(), f"killed at operation {k}"
    assert ends == sorted(ends, reverse=True)
    assert set(ends) == {3, 4}
