"""Options: common ones first, switches without a value, and a word of advice for what is no option."""

from __future__ import annotations

import dataclasses
import re

import pytest

import fednorms as fn
from fednorms.cli import main
from fednorms.cli.compare import Compare
from fednorms.cli.data import Pack
from fednorms.cli.parsing import DataOptions, RecipeOptions, TrainingOptions, merged, parse
from fednorms.cli.run import Run
from tests.cli.test_imports import every_command


def said(capsys, *args):
    assert main(list(args)) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


def test_common_options_come_first_after_two_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("run", "compare"):
        assert main([command, "--help"]) == 0
        out = capsys.readouterr().out
        lines = out.splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(line.startswith(f"  fednorms {command} ") for line in lines) == 2
        assert out.index("For example:") < out.index("--batch-size") < out.index("training options")
        headings = re.findall(r"^[╭─ ]*([a-z ]+) options[ ─╮]*$", out, re.MULTILINE)
        assert headings == [
            "training",
            "federation",
            "model and loss",
            "data",
            "testing",
            "speed and storage",
            "output",
        ]


def test_help_of_every_command_fits_80_columns_and_shows_switches_without_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in every_command():
        assert main([*command, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: fednorms {' '.join(command)}")
        assert max(map(len, text.splitlines())) <= 80, command
        assert not re.search(r"True[,|]\s*False|\(default:\s+(False|None|'')", text), command


def test_a_long_usage_folds_between_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["deploy", "link", "--help"]) == 0
    usage = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert len(usage) > 1
    assert max(map(len, usage)) <= 60
    for line in usage:
        assert line.count("[") == line.count("]")


def test_no_option_is_lost_between_the_headings():
    everything = {f.name for of in (RecipeOptions, TrainingOptions, DataOptions) for f in dataclasses.fields(of)}

    def names(cls):
        for f in dataclasses.fields(cls):
            if dataclasses.is_dataclass(f.default_factory):
                yield from names(f.default_factory)
            else:
                yield f.name

    assert everything - set(names(Run)) == set()
    assert everything - set(names(Compare)) == {"method", "seed"}


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (["--pretrained"], True),
        (["--no-pretrained"], False),
        (["--pretrained", "True"], True),  # as in version 0.1
        (["--pretrained", "False"], False),
        (["--pretrained=false"], False),
        (["--pretrained", "--rounds", "3"], True),
        ([], None),
    ],
)
def test_a_switch_takes_no_value_and_that_of_version_0_1_still_works(given, value):
    assert parse(Run, "run", given).model_and_loss_panel.pretrained is value


def test_a_switch_can_set_a_recipe_back():
    base = fn.Recipe(deterministic=True, data={"complete": True})
    recipe = merged(base, parse(Run, "run", ["--no-deterministic", "--no-complete"]))
    assert recipe.deterministic is False
    assert recipe.data.complete is False
    assert merged(fn.Recipe(deterministic=False), parse(Run, "run", ["--deterministic"])).deterministic is True


def test_flags_of_commands_accept_a_value_too():
    assert parse(Run, "run", ["--quiet", "True"]).output.quiet is True
    assert parse(Run, "run", ["--quiet", "False", "--json"]).output == type(parse(Run, "run", []).output)(json=True)
    assert parse(Pack, "data pack", ["a", "b"]).complete is True
    assert parse(Pack, "data pack", ["a", "b", "--no-complete"]).complete is False
    assert parse(Pack, "data pack", ["a", "b", "--complete", "False"]).complete is False


def test_a_switch_with_a_word_as_value_is_refused(capsys):
    assert "--pretrained is a switch: write --pretrained or --no-pretrained" in said(capsys, "run", "--pretrained=yes")


def test_a_methods_parameter_is_pointed_out(capsys):
    err = said(capsys, "run", "--mu", "0.1")
    assert '--method "fedprox(mu=0.1)"' in err
    assert "fedfr" in err  # which has one, too
    assert '--method "moon(mu=3)"' in said(capsys, "run", "--method", "moon", "--mu=3")
    assert '--methods "greg(alpha=1.0)"' in said(capsys, "compare", "--methods", "greg", "fedavg", "--alpha", "1.0")
    assert "straggler_fraction=0.5" in said(capsys, "run", "--straggler-fraction", "0.5")


def test_a_word_of_other_libraries_is_translated(capsys):
    assert "--lr" in said(capsys, "run", "--learning-rate", "0.1")
    assert "--federation" in said(capsys, "compare", "--dataset", "pacs")


def test_options_override_a_recipe_and_new_data_drop_its_fingerprint():
    base = fn.Recipe(method="fedbn", rounds=7, fingerprint="abc", data={"seed": 1}, training={"lr": 0.3})
    kept = merged(base, parse(Run, "run", ["--epochs", "2"]))
    assert (kept.method, kept.rounds, kept.training.lr, kept.training.epochs) == ("fedbn", 7, 0.3, 2)
    assert (kept.fingerprint, kept.data.seed, kept.seed) == ("abc", 1, 0)
    other = merged(base, parse(Run, "run", ["--data-seed", "4", "--seed", "5"]))
    assert (other.fingerprint, other.data.seed, other.seed) == ("", 4, 5)
