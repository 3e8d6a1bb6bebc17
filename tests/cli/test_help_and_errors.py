"""Commands that need no training: help, lists, descriptions, and one clear message for every mistake."""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
import subprocess
import sys

import pytest

import fednorms as fn
from fednorms import _moved, cli
from fednorms.cli import main
from fednorms.cli.parsing import parse
from fednorms.cli.run import Run
from tests.cli.conftest import ENV, fednorms, started
from tests.support.waiting import HANG

COMMANDS = ("run", "compare", "resume", "reproduce", "evaluate", "predict", "export", "adapt", "list", "describe")


def ask(capsys, *args):
    """The same without a new process: exit code, stdout, stderr."""
    code = main(list(args))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_help_names_every_command_on_its_own_line_and_does_not_load_torch():
    probe = "import sys; from fednorms.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=ENV, timeout=HANG)
    assert done.returncode == 0, done.stderr
    starts = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert all(starts.count(command) == 1 for command in COMMANDS)
    assert "130" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ending", [None, AttributeError("half an import"), fn.BadInput("a package is missing")])
def test_an_interrupted_import_is_answered(number, ending, monkeypatch, capsys):
    def half_imported(name):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if ending is None:
                raise
        raise ending

    monkeypatch.setattr(cli, "import_module", half_imported)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    try:
        code, _, err = ask(capsys, "run")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err) == (130, "\nfednorms: Interrupted.\n")


