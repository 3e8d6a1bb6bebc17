"""Every campaign runs, and finds nothing bad in a few tries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign.__main__ import NAMES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_a_few_tries(name):
    """In its own process: children are forked, and pytest has threads."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "tests.campaign", name, "--seconds", "4", "--seed", "3"]
    done = subprocess.run(call, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 bad" in done.stdout
