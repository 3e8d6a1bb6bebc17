"""What is handed over works without fednorms: folded weights with load.py, torch.export, ONNX."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import fednorms as fn
from fednorms import export, load_model
from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.data import Preprocessing, Split
from fednorms.data.folders import read_image
from fednorms.data.folders.preparations import lesion_square
from fednorms.layers.folding import fold
from fednorms.methods.registry import method
from fednorms.models.registry import build, models
from fednorms.runs.driver import execute
from fednorms.runs.use.loader import LOADER, loader, run_loader
from tests.support.after import CLASSES, federation, order_of, recipe
from tests.support.tiny import TinyNet

# Run in another process, in which fednorms cannot be imported: what a user without it does.
WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch
images = torch.load("images.pt", weights_only=True)
with torch.no_grad():
    logits = LOGITS
assert not [name for name in sys.modules if name.split(".")[0] in BLOCKED]
torch.save(logits, "logits.pt")
"""


def logits_without(folder, images, code, blocked=("fednorms", "safetensors", "torchvision", "timm")):
    """Logits that a program computes in an exported folder, in a process that has no fednorms."""
    torch.save(images, folder / "images.pt")
    program = WITHOUT.replace("BLOCKED", repr(blocked)).replace("    logits = LOGITS", code)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "logits.pt", weights_only=True)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


BY_LOADER = "    from load import load, prepare; logits = load()(prepare(images))"
BY_PROGRAM = "    logits = torch.export.load('model.pt2').module()(images)[0]"


def larger(k=4, crop=None):
    made = federation(unseen=False)
    sites = [
        fn.Site(s.name, s.domain, *(Split(p.x.repeat(1, 1, k, k), p.y) for p in s.splits.values())) for s in made.sites
    ]
    return fn.Federation("large", sites, CLASSES, Preprocessing.imagenet(crop))


def trained(folder, name="fedavg", model="cnn-small", sites=None, own=None, **settings):
    made = recipe(name, model=model if own is None else "custom:Mine", rounds=1, **settings)
    execute(made, out=folder, federation=sites or federation(), model=own)
    return folder


# -- folding --------------------------------------------------------------------------------------------------------
FOLDED = [
    "gn",
    "inorm",
    "fedbn",
    "ws",
    "fedwon",
    "fedwon + fedfn",
    "fedwon(nf_residual=true)",
    "wn + gn",
    "hbn",
    "fbn",
    "mixbn",
    "pn",
    "fedfa",
    "fraug",
    "moon",
    "spherefed",
    "fedrep",
]
KEPT = ["agn", "sn", "rbn", "frn"]
ROUNDED = ("nf_residual", "hbn", "fbn", "pn")  # these fold into the same function, rounded in another order


def disturbed(net):
    """Tensors of a net with something in all of them, as after training."""
    generator = torch.Generator().manual_seed(0)

    def moved(t):
        return t + 0.1 * torch.rand(t.shape, generator=generator, dtype=t.dtype) if t.is_floating_point() else t

    return {name: moved(t) for name, t in net.initial.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FOLDED + KEPT)
