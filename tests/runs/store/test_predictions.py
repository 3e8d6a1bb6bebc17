"""A finished run keeps its test predictions: those of its scores, hashed, and only where they may be kept."""

import numpy as np
import pytest

import fednorms as fn
from fednorms.core.errors import RunFailed
from fednorms.runs.store import predictions as store
from fednorms.runs.store.directory import RunDirectory

TINY = {"rounds": 2, "data": {"size": 8}}


def run(out, **options):
    return fn.run(recipe=fn.Recipe.make(TINY | options), out=out)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return run(out, method="fedbn", evaluate=["auto", "averaged"]), out


def test_they_are_those_of_the_scores_in_the_last_and_the_best_round(made):
    result, out = made
    directory = RunDirectory(out)
    assert result.best is not None
    for t in {result.rounds, result.best["round"]}:
        for label in ("personal/own", "averaged/global"):
            scores = result.tested(t)[f"{label}/test"]
            found = store.read(directory, t, label)
            assert set(found) == set(scores.sites)
            for site, p in found.items():
                assert (p.probabilities.argmax(1) == p.labels).mean() == pytest.approx(scores.sites[site].accuracy)


def test_they_are_verified(made):
    _, out = made
    verified = fn.verify(out)
    files = store.files(RunDirectory(out))
    assert files
    assert {f.state for f in verified.files if f.path in files} == {"intact"}


def test_a_damaged_file_is_found_and_written_again(tmp_path):
    run(tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    (file,) = [f for f in store.files(directory) if "round-000002" in str(f)]
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert [f.path for f in fn.verify(tmp_path / "run").damaged] == [file]
    with pytest.raises(RunFailed, match="content hash"):
        store.read(directory, 2, "global/global")
    fn.resume(tmp_path / "run")
    assert file.read_bytes() == before


def test_an_interrupted_run_keeps_the_same_bytes_as_an_uninterrupted_one(tmp_path):
    run(tmp_path / "whole")

    def interrupt(event):
        if event.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fn.run(recipe=fn.Recipe.make(TINY), out=tmp_path / "cut", callback=interrupt)
    assert not store.files(RunDirectory(tmp_path / "cut"))
    fn.resume(tmp_path / "cut")
    whole, cut = (store.files(RunDirectory(tmp_path / name)) for name in ("whole", "cut"))
    assert [f.read_bytes() for f in whole] == [f.read_bytes() for f in cut]


def test_a_run_that_trains_longer_drops_those_of_its_old_end(tmp_path):
    run(tmp_path / "run", data={"size": 8, "val": 0.0})
    fn.resume(tmp_path / "run", rounds=3)
    assert [f.parent.name for f in store.files(RunDirectory(tmp_path / "run"))] == ["round-000003"]


def test_nothing_is_kept_if_the_recipe_says_so_or_there_is_too_much(tmp_path, monkeypatch):
    run(tmp_path / "private", keep_predictions=False)
    assert not (tmp_path / "private" / "predictions").exists()
    monkeypatch.setattr(store, "LIMIT", 100)
    large = run(tmp_path / "large")
    assert not store.files(RunDirectory(tmp_path / "large"))
    assert any("test predictions were not kept" in note for note in large.notes)
    run(tmp_path / "asked", keep_predictions=True)
    assert store.files(RunDirectory(tmp_path / "asked"))


def test_patients_are_kept_as_numbers(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    y = np.arange(40) % 2
    whose = [f"Jane Doe {i // 4}" for i in range(40)]
    data = fn.from_arrays({"a": (x, y), "b": (x, y)}, groups={"a": whose, "b": whose}, test=0.5)
    fn.run("fedavg", data, rounds=1, out=tmp_path / "run", model="cnn-small")
    (file,) = store.files(RunDirectory(tmp_path / "run"))
    assert b"Jane" not in file.read_bytes()
    (a, _) = store.read(RunDirectory(tmp_path / "run"), 1, "global/global").values()
    assert len(set(a.groups)) == len(set(data.site("a").test.groups)) > 1


def test_modes_that_would_train_again_are_left_out(tmp_path):
    run(tmp_path / "run", rounds=1, method="fedavg + finetune")
    assert all("adapted" not in f.name for f in store.files(RunDirectory(tmp_path / "run")))
