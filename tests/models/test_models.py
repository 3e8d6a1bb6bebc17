"""The models: parameter counts of the papers, contracts, determinism, errors."""

from __future__ import annotations

import builtins

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.layers import (
    AdaptiveGroupNorm,
    WNConv2d,
    WSConv2d,
    group_norm_like,
    is_batchnorm,
    no_norm_like,
    replace_dropout,
    swap,
)
from fednorms.models import build, models, split_head
from fednorms.models.digits_cnn import DigitsCNN
from fednorms.models.lenet import LeNet
from fednorms.models.zoo import zoo_names

# Building 57 million weights several times takes a while.
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n.startswith("alexnet") else n for n in models()]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def changed(model: nn.Module, norm: str) -> nn.Module:
    groups = getattr(model, "gn_groups", {})
    if norm == "none":
        swap(model, is_batchnorm, lambda old, name: no_norm_like(old))
    elif norm == "gn":
        swap(model, is_batchnorm, lambda old, name: group_norm_like(old, groups[name], name))
    elif norm == "ln":
        swap(model, is_batchnorm, lambda old, name: group_norm_like(old, 1, name))
    elif norm == "fednn":
        swap(model, nn.Conv2d, lambda old, name: WNConv2d.like(old, name=name))
        swap(model, is_batchnorm, lambda old, name: AdaptiveGroupNorm.like(old, name=name))
    elif norm == "fedwon":
        swap(model, nn.Conv2d, lambda old, name: WSConv2d.like(old, name=name))
        swap(model, is_batchnorm, lambda old, name: no_norm_like(old))
    return model


@pytest.mark.parametrize(
    ("classes", "norm", "expected"),
    [
        (10, "none", 797_962),
        (10, "bn", 798_218),
        (10, "gn", 798_218),
        (10, "fednn", 798_222),
        (100, "none", 815_332),
    ],
)
def test_lenet_parameter_counts(classes, norm, expected):
    with torch.device("meta"):
        assert count(changed(LeNet(classes), norm)) == expected


@pytest.mark.parametrize(
    ("between", "norm", "expected"),
    [
        ("dropout", "none", 14_213_578),
        ("norm", "bn", 14_219_210),
        ("dropout", "bn", 14_214_090),
        ("dropout", "gn", 14_214_090),
        ("dropout", "ln", 14_214_090),
        ("dropout", "fedwon", 14_213_834),
    ],
)
def test_digits_cnn_parameter_counts(between, norm, expected):
    with torch.device("meta"):
        assert count(changed(DigitsCNN(10, between=between), norm)) == expected


def test_the_digits_networks_differ_as_in_their_papers():
    fedwon, fedbn = build("digits-cnn", 10), build("digits-cnn-fedbn", 10)
    assert [type(m).__name__ for m in fedwon.modules() if is_batchnorm(m)] == ["BatchNorm2d"] * 3
    assert [type(m).__name__ for m in fedbn.modules() if is_batchnorm(m)] == ["BatchNorm2d"] * 3 + ["BatchNorm1d"] * 2
    assert [change.before for change in replace_dropout(fedwon)] == ["Dropout(0.5)"] * 2
    assert replace_dropout(fedbn) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