def test_no_command_and_an_unknown_one_are_bad_input(capsys):
    code, out, _ = ask(capsys)
    assert code == 2
    assert "usage" in out
    code, out, err = ask(capsys, "rnu")
    assert code == 2
    assert not out
    assert 'did you mean "run"' in err
    assert err.startswith("fednorms: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(capsys, command):
    code, out, _ = ask(capsys, command, "--help")
    assert code == 0
    assert "--json" in out
    assert f"fednorms {command}" in out


RECORDED = ("version", "fingerprint", "own_parts")  # written by the run


def test_run_has_an_option_for_every_field_of_a_recipe(capsys):
    _, out, _ = ask(capsys, "run", "--help")
    recipe = [f for f in fn.Recipe.model_fields if f not in ("training", "data", *RECORDED)]
    training = [f.name for f in dataclasses.fields(fn.Training) if f.name != "client_epochs"]  # a table in a recipe
    for field in (*recipe, *training, "size", "data_seed", "val", "test", "hold_out", "group"):
        assert f"--{field.replace('_', '-')} " in out, field
    assert "(default: 30)" in out  # the recipe's own default, not None
    assert "Rounds of federated training." in out  # and its description
    assert "--optimiser" not in out  # the spelling of version 0.1 is accepted, not shown


def test_the_british_spelling_of_version_0_1_is_accepted():
    for spelling in ("--optimizer", "--optimiser"):
        given = parse(Run, "run", [spelling, "adamw"])
        assert given.training_panel.optimizer == "adamw"


def test_describe(capsys):
    code, out, _ = ask(capsys, "describe", "scaffold + fedbn", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["method"] == "scaffold + fedbn"
    assert found["routes"]["norm1.running_mean"] == "LOCAL"
    code, out, _ = ask(capsys, "describe", "fedavg")
    assert code == 0
    assert "SHARED" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--method", "fedprocs"], ['Unknown method "fedprocs"', 'did you mean "fedprox"']),
        (["run", "--method", "fedprox(mu=-1)"], ["mu", ">= 0"]),
        (["run", "--rounds", "0"], ["rounds", "got 0"]),
        (["run", "--lr", "-1", "--batch-size", "0"], ["--lr must be", "--batch-size must be"]),
        (["run", "--federation", "digit-shift"], ["digits-shift"]),
        (["run", "--model", "cnn-smal"], ["cnn-small"]),
        (["run", "missing.toml"], ['"missing.toml"', "No such file"]),
        (["run", "fedbn"], ['"fedbn" is a method', "`fednorms run --method fedbn`"]),
        (["run", "scaffold + fedbn"], ['`fednorms run --method "scaffold + fedbn"`']),
        (["run", "--method", "scaffold", "+", "fedbn"], ["in quotes", '--method "scaffold + fedbn"']),
        (["run", "--method", "fedavg", "fedbn"], ["one method", "`fednorms compare --methods fedavg fedbn`"]),
        (["run", "--method", "fedavg,fedbn"], ["at a comma", "joined by +"]),
        (["run", "--method", "fedprox(0.1)"], ["an option needs its name", "greg(alpha=1.0)"]),
        (["run", "digits-shift"], ["--federation digits-shift"]),
        (["run", "elephant", "tiger"], ['cannot use "tiger"', "--help"]),
        (["run", "--rounds", "ten"], ["--rounds must be a whole number", 'got "ten"']),
        (["run", "--rounds=1.5"], ["--rounds must be a whole number", 'got "1.5"']),
        (["run", "--rounds"], ["--rounds needs a whole number", "rounds of federated training"]),
        (["run", "--lr", "0,1"], ["--lr must be a number", "Write 0.1"]),
        (["run", "--engine", "lop"], ["--engine must be one of", 'did you mean "loop"']),
        (["run", "--epoch", "2"], ["has no option --epoch", 'did you mean "--epochs"']),
        (["run", "-m", "fedbn"], ["has no option -m", 'did you mean "--method"']),
        (["run", "--verbose"], ["has no option --verbose. `fednorms run --help`"]),
        (["run", "--seeds", "3"], ["one seed", "--seeds 3"]),
        (["run", "--device", "gpu"], ['Device "gpu"', "cuda", "--device"]),
        (["run", "--model", "resnet18"], ["resnet18", "torchvision:NAME"]),
        (["run", "--federation", "photo/site"], ['no folder "photo"']),
        (["compare", "fedavg", "fedbn"], ["`fednorms compare --methods fedavg fedbn`"]),
        (["compare", "--method", "fedavg"], ["It is called --methods"]),
        (["compare"], ["needs --methods METHOD"]),
        (["resume"], ["needs RUN (the run's directory)"]),
        (["list"], ["needs one of methods, models"]),
        (["list", "datasets"], ['did you mean "federations"']),
        (["fedbn"], ["`fednorms run --method "]),
        (["--rounds", "3"], ["`fednorms run --rounds 3`"]),
        (["run", "a.toml", "--recipe", "b.toml"], ["a.toml", "b.toml"]),
        (["run", "--participation", "most"], ["participation", "fixed:10"]),
        (["describe", "fedbn(x=1)"], ["no option", "x"]),
        (["resume", "nowhere"], ["nowhere is not a run"]),
        (["evaluate", "nowhere"], ["nowhere is not a run"]),
        (["compare", "--methods", "fedavg", "fedavg"], ["twice"]),
        (["compare", "--methods", "fedavg", "--seeds", "0"], ["seeds"]),
        (["compare", "--methods", "fedavg", "--lrs", "fedbn=0.1"], ["fedbn", "not compared"]),
        (["compare", "--methods", "fedavg", "--lrs", "fedavg"], ["METHOD=LR"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(capsys, *args)
    assert code == 2
    assert not out
    assert err.startswith("fednorms: ")
    assert "Traceback" not in err
    assert all(word in err for word in words), err
    assert not any(tmp_path.iterdir())  # nothing was written


def test_a_folder_in_the_wrong_place_or_misspelt(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "bern" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "bern" / "cat" / "a.png").touch()
    for args, words in {
        ("run", "photos"): '"photos" is a federation. Write --federation photos.',
        ("run", "--federation", "photo"): 'No federation "photo"; did you mean "photos"?',
        ("run", "--federation", "photo/"): 'did you mean "photos"?',
        ("run", "--federation", "photos/bren"): 'did you mean "photos/bern"?',
        ("run", "--federation", "photos/bern"): 'or use the folder above: "photos"',
        ("run", "--federation", "photos/bern/cat/a.png"): "is a file",
    }.items():
        code, _, err = ask(capsys, *args)
        assert code == 2
        assert words in err
    (tmp_path / "photos" / "recipe.toml").touch()
    assert "`fednorms resume photos`" in ask(capsys, "run", "photos")[2]


def test_options_that_do_not_exist_or_do_not_parse_are_bad_input(capsys):
    assert ask(capsys, "run", "--roundz", "3")[0] == 2
    assert ask(capsys, "run", "--rounds", "three")[0] == 2
    assert ask(capsys, "list", "colours")[0] == 2
    assert ask(capsys, "resume")[0] == 2


def test_a_bug_keeps_its_traceback_and_a_user_can_ask_for_one(monkeypatch):
    monkeypatch.setenv("FEDNORMS_TRACEBACK", "1")
    with pytest.raises(fn.BadInput):
        main(["resume", "nowhere"])
    monkeypatch.setattr("fednorms.cli.resume.parse", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["resume", "nowhere"])


def test_a_closed_output_pipe_gives_no_traceback():
    with started("--help") as writer:
        writer.stdout.close()
        assert "Traceback" not in writer.stderr.read()
        assert writer.wait(HANG) in (0, 1)


def test_exit_codes_reach_the_shell():
    said = fednorms("rnu")
    assert said.code == 2
    assert not said.out
    assert 'did you mean "run"' in said.err
    assert fednorms("--version").code == 0


def test_public_names_are_not_hidden_by_modules_of_the_same_name():
    from types import ModuleType

    assert [n for n in fn.__all__ if isinstance(getattr(fn, n), ModuleType)] == ["layers", "methods"]
    assert dir(fn) == sorted(fn.__all__)
    assert fn.methods.FedProx(mu=0.1) == fn.method("fedprox(mu=0.1)").parts[0]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fn.nonsense


@pytest.mark.parametrize(
    ("old", "line"),
    [
        ("fednorms.tree", "from fednorms import Tree"),
        ("fednorms.errors", "from fednorms import BadInput"),
        ("fednorms.runs.opened", "from fednorms import open_run"),
        ("fednorms.layers.surgery", "from fednorms.core.surgery import"),
    ],
)
def test_an_import_path_of_version_0_1_fails_with_the_line_to_write(old, line):
    with pytest.raises(ModuleNotFoundError, match=line):
        importlib.import_module(old)


def test_every_line_that_replaces_an_old_import_works():
    for given in _moved._PUBLIC.values():
        assert set(given.split(", ")) <= set(fn.__all__)
    for module in _moved._PRIVATE.values():
        importlib.import_module(f"fednorms.{module}")
    for old in (*_moved._PUBLIC, *_moved._PRIVATE):
        with pytest.raises(ModuleNotFoundError, match="has moved"):
            importlib.import_module(f"fednorms.{old}")
