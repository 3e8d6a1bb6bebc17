"""FedAP: one mixture of models per client."""

import pytest
import torch

import fednorms as fn
from fednorms.core.border import unusable_measures
from fednorms.core.errors import BadInput
from fednorms.core.tree import Tree
from tests.reference.fedap import fedap, matrix
from tests.support.tiny import (
    client_model,
    close,
    pairs,
    plan_of,
    play,
    rounds,
    setup,
    tiny_data,
    tiny_net,
    tiny_task,
)


def test_weights_are_the_references():
    data = tiny_data()
    run = setup(tiny_task("fedap(lam=0.3)", data), data)
    rows = torch.stack([run.server.parts["fedap"][f"rows/{k}"] for k in data])
    torch.testing.assert_close(rows, matrix(tiny_net(), pairs(data), 0.3), atol=1e-9, rtol=0)
    torch.testing.assert_close(rows.sum(1), torch.ones(3).double())


def test_equals_a_plain_torch_loop():
    data = tiny_data()
    task = tiny_task("fedap(lam=0.3)", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    start, local = fedap(tiny_net(), pairs(data), plans, 0.1, 0.3)
    run = rounds(task, data, 3)
    for i, k in enumerate(data):
        here = client_model(task, data, run, k)
        close(here.pick(start[i]), start[i])
        own = {n: t for n, t in local[i].state_dict().items() if n.startswith("norm.") and t.is_floating_point()}
        close(here.pick(own), own)


def test_lam_one_trains_every_client_by_itself():
    data = tiny_data()
    task = tiny_task("fedap(lam=1)", data)
    run = rounds(task, data, 2)
    alone = tiny_task("standalone", data)
    other = rounds(alone, data, 2)
    for k in data:
        close(client_model(task, data, run, k), client_model(alone, data, other, k))


def test_names_of_clients_may_hold_slashes_and_begin_with_another():
    plain, names = tiny_data(), ("a", "a/b", "c/b")
    data = dict(zip(names, plain.values(), strict=True))
    task, other = (tiny_task("fedap(lam=0.3)", d, batch_size=50) for d in (data, plain))
    run, wanted = rounds(task, data, 2, cohorts=[["a/b"], [*names]]), rounds(other, plain, 2, cohorts=[["b"], [*plain]])
    for k, name in zip(plain, names, strict=True):
        close(client_model(task, data, run, name), client_model(other, plain, wanted, k))


def test_no_client_speaks_under_the_name_of_another():
    task, images = tiny_task("fedap", tiny_data()), {"a": 8, "b": 8, "c": 8}
    [part] = task.method.parts
    honest = {k: Tree({f"{k}/norm": torch.ones(2, 3)}) for k in images}
    assert not unusable_measures(task, part, "grouped", honest, images)
    nested = {k: Tree({f"{k}/norm": torch.ones(2, 3)}) for k in ("a", "a/b")}
    assert not unusable_measures(task, part, "grouped", nested, {"a": 8, "a/b": 8})
    forged = honest | {"b": Tree({**honest["b"], "a/norm": torch.zeros(2, 3)})}
    refused = unusable_measures(task, part, "grouped", forged, images)
    assert "named after another client" in refused["b"]
    assert set(refused) == {"b"}


def test_equal_data_give_equal_shares():
    one = tiny_data(8)["a"]
    data = {k: one for k in "abc"}
    rows = setup(tiny_task("fedap(lam=0.5)", data), data).server.parts["fedap"]
    torch.testing.assert_close(rows["rows/b"], torch.tensor([0.25, 0.5, 0.25]).double())


def test_clients_that_have_sent_nothing_are_left_out():
    data = tiny_data()
    task = tiny_task("fedap(lam=0.5)", data)
    run = rounds(task, data, 1, cohorts=[["a", "b"]])
    w = run.server.parts["fedap"]["rows/c"]
    share = w[0] / (w[0] + w[1])
    wanted = share * run.uploads["a"].model["head.bias"] + (1 - share) * run.uploads["b"].model["head.bias"]
    torch.testing.assert_close(client_model(task, data, run, "c")["head.bias"], wanted)


def test_needs_batchnorm_and_tells_what_it_needs():
    with pytest.raises(BadInput, match="fedap"):
        play("gn(groups=2) + fedap")
    facts = fn.describe("fedap")
    assert facts.addressed == ("fedap",)
    assert not facts.averaged_only
    assert facts.parts[0].setup_trips == 1


@pytest.mark.parametrize("text", ["fedap + fedrdn", "fedrdn + fedap"])
def test_statistics_are_those_of_normalized_images_whatever_the_order(text):
    data = tiny_data()
    rows = [setup(tiny_task(t, data), data).server.parts["fedap"]["rows/a"] for t in (text, "fedap")]
    torch.testing.assert_close(rows[0].sum(), torch.ones(()).double())
    assert not torch.allclose(*rows)
