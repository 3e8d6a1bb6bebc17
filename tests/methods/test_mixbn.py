"""The four alternatives of GReg's appendix."""

import pytest
import torch

from tests.reference.layers_reference import mixed_norm
from tests.support.tiny import client_model, close, play, rounds, same, tiny_data, tiny_net, tiny_task

KINDS = ("global", "fixed", "learned", "ensemble")
STATISTICS = ("norm.running_mean", "norm.running_var")


@pytest.mark.parametrize("kind", KINDS)
def test_round_zero_is_fedavg(kind):
    run, plain = play(f"mixbn(kind={kind})", n=1), play("fedavg", n=1)
    for name, tensor in plain.model.items():
        torch.testing.assert_close(run.model[name], tensor, atol=1e-13, rtol=0)


def test_lam_zero_is_batch_normalization_and_lam_one_is_global():
    run, plain = play("mixbn(lam=0)", n=3), play("fedavg", n=3)
    for name, tensor in plain.model.items():
        torch.testing.assert_close(run.model[name], tensor, atol=1e-12, rtol=0)
    one, other = play("mixbn(lam=1)", n=3), play("mixbn(kind=global)", n=3)
    close(one.model, other.model, atol=1e-12)


def test_global_trains_with_the_broadcast_statistics_like_a_bn_layer_in_eval_mode():
    data = tiny_data(8)
    first = play("fedavg", data, n=1)
    task = tiny_task("mixbn(kind=global)", data)
    second = rounds(task, data, 1, run=rounds(task, data, 1))
    # fixbn freezes the statistics of the same moment, so the trained tensors agree.
    frozen = tiny_task("fixbn(switch=0.25)", data, rounds=4)
    wanted = rounds(frozen, data, 2)
    assert not same(first.model, wanted.model)
    for name in ("conv.weight", "norm.weight", "norm.bias", "head.weight"):
        torch.testing.assert_close(second.model[name], wanted.model[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_running_estimates_follow_the_batches_whatever_the_normalizer(kind):
    # At rate 0 all kinds see the same inputs of the layer, so they record what FedAvg records.
    run, plain = play(f"mixbn(kind={kind})", n=3, lr=0.0), play("fedavg", n=3, lr=0.0)
    for name in STATISTICS:
        torch.testing.assert_close(run.model[name], plain.model[name], atol=1e-13, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_normalizes_with_what_was_sent(kind):
    data = tiny_data()
    task = tiny_task(f"mixbn(kind={kind})", data)
    run = rounds(task, data, 1)
    x = data["c"].x
    conv = tiny_net().conv
    conv.load_state_dict({k: run.model[f"conv.{k}"] for k in ("weight", "bias")})
    h = conv(x).detach()
    model = client_model(task, data, run, "c")
    layer = task.net.module.norm
    layer.train()
    got = torch.func.functional_call(
        layer, {k.removeprefix("norm."): v.clone() for k, v in model.items() if k.startswith("norm.")}, (h,)
    )
    lam = 0.5
    wanted = mixed_norm(
        h.numpy(),
        kind,
        lam,
        run.model["norm.running_mean"].numpy(),
        run.model["norm.running_var"].numpy(),
        run.model["norm.weight"].numpy(),
        run.model["norm.bias"].numpy(),
    )
    torch.testing.assert_close(got.detach(), torch.from_numpy(wanted), atol=1e-10, rtol=0)


def test_the_learned_share_moves_and_is_averaged():
    run = play("mixbn(kind=learned)", n=3)
    assert run.model["norm.mix"] != 0
    sizes = [11, 7, 10]
    mean = sum(n * run.uploads[k].model["norm.mix"] for n, k in zip(sizes, "abc", strict=True)) / 28
    torch.testing.assert_close(run.model["norm.mix"], mean, atol=1e-14, rtol=0)


def test_owned_tensors_are_never_sent():
    run = play("mixbn", n=2)
    assert not {"norm.sent_mean", "norm.sent_var", "norm.active"} & run.uploads["a"].model.keys()


def test_ensemble_of_equal_statistics_is_batch_normalization():
    h = torch.randn(5, 4, 3, 3, dtype=torch.float64)
    layer = tiny_task("mixbn(kind=ensemble)", tiny_data()).net.module.norm.train()
    layer.sent_mean.copy_(h.mean((0, 2, 3)))
    layer.sent_var.copy_(h.var((0, 2, 3), unbiased=False))
    layer.active.fill_(1.0)
    wanted = torch.nn.functional.batch_norm(h, None, None, training=True)
    torch.testing.assert_close(layer(h), wanted, atol=1e-12, rtol=0)


def test_a_users_own_tensor_called_active_is_not_touched():
    model = tiny_net()
    model.pool.register_buffer("active", torch.ones(1, dtype=torch.float64))
    run = play("mixbn", n=2, model=model)
    assert run.model["pool.active"].tolist() == [1.0]
