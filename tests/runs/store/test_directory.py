"""The run's directory: who may use it, metrics that survive a crash, and the lock."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fednorms.core.errors import BadInput, RunFailed
from fednorms.runs.store.directory import RunDirectory

RECIPE = 'method = "fedavg"\nrounds = 3\nname = "Zürich"\n'


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(RECIPE, resume=False)
    return directory


# --- create ---


def test_create_makes_parents_and_keeps_the_recipe_byte_for_byte(tmp_path):
    run = RunDirectory(tmp_path / "a" / "b")
    run.create(RECIPE, resume=False)
    assert run.recipe.read_bytes() == RECIPE.encode()
    assert run.read_recipe() == RECIPE
    assert os.listdir(run.path) == ["recipe.toml"]


def test_paths_are_inside_the_directory(run):
    paths = [run.recipe, run.metrics_path, run.checkpoints, run.summary_path, run.spill]
    assert all(path.parent == run.path for path in paths)
    assert len(set(paths)) == len(paths)


def test_the_same_recipe_may_be_resumed_but_not_started_again(run):
    run.create(RECIPE, resume=True)
    with pytest.raises(BadInput, match=r"already holds a run of this recipe.*fednorms resume .*another out="):
        run.create(RECIPE, resume=False)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("other", "there", "asked"),
    [
        (RECIPE.replace("3", "4"), "line 2 of that run: rounds = 3", "line 2 requested:   rounds = 4"),
        (RECIPE + "x = 1\n", "line 4 of that run: (nothing)", "line 4 requested:   x = 1"),
        ("", 'line 1 of that run: method = "fedavg"', "line 1 requested:   (nothing)"),
    ],
)
def test_another_recipe_is_refused_with_the_difference(run, resume, other, there, asked):
    with pytest.raises(BadInput) as caught:
        run.create(other, resume=resume)
    message = str(caught.value)
    for words in (str(run.path), there, asked, "another out=", "fednorms resume"):
        assert words in message
    assert run.read_recipe() == RECIPE


def test_a_directory_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(BadInput, match=r"not empty and holds no run \(it has thesis.tex\).*another out="):
        RunDirectory(tmp_path).create(RECIPE, resume=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_the_leftovers_of_a_killed_start_are_no_obstacle(tmp_path):
    (tmp_path / ".0123.tmp").write_text("meth")
    (tmp_path / ".lock").write_text("1\n")
    RunDirectory(tmp_path).create(RECIPE, resume=False)
    assert RunDirectory(tmp_path).read_recipe() == RECIPE


@pytest.mark.parametrize("inside", ["", "run", "a/run"])
def test_a_file_in_the_way_is_named(tmp_path, inside):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BadInput, match=f"{file} is a file"):
        RunDirectory(file / inside).create(RECIPE, resume=False)


@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_is_bad_input(tmp_path, monkeypatch, call, code):
    def fail(*_args, **_keywords):
        raise OSError(code, os.strerror(code))

    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(BadInput, match=f"Cannot write a run to {path} .*choose another out="):
            RunDirectory(path).create(RECIPE, resume=False)


def test_a_full_disk_is_a_failure_and_the_start_can_be_tried_again(tmp_path, monkeypatch):
    def fail(*_args, **_keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RunFailed, match="disk is full"):
            RunDirectory(tmp_path / "run").create(RECIPE, resume=False)
    assert os.listdir(tmp_path / "run") == []
    RunDirectory(tmp_path / "run").create(RECIPE, resume=False)


def test_reading_a_folder_without_a_run_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="is not a run"):
        RunDirectory(tmp_path).read_recipe()


# --- lock ---

LOCKER = """
    import sys
    from fednorms.core.errors import RunFailed
    from fednorms.runs.store.directory import RunDirectory
    try:
        with RunDirectory(sys.argv[1]).lock():
            print("locked", flush=True)
            sys.stdin.read()
    except RunFailed as error:
        print(error, flush=True)
