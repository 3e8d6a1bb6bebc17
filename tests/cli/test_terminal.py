"""What a user sees in a terminal of 80 columns, through a pseudo-terminal; and what a pipe gets."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys

import pytest
from rich.cells import cell_len

from fednorms.runs.cells import CellEvent, Outcome
from fednorms.runs.pace import LIMIT, Pace
from fednorms.runs.progress import CellWatch, Reporter
from tests.cli.conftest import ENV, FEDNORMS, fednorms, held
from tests.support.waiting import HANG

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[78=>]")
QUICK = ("--size", "8", "--steps", "1", "--rounds", "1")


def on_terminal(*args, width=80, cwd=None):
    """Run a command in a terminal of this width: exit code, and everything it showed, as lines without colors."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    env = {k: v for k, v in ENV.items() if k != "COLUMNS"} | {"TERM": "xterm"}
    with subprocess.Popen(
        [*FEDNORMS, *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=cwd, close_fds=True
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # the other end has been closed
            pass
        os.close(ours)
        code = process.wait(HANG)
    text = CONTROL.sub("", shown.decode())
    return code, [line.rstrip() for line in re.split(r"[\r\n]+", text)]


def words(text):
    return set(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    "command",
    [
        ("list", "methods"),
        ("list", "methods", "--costs"),
        ("list", "federations"),
        ("list", "analyses"),
        ("reproduce", "--help"),
        ("run", "--help"),
        ("list", "--help"),
        ("deploy", "link", "--help"),
        ("deploy", "--help"),
        ("--help",),
        ("describe", "scaffold + fedbn"),
        ("describe", "scaffold + fedbn", "--privacy"),
    ],
    ids=" ".join,
)
def test_lists_and_help_fit_80_columns_and_no_word_is_broken(command):
    code, lines = on_terminal(*command)
    assert code == 0
    assert max(map(cell_len, lines)) <= 80
    whole = fednorms(*command)
    shown, there = ({word.strip("(),:") for word in words(text)} for text in (" ".join(lines), whole.out))
    notice = words("link paper options columns column the do does not fit 80 characters")  # what was left out
    assert shown - there <= {"", *notice}


def test_a_table_of_results_fits_80_columns_and_is_one_line_per_row_in_a_pipe(tmp_path):
    methods = ("fedavg", "scaffold + greg(alpha=1.0) + fedfn", "fedbn")
    command = ("compare", "--methods", *methods, "--seeds", "2", *QUICK, "--out", tmp_path / "c")
    code, lines = on_terminal(*command)
    assert code == 0, lines
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("method")) :]
    table = table[: next((i for i, line in enumerate(table) if line.startswith("data:")), len(table))]
    assert max(map(cell_len, table)) <= 80
    for domain in ("clean", "faint", "foggy", "negative", "poster"):
        assert domain in " ".join(table).split()
    piped = fednorms(*command)  # the same runs, finished
    assert piped.code == 0
    for method in methods:
        (row,) = [line for line in piped.out.splitlines() if line.startswith(f"{method}  ")]
        assert row.count("±") == 6
        assert row == row.rstrip()


def test_the_bar_of_a_continued_run_starts_where_it_was(folder, tmp_path):
    run = tmp_path / "run"
    options = ("--federation", folder, "--batch-size", "4", "--rounds", "6", "--out", run)
    with held("run", *options, run=run, number=3):
        pass  # killed in its fourth round
    code, lines = on_terminal("resume", run)
    assert code == 0, lines
    shown = [int(done) for line in lines for done in re.findall(r"(\d)/6 rounds", line)]
    assert shown[0] >= 2  # the last checkpoint: of round 2 or 3
    assert shown[-1] == 6
    assert shown == sorted(shown)


def test_one_round_is_not_one_rounds(folder, tmp_path):
    _, lines = on_terminal("run", "--federation", folder, "--batch-size", "4", "--rounds", "1", "--out", tmp_path / "r")
    said = " ".join(lines)
    assert "1/1 round" in said
    assert "1 round," in said
    assert not re.search(r"\b1 rounds|1/1 rounds", said)


def test_time_left_is_smooth_though_rounds_are_not():
    assert LIMIT < 3
    pace, now, before = Pace(), 0.0, None
    for seconds in [30.0, 1.0, 1.0, 20.0, 1.0, 40.0, *[1.0] * 30, 60.0, *[1.0] * 20]:
        now += seconds
        pace.trained(now)
        left = pace.left(1000, now)
        if before is not None:
            assert 1 / LIMIT - 1e-9 <= left / before <= LIMIT + 1e-9
        before = left
    assert pace.left(0, now) is None
    assert pace.left(5, now + 1e6) == 0.0


def test_time_left_is_right_for_even_rounds_and_needs_two_of_them():
    pace = Pace()
    pace.trained(50.0)  # slow to start: not counted
    pace.trained(52.0)
    assert pace.left(10, 52.0) is None
    pace.trained(54.0)
    assert pace.left(10, 54.0) == 20.0
    assert pace.left(10, 55.0) == 19.0  # counted down


def test_rounds_of_finished_runs_do_not_count_as_fast_ones():
    reporter = Reporter("compare", 40, silent=True)
    watch = CellWatch(reporter)
    row = {"scores": {}, "train_loss": None, "diverged": []}
    watch(CellEvent("fedavg", 0, 10, 10, outcome=Outcome("fedavg", 0, 0.1)))  # finished yesterday
    watch(CellEvent("fedbn", 0, 8, 10, row))  # continued after round 7
    assert reporter.done == 18
    assert reporter.pace.rounds == 0
    watch(CellEvent("fedbn", 0, 9, 10, row))
    assert reporter.pace.rounds == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_pipe_gets_no_control_characters(folder, tmp_path):
    said = fednorms("run", "--federation", folder, "--batch-size", "4", "--rounds", "2", "--out", tmp_path / "r")
    assert said.code == 0
    assert all(ord(c) >= 32 or c == "\n" for c in said.out + said.err)
