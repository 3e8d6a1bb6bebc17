"""Finding the classifier of any model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.layers import UnitNormLinear, swap
from fednorms.layers.convolution import StandardisedConv2d
from fednorms.methods.registry import method
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
    "torchvision:squeezenet1_1": ["classifier.1"],
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
    assert all(model.get_submodule(head).weight.shape[0] == 7 for head in found)


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


def test_an_explicit_head_is_used():
    net = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Sequential(nn.ReLU(), nn.Linear(4, 2))})
    assert split_head(net, "one") == ["one"]
    assert split_head(net, ["one", "two"]) == ["one", "two.1"]
    assert split_head(net, "two.1") == ["two.1"]
    with pytest.raises(BadInput, match=r'ModuleDict has no module "three".*head= .*one, two\.1'):
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
    with pytest.raises(BadInput, match=f"Model {type(model).__name__}: cannot find the linear layer"):
        split_head(model)


def test_a_model_whose_classifier_is_gone_is_refused():
    headless = pytest.importorskip("timm").create_model("mobilenetv3_small_050", num_classes=0)
    with pytest.raises(BadInput, match="cannot find"):
        split_head(headless)


# -- a 1x1 convolution as the classifier ----------------------------------------------------------------------------
def all_convolutional(classes: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.ReLU()
    return nn.Sequential(*body, nn.Conv2d(6, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_features_in_front_of_a_convolution_are_means_over_positions():
    model = all_convolutional().eval()
    net, x = Net(model, method("fedavg")), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        logits, features = net.forward(net.initial, x, train=False, batch_statistics=False)
        torch.testing.assert_close(logits, model(x))
        torch.testing.assert_close(features, model[:5](x).mean((2, 3)))


def test_standardized_convolutions_do_not_change_the_classifier():
    for text in ("wn", "ws", "fedwon"):
        net = Net(all_convolutional(), method(text))
        assert isinstance(net.module[0], StandardisedConv2d)
        assert isinstance(net.module[3], StandardisedConv2d)
        assert type(net.module[5]) is nn.Conv2d
        assert net.heads == ["5"]


def test_a_convolution_stays_with_the_client_as_any_other_head_does():
    assert sorted(Net(all_convolutional(), method("fedper")).own) == ["5.bias", "5.weight"]


@pytest.mark.parametrize("text", ["fedfn", "spherefed", "moon(projection=4)", "fraug"])
def test_parts_that_change_linear_classifiers_say_so(text):
    with pytest.raises(BadInput, match=r"linear classifier.*Conv2d"):
        Net(all_convolutional(), method(text))


def test_another_number_of_outputs_is_noticed():
    doubled = nn.Sequential(all_convolutional(5), nn.Unflatten(1, (5, 1)), nn.Upsample(2), nn.Flatten())
    net = Net(doubled, method("fedavg"))
    with pytest.raises(BadInput, match=r'"0\.5".* has 5 outputs, not 10'):
        net.probe((3, 8, 8), 10)


def test_an_all_convolutional_model_trains_is_exported_and_predicts(tmp_path):
    recipe = fn.Recipe(data={"size": 8}, evaluate_every=2)
    result = fn.run("fedrep", model=all_convolutional(), rounds=2, recipe=recipe, out=tmp_path / "run")
    fn.export(tmp_path / "run", tmp_path / "model", site="foggy", model=all_convolutional())
    loaded = fn.load_model(tmp_path / "model", all_convolutional())
    own = result.model(site="foggy")
    x = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    assert not torch.equal(own[5].weight, result.model(site="clean")[5].weight)
    torch.testing.assert_close(loaded.logits(x), own(loaded.prepare(x)))
