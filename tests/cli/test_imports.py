"""What answers at once imports nothing heavy. The imports are checked, never the clock."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from docs.make_cli_page import commands, help_of
from tests.cli.conftest import ENV
from tests.support.waiting import HANG

HEAVY = {"torch", "torchvision", "timm", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "flwr", "PIL", "datasets"}
PROBE = """
import contextlib, io, json, sys
before = set(sys.modules)
from fednorms.cli import main
codes = []
for args in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codes.append(main(args))
print(json.dumps([codes, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def answered(*commands):
    """The exit codes of commands in one new process, and the packages that they imported."""
    asked = [sys.executable, "-c", PROBE, json.dumps([list(c) for c in commands])]
    done = subprocess.run(asked, capture_output=True, text=True, env=ENV, timeout=HANG)
    assert done.returncode == 0, done.stderr
    codes, packages = json.loads(done.stdout)
    return codes, HEAVY & set(packages)


def every_command(*group):
    """The words of every command and subcommand, as help lists them."""
    for name in commands(help_of([*group])):
        yield (*group, name)
        yield from every_command(*group, name)


def test_help_of_every_command_imports_nothing_heavy():
    found = list(every_command())
    assert {("run",), ("verify",), ("data", "check"), ("deploy", "node")} <= set(found)
    codes, heavy = answered(["--help"], ["--version"], *([*command, "--help"] for command in found))
    assert set(codes) == {0}
    assert heavy == set()


def test_a_mistyped_option_or_command_imports_nothing_heavy():
    wrong = [["rnu"], ["run", "--roundz", "3"], ["run", "--rounds", "three"], ["compare"], ["list", "colours"]]
    codes, heavy = answered(*wrong)
    assert set(codes) == {2}
    assert heavy == set()


def test_the_probe_finds_an_import():
    assert "torch" in answered(["describe", "no-such-method"])[1]


@pytest.mark.parametrize("line", ["import fednorms", "import fednorms; dir(fednorms)"])
def test_importing_the_package_imports_nothing_heavy(line):
    probe = f"import sys; {line}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=ENV, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & HEAVY == set()


def test_training_imports_no_optional_package():
    probe = (
        "import sys, fednorms as fn; fn.run('fedbn', rounds=1, model='cnn-small'); "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=ENV, timeout=HANG)
    assert done.returncode == 0, done.stderr
    optional = {"torchvision", "timm", "matplotlib", "flwr", "datasets", "IPython"}
    assert set(done.stdout.split()) & (optional | {"tensorboard", "wandb", "mlflow"}) == set()
