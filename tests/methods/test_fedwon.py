"""FedWon: nonorm + wsconv + agc, and the ablations without one of them."""

import pytest
import torch
from torch import nn

from fednorms.methods.registry import method
from tests.reference.layers_reference import adaptive_clip, scaled_weight
from tests.support.tiny import close, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_fedwon_is_the_sum_of_its_parts():
    assert method("fedwon(clip=1.28)") == method("nonorm + wsconv + agc(clip=1.28, min_batch=32)")


def test_no_buffer_remains_and_each_filter_has_a_gain():
    net = tiny_task("fedwon", tiny_data()).net
    assert net.buffers == []
    assert net.initial["conv.gain"].flatten().tolist() == [1.0] * 4


@pytest.mark.parametrize("form", ["listing", "formula"])
def test_the_network_computes_with_scaled_filters(form):
    x = tiny_data()["a"].x
    net = tiny_task(f"nonorm + wsconv(form={form})", tiny_data()).net
    model = tiny_net()
    model.norm = nn.Identity()
    raw = model.conv.weight.detach().numpy()
    model.conv.weight.data = torch.from_numpy(scaled_weight(raw, [1.0] * 4, form))
    got, _ = net.forward(net.initial.clone(), x, train=True, batch_statistics=True)
    torch.testing.assert_close(got, model(x), atol=1e-12, rtol=0)


def test_training_and_test_outputs_agree_and_samples_are_independent():
    x = tiny_data()["a"].x
    net = tiny_task("fedwon", tiny_data()).net
    trained, _ = net.forward(net.initial, x, train=True, batch_statistics=True)
    tested, _ = net.forward(net.initial, x, train=False, batch_statistics=False)
    alone, _ = net.forward(net.initial, x[:1], train=True, batch_statistics=True)
    assert torch.equal(trained, tested)
    torch.testing.assert_close(trained[:1], alone, atol=1e-14, rtol=0)


def test_batches_of_one_train():
    assert play("fedwon", n=1, batch_size=1).model.finite()


@pytest.mark.parametrize("clip", [0.01, 0.3])
def test_a_clipped_step_by_the_formula(clip):
    data = tiny_data(6)
    run = play(f"nonorm + agc(clip={clip})", data, n=1, batch_size=6, lr=1.0)
    model = tiny_net()
    model.norm = nn.Identity()
    nn.functional.cross_entropy(model(data["a"].x), data["a"].y).backward()
    clipped = 0
    for name, p in model.named_parameters():
        g = p.grad.numpy()
        wanted = g if name.startswith("head.") else adaptive_clip(g, p.detach().numpy(), clip)
        clipped += bool((wanted != g).any())
        torch.testing.assert_close(run.model[name], p.detach() - torch.from_numpy(wanted), atol=1e-12, rtol=0)
    assert clipped or clip > 0.1  # the small threshold is not a vacuous test


def test_an_infinite_threshold_is_no_clipping_bit_for_bit():
    assert same(play("fedavg").model, play("agc(clip=inf)").model)


def test_small_batches_are_not_clipped():
    hard = {"clip": "agc(clip=1e-6, min_batch=32)", "none": "fedavg"}
    assert same(play(hard["none"], batch_size=31).model, play(hard["clip"], batch_size=31).model)
    assert not same(play(hard["none"], batch_size=32).model, play(hard["clip"], batch_size=32).model)


def test_bias_flags():
    model = tiny_net()
    model.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False).double()
    for text, there in [("nonorm + wsconv", False), ("nonorm + wsconv(add_bias=true)", True)]:
        assert ("conv.bias" in tiny_task(text, tiny_data(), model=model).net.initial) is there


def test_the_ablations_train():
    data = tiny_data()
    for text in ("nonorm", "nonorm + wsconv", "nonorm + agc", "wsconv"):
        assert rounds(tiny_task(text, data), data, 2).model.finite()


def test_nonorm_is_the_network_without_its_layer():
    data = tiny_data(6)
    model = tiny_net()
    model.norm = nn.Identity()
    close(play("nonorm", data).model, play("fedavg", data, model=model).model, atol=0)
