"""FedAvg+GN and FedAvg+LN."""

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from tests.support.tiny import play, same, tiny_data, tiny_net, tiny_task


def with_norm(layer):
    model = tiny_net()
    model.norm = layer.double()
    return model


@pytest.mark.parametrize(
    ("text", "layer"),
    [("gn(groups=2)", nn.GroupNorm(2, 4)), ("ln", nn.GroupNorm(1, 4)), ("gn(groups=4)", nn.GroupNorm(4, 4))],
)
def test_equals_fedavg_on_a_network_built_with_that_layer(text, layer):
    assert same(play(text).model, play("fedavg", model=with_norm(layer)).model)


def test_no_buffers_remain():
    assert tiny_task("gn(groups=2)", tiny_data()).net.buffers == []


def test_one_group_is_layer_norm_and_one_per_channel_is_instance_norm():
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    layers = {t: tiny_task(t, tiny_data()).net.module.norm for t in ("ln", "gn(groups=1)", "gn(groups=4)")}
    ln = nn.functional.layer_norm(x, (4, 5, 5))
    torch.testing.assert_close(layers["ln"](x), ln, atol=1e-12, rtol=0)
    torch.testing.assert_close(layers["gn(groups=1)"](x), ln, atol=1e-12, rtol=0)
    torch.testing.assert_close(layers["gn(groups=4)"](x), nn.functional.instance_norm(x), atol=1e-12, rtol=0)


def test_the_networks_own_table_comes_before_the_rule():
    model = tiny_net()
    model.gn_groups = {"norm": 2}
    assert tiny_task("gn", tiny_data(), model=model).net.module.norm.num_groups == 2
    assert tiny_task("gn(groups=4)", tiny_data(), model=model).net.module.norm.num_groups == 4


def test_a_width_that_does_not_divide_is_an_error_that_names_the_layer():
    with pytest.raises(BadInput, match=r"norm.*3"):
        tiny_task("gn(groups=3)", tiny_data())


def test_affine_is_kept():
    model = tiny_net()
    nn.init.constant_(model.norm.weight, 1.5)
    assert tiny_task("gn(groups=2)", tiny_data(), model=model).net.initial["norm.weight"].tolist() == [1.5] * 4
