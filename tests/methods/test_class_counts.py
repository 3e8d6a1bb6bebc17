"""FedLC and FedRoD: losses that know how many images of each class a client has."""

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.round import broadcast
from fednorms.core.states import Client
from fednorms.data import Split
from fednorms.evaluation.modes import Mode, model_for, score_site
from fednorms.layers import PersonalLinear
from tests.methods.test_moon import features
from tests.reference.class_counts import fedlc, fedrod
from tests.support.tiny import CLASSES, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

PERSONAL = ["head.personal_weight", "head.personal_bias"]


def skewed():
    """The last client has no image of the last class."""
    data = tiny_data()
    data["c"] = Split(data["c"].x, data["c"].y % (CLASSES - 1))
    return data


@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_fedlc_equals_a_plain_torch_loop(tau):
    """The loss of FL-bench's port differs by at most 4e-7 on random numbers (it computes in float32)."""
    data = skewed()
    task = tiny_task(f"fedlc(tau={tau})", data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    close(rounds(task, data, 3).model, fedlc(tiny_net(), pairs(data), plans, 0.1, tau, CLASSES).state_dict(), atol=1e-9)


def test_fedlc_without_calibration_is_fedavg_bit_for_bit():
    assert same(play("fedlc(tau=0)", n=3).model, play("fedavg", n=3).model)
    assert not same(play("fedlc", n=1).model, play("fedavg", n=1).model)


@pytest.mark.parametrize("text", ["fedlc", "fedrod"])
def test_with_as_many_images_of_every_class_the_shared_model_is_fedavgs(text):
    data = {k: Split(s.x, torch.arange(len(s.y)) % CLASSES) for k, s in tiny_data(6, 9).items()}
    plain = play("fedavg", data, n=3).model
    close({n: t for n, t in play(text, data, n=3).model.items() if n in plain}, plain, atol=1e-12)


def test_fedrod_equals_a_plain_torch_loop():
    """The balanced softmax of PFLlib's port is equal, bit for bit, on random numbers."""
    data = skewed()
    task = tiny_task("fedrod", data)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    server, own = fedrod(tiny_net(), features, pairs(data), plans, 0.1, CLASSES)
    close({n: t for n, t in run.model.items() if n not in PERSONAL}, server.state_dict(), atol=1e-9)
    for name, head in zip(data, own, strict=True):
        close(run.states[name].local, dict(zip(PERSONAL, (head.weight, head.bias), strict=True)), atol=1e-9)


def test_the_server_has_the_generic_model_and_clients_their_own_on_top():
    data = skewed()
    task = tiny_task("fedrod", data)
    run = rounds(task, data, 2)
    assert not any(run.model[n].any() for n in PERSONAL)
    sent, client = broadcast(task, run.server), Client("a", data["a"], run.states["a"])
    logits = {}
    for mode in ("global", "personal", "unseen"):
        tensors, _ = model_for(task, sent, client, Mode(mode))
        logits[mode], f = task.net.forward(tensors, data["a"].x, train=False, batch_statistics=False)
    weight, bias = (run.states["a"].local[n] for n in PERSONAL)
    generic = nn.functional.linear(f, run.model["head.weight"], run.model["head.bias"])
    assert torch.equal(logits["global"], generic)
    assert torch.equal(logits["unseen"], generic)
    torch.testing.assert_close(logits["personal"], generic + nn.functional.linear(f, weight, bias))
    tensors, mine = model_for(task, sent, client, Mode("personal"))
    assert score_site(task, sent, client, data["a"], CLASSES, tensors, mine, Mode("personal")).loss < float("inf")


def test_fedrod_needs_a_classifier_that_trains():
    with pytest.raises(BadInput, match="fedrod"):
        tiny_task("fedbabu + fedrod", tiny_data())


@pytest.mark.parametrize("text", ["fedlc", "fedrod"])
def test_classes_are_counted_once_and_never_sent(text):
    run = play(text, skewed(), n=2)
    assert run.states["c"].parts[text]["count"].tolist() == torch.bincount(skewed()["c"].y, minlength=CLASSES).tolist()
    assert not run.uploads["c"].parts.get(text)


@pytest.mark.parametrize("bias", [True, False])
def test_an_export_folds_both_classifiers_into_one(bias):
    layer = PersonalLinear(nn.Linear(5, 3, bias=bias)).eval()
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(4, 5)
    torch.testing.assert_close(layer.folded(2)(x), layer(x))
    assert type(layer.folded(2)) is nn.Linear
