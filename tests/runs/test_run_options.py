"""What `run` takes: optimizers, schedules, epochs per client; and what it answers to other words."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.part import Part, part
from fednorms.papers.tables.record import plain, same_run
from fednorms.runs.callables import Callables
from fednorms.runs.driver import execute
from fednorms.runs.identity import own_name
from fednorms.runs.recipe import Recipe
from tests.support.after import federation, recipe
from tests.support.tiny import close, same


def halving(t):
    return 0.5**t


def run(**given):
    return fn.run(**({"method": "fedavg", "federation": federation(), "recipe": recipe("fedavg")} | given))


# -- what works -----------------------------------------------------------------------------------------------------
def test_settings_of_training_can_be_given_one_by_one():
    given = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, "schedule": "exp", "warmup": 2, "batch_size": 8}
    found = run(**given).recipe.training
    assert {k: getattr(found, k) for k in given} == given
    assert run(optimizer="adam", rounds=1).recipe.training.optimizer == "adam"


def test_a_schedule_is_a_function_of_the_round_from_1():
    asked = []

    def spy(t):
        asked.append(t)
        return 1 / t

    result = run(rounds=3, lr=0.3, schedule=spy)
    assert asked == [1, 2, 3]
    assert [row["lr"] for row in result.history] == pytest.approx([0.3, 0.15, 0.1])
    assert result.recipe.training.schedule.startswith("custom:spy@")
    plain = run(rounds=3, lr=0.3, schedule="exp", training=fn.Training(batch_size=4, decay=0.5))
    own = run(rounds=3, lr=0.3, schedule=lambda t: 0.5 ** (t - 1))
    assert same(own._state.model, plain._state.model)


@pytest.mark.usefixtures("parts_as_before")
def test_hooks_count_rounds_from_0_and_users_from_1():
    hook, user = [], []

    @part("counting")
    class Counting(Part):
        def server(self, delta, r):
            hook.append(r.context.round)
            return delta, r.mine

    result = run(method="counting", rounds=3, callback=lambda event: user.append(event.round))
    assert hook == [0, 1, 2]
    assert user == [row["round"] for row in result.history] == [t for t, _ in result.curve()] == [1, 2, 3]


def test_the_class_of_an_optimizer_gives_what_its_name_gives():
    given = {"recipe": recipe("fedavg", precision="float64"), "lr": 0.01, "weight_decay": 0.1, "rounds": 1}
    for name, cls in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        named, own = run(optimizer=name, **given), run(optimizer=cls, **given)
        close(own._state.model, named._state.model, atol=1e-7)  # a bias before a normalization has only noise to follow
        assert own.recipe.training.optimizer.startswith(f"custom:{cls.__name__}@")


def test_optimizers_are_told_apart_by_name_and_options():
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    names = [own_name(make) for make in (sgd, adam, partial(sgd, nesterov=True), partial(adam, nesterov=True))]
    assert len(set(names)) == 4


def test_epochs_of_each_client_are_recorded_as_numbers(tmp_path):
    by_size = run(rounds=1, epochs=lambda site: 2 if len(site.train) > 12 else 1, out=tmp_path / "run")
    wanted = {"a": 1, "b": 2, "c": 2}
    assert by_size.recipe.training.client_epochs == wanted
    assert Recipe.read(tmp_path / "run" / "recipe.toml").training.client_epochs == wanted
    by_name = run(rounds=1, epochs={"b": 2, "c": 2})
    assert same(by_size._state.model, by_name._state.model)
    assert run(rounds=1, epochs=3, training=fn.Training(client_epochs={"a": 2})).recipe.training.client_epochs is None


def test_compare_takes_the_same():
    given = {"optimizer": torch.optim.RMSprop, "schedule": halving, "epochs": {"b": 3}}
    found = fn.compare(["fedavg", "fedbn"], federation(), rounds=2, seeds=1, **given)
    assert not found.failed
    assert "2 rounds of 1 to 3 epochs" in found.about["training"]
    assert "optimizer custom:RMSprop@" in found.about["training"]


# -- resuming -------------------------------------------------------------------------------------------------------
def interrupted(out, **given):
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(rounds=3, out=out, callback=stop, **given)
    return out


def test_resume_asks_for_functions_and_gives_the_same_bits(tmp_path):
    given = {"optimizer": partial(torch.optim.RMSprop, alpha=0.9), "schedule": halving}
    out = interrupted(tmp_path / "run", **given)
    with pytest.raises(BadInput, match=r"custom optimizer \(RMSprop\).*resume\(path, optimizer=...\)"):
        fn.resume(out, federation=federation())
    with pytest.raises(BadInput, match=r"custom schedule \(halving\)"):
        fn.resume(out, federation=federation(), optimizer=given["optimizer"])
    with pytest.raises(BadInput, match="made with another custom schedule"):
        fn.resume(out, federation=federation(), **given | {"schedule": lambda t: 1.0})
    with pytest.raises(BadInput, match="made with another custom optimizer"):
        fn.resume(out, federation=federation(), **given | {"optimizer": partial(torch.optim.RMSprop, alpha=0.8)})
    whole, again = run(rounds=3, **given), fn.resume(out, federation=federation(), **given)
    assert same(whole._state.model, again._state.model)
    assert again.rounds == 3


def test_a_run_with_functions_can_be_used_without_them(tmp_path):
    run(rounds=1, out=tmp_path / "run", optimizer=torch.optim.RMSprop, schedule=halving)
    opened = fn.open_run(tmp_path / "run", federation=federation())
    assert fn.evaluate_run(tmp_path / "run", federation=federation())
    with pytest.raises(BadInput, match=r"custom schedule \(halving\), so its rounds cannot be repeated"):
        opened.next_round()


# -- what does not work says so -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mu": 0.1}, r'not an option of fednorms.run, but of the method fedprox .*method="fedprox\(mu=0.1\)"'),
        ({"method": "moon", "mu": 0.1}, r'method="moon\(mu=0.1\)"'),
        ({"learning_rate": 0.1}, "has no learning_rate=. It is called lr="),
        ({"local_epochs": 2}, "It is called epochs="),
        ({"seeds": 3}, r'fednorms.compare\(\["fedavg"\], ..., seeds=3\)'),
        ({"clip": 1.0}, r"training=fednorms.Training\(clip=1.0\)"),
        ({"size": 32}, "setting of the data"),
        ({"evaluate_every": 2}, r"recipe=fednorms.Recipe\(evaluate_every=2\)"),
        ({"patience": 2}, r"stop=fednorms.EarlyStopping\(patience=2\)"),
        ({"ruonds": 2}, 'did you mean "rounds"'),
        ({"optimizer": "adan"}, "optimizer= must be sgd, adam or adamw"),
        ({"schedule": lambda t: -1.0}, r"finite number >= 0.*For round 1 of 2 it returned -1.0"),
        ({"schedule": lambda t: "a"}, "it returned 'a'"),
        ({"epochs": {"d": 2}}, 'names the client "d", which does not train'),
        ({"epochs": lambda site: 0.5}, 'an integer >= 1. For site "a" it returned 0.5'),
        ({"method": "fednova", "optimizer": torch.optim.SGD}, "cannot be combined with fednova"),
        ({"engine": "workers", "optimizer": torch.optim.SGD}, 'Engine "workers" cannot run the custom optimizer "SGD'),
    ],
)
def test_every_mistake_says_where_it_goes(given, words):
    with pytest.raises(BadInput, match=words):
        run(**given)


def test_compare_and_resume_answer_unknown_words(tmp_path):
    with pytest.raises(BadInput, match=r'method="fedprox\(mu=1\)"'):
        fn.compare(["fedprox"], mu=1)
    with pytest.raises(BadInput, match='resume has no round=: did you mean "rounds"'):
        fn.resume(tmp_path, round=3)


# -- losses that explode --------------------------------------------------------------------------------------------
def test_a_loss_that_explodes_is_noted_once():
    result = run(loss=lambda logits, y: torch.nn.functional.cross_entropy(logits, y) + 2e6)
    found = [note for note in result.notes if "training loss of client" in note]
    assert len(found) == 1
    assert found[0].startswith("round 1: ")
    assert not [note for note in run().notes if "training loss" in note]


def test_a_loss_that_is_not_finite_stops_or_skips():
    def loss(logits, y):
        return logits.sum() * 0.0 + (float("inf") if len(y) < 4 else 1.0)  # only b, of 13 images, has a short batch

    with pytest.raises(fn.Diverged, match=r'Client "b" diverged in round 1, step 4: the model \(loss\) is not finite'):
        run(loss=loss)
    skipped = run(loss=loss, on_divergence="skip", rounds=1)
    assert list(skipped.history[0]["diverged"]) == ["b"]


def test_a_recipe_without_the_new_keys_is_written_as_before_and_differs_from_one_with_them():
    plain_keys = Recipe().to_dict()
    assert "patience" not in plain_keys
    assert not {"warmup", "client_epochs"} & plain_keys["training"].keys()
    for changed in (Recipe(patience=3), Recipe(training={"warmup": 2}), Recipe(training={"client_epochs": {"a": 2}})):
        assert Recipe.from_toml(changed.to_toml()) == changed
        assert not same_run(plain(Recipe()), changed)
        assert not same_run(plain(changed), Recipe())


def test_recipes_do_not_accept_a_name_without_its_function():
    named = recipe("fedavg", training={"optimizer": "custom:mine@12"})
    with pytest.raises(BadInput, match=r"custom optimizer \(mine\)"):
        execute(named, federation=federation())
    assert execute(named, federation=federation(), own=Callables(torch.optim.SGD)).rounds == 2
