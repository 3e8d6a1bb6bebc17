"""What a link has started ends with it, also if the link is killed; nothing else is ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")
pytest.importorskip("fcntl", reason="links run on Linux and macOS")

from fednorms.core.errors import BadInput
from fednorms.flower.lifeline import KILLED, VARIABLE, lifeline
from tests.support.waiting import HANG, wait_until

SRC = str(Path(__file__).parents[2] / "src")
HOLDER = """
import sys, time
from pathlib import Path
from fednorms.flower.lifeline import lifeline
with lifeline(Path(sys.argv[1]), "mark"):
    print("held", flush=True)
    time.sleep(10**6)
"""
# An app that Flower's own monitor does not end: it ignores the interrupt.
APP = """
import signal, sys, time
from fednorms.flower.lifeline import end_with_link
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_link()
print("working", flush=True)
time.sleep(10**6)
"""
WORKER = """
import multiprocessing, sys, time
from fednorms.flower.lifeline import end_with_parent
def work():
    end_with_parent()
    print("working", flush=True)
    time.sleep(10**6)
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
"""


@pytest.fixture
def start():
    started = []

    def run(code, *args, **environment):
        env = {**os.environ, "PYTHONPATH": SRC, **environment}
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(HANG)
        process.stdout.close()


def test_an_app_that_ignores_signals_ends_with_its_killed_link(start, tmp_path):
    path = tmp_path / "link.lock"
    link = start(HOLDER, path)
    assert link.stdout.readline() == b"held\n"
    app = start(APP, **{VARIABLE: str(path)})
    assert app.stdout.readline() == b"working\n"
    link.send_signal(signal.SIGKILL)
    assert app.wait(HANG) == KILLED
    again = start(HOLDER, path)  # the next link is not the one that the app waited for
    assert again.stdout.readline() == b"held\n"


def test_an_app_that_starts_after_its_link_has_ended_ends(start, tmp_path):
    assert start(APP, **{VARIABLE: str(tmp_path / "gone.lock")}).wait(HANG) == KILLED


def test_a_worker_ends_with_its_killed_node(start):
    node = start(WORKER)
    assert node.stdout.readline() == b"working\n"
    node.send_signal(signal.SIGKILL)
    assert node.stdout.read() == b""  # the worker has it, too, until it ends


def test_a_second_link_with_the_same_database_is_refused(tmp_path):
    path = tmp_path / "link.db.lock"
    with lifeline(path, "mark"), pytest.raises(BadInput, match=r"Another link uses .*link\.db\."), lifeline(path, "m"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_link_left_is_ended_at_the_next_start_and_nothing_else(start, tmp_path):
    path = tmp_path / "link.lock"
    code = "print('here', flush=True); import time; time.sleep(10**6)"
    left, other = start(code, tmp_path / "secret"), start(code, "another command")
    for process in (left, other):
        assert process.stdout.readline() == b"here\n"
    children = [left.pid, other.pid, 1, -1, "x"]
    path.write_text(json.dumps({"mark": str(tmp_path / "secret"), "children": children}))
    with lifeline(path, "mark"):
        assert left.wait(HANG) == -signal.SIGKILL
        assert other.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"children": 3}', '{"mark": "", "children": [1]}'])
def test_a_file_that_a_killed_link_left_unfinished_is_replaced(text, tmp_path):
    (tmp_path / "link.lock").write_text(text)
    with lifeline(tmp_path / "link.lock", "mark"):
        pass


def test_flowers_programs_end_with_a_killed_parent(start, tmp_path):
    """Linux ends them; the program here, which stands for one of Flower's, would run on."""
    if sys.platform != "linux":
        pytest.skip("other systems end them at the next start")
    program = tmp_path / "flower-something"
    program.write_text("#!/bin/sh\ntrap '' TERM INT\necho $$ > $1\nwhile true; do sleep 0.1; done\n")
    program.chmod(0o755)
    code = (
        "import sys, time; from fednorms.flower.processes import start\n"
        f"sys.executable = {str(tmp_path / 'python')!r}\n"
        "start('flower-something', sys.argv[1:])\ntime.sleep(10**6)"
    )
    number = tmp_path / "number"
    parent = start(code, number)
    wait_until(lambda: number.exists() and number.read_text().endswith("\n"), parent)
    parent.send_signal(signal.SIGKILL)
    assert parent.stdout.read() == b""  # the child has it, too, until it ends
