"""A model is handed out with its whole preparation: files give what the run's own evaluation gives."""

from __future__ import annotations

import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fednorms import adapt, evaluate_run, export, load_model, predict
from fednorms.core.errors import BadInput
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.data.readers import isic
from fednorms.runs.driver import execute
from tests.support.after import CLASSES, federation, images, recipe
from tests.support.layouts import picture, table

SIZE = 20  # of 22 stored pixels


@pytest.fixture(scope="module")
def skin(tmp_path_factory):
    """A tiny Fed-ISIC2019 of colored noise, wider than high, and the run on it."""
    root = tmp_path_factory.mktemp("skin")
    rows = [
        {"image": f"ISIC_{i:04d}", "target": i % 8, "center": i % 6, "fold": "test" if i % 4 == 0 else "train"}
        for i in range(72)
    ]
    table(root / "train_test_split", rows)
    random = np.random.default_rng(0)
    for i in range(72):
        tint = np.array([1.0, 0.3 + 0.01 * (i % 8), 0.5])
        pixels = (random.integers(0, 256, (26, 40, 3)) * tint).astype(np.uint8)
        path = root / "ISIC_2019_Training_Input" / f"ISIC_{i:04d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
        rows[i]["image"] = path.name
    table(root / "train_test_split", rows)
    sites = isic.fed_isic2019(root, complete=False, size=SIZE, cache=False)
    execute(recipe("fedavg", rounds=1, model="cnn-small"), out=root / "run", federation=sites)
    return root, rows, sites


