"""What a user installs: the wheel works outside the clone. The steps are those of the Dockerfile, without Docker."""

import json
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


def instructions(text):
    """The instructions of a Dockerfile, in order: their names, and the rest of their lines."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], " ".join(line.split(None, 1)[1].split())) for line in whole]


def test_the_dockerfile_is_read_as_docker_reads_it():
    read = instructions('# a note\nFROM a AS b\nRUN one \\\n && two\n\n# more\nCMD ["x"]\n')
    assert read == [("FROM", "a AS b"), ("RUN", "one && two"), ("CMD", '["x"]')]
    assert {name for name, _ in instructions(DOCKERFILE)} <= {
        *("FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD")
    }


def test_the_dockerfile_installs_extras_that_exist():
    [extras] = re.findall(r"fednorms\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_page_of_installation_lists_every_extra():
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(PROJECT["optional-dependencies"])


# What takes the place of uv in the Dockerfile's steps. Nothing is downloaded: build tools and dependencies are those of
# the environment that runs the tests, and the image's Python is a new environment.
SHIM = """#!{python}
import subprocess, sys
args = sys.argv[1:]
def drop(*options):
    global args
    kept = []
    while args:
        arg = args.pop(0)
        if arg in options:
            args.pop(0)  # its value
        else:
            kept.append(arg)
    args = kept
if args[0] == "build":
    drop("--build-constraints")
    args += ["--no-build-isolation", "--python", "{python}"]
else:
    assert "--system" in args, args
    args.remove("--system")
    drop("--torch-backend", "--constraints")
    args += ["--no-deps", "--offline", "--python", "{image}/bin/python"]
sys.exit(subprocess.run(["{uv}", *args]).returncode)
"""


def copy_of_the_clone(to):
    """Copy what git knows, as a fresh clone would have it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="needs uv, which make installs")
def test_the_wheel_works_outside_the_clone(tmp_path):
    """Carry out the Dockerfile's steps in folders instead of images, and train with what it installs."""

    def carry_out(*command, cwd=tmp_path):
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "FEDNORMS_CACHE": str(tmp_path / "cache")}
    tools, fresh, context = tmp_path / "tools", tmp_path / "fresh", tmp_path / "context"
    copy_of_the_clone(context)
    carry_out(UV, "venv", "--python", sys.executable, fresh)
    tools.mkdir()
    (tools / "uv").write_text(SHIM.format(python=sys.executable, image=fresh, uv=UV), encoding="utf-8")
    (tools / "pip").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/pip.log\n', encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment["PATH"] = f"{tools}:{os.environ['PATH']}"

    stages, final = {}, {}
    for name, rest in instructions(DOCKERFILE):
        if name == "FROM":
            _, _, stage = rest.partition(" AS ")
            root = stages[stage] = tmp_path / f"stage-{len(stages)}"
            here = root
            (root / "tmp").mkdir(parents=True)
        elif name == "WORKDIR":
            here = root / rest.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *flags, source, target = rest.split()
            origin = stages[flags[0].removeprefix("--from=")] if flags else context
            into = root / target.lstrip("/") if target.startswith("/") else here / target
            copy = shutil.copytree if (origin / source.lstrip("/")).is_dir() else shutil.copy
            copy(origin / source.lstrip("/"), into, **({"dirs_exist_ok": True} if copy is shutil.copytree else {}))
        elif name == "RUN":
            inside = re.sub(r"(?<![\w./])/(?=(?:wheels|tmp|src)\b)", f"{root}/", rest)
            carry_out("bash", "-ec", inside, cwd=here)
        else:
            final[name] = rest
    [wheel] = stages["wheel"].glob("wheels/fednorms-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "fednorms/recipes/fedwon/table-1.toml" in inside
    assert not [name for name in inside if name.endswith("results.json") or name.startswith(("tests/", "docs/"))]
    assert not list(root.glob("wheels/*"))  # the image does not keep them
    assert "constraints.txt uv" in (tmp_path / "pip.log").read_text(encoding="utf-8")
    assert json.loads(final["ENTRYPOINT"]) == ["fednorms"]
    shutil.rmtree(context)

    python = fresh / "bin" / "python"
    [packages] = fresh.glob("lib/python*/site-packages")
    # Every installed package but fednorms itself, whose editable installation would hide the wheel.
    borrowed = [p for p in sys.path if p.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("".join(f"{place}\n" for place in borrowed), encoding="utf-8")

    where = carry_out(python, "-c", "import fednorms; print(fednorms.__file__)")
    assert Path(where.strip()).is_relative_to(fresh)
    fednorms = fresh / "bin" / "fednorms"
    assert "usage" in carry_out(fednorms, *json.loads(final["CMD"])).lower()
    assert "fedbn" in carry_out(fednorms, "list", "methods")
    assert "fedwon-table-1" in carry_out(fednorms, "reproduce", "--list")
    carry_out(fednorms, "run", "--method", "fedbn", "--rounds", "1", "--out", tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()
