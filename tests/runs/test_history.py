"""Recipes of older versions mean what they meant when they were written."""

import pytest
import torch

import fednorms as fn
from fednorms.papers.tables.record import plain, same_run
from fednorms.runs.recipe import Recipe
from tests.support.after import federation, recipe


def test_an_interrupted_run_of_version_0_1_continues_with_its_own_scaffold(tmp_path):
    """The directory is what 0.1 leaves behind: its version, and the text "scaffold" for control="gradient"."""
    wanted = recipe("scaffold(control=gradient)", rounds=3, training={"batch_size": 4, "lr": 0.05, "weight_decay": 0.1})
    whole = fn.run(federation=federation(), recipe=wanted, out=tmp_path / "whole")

    def stop(event):
        if event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fn.run(federation=federation(), recipe=wanted, out=tmp_path / "half", callback=stop)
    file = tmp_path / "half" / "recipe.toml"
    text = file.read_text().replace("scaffold(control='gradient')", "scaffold")
    file.write_text(text.replace(f'version = "{fn.__version__}"', 'version = "0.1.0"'))
    assert 'method = "scaffold"' in file.read_text()

    resumed = fn.resume(tmp_path / "half", federation=federation())
    assert [row["scores"] for row in resumed.history] == [row["scores"] for row in whole.history]
    for one, other in zip(_tensors(tmp_path / "whole"), _tensors(tmp_path / "half"), strict=True):
        assert torch.equal(one, other)
    plainly = fn.run(
        federation=federation(), recipe=wanted.model_copy(update={"method": "scaffold"}), out=tmp_path / "n"
    )
    assert plainly.recipe.method == "scaffold(control='difference')"
    assert not all(map(torch.equal, _tensors(tmp_path / "whole"), _tensors(tmp_path / "n")))


def _tensors(run):
    return list(fn.open_run(run, federation=federation()).state.model.values())


def test_a_stored_result_is_taken_for_what_it_was():
    then = plain(Recipe(method="scaffold")) | {"version": "0.1.0"}
    assert same_run(then, Recipe(method="scaffold(control=gradient)"))
    assert not same_run(then, Recipe(method="scaffold"))
    now = plain(Recipe(method="scaffold").resolved())
    assert same_run(now, Recipe(method="scaffold"))
    assert same_run(now, Recipe(method="scaffold(control=difference)"))


def test_a_run_of_an_older_version_is_the_same_run(tmp_path):
    """The version is recorded, not part of what identifies a run: continuing by `out` works."""
    made = recipe("fedbn", rounds=1)
    fn.run(federation=federation(), recipe=made, out=tmp_path / "run")
    file = tmp_path / "run" / "recipe.toml"
    file.write_text(file.read_text().replace(f'version = "{fn.__version__}"', 'version = "0.1.0"'))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    fn.run(federation=federation(), recipe=made, out=tmp_path / "run")  # refused if it were another run
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
