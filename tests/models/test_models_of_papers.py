"""The larger networks of the papers: parameter counts, grids, shortcuts, statistics, weights from a file."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.layers import WSConv2d, group_norm_like, is_batchnorm, keeps_statistics, no_norm_like, swap
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.models.alexnet import AlexNet, six_by_six
from fednorms.models.cnn4 import CNN4
from fednorms.models.mobilenet_v1 import MobileNetV1
from fednorms.models.resnet_cifar import Block, CifarResNet, ZeroPadShortcut
from fednorms.models.vgg11 import VGG11
from fednorms.models.weights import load_weights


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def changed(model: nn.Module, norm: str) -> nn.Module:
    if norm == "fedwon":
        swap(model, nn.Conv2d, lambda old, name: WSConv2d.like(old, name=name))
    if norm in ("none", "fedwon"):
        swap(model, is_batchnorm, lambda old, name: no_norm_like(old))
    if norm == "gn":
        swap(model, is_batchnorm, lambda old, name: group_norm_like(old, model.gn_groups[name], name))
    if norm == "ln":
        swap(model, is_batchnorm, lambda old, name: group_norm_like(old, 1, name))
    return model


RESNET18 = {"widths": (64, 128, 256, 512), "blocks": 2, "option": "B"}


@pytest.mark.parametrize(
    ("make", "norm", "expected"),
    [
        (lambda: AlexNet(10), "none", 57_044_810),
        (lambda: AlexNet(10, between="norm"), "bn", 57_063_498),
        (lambda: AlexNet(10), "bn", 57_047_114),
        (lambda: AlexNet(10), "gn", 57_047_114),
        (lambda: AlexNet(10), "ln", 57_047_114),
        (lambda: AlexNet(10), "fedwon", 57_045_962),
        (lambda: CNN4(10), "bn", 115_658),
        (lambda: VGG11(10), "bn", 9_750_922),
        (lambda: VGG11(100), "bn", 9_797_092),
        (lambda: MobileNetV1(10), "bn", 3_217_226),
        (lambda: MobileNetV1(100), "gn", 3_309_476),
        (lambda: CifarResNet(10), "bn", 269_722),
        (lambda: CifarResNet(10), "gn", 269_722),
        (lambda: CifarResNet(10, option="B"), "bn", 272_474),
        (lambda: CifarResNet(10, **RESNET18), "bn", 11_173_962),
        (lambda: CifarResNet(10, **RESNET18, tracked=False), "ln", 11_173_962),
    ],
)
def test_parameter_counts(make, norm, expected):
    with torch.device("meta"):
        assert count(changed(make(), norm)) == expected


def test_body_of_mobilenet_and_headless_vgg():
    with torch.device("meta"):
        assert count(MobileNetV1(10).body) == 3_206_976
        vgg = VGG11(10)
        assert count(vgg) - vgg.head.bias.numel() == 9_750_912


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("resnet18", 10, 11_181_642),
        ("resnet18", 1000, 11_689_512),
        ("resnet50", 10, 23_508_032 + 2049 * 10),
        ("mobilenet_v2", 10, 2_223_872 + 1281 * 10),
        ("efficientnet_b0", 10, 4_007_548 + 1281 * 10),
        ("densenet121", 10, 6_953_856 + 1025 * 10),
    ],
)
def test_counts_of_torchvisions_models(name, classes, expected):
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        assert count(models.get_model(name, weights=None, num_classes=classes)) == expected


@pytest.mark.parametrize(("name", "body", "head"), [("levit_128s", 7.0, 2 * 385), ("mobilevit_s", 4.9, 641)])
def test_counts_of_timms_models(name, body, head):
    """Millions as in GReg's Table 4, and the number of parameters per class: LeViT has two classifiers."""
    timm = pytest.importorskip("timm")
    ten, eleven = (count(timm.create_model(name, pretrained=False, num_classes=n)) for n in (10, 11))
    assert eleven - ten == head
    assert round((ten - 10 * head) / 1e6, 1) == body


@pytest.mark.parametrize(("height", "width"), [(6, 6), (7, 7), (12, 7), (1, 3), (13, 5)])
def test_the_grid_of_alexnet_is_adaptive_pooling(height, width):
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    assert torch.allclose(six_by_six(x), F.adaptive_avg_pool2d(x, 6), atol=1e-12)


def test_alexnet_takes_any_size_from_63_pixels():
    with torch.device("meta"):
        model = AlexNet(3)
        for size in (63, 64, 100, 256):
            assert model(torch.zeros(1, 3, size, size + 7)).shape == (1, 3)
    with pytest.raises(BadInput, match="at least 63 pixels, got 62x70"):
        model(torch.zeros(1, 3, 62, 70))
    with pytest.raises(BadInput, match="at least 63"):
        build("alexnet", 10, size=32)


def test_the_zero_padding_shortcut_has_no_parameters_and_keeps_values():
    x = torch.randn(1, 4, 6, 6)
    y = ZeroPadShortcut(2, 4)(x)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any()
    assert not y[:, 6:].any()
    assert not list(Block(4, 8, 2, "A", True).shortcut.parameters())
    assert isinstance(Block(4, 4, 1, "B", True).shortcut, nn.Identity)


def test_a_block_without_its_branch_is_its_shortcut():
    block = Block(4, 8, 2, "A", True)
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), block.shortcut(x))


@pytest.mark.parametrize("make", [lambda: MobileNetV1(3), lambda: CifarResNet(3, blocks=1, tracked=False)])
def test_untracked_norms_keep_nothing_and_test_like_they_train(make):
    model = make()
    norms = [m for m in model.modules() if is_batchnorm(m)]
    assert norms
    assert not any(keeps_statistics(m) for m in norms)
    assert not list(model.buffers())
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.train()(x), model.eval()(x))


def test_vgg_starts_with_its_own_variance():
    model = build("vgg11", 10)
    weight = model.body[-3].weight
    assert float(weight.detach().std()) == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.02)
    assert not model.body[0].bias.any()


@pytest.mark.parametrize("text", ["gn", "ln", "fedwon", "fednn", "fedfn"])
def test_methods_change_the_small_resnet(text):
    net = Net(CifarResNet(3, widths=(8, 8), blocks=1), method(text), name="resnet")
    assert net.changes


def test_a_report_says_what_was_loaded(tmp_path):
    source = CifarResNet(10, widths=(4, 8), blocks=1)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    other = CifarResNet(3, widths=(4, 8), blocks=1)
    report = load_weights(other, tmp_path / "w.pt")
    assert set(report.loaded) | set(report.fresh) == set(other.state_dict())
    assert report.fresh == {"head.weight": "3x8 here, 10x8 in the file", "head.bias": "3 here, 10 in the file"}
    assert torch.equal(other.conv.weight, source.conv.weight)
    small = build("cnn-small", 4, seed=1)
    torch.save(small.state_dict(), tmp_path / "s.pt")
    assert not build("cnn-small", 4, weights=tmp_path / "s.pt").loaded_weights.fresh
