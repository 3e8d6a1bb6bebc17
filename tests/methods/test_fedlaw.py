"""FedLAW: equal to a loop over clients and steps, and its identities."""

from dataclasses import replace

import pytest
import torch

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.round import server_update
from fednorms.core.tree import Tree
from tests.reference import fedlaw as reference
from tests.support.tiny import close, play, proxy_for, rounds, same, tiny_data, tiny_task

PARAMS = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]


def trained(text, n=1, **settings):
    data = tiny_data()
    task = tiny_task(text, data, **settings)
    return task, rounds(task, data, n)


def batches_of(task, t, epochs, size):
    """The server's batches of a round."""
    split = proxy_for(task.net)
    word = noise.seed_of("noise of a pass", task.seed, t, "server", "fedlaw") & 0xFFFFFFFF
    orders = [noise.permutation(len(split), "order of a pass", word, e) for e in range(epochs)]
    return [[(split.x[rows], split.y[rows]) for rows in order.split(size)] for order in orders]


@pytest.mark.parametrize(("form", "optimizer", "epochs"), [("exp", "adam", 22), ("quad", "adam", 3), ("exp", "sgd", 4)])
def test_equals_the_loop(form, optimizer, epochs):
    task, run = trained(f"fedlaw(form={form}, optimizer={optimizer}, epochs={epochs}, lr=0.05, batch_size=4)")
    states, sizes = [u.model for u in run.uploads.values()], [u.weight for u in run.uploads.values()]
    server = task.net.plain(task.net.initial)
    step = getattr(reference, optimizer)
    batches = batches_of(task, 0, epochs, 4)
    new, gamma, _ = reference.learn(server, states, sizes, batches, form=form, step=step, rate=0.05)
    assert abs(gamma - 1) > 1e-3
    close(run.model.pick(PARAMS), dict(new.named_parameters()))
    statistics = ["norm.running_mean", "norm.running_var"]
    close(run.model.pick(statistics), Tree(dict(new.named_buffers())).pick(statistics))


def test_a_second_round_starts_from_the_servers_statistics():
    task, run = trained("fedlaw(epochs=2)", 2)
    _, first = trained("fedlaw(epochs=2)", 1)
    states, sizes = [u.model for u in run.uploads.values()], [u.weight for u in run.uploads.values()]
    server = task.net.plain(first.model)
    new, _, _ = reference.learn(server, states, sizes, batches_of(task, 1, 2, 128))
    close(run.model.pick(PARAMS), dict(new.named_parameters()))
    torch.testing.assert_close(run.model["norm.running_mean"], new.norm.running_mean)


def test_without_epochs_it_is_fedavg_bit_for_bit():
    assert same(play("fedlaw(epochs=0)").model, play("fedavg").model)


@pytest.mark.parametrize(("form", "weighting"), [("exp", "size"), ("exp", "uniform"), ("quad", "uniform")])
def test_it_starts_from_the_clients_weights(form, weighting):
    found = play(f"fedlaw(form={form}, lr=1e-12)", n=1, weighting=weighting).model
    close(found.pick(PARAMS), play("fedavg", n=1, weighting=weighting).model.pick(PARAMS), atol=1e-9)


def test_a_single_client_is_only_shrunk():
    data = tiny_data(9)
    task = tiny_task("fedlaw(lr=0.1)", data)
    run = rounds(task, data, 1)
    (upload,) = run.uploads.values()
    ratio = {n: run.model[n] / upload.model[n] for n in PARAMS}
    gamma = ratio["head.weight"].flatten()[0]
    for t in ratio.values():
        torch.testing.assert_close(t, gamma.expand_as(t))


def test_a_useless_model_loses_its_weight():
    """A model that answers with another class than the right one gets the smallest lambda."""
    task, run = trained("fedlaw(lr=0.1)")
    good = run.uploads["a"].model
    flipped = {k: -10 * t if k.startswith("head") else t for k, t in good.items()}
    uploads = [replace(u, model=Tree(good if n == "a" else flipped)) for n, u in run.uploads.items() if n != "c"]
    start = replace(run.server, round=0, model=task.net.initial)
    mixed = server_update(task, start, uploads).model["head.weight"] / good["head.weight"]
    plain = (uploads[0].weight - 10 * uploads[1].weight) / (uploads[0].weight + uploads[1].weight)
    assert float(mixed.mean()) > plain / 2


def test_the_servers_images_matter_and_the_clients_do_not_see_them():
    data = tiny_data()
    found = [
        rounds(tiny_task("fedlaw(epochs=2)", data, proxy=tiny_data(9, seed=seed)["a"]), data, 1) for seed in (5, 6)
    ]
    assert not same(found[0].model, found[1].model)
    for name in data:
        assert same(found[0].uploads[name].model, found[1].uploads[name].model)


def test_without_images_at_the_server_it_says_what_to_do():
    data = tiny_data()
    task = tiny_task("fedlaw", data, proxy=None)
    with pytest.raises(BadInput, match=r"fedlaw learns from images at the server.*proxy="):
        rounds(task, data, 1)


@pytest.mark.parametrize("other", ["fedbn", "fedper", "hbn", "standalone"])
def test_the_server_must_have_the_whole_model(other):
    with pytest.raises(BadInput, match=rf"fedlaw.*no complete copy at the server.*Remove fedlaw or {other} from"):
        tiny_task(f"{other} + fedlaw", tiny_data())


@pytest.mark.parametrize(("size", "images"), [(1, 9), (128, 1)])
def test_images_that_make_no_batch_are_refused(size, images):
    data = tiny_data()
    task = tiny_task(f"fedlaw(batch_size={size})", data, proxy=tiny_data(images)["a"])
    with pytest.raises(BadInput, match=r"fedlaw: the server's images make no batch of two.*batch_size"):
        rounds(replace(task, needs_two=True), data, 1)


@pytest.mark.parametrize("other", ["median", "dpcentral"])
def test_rivals_are_refused(other):
    with pytest.raises(BadInput, match="fedlaw"):
        tiny_task(f"{other} + fedlaw", tiny_data())
