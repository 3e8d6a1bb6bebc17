"""What a user installs: the wheel works outside the clone. The steps are those of the Dockerfile, without Docker."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UV = Path(sys.executable).with_name("uv")


def test_the_dockerfile_installs_extras_that_exist():
    [extras] = re.findall(r"fednorms\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    for step in ("uv build --wheel", "uv pip install", 'ENTRYPOINT ["fednorms"]'):
        assert step in DOCKERFILE


def test_the_page_of_installation_lists_every_extra():
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(PROJECT["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="needs uv, which make installs")
def test_the_wheel_works_outside_the_clone(tmp_path):
    """Build the wheel, install it into a new environment, and train there."""

    def carry_out(*command, cwd=tmp_path):
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "FEDNORMS_CACHE": str(tmp_path / "cache")}
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in files.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    # Nothing is downloaded: build tools and dependencies are those of the environment that runs the tests.
    carry_out(UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", tmp_path, clone)
    [wheel] = tmp_path.glob("fednorms-*.whl")
    shutil.rmtree(clone)
    inside = zipfile.ZipFile(wheel).namelist()
    assert "fednorms/recipes/fedwon/table-1.toml" in inside
    assert not [name for name in inside if name.endswith("results.json") or name.startswith(("tests/", "docs/"))]

    fresh = tmp_path / "fresh"
    carry_out(UV, "venv", "--python", sys.executable, fresh)
    python = fresh / "bin" / "python"
    carry_out(UV, "pip", "install", "--python", python, "--no-deps", "--offline", wheel)
    [packages] = fresh.glob("lib/python*/site-packages")
    # Every installed package but fednorms itself, whose editable installation would hide the wheel.
    borrowed = [p for p in sys.path if p.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("".join(f"{place}\n" for place in borrowed), encoding="utf-8")

    where = carry_out(python, "-c", "import fednorms; print(fednorms.__file__)")
    assert Path(where.strip()).is_relative_to(fresh)
    fednorms = fresh / "bin" / "fednorms"
    assert "usage" in carry_out(fednorms, "--help").lower()
    assert "fedwon-table-1" in carry_out(fednorms, "reproduce", "--list")
    carry_out(fednorms, "run", "--method", "fedbn", "--rounds", "1", "--out", tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()