def test_contract(name, channels):
    info = models()[name]
    model = build(name, classes=4, channels=channels)
    x = torch.randn(2, channels, info.size, info.size)
    features = model.eval().features(x)
    assert features.shape == (2, model.feature_dim)
    assert torch.equal(model(x), model.head(features))
    assert torch.equal(model(x), model(x))
    assert split_head(model) == ["head"]
    assert model.head.in_features == model.feature_dim
    assert model(x).shape == (2, 4)
    norms = {key for key, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert set(model.gn_groups) == norms
    assert info.description
    model.double()(x.double())


@pytest.mark.parametrize("name", NAMES)
def test_seeds_decide_the_weights_and_do_not_touch_torchs_generator(name):
    before = torch.get_rng_state()
    a = build(name, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    b, c = build(name, 3, seed=1), build(name, 3, seed=2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)


@pytest.mark.parametrize("size", [8, 9, 12, 13, 16, 20, 28, 32, 33, 64])
def test_the_small_network_takes_any_size_and_is_small(size):
    model = build("cnn-small", 10, channels=1, size=size)
    assert count(model) < 50_000
    assert model(torch.randn(2, 1, size, size)).shape == (2, 10)
    assert model(torch.randn(2, 1, size, size + 3)).shape == (2, 10)


def test_the_small_network_learns():
    torch.manual_seed(0)
    model = build("cnn-small", 2, channels=1)
    y = torch.arange(32) % 2
    x = torch.randn(32, 1, 16, 16) * 0.1
    x[:, 0, :8] += y[:, None, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(x).argmax(1) == y).all()


@pytest.mark.parametrize(
    ("name", "size"), [("lenet", 28), ("digits-cnn", 32), ("digits-cnn-fedbn", 16), ("cnn-small", 7)]
)
def test_a_wrong_size_is_refused_clearly(name, size):
    with pytest.raises(BadInput, match=rf"takes .*, got {size}"):
        build(name, 10, size=size)
    with pytest.raises(BadInput, match=rf"got {size}x{size}"):
        build(name, 10)(torch.zeros(2, 3, size, size))


def test_unknown_names_get_the_nearest_and_the_list():
    with pytest.raises(BadInput, match=r"did you mean \"lenet\".*cnn-small, lenet, digits-cnn"):
        build("lennet", 10)
    with pytest.raises(BadInput, match="torchvision:NAME, timm:NAME or a custom mymodule:Net"):
        build("torchvision:", 10)
    with pytest.raises(BadInput, match="must be positive"):
        build("lenet", 0)
    with pytest.raises(BadInput, match="no pretrained weights"):
        build("lenet", 10, pretrained=True)
    with pytest.raises(BadInput, match="either pretrained or weights"):
        build("torchvision:resnet18", 10, pretrained=True, weights="x.pt")


def test_zoo_models():
    torchvision = pytest.importorskip("torchvision")
    assert torchvision
    model = build("torchvision:mobilenet_v2", classes=6, seed=3)
    assert count(model) == 2_223_872 + 1281 * 6
    again = build("torchvision:mobilenet_v2", classes=6, seed=3)
    assert torch.equal(model.classifier[1].weight, again.classifier[1].weight)
    with pytest.raises(BadInput, match='did you mean "torchvision:resnet18"'):
        build("torchvision:resnet19", 10)
    with pytest.raises(BadInput, match="takes 3 channels, got 1"):
        build("torchvision:resnet18", 10, channels=1)
    assert not any(name.startswith("quantized") or "rcnn" in name for name in zoo_names("torchvision"))


def test_googlenet_returns_plain_logits_in_training():
    pytest.importorskip("torchvision")
    model = build("torchvision:googlenet", 4)
    assert isinstance(model(torch.randn(2, 3, 32, 32)), torch.Tensor)


def test_timm_models():
    pytest.importorskip("timm")
    model = build("timm:mobilenetv3_small_050", classes=4, channels=1)
    assert model.eval()(torch.randn(2, 1, 32, 32)).shape == (2, 4)
    with pytest.raises(BadInput, match='did you mean "timm:'):
        build("timm:mobilenetv3_smal_050", 4)


def test_timm_models_tied_to_a_size_are_built_for_it():
    pytest.importorskip("timm")
    model = build("timm:levit_128s", classes=4, size=64)
    assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 4)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_missing_extra_is_named(library, monkeypatch):
    real = builtins.__import__
    monkeypatch.setattr("importlib.import_module", lambda name: real("no_such_package_" + library))
    with pytest.raises(BadInput, match=rf"need {library}, .*pip install .fednorms\[zoo\]"):
        build(f"{library}:resnet18", 10)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_from_a_file(tmp_path, suffix):
    source = build("cnn-small", 10, seed=1)
    path = tmp_path / f"w.{suffix}"
    if suffix == "pt":
        torch.save({"state_dict": source.state_dict()}, path)
    else:
        from safetensors.torch import save_file

        save_file(source.state_dict(), path)
    same = build("cnn-small", 10, seed=2, weights=path)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), source.parameters(), strict=True))
    other, fresh = build("cnn-small", 3, seed=2, weights=path), build("cnn-small", 3, seed=2)
    assert torch.equal(other.conv2.weight, source.conv2.weight)
    assert torch.equal(other.head.weight, fresh.head.weight)
    with pytest.raises(BadInput, match=r"does not fit SmallCNN: conv1.weight has shape \(16, 3, 3, 3\)"):
        build("cnn-small", 10, channels=1, weights=path)


def test_weights_files_that_cannot_be_used(tmp_path):
    with pytest.raises(BadInput, match="no file"):
        build("cnn-small", 10, weights=tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"not a file of torch")
    with pytest.raises(BadInput, match=r"cannot read .*bad\.pt"):
        build("cnn-small", 10, weights=tmp_path / "bad.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="is not a state dict"):
        build("cnn-small", 10, weights=tmp_path / "list.pt")


@pytest.mark.parametrize("kind", ["sparse", "sparse_csr", "meta", "complex", "quantized"])
@pytest.mark.filterwarnings("ignore")
def test_unusual_tensors_are_refused_in_words(tmp_path, kind):
    weights = build("cnn-small", 10).state_dict()
    name, dense = "head.weight", weights["head.weight"]
    weights[name] = {
        "sparse": dense.to_sparse,
        "sparse_csr": dense.to_sparse_csr,
        "meta": lambda: dense.to("meta"),
        "complex": lambda: dense.to(torch.complex64),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }[kind]()
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(BadInput, match=rf'w\.pt" has a {kind.partition("_")[0]} tensor, "{name}"; expected dense'):
        build("cnn-small", 10, weights=tmp_path / "w.pt")


def test_complex_safetensors_and_names_that_are_no_text_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"head.weight": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "w.safetensors")
    with pytest.raises(BadInput, match=r'has a complex tensor, "head\.weight"'):
        build("cnn-small", 10, weights=tmp_path / "w.safetensors")
    torch.save({1: torch.zeros(2)}, tmp_path / "w.pt")
    with pytest.raises(BadInput, match="is not a state dict"):
        build("cnn-small", 10, weights=tmp_path / "w.pt")


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_pretrained_without_a_network_is_one_message(library, monkeypatch):
    from fednorms.models import zoo

    def offline(*_):
        raise ConnectionError("no route to host\nand ninety more lines")

    pytest.importorskip(library)
    monkeypatch.setattr(zoo, f"_{library}", offline)
    with pytest.raises(BadInput, match=r"cannot be downloaded \(no route to host\)\. .*--weights FILE"):
        zoo.build_zoo(library, "resnet18", 7, pretrained=True)
    with pytest.raises(ConnectionError):  # without a download it is a bug, which keeps its traceback
        zoo.build_zoo(library, "resnet18", 7)


def test_weights_in_float16_load_as_float32(tmp_path):
    first = build("cnn-small", 4, seed=1)
    half = {k: v.half() if v.is_floating_point() else v for k, v in first.state_dict().items()}
    torch.save(half, tmp_path / "half.pt")
    loaded = build("cnn-small", 4, seed=2, weights=tmp_path / "half.pt")
    for name, value in loaded.state_dict().items():
        assert value.dtype == first.state_dict()[name].dtype
        assert torch.equal(value, half[name].to(value.dtype))
