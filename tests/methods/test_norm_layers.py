"""Layers as parts: rbn, sn, inorm, ws and pn; and what wsconv starts from."""

import numpy as np
import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.methods.registry import method
from tests.reference.layers_reference import weight_norm
from tests.support.tiny import close, play, same, tiny_data, tiny_net, tiny_task


def forward(task, x, train=True, **tensors):
    net = task.net
    return net.forward({**net.initial.clone(), **tensors}, x, train=train, batch_statistics=train)[0]


# -- rbn --------------------------------------------------------------------------------------------------------------
def test_rbn_starts_as_a_network_with_scaled_batch_norm_and_shares_everything():
    x = tiny_data()["a"].x
    task = tiny_task("rbn", tiny_data())
    model = tiny_net()
    wanted = model.head(model.pool(torch.relu(0.7310585786300049 * model.norm(model.conv(x)))).flatten(1))
    torch.testing.assert_close(forward(task, x), wanted, atol=1e-12, rtol=0)
    assert {r.name for r in task.net.routes.values()} == {"SHARED"}
    run = play("rbn", n=2)
    for name in ("centre", "scale_weight", "scale_bias"):
        assert not torch.equal(run.model[f"norm.{name}"], task.net.initial[f"norm.{name}"])


# -- sn ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("which", "other"), [(0, "inorm"), (1, "ln"), (2, "fedavg")])
def test_sn_with_one_hot_weights_is_the_method_with_that_layer(which, other):
    x = tiny_data()["a"].x
    one_hot = torch.tensor([0.0 if k == which else -1e9 for k in range(3)], dtype=torch.float64)
    got = forward(
        tiny_task("sn(biased=true)", tiny_data()), x, **{"norm.mean_logits": one_hot, "norm.var_logits": one_hot}
    )
    torch.testing.assert_close(got, forward(tiny_task(other, tiny_data()), x), atol=1e-10, rtol=0)


def test_sn_logits_move_and_their_gradient_sums_to_zero():
    run = play("sn", n=1, lr=0.5)
    for name in ("norm.mean_logits", "norm.var_logits"):
        moved = run.model[name] - 1
        assert moved.abs().max() > 0
        assert abs(moved.sum()) < 1e-12


# -- inorm ------------------------------------------------------------------------------------------------------------
def test_inorm_is_group_norm_with_a_group_per_channel():
    close(play("inorm").model, play("gn(groups=4)").model, atol=1e-10)
    assert tiny_task("inorm", tiny_data()).net.buffers == []


# -- ws ---------------------------------------------------------------------------------------------------------------
def test_ws_is_the_authors_weight_normalization():
    assert same(play("ws").model, play("wn(variant=author)").model)


def test_ws_filters_have_squared_norm_m_minus_1():
    weight = tiny_task("ws", tiny_data()).net.module.conv.effective_weight().detach()
    m = weight[0].numel()
    wanted = torch.from_numpy(weight_norm(tiny_net().conv.weight.detach().numpy(), "author", 1e-5))
    torch.testing.assert_close(weight, wanted, atol=1e-12, rtol=0)
    np.testing.assert_allclose(weight.square().sum((1, 2, 3)), m - 1, rtol=1e-3)
    scaled = tiny_task("wsconv", tiny_data()).net.module.conv.effective_weight().detach()
    np.testing.assert_allclose(scaled.square().sum((1, 2, 3)), (m - 1) / m, rtol=1e-9)


def test_ws_twice_is_refused():
    with pytest.raises(BadInput, match="own forward"):
        tiny_task("wn + ws", tiny_data())


# -- pn ---------------------------------------------------------------------------------------------------------------
def test_pn_is_marked_experimental_and_treats_samples_independently():
    x = tiny_data()["a"].x
    task = tiny_task("pn", tiny_data())
    assert "EXPERIMENTAL" in type(task.method.parts[0]).__doc__
    whole = forward(task, x)
    torch.testing.assert_close(whole[:1], forward(task, x[:1]), atol=1e-13, rtol=0)
    assert torch.equal(whole, forward(task, x, train=False))
    assert task.net.buffers == []
    assert play("pn", n=1, batch_size=1).model.finite()


def test_pn_with_the_batchs_moments_is_batch_norm():
    x = tiny_data()["a"].x
    h = tiny_net().conv(x).detach()
    moments = {"norm.mean": h.mean((0, 2, 3)), "norm.log_var": h.var((0, 2, 3), unbiased=False).log()}
    got = forward(tiny_task("pn", tiny_data()), x, **moments)
    torch.testing.assert_close(got, forward(tiny_task("fedavg", tiny_data()), x), atol=1e-10, rtol=0)


def test_pn_learns_its_mean_and_noise_repeats():
    run = play("pn(noise=0.2)", n=2)
    assert run.model["norm.mean"].abs().min() > 0
    assert run.model["norm.log_var"].abs().min() > 0
    assert same(run.model, play("pn(noise=0.2)", n=2).model)
    assert not same(run.model, play("pn", n=2).model)


# -- wsconv's start ---------------------------------------------------------------------------------------------------
def test_wsconv_keeps_weights_unless_asked_to_draw_them():
    model = tiny_net()
    kept = tiny_task("wsconv", tiny_data(), model=model).net.initial
    assert torch.equal(kept["conv.weight"], model.conv.weight)
    drawn = tiny_task("wsconv(start=xavier)", tiny_data(), model=model).net.initial
    again = tiny_task("fedwon(start=xavier)", tiny_data(), model=tiny_net()).net.initial
    other = tiny_task("fedwon(start=xavier)", tiny_data(), model=tiny_net(seed=5)).net.initial
    assert torch.equal(drawn["conv.weight"], again["conv.weight"])
    assert not torch.equal(drawn["conv.weight"], other["conv.weight"])  # another seed of the run, another start
    assert not torch.equal(drawn["conv.weight"], kept["conv.weight"])
    assert torch.equal(model.conv.weight, tiny_net().conv.weight)  # the user's own module is never touched


def test_xavier_has_its_deviation_and_other_layers_other_numbers():
    model = nn.Sequential(nn.Conv2d(8, 32, 5), nn.Conv2d(32, 32, 5), nn.Flatten(), nn.Linear(32, 3))
    one = Net(model, method("wsconv(start=xavier)")).initial
    two = Net(model, method("wsconv(start=xavier)"), dtype=torch.float64).initial
    for name, fan in (("0.weight", 25 * (8 + 32)), ("1.weight", 25 * (32 + 32))):
        np.testing.assert_allclose(one[name].std(), (2 / fan) ** 0.5, rtol=0.03)
        assert torch.equal(one[name].double(), two[name])
    assert not torch.equal(one["0.weight"][:, :8], one["1.weight"][:, :8])
