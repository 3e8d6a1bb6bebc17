"""FedBN and SiloBN: who keeps which tensors of a batch-normalization layer."""

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.part import Route
from tests.reference.fedbn import fedbn
from tests.support.tiny import client_model, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

AFFINE = {"norm.weight", "norm.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize(("text", "statistics_only"), [("fedbn", False), ("silobn", True)])
def test_client_models_equal_a_plain_torch_loop(text, statistics_only):
    data = tiny_data()
    task = tiny_task(text, data, epochs=2)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    models = fedbn(tiny_net(), pairs(data), plans, 0.1, statistics_only)
    for name, wanted in zip("abc", models, strict=True):
        close(client_model(task, data, run, name), wanted.state_dict())


@pytest.mark.parametrize(("text", "kept"), [("fedbn", AFFINE | STATISTICS), ("silobn", STATISTICS)])
def test_what_is_kept_is_never_sent_and_the_server_never_changes_it(text, kept):
    run = play(text)
    assert run.states["a"].local.keys() == kept
    assert not kept & run.uploads["a"].model.keys()
    start = tiny_net().state_dict()
    assert all(torch.equal(run.model[k], start[k]) for k in kept)


@pytest.mark.parametrize(("text", "kept"), [("fedbn", AFFINE | STATISTICS), ("silobn", STATISTICS)])
def test_after_a_round_shared_tensors_are_equal_and_kept_ones_differ_and_persist(text, kept):
    data = tiny_data(12, 12)
    task = tiny_task(text, data)
    run = rounds(task, data, 2)
    a, b = (client_model(task, data, run, k) for k in "ab")
    assert {k for k in a if not torch.equal(a[k], b[k])} == kept - {"norm.num_batches_tracked"}
    assert all(a[k] is run.states["a"].local[k] for k in kept)


@pytest.mark.parametrize("text", ["fedbn", "silobn"])
def test_one_client_is_fedavg(text):
    data = tiny_data(9)
    task = tiny_task(text, data)
    run = rounds(task, data, 3)
    assert same(client_model(task, data, run, "a"), play("fedavg", data, n=3).model)


def test_silobn_with_identical_clients_is_fedavg():
    split = tiny_data(4)["a"]
    data = {"a": split, "b": split}
    task = tiny_task("silobn", data)
    run = rounds(task, data, 3)
    close(client_model(task, data, run, "a"), play("fedavg", data, n=3).model, atol=1e-12)


def test_the_two_differ_exactly_in_the_affine_tensors():
    data = tiny_data()
    routes = [tiny_task(text, data).net.routes for text in ("fedbn", "silobn")]
    assert {k for k in routes[0] if routes[0][k] != routes[1][k]} == AFFINE


def test_weights_of_the_average():
    assert tiny_task("fedbn", tiny_data()).method.weighting() == "uniform"
    assert tiny_task("silobn", tiny_data()).method.weighting() == "size"


def test_upload_also_gives_the_server_the_mean_for_unseen_sites():
    data = tiny_data(12, 12)
    task = tiny_task("fedbn(upload=true)", data)
    run = rounds(task, data, 2)
    mean = (run.states["a"].local["norm.running_var"] + run.states["b"].local["norm.running_var"]) / 2
    torch.testing.assert_close(run.model["norm.running_var"], mean, atol=1e-14, rtol=0)
    assert task.net.routes["norm.weight"] is Route.SENT
    plain = tiny_task("fedbn", data)
    other = rounds(plain, data, 2)
    for name in "ab":
        assert same(client_model(task, data, run, name), client_model(plain, data, other, name))


def test_layers_are_found_by_type_not_by_name():
    assert not [n for n in tiny_net().state_dict() if "bn" in n]
    assert set(tiny_task("fedbn", tiny_data()).net.own) == AFFINE | STATISTICS


@pytest.mark.parametrize("text", ["nonorm + fedbn", "gn(groups=2) + fedbn", "ln + silobn"])
def test_a_network_without_such_layers_is_an_error_that_says_what_to_do(text):
    name = text.split("+ ")[1]
    with pytest.raises(
        BadInput, match=rf'{name} has nothing to act on: model "TinyNet".*after.*Remove {name} .* choose'
    ):
        tiny_task(text, tiny_data())
