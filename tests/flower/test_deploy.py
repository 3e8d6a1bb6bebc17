"""`fednorms deploy` and `describe --privacy`, which need no Flower."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.explain.leaves import what_leaves
from fednorms.flower.project import read_address, read_project
from fednorms.flower.settings import Deployment, flat, read
from fednorms.runs.recipe import Recipe
from tests.support.waiting import HANG

INIT = ["--sites", "north", "south", "--classes", "cat", "dog", "--size", "8"]


def images(folder, classes=("cat", "dog"), size=8, count=6):
    for label in classes:
        (folder / label).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (size, size), (40 * i, 0, 90)).save(folder / label / f"{i}.png")
    return folder


def test_a_project_reads_back_as_the_recipe_that_made_it(tmp_path):
    asked = ["--method", "scaffold + fedbn", "--lr", "0.3", "--evaluate", "personal", "personal/batch"]
    assert main(["deploy", "init", str(tmp_path / "p"), *INIT, *asked]) == 0
    recipe, deployment = read_project(tmp_path / "p")
    assert recipe.method == "scaffold + fedbn"
    assert recipe.training.lr == 0.3
    assert recipe.evaluate == ["personal", "personal/batch"]
    assert deployment == Deployment(sites="north,south", classes="cat,dog", minimum=2)
    app = tomllib.loads((tmp_path / "p" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {"serverapp": "fednorms_app:server", "clientapp": "fednorms_app:client"}
    readme = (tmp_path / "p" / "README.md").read_text()
    assert "@" not in readme.replace("@north", "")
    for command in ("deploy link", "deploy node", "flwr run", "flwr log", "fednorms export", "deploy probe"):
        assert command in readme
    assert "0.0.0.0" not in readme
    assert read_address(tmp_path / "p") == ("server.example", 8443)


def test_commands_of_the_readme_hold_any_name(tmp_path):
    asked = ["--sites", "St. Olav's", "south", "--classes", "cat", "dog", "--size", "8"]
    assert main(["deploy", "init", str(tmp_path / "p"), *asked]) == 0
    readme = (tmp_path / "p" / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if "deploy node" in line]
    words = shlex.split(line)
    assert words[words.index("--key") + 1] == "St. Olav's.key"
    assert words[words.index("--site") + 1] == "St. Olav's"
    assert "both sites have joined, or after 600 s if at least 2 have" in readme


@pytest.mark.parametrize(("sites", "minimum"), [(["a"], 1), (["a", "b"], 2), (["a", "b", "c"], 2)])
def test_a_round_needs_two_sites_unless_there_is_only_one(sites, minimum, tmp_path):
    """The mean over one site is that site's model."""
    assert main(["deploy", "init", str(tmp_path / "p"), "--sites", *sites, *INIT[3:]]) == 0
    assert read_project(tmp_path / "p")[1].minimum == minimum
    assert main(["deploy", "init", str(tmp_path / "q"), "--sites", *sites, *INIT[3:], "--minimum", "1"]) == 0
    assert read_project(tmp_path / "q")[1].minimum == 1


def test_any_recipe_survives_a_run_config():
    recipe = Recipe(method="hbn", class_weights=[1.0, 2.0], head=["fc"], training={"clip": 1.0}, data={"val": 0.2})
    config = {}
    for key, value in flat(recipe).items():
        config |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    assert all(isinstance(v, str | int | float | bool) for v in config.values())
    assert read(config)[0] == recipe


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"deploy.minimun": 2}, '"deploy.minimun"'),
        ({"deploy.minimum": "two"}, "deploy.minimum"),
        ({"deploy.deadline": 0}, "deploy.deadline above 0"),
        ({"deploy.sites": "a,b,a"}, "names a site twice"),
        ({"recipe": "rounds ="}, "not valid TOML"),
        ({"training.lrr": 0.1}, 'unknown key "training.lrr"'),
    ],
)
def test_mistakes_in_a_run_config_are_named(config, said):
    with pytest.raises(BadInput) as error:
        read(config)
    assert said in str(error.value)


def test_a_site_checks_its_folder_before_it_joins(tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "p"), *INIT]) == 0
    capsys.readouterr()
    check = ["deploy", "check", str(tmp_path / "p"), "--site", "north", "--data"]
    assert main([*check, str(images(tmp_path / "north")), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["shape"] == [3, 8, 8]
    assert sum(map(sum, said["images"].values())) == 12
    assert main([*check, str(images(tmp_path / "other", ("cat", "wolf")))]) == 2
    assert "wolf" in capsys.readouterr().err
    assert main([*check, str(tmp_path / "nowhere")]) == 2
    assert main(["deploy", "check", str(tmp_path / "p"), "--site", "nord", "--data", str(tmp_path / "north")]) == 2
    assert 'did you mean "north"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*INIT, "--method", "fedtan"], "cannot run across machines: fedtan takes steps"),
        (INIT[:-2], "--size PIXELS"),
        (["--sites", "a", "a", *INIT[3:]], "different names"),
        ([*INIT, "--minimum", "9"], "--minimum is 1 to 2"),
        ([*INIT, "--minimum", "0"], "--minimum is 1 to 2"),
        ([*INIT, "--deadline", "nan"], "--deadline is a number of seconds above 0"),
        ([*INIT, "--port", "0"], "--port is 1 to 65535"),
        ([*INIT, "--port", "65536"], "--port is 1 to 65535"),
        ([*INIT, "--channels", "2"], "--channels is 1, 3 or 4"),
        ([*INIT, "--host", 'ho st;"x'], "--host is a name or an address"),
        ([*INIT, "--class-weights", "1", "2", "3"], "--class-weights needs 2 numbers"),
        ([*INIT, "--hold-out", "north"], "every site trains on its own"),
        ([*INIT, "--model", "nix"], "nix"),
        ([*INIT, "--model", "lenet"], "8"),
    ],
)
def test_init_refuses_what_cannot_work(arguments, said, tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "p"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_without_flower_the_library_imports_and_says_what_to_install():
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'flwr' else find(name, *a)\n"
        "import fednorms, fednorms.flower, fednorms.cli.deploy\n"
        "from fednorms.core.errors import BadInput\n"
        "try:\n    fednorms.flower.client_app\n"
        "except BadInput as error:\n    print(error)\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "pip install 'fednorms[flower]'" in done.stdout


@pytest.mark.parametrize("text", ["fedrdn", "fedfa", "fedplvm", "hbn", "fedproto", "fbn"])
def test_parts_that_send_statistics_of_the_data_are_marked(text):
    assert any(x.statistics for x in what_leaves(text).leaving if x.sender == text)


def test_privacy_lists_what_an_upload_holds_and_what_stays(capsys):
    found = what_leaves("scaffold + fedbn")
    weights, upload = found.leaving
    assert not any("norm" in name for name in weights.names)
    assert (upload.sender, upload.names, upload.averaged) == ("scaffold", weights.names, True)
    assert weights.nbytes == upload.nbytes
    assert not any(x.statistics for x in found.leaving)
    assert found.secure_aggregation
    assert any(name.endswith("running_mean") for name in found.kept)
    assert main(["describe", "fedrdn", "--privacy", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    once = next(x for x in said["leaves"] if x["when"] == "once")
    assert once["nbytes"] == 2 * 3 * torch.zeros(()).element_size()
    assert not said["secure_aggregation"]
