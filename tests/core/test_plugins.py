"""Other packages plug in methods, models and federations; a module in the working directory has a model."""

from __future__ import annotations

import json
import sys

import pytest

import fednorms as fn
from fednorms.cli import main
from fednorms.core import plugins
from fednorms.core.part import REGISTRY
from fednorms.models import build
from fednorms.models.custom import find, make_model
from fednorms.runs.store.directory import RunDirectory

CODE = '''
import fednorms as fn
from torch import nn

@fn.part("halfstep_of_a_plugin")
class HalfStep(fn.Part):
    """Move half as far as the mean update."""
    paper = "nobody 2026"
    def server(self, delta, r): return 0.5 * delta, r.mine

class Net(nn.Module):
    """Two layers."""
    def __init__(self, num_classes, in_channels=3, width=4):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_channels, width, 3), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, num_classes)
    def forward(self, x): return self.head(self.norm(self.conv(x)).mean((2, 3)))

def wards(size=8, seed=0):
    """Five wards of one hospital."""
    return fn.federation("digits-shift", size=size, seed=seed)
'''
ENTRIES = """
[fednorms.methods]
steps = tiny_plugin_of_a_test
[fednorms.models]
tinynet = tiny_plugin_of_a_test:Net
[fednorms.federations]
wards = tiny_plugin_of_a_test:wards
"""
QUICK = ("--rounds", "1", "--size", "8", "--steps", "1")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as pip installs it: a module, and a dist-info folder with entry points."""
    site = tmp_path / "site"
    info = site / "tiny_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tiny_plugin_of_a_test.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    yield site
    for name in ("tiny_plugin_of_a_test", "nets_of_a_test"):
        sys.modules.pop(name, None)
    REGISTRY.pop("halfstep_of_a_plugin", None)
    plugins._asked_for.clear()


def test_a_package_brings_a_method_a_model_and_a_federation(package, capsys):
    given = ("--method", "halfstep_of_a_plugin", "--model", "tinynet", "--federation", "wards", *QUICK)
    assert main(["run", *given, "--out", "r", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recipe"]["federation"] == "wards"
    recorded = RunDirectory(package.parent / "r").read_recipe()
    assert 'model = "tinynet@' in recorded
    assert "halfstep_of_a_plugin" in recorded
    assert main(["resume", "r", "--quiet"]) == 0
    assert main(["export", "r", "--out", "m"]) == 0
    assert fn.load_model("m").module.head.out_features == 10


def test_list_shows_what_packages_bring(package, capsys):
    for what, name, words in (
        ("methods", "halfstep_of_a_plugin", "Move half as far"),
        ("models", "tinynet", "Two layers. (from tiny-plugin)"),
        ("federations", "wards", "Five wards of one hospital. (from tiny-plugin)"),
    ):
        assert main(["list", what, name]) == 0
        out = capsys.readouterr().out
        assert name in out
        assert words in out


def test_a_federation_of_a_package_gets_the_options_that_it_has(package):
    assert fn.federation("wards", size=10).shape == (3, 10, 10)
    with pytest.raises(fn.BadInput, match=r'"wards" of tiny-plugin has no option val'):
        fn.federation("wards", val=0.3)


def test_a_broken_package_is_a_note_and_other_methods_work(package):
    (package / "tiny_plugin_of_a_test.py").write_text("import no_such_module_at_all")
    with pytest.warns(UserWarning, match=r"tiny-plugin declares .*no_such_module_at_all.*uninstall"):
        assert str(fn.method("fedbn")) == "fedbn"
    assert str(fn.method("fedfn")) == "fedfn"  # said once
    with pytest.raises(fn.BadInput, match="tiny-plugin"):
        build("tinynet", 10)


def test_a_model_in_a_module_of_the_working_directory(package, capsys, monkeypatch):
    module = package.parent / "nets_of_a_test.py"
    module.write_text(CODE.replace("halfstep_of_a_plugin", "another_step_of_a_plugin"))
    REGISTRY.pop("another_step_of_a_plugin", None)
    given = ["run", "--model", "nets_of_a_test:Net", *QUICK, "--out", "r"]
    try:
        assert main([*given, "--quiet"]) == 0
        first = fn.open_run("r").recipe.model
        assert first.startswith("nets_of_a_test:Net@")
        assert main(given) == 0
        assert "Nothing was trained" in capsys.readouterr().err
        del sys.modules["nets_of_a_test"]
        REGISTRY.pop("another_step_of_a_plugin", None)
        module.write_text(module.read_text().replace("width=4", "width=6"))
        assert main(["resume", "r"]) == 2
        assert "would import that module" in capsys.readouterr().err
        assert "nets_of_a_test" not in sys.modules
        monkeypatch.setenv("FEDNORMS_MODELS", "nets_of_a_test")
        assert main(["resume", "r"]) == 2
        assert "The code of nets_of_a_test:Net has changed" in capsys.readouterr().err
        assert main(given) == 2  # the directory holds another run
    finally:
        REGISTRY.pop("another_step_of_a_plugin", None)


def test_the_seed_decides_a_custom_models_first_weights_however_its_code_was_recorded(package):
    a, b, c = (build(name, 10, seed=s) for name, s in (("tinynet", 1), ("tinynet@0123", 1), ("tinynet", 2)))
    assert a.head.weight.equal(b.head.weight)
    assert not a.head.weight.equal(c.head.weight)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module_at_all:Net", "cannot be imported"),
        ("tiny_plugin_of_a_test:Nit", 'has no "Nit"'),
        ("tiny_plugin_of_a_test:wards", "must be a class derived from nn.Module"),
        ("os:getcwd", "must be a class derived from nn.Module"),
        ("torch.nn:Linear", 'needs the argument "in_features"'),
        ("custom:Net", "Unknown model"),
    ],
)
def test_a_custom_model_that_cannot_be_made_says_why(package, name, words):
    with pytest.raises(fn.BadInput, match=words):
        build(name, 10)


def test_a_function_that_returns_no_model_is_refused():
    with pytest.raises(fn.BadInput, match="returned int instead of"):
        make_model("m:f", lambda classes: 3, 10, 3, 8)


def test_our_own_names_are_not_custom():
    assert find("cnn-small") is None
    assert find("torchvision:resnet18") is None
