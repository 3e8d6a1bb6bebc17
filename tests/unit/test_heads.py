"""Finding the classifier of any model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fednorms.errors import BadInput
from fednorms.layers import UnitNormLinear, swap
from fednorms.models import split_head

HEADS = {
    "torchvision:resnet18": ["fc"],
    "torchvision:vgg11_bn": ["classifier.6"],
    "torchvision:alexnet": ["classifier.6"],
    "torchvision:densenet121": ["classifier"],
    "torchvision:mobilenet_v2": ["classifier.1"],
    "torchvision:mobilenet_v3_small": ["classifier.3"],
    "torchvision:efficientnet_b0": ["classifier.1"],
    "torchvision:convnext_tiny": ["classifier.2"],
    "torchvision:shufflenet_v2_x0_5": ["fc"],
    "torchvision:regnet_y_400mf": ["fc"],
    "torchvision:googlenet": ["fc"],
    "torchvision:vit_b_16": ["heads.head"],
    "torchvision:swin_t": ["head"],
    "timm:levit_128s": ["head.linear", "head_dist.linear"],
    "timm:mobilevit_s": ["head.fc"],
    "timm:resnet18": ["fc"],
    "timm:efficientnet_lite0": ["classifier"],
    "timm:mobilenetv3_small_050": ["classifier"],
    "timm:deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "timm:convnext_atto": ["head.fc"],
}


def zoo(name: str) -> nn.Module:
    library, _, model = name.partition(":")
    # RegNet computes its widths with tensors, so it cannot be built without memory.
    with torch.device("cpu" if model.startswith("regnet") else "meta"):
        if library == "timm":
            return pytest.importorskip("timm").create_model(model, num_classes=7)
        models = pytest.importorskip("torchvision.models")
        options = {"init_weights": False} if model == "googlenet" else {}
        return models.get_model(model, weights=None, num_classes=7, **options)


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_the_zoo(name):
    model = zoo(name)
    found = split_head(model)
    assert found == HEADS[name]
    assert all(model.get_submodule(head).out_features == 7 for head in found)


def test_the_head_is_found_again_after_surgery():
    model = zoo("torchvision:mobilenet_v2")
    swap(model, nn.Linear, lambda old, name: UnitNormLinear.like(old, name=name))
    assert split_head(model) == ["classifier.1"]


def test_the_levit_heads_do_produce_the_logits():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("levit_128s", num_classes=7).eval()
    for name in split_head(model):
        head = model.get_submodule(name)
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, 2.0)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.randn(1, 3, 224, 224)), torch.full((1, 7), 2.0))


class Named(nn.Module):
    """The classifier is registered first, the body after it."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.body = nn.Linear(4, 8)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2)


def test_user_models():
    assert split_head(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2), nn.Softmax(1))) == ["2"]
    assert split_head(Named()) == ["classifier.2"]


def test_an_explicit_head_is_taken():
    net = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Sequential(nn.ReLU(), nn.Linear(4, 2))})
    assert split_head(net, "one") == ["one"]
    assert split_head(net, ["one", "two"]) == ["one", "two.1"]
    assert split_head(net, "two.1") == ["two.1"]
    with pytest.raises(BadInput, match=r"ModuleDict: head='three' is no module of it; pass head= .*one, two\.1"):
        split_head(net, "three")
    with pytest.raises(BadInput, match=r"is a ReLU that does not end in an nn\.Linear"):
        split_head(net, "two.0")
    with pytest.raises(BadInput, match="names no module"):
        split_head(net, [])


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        Attention(),
        nn.Linear(3, 2),
    ],
    ids=["no linear", "norm last", "attention last", "only a linear"],
)
def test_a_model_without_a_clear_head_is_refused_by_name(model):
    with pytest.raises(BadInput, match=f"model {type(model).__name__}: cannot find the linear layer"):
        split_head(model)


def test_a_convolutional_classifier_is_refused():
    with pytest.raises(BadInput, match="SqueezeNet"):
        split_head(zoo("torchvision:squeezenet1_1"))
    headless = pytest.importorskip("timm").create_model("mobilenetv3_small_050", num_classes=0)
    with pytest.raises(BadInput, match="cannot find"):
        split_head(headless)