def by_hand(path):
    """The steps of the exported README, written independently of the library."""
    image = Image.open(path).convert("RGB")
    scale = 22 / min(image.size)
    image = image.resize([max(22, int(n * scale)) for n in image.size], Image.Resampling.BILINEAR)
    x = np.asarray(image, dtype=np.float64)
    e = np.array([np.mean(x[..., c] ** 6) ** (1 / 6) for c in range(3)])
    e /= np.linalg.norm(e)
    x = np.minimum(255, np.floor(x / (math.sqrt(3) * e) + 1e-9))
    left, top = (image.width - 22) // 2, (image.height - 22) // 2
    x = x[top : top + 22, left : left + 22][1:21, 1:21] / 255
    x = (x - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return torch.tensor(x.transpose(2, 0, 1), dtype=torch.float32)


def test_files_are_prepared_as_in_training(skin, tmp_path):
    root, rows, sites = skin
    files = [root / "ISIC_2019_Training_Input" / r["image"] for r in rows if r["fold"] == "test" and r["center"] == 2]
    labels = [isic.CLASSES[r["target"]] for r in rows if r["fold"] == "test" and r["center"] == 2]
    export(root / "run", tmp_path / "x")
    model = load_model(tmp_path / "x")
    stored = sites.site(isic.CENTERS[2]).test
    expected = model(stored.x)  # export has compared these logits with the run's own, bit for bit
    assert torch.equal(torch.stack([model.read(f) for f in files]), stored.x)
    of_run, of_export = predict(root / "run", files), predict(tmp_path / "x", files)
    for found in (of_run, of_export):
        rounded = torch.tensor([list(p.probabilities.values()) for p in found], dtype=torch.float32)
        torch.testing.assert_close(rounded, expected, rtol=1e-5, atol=1e-6)
        assert "prepare" not in found[0].note
    (scores,) = evaluate_run(root / "run", ["global"], federation=sites).values()
    score = scores.sites[isic.CENTERS[2]].accuracy
    assert score == pytest.approx(np.mean([p.label == y for p, y in zip(of_run, labels, strict=True)]))
    with torch.no_grad():
        logits = model.module(torch.stack([by_hand(f) for f in files]))
    logits = logits[0] if isinstance(logits, tuple) else logits
    torch.testing.assert_close(logits.softmax(1), expected, rtol=1e-4, atol=1e-5)


def test_the_preparation_is_data_too(skin, tmp_path):
    export(skin[0] / "run", tmp_path / "x")
    done = json.loads((tmp_path / "x" / "model.json").read_text())["preprocessing"]
    assert (done["prepared"], done["stored"], done["crop"]) == (
        "shorter side 22, shades of grey 6, its middle", [3, 22, 22], SIZE,
    )  # fmt: skip
    readme = (tmp_path / "x" / "README.txt").read_text()
    places = [
        readme.index(word) for word in ("shorter side of 22", "color constancy", "middle 20 x 20", "divide by 255")
    ]
    assert places == sorted(places)


def test_onnx_refuses_a_preparation_that_it_cannot_do(skin, tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(BadInput, match=r"shades of grey 6.*Export without onnx=True: read\(file\)"):
        export(skin[0] / "run", tmp_path / "x", onnx=True)
    with pytest.raises(BadInput, match=r"shades of grey 6.*Export without torch_export=True"):
        export(skin[0] / "run", tmp_path / "x", torch_export=True)
    assert not (tmp_path / "x").exists()


def test_a_new_site_is_prepared_too(skin, tmp_path):
    root, rows, _ = skin
    for row in rows[:32]:
        target = tmp_path / "clinic" / isic.CLASSES[row["target"]] / row["image"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((root / "ISIC_2019_Training_Input" / row["image"]).read_bytes())
    done = adapt(root / "run", tmp_path / "clinic", out=tmp_path / "x", test=0.0)
    assert not any("prepare" in note for note in done.notes)
    model = load_model(tmp_path / "x")
    assert (model.shape, model.stored_shape) == ((3, 20, 20), (3, 22, 22))


@pytest.mark.parametrize("method", ["fedavg", "fedrdn"])
def test_a_crop_is_part_of_the_model(method, tmp_path):
    random = torch.Generator().manual_seed(0)
    y = torch.arange(9) % 3
    members = [Site(name, name, *(Split(images(y, k, random, 10), y) for _ in range(3))) for k, name in enumerate("ab")]
    sites = Federation("tiny", members, CLASSES, Preprocessing((0.4,) * 3, (0.3,) * 3, crop=8))
    execute(recipe(method, rounds=1, model="cnn-small"), out=tmp_path / "run", federation=sites)
    onnx = importlib.util.find_spec("onnxruntime") is not None and importlib.util.find_spec("onnxscript") is not None
    export(tmp_path / "run", tmp_path / "x", site=sites.sites[0].name, onnx=onnx)
    model, x = load_model(tmp_path / "x"), sites.sites[0].test.x
    assert x.shape[2:] == model.stored_shape[1:]
    assert model.shape[1:] == (8, 8)
    border = (x.shape[2] - 8) // 2
    assert torch.equal(model(x), model(x[:, :, border : border + 8, border : border + 8]))
    with pytest.raises(BadInput, match=r"N x 3 x 8 x 8 or N x 3 x 10 x 10"):
        model(x[:, :, :7])
    if onnx:
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "x" / "model.onnx", providers=["CPUExecutionProvider"])
        logits = torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
        torch.testing.assert_close(logits, model.logits(x), rtol=1e-3, atol=1e-4)


def test_a_model_without_statistics_is_not_handed_out(tmp_path):
    """Its classes depend on the other images of the batch: every way to hand it out says so, and what to do."""

    class Untracked(nn.Sequential):
        def __init__(self, tracked=False):
            norm = nn.BatchNorm2d(4, track_running_stats=tracked)
            super().__init__(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    picture(tmp_path / "rex.png", 7, (8, 8))
    for tracked in (False, True):
        folder, model = tmp_path / str(tracked), Untracked(tracked)
        execute(recipe("fedavg", rounds=1, model="custom:Untracked"), out=folder, federation=federation(), model=model)
        ways = (
            lambda folder=folder, model=model: predict(folder, [tmp_path / "rex.png"], model=model),
            lambda folder=folder, model=model: export(folder, folder / "x", model=model),
        )
        for way in ways:
            if tracked:
                way()
            else:
                with pytest.raises(
                    BadInput, match=r': 1\), so .* depends on the other images.*fednorms evaluate.*"gn"'
                ):
                    way()
        assert (folder / "x").exists() == tracked
        assert evaluate_run(folder, federation=federation(), model=model), "sites are tested as before"