def test_folding_keeps_the_function(name, dtype):
    arch = "resnet20" if "residual" in name else "cnn-small"
    net = Net(build(arch, 3, size=16), method(name), dtype=dtype)
    before, after = (net.plain(disturbed(net)) for _ in range(2))
    fold(after, (3, 16, 16))
    x = torch.randn(5, 3, 16, 16, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = before(x), after(x)
    if any(word in name for word in ROUNDED):
        torch.testing.assert_close(found, expected, **({"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}))
    else:
        assert torch.equal(found, expected)
    ours = {type(m).__name__ for m in after.modules() if type(m).__module__.startswith("fednorms.layers")}
    assert bool(ours - {"UnitNormLinear", "ReLUWithoutThreshold"}) == (name in KEPT)


def test_folded_filters_are_the_published_formula():
    """FedWon's listing, written out: gain (w - mean) / sqrt(max(n var, eps)), var with divisor n - 1."""
    net = Net(build("cnn-small", 3), method("fedwon"), dtype=torch.float64)
    tensors = disturbed(net)
    module = net.plain(tensors)
    fold(module, (3, 16, 16))
    w, gain = tensors["conv2.weight"], tensors["conv2.gain"]
    expected = torch.empty_like(w)
    for i, one in enumerate(w):
        n = one.numel()
        var = sum(float(v - one.mean()) ** 2 for v in one.flatten()) / (n - 1)
        expected[i] = float(gain[i]) * (one - one.mean()) / max(n * var, 1e-4) ** 0.5
    assert type(module.conv2) is nn.Conv2d
    torch.testing.assert_close(module.conv2.weight, expected)


# -- load.py --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [slow("fedavg"), "fedwon + fedfn", slow("hbn")])
def test_a_model_works_where_fednorms_cannot_be_imported(name, tmp_path):
    export(trained(tmp_path / "r", name), tmp_path / "x", site="b")
    images = federation().site("b").test.x
    found = logits_without(tmp_path / "x", images, BY_LOADER)
    assert torch.equal(found, load_model(tmp_path / "x").logits(images))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), [("gn", "torchvision:resnet18"), ("fedwon", "timm:efficientnet_lite0"), ("fedbn", "alexnet")]
)
def test_other_libraries_models_work_without_fednorms(name, model, tmp_path):
    sites = larger(8)
    export(trained(tmp_path / "r", name, model, sites), tmp_path / "x", site="b")
    images = sites.site("b").test.x[:3]
    found = logits_without(tmp_path / "x", images, BY_LOADER, blocked=("fednorms",))
    assert torch.equal(found, load_model(tmp_path / "x").logits(images))


@pytest.mark.parametrize("name", sorted(models()))
def test_every_network_of_ours_has_a_loader(name, tmp_path):
    """Its own source, with nothing left of fednorms."""
    size = 64 if "alexnet" in name else models()[name].size
    bare = build(name, 3, size=size)
    module = build(name, 3, size=size, seed=1).eval()
    fold(module, (3, size, size))
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    text = loader(name, module, bare, CLASSES, (3, size, size), size, Preprocessing(), False, ["step"], None)
    assert "import fednorms" not in text
    assert "from fednorms" not in text
    x = torch.rand(2, 3, size, size)
    with torch.no_grad():
        assert torch.equal(run_loader(text, tmp_path, bare, x), module(x))


def test_load_py_measures_what_the_model_measures(tmp_path):
    """FedRDN without a site normalizes with statistics of the images that it is given."""
    export(trained(tmp_path / "r", "fedrdn"), tmp_path / "x")
    space = {"__file__": str(tmp_path / "x" / LOADER)}
    exec((tmp_path / "x" / LOADER).read_text(), space)
    images = federation().site("b").test.x
    with torch.no_grad():
        found = space["load"]()(space["prepare"](images))
    torch.testing.assert_close(found, load_model(tmp_path / "x").logits(images))


def test_a_custom_model_is_passed_to_load(tmp_path):
    export(trained(tmp_path / "r", "gn(groups=1)", own=TinyNet()), tmp_path / "x", model=TinyNet())
    space = {"__file__": str(tmp_path / "x" / LOADER)}
    exec((tmp_path / "x" / LOADER).read_text(), space)
    images = federation().site("b").test.x
    with torch.no_grad():
        found = space["load"](TinyNet())(space["prepare"](images))
    assert torch.equal(found, load_model(tmp_path / "x", TinyNet()).logits(images))


def files(folder):
    """One image file of each kind that is read in its own way."""
    rng = np.random.default_rng(0)
    rgb = rng.integers(256, size=(9, 7, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(folder / "rgb.png")
    Image.fromarray(rgb[..., 0]).save(folder / "grey.png")
    Image.fromarray(rng.integers(65536, size=(9, 7), dtype=np.uint16)).save(folder / "deep.png")
    Image.fromarray(rgb).convert("P").save(folder / "palette.png", transparency=3)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(rgb).save(folder / "turned.jpg", exif=turned)
    return [folder / name for name in ("rgb.png", "grey.png", "deep.png", "palette.png", "turned.jpg")]


@pytest.mark.parametrize("crop", [None, 24])
def test_load_py_reads_and_prepares_as_training_did(crop, tmp_path):
    export(trained(tmp_path / "r", sites=larger(crop=crop)), tmp_path / "x")
    space = {"__file__": str(tmp_path / "x" / LOADER)}
    exec((tmp_path / "x" / LOADER).read_text(), space)
    model = load_model(tmp_path / "x")
    for file in files(tmp_path):
        assert torch.equal(space["read"](file), read_image(file, (3, 32, 32)))
        batch = space["read"](file)[None]
        assert torch.equal(space["prepare"](batch), model.prepare(batch))


def test_load_py_prepares_lesions_as_training_did(tmp_path):
    prepared = lesion_square(16)
    bare = build("cnn-small", 3)
    text = loader(
        "cnn-small", bare, bare, CLASSES, (3, 16, 16), 16, Preprocessing(), False, ["x"], ((3, 16, 16), prepared)
    )
    space = {"__file__": str(tmp_path / LOADER)}
    exec(text, space)
    for file in files(tmp_path):
        assert torch.equal(space["read"](file), read_image(file, (3, 16, 16), prepared))


# -- graphs ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_layer_that_torch_does_not_have_goes_into_a_program(tmp_path):
    export(trained(tmp_path / "r", "fednn"), tmp_path / "x")
    needs = json.loads((tmp_path / "x" / "model.json").read_text())["needs"]
    assert "AdaptiveGroupNorm" in needs["why"]
    assert not (tmp_path / "x" / LOADER).exists()
    images = federation().site("b").test.x
    found = logits_without(tmp_path / "x", images, BY_PROGRAM)
    torch.testing.assert_close(found, load_model(tmp_path / "x").logits(images))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frn", "sn", "rbn", "fedrdn"])
def test_a_program_and_onnx_agree_with_torch(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    export(trained(tmp_path / "r", name), tmp_path / "x", site="b", onnx=True, torch_export=True)
    images = federation().site("b").test.x
    expected = load_model(tmp_path / "x").logits(images)
    program = torch.export.load(tmp_path / "x" / "model.pt2").module()
    torch.testing.assert_close(program(images)[0], expected)
    session = runtime.InferenceSession(tmp_path / "x" / "model.onnx", providers=["CPUExecutionProvider"])
    logits, _ = session.run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-3, atol=1e-4)


class Fickle(TinyNet):
    """A model that no tracer can follow: it looks at the values of its input."""

    def forward(self, x):
        return super().forward(x if float(x.mean()) > -9 else -x)


@pytest.mark.parametrize("option", ["onnx", "torch_export"])
def test_a_model_that_cannot_be_traced_is_refused(option, tmp_path):
    trained(tmp_path / "r", own=Fickle())
    with pytest.raises(BadInput, match=rf"cannot trace this model.*Export without {option}=True"):
        export(tmp_path / "r", tmp_path / "x", model=Fickle(), **{option: True})
    assert not (tmp_path / "x").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


# -- statistics -----------------------------------------------------------------------------------------------------
def test_batchnorm_without_statistics_gets_them_measured(tmp_path):
    """They are BatchNorm's own over the sites' training images, and one image's class no longer depends on others."""
    sites = larger()
    trained(tmp_path / "r", "fedavg", "cnn4", sites)
    with pytest.raises(BadInput, match=r"keeps no normalization statistics.*custom federation"):
        export(tmp_path / "r", tmp_path / "x")
    with pytest.raises(BadInput, match="`fednorms export` where the run's data are"):
        fn.predict(tmp_path / "r", sites.site("b").test.x)
    done = export(tmp_path / "r", tmp_path / "x", federation=sites)
    assert any("measured on the training images of 3 sites" in note for note in done.notes)
    model = load_model(tmp_path / "x")
    x = sites.site("b").test.x
    torch.testing.assert_close(model.logits(x[:1]), model.logits(x)[:1])
    # The first layer's input is the image itself: its statistics, written out, over batches of 4 in the test's order.
    conv, norm = model.module.body[0][0], model.module.body[0][1]
    total, mean, var = 0, 0.0, 0.0
    for site in sites.sites:
        shuffled = site.train.x[order_of(site.name, len(site.train))]
        for some in shuffled.split(4):
            with torch.no_grad():
                y = conv(sites.preprocessing(some)).double().transpose(0, 1).flatten(1)
            total, mean, var = total + len(some), mean + len(some) * y.mean(1), var + len(some) * y.var(1)
    torch.testing.assert_close(norm.running_mean.double(), mean / total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), var / total, rtol=1e-4, atol=1e-5)


def test_a_sites_model_has_the_sites_statistics(tmp_path):
    sites = larger()
    trained(tmp_path / "r", "fedavg", "cnn4", sites)
    found = {}
    for site in (None, "a"):
        export(tmp_path / "r", tmp_path / f"{site}", site=site, federation=sites)
        found[site] = load_model(tmp_path / f"{site}").module.body[0][1].running_mean
    assert not torch.allclose(found[None], found["a"])


# -- files ----------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_have_the_mode_that_the_umask_gives(mask, tmp_path):
    trained(tmp_path / "r")
    before = os.umask(mask)
    try:
        done = export(tmp_path / "r", tmp_path / "x", onnx=mask == 0o022)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in done.paths} == {0o666 & ~mask}
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o777 & ~mask


def test_an_export_of_bfloat16_computes_in_float32(tmp_path):
    done = export(trained(tmp_path / "r", precision="bfloat16"), tmp_path / "x")
    assert any("bfloat16" in note for note in done.notes)
    assert load_model(tmp_path / "x").logits(federation().site("b").test.x).dtype is torch.float32
