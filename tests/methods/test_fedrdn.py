"""FedRDN: whose statistics normalize an image."""

import pytest
import torch

from fednorms.core.passes import prepare_test
from fednorms.core.round import broadcast, site_state
from fednorms.core.states import Client, context_of
from fednorms.data import Preprocessing, Split
from fednorms.methods.registry import method
from tests.support.tiny import plan_of, play, rounds, same, setup, tiny_data, tiny_task
from tests.support.tiny_parts import negating_and_doubling


def expected(split):
    """mean and sd per image and channel, then averaged: by loops."""
    n = len(split)
    mean = sum(split.x[i].flatten(1).mean(1) for i in range(n)) / n
    std = sum(split.x[i].flatten(1).std(1) for i in range(n)) / n
    return mean, std


def seen_by_training(monkeypatch, text, data):
    """Every batch that a training step of client "a" feeds the network, with the rows it was made of."""
    task = tiny_task(text, data, preprocessing=Preprocessing.centered(3), batch_size=len(data["a"]))
    run = setup(task, data)
    seen = []
    forward = task.net.forward

    def spy(tensors, x, **kw):
        seen.append(x.clone())
        return forward(tensors, x, **kw)

    monkeypatch.setattr(task.net, "forward", spy)
    rounds(task, data, 1, run=run, cohorts=["a"])
    return seen[0]


def test_setup_measures_every_client_once():
    data = tiny_data()
    run = setup(tiny_task("fedrdn", data), data)
    for k, (name, split) in enumerate(data.items()):
        mean, std = expected(split)
        mine = run.states[name].parts["fedrdn"]
        torch.testing.assert_close(mine["mean"], mean, atol=1e-12, rtol=0)
        torch.testing.assert_close(mine["std"], std, atol=1e-12, rtol=0)
        assert torch.equal(run.server.parts["fedrdn"]["mean"][k], mine["mean"])
        assert torch.equal(run.server.parts["fedrdn"]["std"][k], mine["std"])


def test_each_image_is_normalized_by_the_pair_of_one_client(monkeypatch):
    data = tiny_data(40, 7, 10)
    x = seen_by_training(monkeypatch, "fedrdn", data)
    table = [expected(s) for s in data.values()]
    task = tiny_task("fedrdn", data, batch_size=40)
    rows = plan_of(task, data["a"], "a", 0)[0]
    used = []
    for image, row in zip(x, rows, strict=True):
        raw = data["a"].x[row]
        fits = [torch.allclose(image, (raw - m[:, None, None]) / s[:, None, None], atol=1e-9) for m, s in table]
        assert sum(fits) == 1  # a pair, never the mean of one client with the deviation of another
        used.append(fits.index(True))
    assert set(used) == {0, 1, 2}


def test_the_authors_draw_is_once_per_batch(monkeypatch):
    data = tiny_data(40, 7, 10)
    x = seen_by_training(monkeypatch, "fedrdn(variant=author)", data)
    table = [expected(s) for s in data.values()]
    task = tiny_task("fedrdn", data, batch_size=40)
    raw = data["a"].x[plan_of(task, data["a"], "a", 0)[0]]
    fits = [
        (i, j)
        for i, (m, _) in enumerate(table)
        for j, (_, s) in enumerate(table)
        if torch.allclose(x, (raw - m[:, None, None]) / s[:, None, None], atol=1e-9)
    ]
    assert len(fits) == 1


def test_a_test_uses_the_clients_own_pair():
    data = tiny_data()
    task = tiny_task("fedrdn", data, preprocessing=Preprocessing.centered(3))
    run = rounds(task, data, 1)
    client = Client("b", data["b"], run.states["b"])
    context = context_of(task, 1, client, evaluating=True)
    x, _ = prepare_test(task, (data["b"].x, data["b"].y), context, run.states["b"].parts, broadcast(task, run.server))
    mean, std = expected(data["b"])
    torch.testing.assert_close(x, (data["b"].x - mean[:, None, None]) / std[:, None, None], atol=1e-12, rtol=0)


def test_a_single_client_always_uses_its_own_pair():
    data = tiny_data(9)
    mean, std = expected(data["a"])
    fixed = Preprocessing(tuple(mean.tolist()), tuple(std.tolist()))
    run, plain = play("fedrdn", data, n=2), play("fedavg", data, n=2, preprocessing=fixed)
    for name in run.model:
        torch.testing.assert_close(run.model[name], plain.model[name], atol=1e-10, rtol=0)


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_draws_are_keyed(variant):
    torch.manual_seed(1)
    one = play(f"fedrdn(variant={variant})")
    torch.manual_seed(2)
    assert same(one.model, play(f"fedrdn(variant={variant})").model)


def test_nothing_more_is_sent_in_a_round():
    run = play("fedrdn")
    assert not run.uploads["a"].parts.get("fedrdn")


def test_only_the_authors_measure_images_as_training_augments_them():
    data = tiny_data()
    with negating_and_doubling() as (negate, _):
        for text in ("fedrdn", "fedrdn(variant=author)"):
            for ours in (negate + method(text), method(text) + negate):
                run = setup(tiny_task(ours, data), data)
                for name, split in data.items():
                    mean, std = expected(Split(1 - split.x, split.y) if "author" in text else split)
                    mine = run.states[name].parts["fedrdn"]
                    torch.testing.assert_close(mine["mean"], mean, atol=1e-12, rtol=0)
                    torch.testing.assert_close(mine["std"], std, atol=1e-12, rtol=0)


def test_a_site_that_is_only_tested_is_measured_without_augmentation():
    data = tiny_data()
    task = tiny_task("augment + fedrdn(variant=author)", data)
    run = rounds(task, data, 1)
    mine = site_state(task, broadcast(task, run.server), Client("new", data["b"]))["fedrdn"]
    torch.testing.assert_close(mine["mean"], expected(data["b"])[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_images_are_normalized_last_whatever_the_order(variant):
    rdn, augment = f"fedrdn(variant={variant})", "augment(chain=crop_flip)"
    one, other = play(f"{augment} + {rdn}"), play(f"{rdn} + {augment}")
    assert same(one.model, other.model)
    assert not same(one.model, play(rdn).model)  # not a vacuous test
