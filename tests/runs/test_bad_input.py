"""Bad input to a run: one clear message each, before anything is written."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.core.errors import BadInput, Diverged
from fednorms.data import from_arrays


def images(n, seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8), torch.arange(n) % 2


def two_sites(first=12, second=12):
    return from_arrays(
        {
            "a": {"train": images(first), "test": images(6, 1)},
            "b": {"train": images(second, 2), "test": images(6, 3)},
        },
        classes=["no", "yes"],
    )


class Flat(nn.Module):
    """A network whose batch normalization sees one value per channel and image."""

    def __init__(self, classes=2):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_client_with_one_image_and_batch_normalization_is_explained():
    with pytest.raises(BadInput, match=r"one training image.*\+ gn"):
        fn.run("fedavg", two_sites(second=1), Flat(), 1)


def test_batch_size_one_and_batch_normalization_is_explained():
    with pytest.raises(BadInput, match="batch_size=1"):
        fn.run("fedavg", two_sites(), Flat(), 1, batch_size=1)


def test_a_last_batch_of_one_is_dropped_and_counted():
    result = fn.run("fedavg", two_sites(9, 8), Flat(), 1, batch_size=4)
    assert result.history[0]["dropped"] == 1


def test_a_model_with_too_few_outputs_is_named():
    with pytest.raises(BadInput, match=r"Flat.*expected \(2, 2\)"):
        fn.run("fedavg", two_sites(), Flat(classes=5), 1)


def test_a_model_that_cannot_take_the_images_is_named():
    federation = from_arrays({"a": {"train": images(8, size=12), "test": images(4, 1, size=12)}}, classes=["no", "yes"])
    with pytest.raises(BadInput, match="cannot take images of 3x12x12"):
        fn.run("fedavg", federation, Flat(), 1)


def test_more_participants_than_clients():
    with pytest.raises(BadInput, match="asks for 3 clients, but the federation has 2"):
        fn.run("fedavg", two_sites(), Flat(), 1, participation="fixed:3")


def test_class_weights_of_the_wrong_length():
    with pytest.raises(BadInput, match="class_weights needs 2 numbers"):
        fn.run("fedavg", two_sites(), Flat(), 1, recipe=fn.Recipe(class_weights=[1.0, 2.0, 3.0]))


def test_a_mode_the_method_does_not_have():
    with pytest.raises(BadInput, match="finetune"):
        fn.run("fedavg", two_sites(), Flat(), 1, evaluate=["adapted"])


def test_nothing_is_written_for_bad_input(tmp_path):
    with pytest.raises(BadInput):
        fn.run("fedavg", two_sites(), Flat(classes=5), 1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_divergence_stops_the_round_with_client_step_and_hint():
    with pytest.raises(
        Diverged, match=r'Client "a" diverged in round \d+, step \d+: .* is not finite. Lower the learning'
    ):
        fn.run("fedavg", two_sites(), Flat(), 3, lr=1e30)


def test_skipped_clients_are_dropped_from_the_average_and_counted(tmp_path):
    recipe = fn.Recipe(on_divergence="skip")
    result = fn.run("fedavg", two_sites(), Flat(), 3, lr=1e30, recipe=recipe, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(rows[-1]["diverged"]) == ["a", "b"]
    assert result.to_dict()["diverged"] == sum(len(row["diverged"]) for row in rows)
    assert rows[-1]["train_loss"] is None
    assert all(torch.isfinite(p).all() for p in result.model().parameters())


def test_a_run_directory_of_another_recipe_is_refused_and_untouched(tmp_path):
    model = Flat()
    fn.run("fedavg", two_sites(), model, 1, out=tmp_path / "run")
    before = (tmp_path / "run" / "recipe.toml").read_text()
    with pytest.raises(BadInput, match="rounds"):
        fn.run("fedavg", two_sites(), model, 2, out=tmp_path / "run")
    assert (tmp_path / "run" / "recipe.toml").read_text() == before


def test_other_data_are_refused(tmp_path):
    model = Flat()
    fn.run("fedavg", two_sites(), model, 1, out=tmp_path / "run")
    with pytest.raises(BadInput, match="other data"):
        fn.resume(tmp_path / "run", federation=two_sites(second=14), model=model)


def test_a_run_with_custom_objects_says_what_resume_needs(tmp_path):
    fn.run("fedavg", two_sites(), Flat(), 1, out=tmp_path / "run")
    with pytest.raises(BadInput, match=r"custom federation .*fednorms.resume\(path, federation=...\)"):
        fn.resume(tmp_path / "run")


def test_recipe_fields_apply_unless_an_argument_overrides_them():
    recipe = fn.Recipe(method="fedprox", rounds=2, seed=5, participation="fixed:1")
    result = fn.run(federation=two_sites(), model=Flat(), rounds=1, recipe=recipe)
    assert result.recipe.method == "fedprox"
    assert (result.recipe.rounds, result.recipe.seed) == (1, 5)
    assert result.history[0]["clients"] == 1


def test_every_setting_that_messages_suggest_is_an_argument():
    settings = {"engine": "loop", "head": ["head"], "on_divergence": "skip", "weighting": "uniform"}
    result = fn.run("fedavg", two_sites(), Flat(), 1, device="cpu", **settings)
    assert {key: getattr(result.recipe, key) for key in settings} == settings
    with pytest.raises(BadInput, match=r'weighting= must be .*"size" or "uniform", got "even"'):
        fn.run("fedavg", two_sites(), Flat(), 1, weighting="even")


def test_a_named_federation_object_is_recorded_by_its_name(tmp_path):
    found = fn.federation("digits-shift", size=8, test=0.8)
    result = fn.run("fedavg", found, rounds=1, out=tmp_path / "run", recipe=fn.Recipe(data={"augment": "flip"}))
    data = result.recipe.data
    assert (result.recipe.federation, data.size, data.test, data.augment) == ("digits-shift", 8, 0.8, "flip")
    assert result.recipe.fingerprint == found.fingerprint()
    assert fn.evaluate_run(tmp_path / "run")["global/global/test"].mean == result.accuracy  # without the object
    assert fn.resume(tmp_path / "run").accuracy == result.accuracy
    assert fn.run("fedavg", found.hold_out("faint"), rounds=1).recipe.federation == "custom:digits-shift"


def test_pixels_changed_in_place_are_found_by_the_fingerprint(tmp_path):
    found = fn.federation("digits-shift", size=8, test=0.8)
    found.site("clean").train.x.zero_()
    fn.run("fedavg", found, rounds=1, out=tmp_path / "run")
    with pytest.raises(BadInput, match="made on other data"):
        fn.evaluate_run(tmp_path / "run")


@pytest.mark.parametrize(("key", "value"), [("hold_out", ["faint"]), ("proxy", "0.1"), ("partition", "iid(clients=2)")])
def test_what_divides_a_federation_is_refused_for_a_federation_object(key, value):
    recipe = fn.Recipe(data={key: value})
    for start in (fn.run, lambda method, *more, **options: fn.compare([method], *more, **options)):
        with pytest.raises(BadInput, match=f"data.{key} = .* before the run"):
            start("fedavg", fn.federation("digits-shift"), recipe=recipe)