"""


def _locker(path):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOCKER), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


def test_two_processes_cannot_write_one_run_and_a_killed_one_leaves_no_lock(run):
    pytest.importorskip("fcntl")
    with _locker(run.path) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunFailed) as caught, run.lock():
            pass
        assert str(run.path) in str(caught.value)
        assert f"({other.pid})" in str(caught.value)
        other.kill()
    with run.lock(), _locker(run.path) as other:
        assert f"Another process ({os.getpid()}) is writing the run in {run.path}" in other.stdout.readline()
        other.stdin.close()
    with run.lock():  # released after a failure inside, too
        pass


def test_the_lock_is_released_after_an_error(run):
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    with run.lock():
        pass


def test_locking_removes_what_a_killed_process_spilled(run):
    run.spill.mkdir()
    (run.spill / "left").write_text("")
    with run.lock():
        assert not run.spill.exists()


# --- metrics and summary ---


def test_rows_come_back_and_every_line_is_strict_json(run):
    rows = [
        {"round": 1, "loss": float("nan"), "scores": {"a": [float("inf"), 0.1], "b": (1, -float("inf"))}},
        {"round": 2, "loss": np.float32(0.5), "n": np.int64(3), "ok": True, "name": "é\n", "none": None},
    ]
    for row in rows:
        run.append_metrics(row)
    expected = [
        {"round": 1, "loss": None, "scores": {"a": [None, 0.1], "b": [1, None]}},
        {"round": 2, "loss": 0.5, "n": 3, "ok": True, "name": "é\n", "none": None},
    ]
    assert run.metrics() == expected

    def refuse(word):
        raise AssertionError(word)

    assert [json.loads(line, parse_constant=refuse) for line in run.metrics_path.read_text().splitlines()] == expected


def test_a_row_is_one_write_and_on_the_disk_at_once(run, monkeypatch):
    writes = []
    original = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: writes.append(bytes(data)) or original(handle, data))
    run.append_metrics({"round": 1})
    assert writes == [b'{"round": 1}\n']
    assert RunDirectory(run.path).metrics() == [{"round": 1}]


@pytest.mark.parametrize("long", [False, True])
def test_a_line_torn_anywhere_is_left_out_and_written_over(run, long):
    rows = [{"round": 1}, {"round": 2, "loss": 0.25, "text": "x" * (9000 if long else 0)}]
    for row in rows:
        run.append_metrics(row)
    whole = run.metrics_path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole), 997 if long else 1):
        run.metrics_path.write_bytes(whole[:cut])
        assert run.metrics() == rows[:1]
        run.append_metrics({"round": 3})
        assert run.metrics() == [{"round": 1}, {"round": 3}]
    run.metrics_path.write_bytes(whole[:5])
    assert run.metrics() == []
    run.append_metrics({"round": 3})
    assert run.metrics() == [{"round": 3}]


def test_a_damaged_line_in_the_middle_is_named(run):
    run.metrics_path.write_text('{"round": 1}\nrubbish\n{"round": 3}\n')
    with pytest.raises(RunFailed, match="line 2, is not a JSON object"):
        run.metrics()
    run.metrics_path.write_bytes(b'{"round": 1}\n\0\0\0\0\n')  # a last line of zeros, as after a power cut
    assert run.metrics() == [{"round": 1}]


@pytest.mark.parametrize("part", [0, 5])
def test_a_full_disk_while_appending_leaves_the_earlier_rows(run, monkeypatch, part):
    run.append_metrics({"round": 1})
    original = os.write

    def write(handle, data):
        if part and len(data) > len(b'{"round": 2}\n') - part:
            return original(handle, bytes(data)[:part])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(RunFailed, match=f"{run.metrics_path}: the disk is full.*resume {run.path}`"):
            run.append_metrics({"round": 2})
    assert run.metrics_path.read_bytes() == b'{"round": 1}\n'


def test_cutting_keeps_the_bytes_of_the_rows_before(run):
    for number in range(1, 6):
        run.append_metrics({"round": number, "loss": 1 / number})
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    with run.metrics_path.open("ab") as stream:
        stream.write(b'{"round": 6, "lo')
    assert run.cut_metrics(3) == 2
    assert run.metrics_path.read_bytes() == b"".join(lines[:3])
    assert run.cut_metrics(3) == 0
    assert run.cut_metrics(0) == 3
    assert run.metrics() == []


def test_cutting_before_there_are_metrics_makes_no_file(run):
    assert run.cut_metrics(0) == 0
    assert not run.metrics_path.exists()


def test_cutting_is_all_or_nothing(run, monkeypatch):
    for number in range(1, 4):
        run.append_metrics({"round": number})
    before = run.metrics_path.read_bytes()

    def fail(*_args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(RunFailed, match="Input/output error"):
            run.cut_metrics(1)
    assert run.metrics_path.read_bytes() == before


def test_summary(run):
    assert run.summary() is None
    run.write_summary({"accuracy": float("nan"), "site": "Zürich", "bad name": "\udcff", "rounds": 3})
    assert run.summary() == {"accuracy": None, "site": "Zürich", "bad name": "?", "rounds": 3}
    assert "Zürich" in run.summary_path.read_text(encoding="utf-8")
    run.summary_path.write_text("{")
    with pytest.raises(RunFailed, match=r"summary\.json"):
        run.summary()
