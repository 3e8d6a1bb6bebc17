"""Routes by module type over the model zoos: FedBN keeps every BatchNorm of every network local, whatever its name."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.methods.registry import method
from fednorms.models import build

ZOO = [
    "torchvision:resnet18",
    "torchvision:vgg11_bn",
    "torchvision:densenet121",
    "torchvision:mobilenet_v2",
    "torchvision:mobilenet_v3_small",
    "torchvision:efficientnet_b0",
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:regnet_y_400mf",
    "torchvision:mnasnet0_5",
    "timm:resnet18",
    "timm:efficientnet_lite0",
    "timm:mobilevit_s",
    "timm:levit_128s",
]


@pytest.mark.parametrize("name", ZOO)
def test_every_batchnorm_is_local_under_fedbn_and_its_statistics_under_silobn(name):
    model = build(name, classes=3, size=224)
    layers = {n for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    owned = {f"{n}.{leaf}" for n in layers for leaf, _ in model.get_submodule(n).named_parameters(recurse=False)}
    stats = {f"{n}.{leaf}" for n in layers for leaf, _ in model.get_submodule(n).named_buffers(recurse=False)}
    assert layers
    fedbn = Net(model, method("fedbn"), name=name)
    assert {n for n, r in fedbn.routes.items() if r is Route.LOCAL} == owned | stats
    silobn = Net(model, method("silobn"), name=name)
    assert {n for n, r in silobn.routes.items() if r is Route.LOCAL} == stats
    assert set(fedbn.routes) == set(model.state_dict())


def test_a_network_whose_only_normalization_is_layer_norm_refuses_fedbn_and_names_itself():
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 2))
    with pytest.raises(BadInput, match='model "transformer" has no tensor'):
        Net(model, method("fedbn"), name="transformer")


def test_frozen_parameters_of_the_user_stay_frozen():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    model[0].weight.requires_grad_(False)
    net = Net(model, method("fedavg"))
    assert net.routes["0.weight"] is Route.FROZEN
    assert "0.weight" not in net.trained
    assert "0.weight" not in net.exchanged
