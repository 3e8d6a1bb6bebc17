"""Generated data: constants and definitions, plain references, and dials that change only what they should."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.data.generate import (
    APPROXIMATE,
    CORRUPTIONS,
    blurs,
    corrupt,
    corrupted_federation,
    mnist_m,
    resampling,
    shift,
    synth_digits,
    tones,
    weather,
)
from fednorms.data.generate.rendered_digits import fonts
from fednorms.data.registry import federation
from fednorms.data.show import view


def photos(n=6, size=32, seed=0):
    """Smooth colorful images."""
    r = np.random.RandomState(seed)
    small = torch.from_numpy(r.random_sample((n, 3, 5, 5))).float()
    big = torch.nn.functional.interpolate(small, size=(size, size), mode="bilinear")
    return (big * 255).to(torch.uint8)


def unit(n=6, size=32):
    return photos(n, size).float() / 255


def r():
    return np.random.RandomState(0)


# -- all corruptions ------------------------------------------------------------------------------------------------
def test_there_are_nineteen_with_five_severities_each():
    published = (
        "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog "
        "brightness contrast elastic_transform pixelate jpeg_compression speckle_noise gaussian_blur spatter saturate"
    )
    assert list(CORRUPTIONS) == published.split()
    assert all(len(constants) == 5 for _, constants in CORRUPTIONS.values())
    assert set(APPROXIMATE) == {"frost", "snow", "spatter", "motion_blur"}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_depends_on_its_seed_and_changes_the_image(name):
    x = photos(3)
    for severity in (1, 5):
        y = corrupt(x, name, severity, seed=1)
        assert y.shape == x.shape
        assert y.dtype == torch.uint8
        assert not torch.equal(y, x)
        torch.manual_seed(5)
        assert torch.equal(y, corrupt(x, name, severity, seed=1))


@pytest.mark.parametrize(
    "name", [n for n in CORRUPTIONS if n not in ("elastic_transform", "saturate", "spatter", "frost", "glass_blur")]
)
def test_severity_grows(name):
    x = photos(8)
    change = [float((corrupt(x, name, s).float() - x.float()).abs().mean()) for s in (1, 3, 5)]
    assert change[0] < change[1] < change[2]


def test_mistakes_are_explained():
    x = photos(1)
    with pytest.raises(BadInput, match='did you mean "fog"'):
        corrupt(x, "fogg", 1)
    with pytest.raises(BadInput, match="severity must be 1 to 5, got 6"):
        corrupt(x, "fog", 6)
    with pytest.raises(BadInput, match="expected RGB images of type uint8"):
        corrupt(x.float(), "fog", 1)


# -- each against its definition ------------------------------------------------------------------------------------
def test_noises_have_the_stated_moments():
    x = torch.full((40, 3, 32, 32), 0.5)
    assert float((tones.gaussian_noise(x, (0.1,), r()) - x).std()) == pytest.approx(0.1, rel=0.02)
    assert float((tones.speckle_noise(x, (0.2,), r()) - x).std()) == pytest.approx(0.1, rel=0.02)
    shot = tones.shot_noise(x, (50,), r())
    assert float(shot.mean()) == pytest.approx(0.5, rel=0.02)
    assert float(shot.var()) == pytest.approx(0.5 / 50, rel=0.03)
    assert torch.allclose((shot * 50).round(), shot * 50, atol=1e-4)
    salted = tones.impulse_noise(x, (0.07,), r())
    assert float((salted != 0.5).float().mean()) == pytest.approx(0.07, rel=0.05)
    assert float((salted == 1).float().mean()) == pytest.approx(0.035, rel=0.1)


def test_hsv_against_colorsys():
    import colorsys

    x = unit(2, 8)
    x[0, :, 0, 0], x[0, :, 0, 1] = 0.0, 0.5  # black and grey
    bright, strong = tones.brightness(x, (0.2,), r()), tones.saturate(x, (2, 0.1), r())
    for n, i, j in np.ndindex(2, 8, 8):
        h, s, v = colorsys.rgb_to_hsv(*x[n, :, i, j].tolist())
        assert bright[n, :, i, j].tolist() == pytest.approx(colorsys.hsv_to_rgb(h, s, min(v + 0.2, 1)), abs=1e-5)
        expected = colorsys.hsv_to_rgb(h, min(2 * s + 0.1, 1), v)
        assert strong[n, :, i, j].tolist() == pytest.approx(expected, abs=1e-5)


def test_contrast_keeps_the_mean_of_each_channel():
    x = unit()
    y = tones.contrast(x, (0.3,), r())
    assert torch.allclose(y.mean((2, 3)), x.mean((2, 3)), atol=1e-6)
    assert torch.allclose(y.std((2, 3)), 0.3 * x.std((2, 3)), atol=1e-6)


@pytest.mark.parametrize("sigma", [0.4, 0.7, 1.0])
def test_gaussian_blur_is_scipys(sigma):
    ndimage = pytest.importorskip("scipy.ndimage")
    x = unit(2, 12)
    expected = np.stack([[ndimage.gaussian_filter(c, sigma, mode="nearest") for c in image] for image in x.numpy()])
    assert np.allclose(blurs.gaussian(x, sigma).numpy(), expected, atol=1e-5)


def test_blurs_leave_flat_images_and_the_smallest_disk_is_only_its_smoothing():
    flat = torch.full((2, 3, 16, 16), 0.3)
    for blur, c in (
        (blurs.defocus, (1.5, 0.1)),
        (blurs.zoom_blur, (1.25,)),
        (blurs.motion_blur, (9, 2.5)),
        (blurs.glass_blur, (0.4, 1, 2)),
    ):
        assert torch.allclose(blur(flat, c, r()), flat, atol=1e-5)
    dot = torch.zeros(1, 3, 17, 17)
    dot[..., 8, 8] = 1
    assert torch.allclose(
        blurs.defocus(dot, (1, 1e-3), r())[0, 0].nonzero(), torch.tensor([[7, 8], [8, 7], [8, 8], [8, 9], [9, 8]])
    )


def test_zoom_blur_is_the_mean_of_its_zooms():
    x = unit(1)
    by_hand = (x + sum(blurs.zoomed(x, 1 + i / 100) for i in range(6))) / 7
    assert torch.allclose(blurs.zoom_blur(x, (1.05,), r()), by_hand, atol=1e-6)
    assert torch.allclose(blurs.zoomed(x, 1.0), x, atol=1e-5)


def test_glass_only_moves_pixels():
    x = unit(2, 8)
    y = blurs.glass_blur(x, (0.0, 1, 1), r())
    assert not torch.equal(x, y)
    for n in range(2):
        before, after = ({tuple(p) for p in z[n].flatten(1).T.tolist()} for z in (x, y))
        assert before == after


def test_motion_goes_along_its_angle():
    dot = torch.zeros(2, 1, 9, 9)
    dot[..., 4, 4] = 1
    y = blurs.motion(dot, 3, 2.0, np.array([0.0, 90.0]))
    assert set(y[0, 0].nonzero()[:, 0].tolist()) == {4}
    assert set(y[1, 0].nonzero()[:, 1].tolist()) == {4}


def test_plasma_and_fog():
    clouds = weather.plasma(3, 32, 2.0, r(), torch.zeros(1))
    assert clouds.amin((1, 2, 3)).tolist() == [0.0] * 3
    assert clouds.amax((1, 2, 3)).tolist() == [1.0] * 3
    rough, smooth = (weather.plasma(8, 32, d, r(), torch.zeros(1)).diff(dim=2).abs().mean() for d in (1.5, 3.0))
    assert rough > smooth
    x = unit(2)
    assert (weather.fog(x, (1.5, 1.75), r()).amax((1, 2, 3)) <= x.amax((1, 2, 3)) + 1e-6).all()


def test_mud_is_brown_and_only_where_drops_are():
    x = unit(4)
    y = weather.spatter(x, (0.65, 0.1, 0.5, 0.68, 0.6, 1), r())
    same = (y == x).all(1)
    assert 0.5 < same.float().mean() < 1
    fully = (y - torch.tensor([63, 42, 20]).view(1, 3, 1, 1) / 255).abs().amax(1) < 0.01
    assert fully.any()


@pytest.mark.parametrize("c", [0.95, 0.85, 0.65])
def test_pixelate_is_pillows_box_filter(c):
    x = photos(2)
    small = int(32 * c)
    for image, ours in zip(x, resampling.pixelate(x.float(), (c,), r()), strict=True):
        pil = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((small, small), Image.Resampling.BOX)
        theirs = np.asarray(pil.resize((32, 32), Image.Resampling.BOX), float)
        assert np.abs(theirs - ours.permute(1, 2, 0).numpy()).max() <= 1.5  # Pillow rounds after each pass


def test_jpeg_is_pillows():
    x = photos(1)
    stream = io.BytesIO()
    Image.fromarray(x[0].permute(1, 2, 0).numpy()).save(stream, "JPEG", quality=40)
    theirs = torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1)
    assert torch.equal(corrupt(x, "jpeg_compression", 5)[0], theirs)


def test_elastic_without_reach_is_the_identity_and_moves_three_points():
    x = unit(2)
    assert torch.allclose(resampling.elastic_transform(x, (0, 0, 0.0), r()), x, atol=1e-5)

    class Fixed:
        def uniform(self, low, high, size):
            return np.full(size, 2.0)  # every point two down and two right

    moved = resampling.elastic_transform(x, (0, 0, 2.0), Fixed())
    assert torch.allclose(moved[..., 2:, 2:], x[..., :-2, :-2], atol=1e-4)


# -- federations and digits -----------------------------------------------------------------------------------------
def test_no_client_trains_on_a_picture_that_another_is_tested_on():
    x, y = photos(20, 8), torch.arange(20) % 2
    x[:, 0, 0, 0] = torch.arange(20, dtype=torch.uint8) * 10
    made = corrupted_federation(x, y, ["a", "b"], severity=1, names=["pixelate", "jpeg_compression", "frost"], test=6)
    assert [len(s.test) for s in made.sites] == [6, 6, 6]
    assert len({tuple(s.test.y.tolist()) for s in made.sites}) == 1
    assert made.source["generated"]
    assert [s.attributes["generated"] for s in made.sites] == ["yes", "yes", "approximate"]
    with pytest.raises(BadInput, match="must leave images to train on"):
        corrupted_federation(x, y, ["a", "b"], test=20)


def test_mnist_m_on_black_and_white():
    digits = np.random.RandomState(0).randint(0, 3, (4, 6, 5)).astype(np.uint8)
    mask = torch.from_numpy(digits > 0)[:, None].expand(4, 3, 6, 5)
    black, white = np.zeros((9, 9, 3), np.uint8), np.full((6, 5, 3), 255, np.uint8)
    assert torch.equal(mnist_m(digits, [black]), 255 * mask.to(torch.uint8))
    assert torch.equal(mnist_m(digits, [white]), 255 * (~mask).to(torch.uint8))
    noise = [np.random.RandomState(i).randint(0, 256, (12, 12, 3)).astype(np.uint8) for i in range(3)]
    made = mnist_m(torch.from_numpy(digits), noise, seed=2)
    assert torch.equal(made, mnist_m(digits, noise, seed=2))
    assert not torch.equal(made, mnist_m(digits, noise, seed=3))
    plain = torch.where(mask, 255 - made, made)[0].permute(1, 2, 0).numpy()
    pieces = [b[t : t + 6, l : l + 5] for b in noise for t in range(7) for l in range(8)]
    assert any((plain == piece).all() for piece in pieces)
    for bad in ([], [black[:5]], [black.astype(float)]):
        with pytest.raises(BadInput, match="at least 6x5"):
            mnist_m(digits, bad)


def test_rendered_digits_are_readable():
    x, y = synth_digits(200, seed=1)
    assert torch.bincount(y).tolist() == [20] * 10
    again = synth_digits(200, seed=1)[0]
    assert torch.equal(x, again)
    grey = tones.gray(x.float())
    assert (grey.amax((1, 2, 3)) - grey.amin((1, 2, 3))).min() > 20
    if fonts():  # the nearest of other digits in shape has the same label more often than by chance
        shape = (grey - grey.mean((1, 2, 3), keepdim=True)).flatten(1)
        shape = shape / shape.norm(dim=1, keepdim=True)
        alike = (shape @ shape.T).abs().fill_diagonal_(-1)
        assert (y[alike.argmax(1)] == y).float().mean() > 0.35


def test_rendering_without_matplotlib(monkeypatch):
    monkeypatch.setattr(sys.modules[synth_digits.__module__], "find_spec", lambda name: None)
    assert synth_digits(3)[0].shape == (3, 3, 32, 32)


# -- dials ----------------------------------------------------------------------------------------------------------
def dialled(label, feature, n=300):
    g = torch.Generator().manual_seed(0)
    return shift(torch.rand(n, 3, 6, 6, generator=g), torch.arange(n) % 5, list("abcde"), 5, label, feature)


def test_the_label_dial_moves_labels_only_and_linearly():
    found = [view(dialled(v, 0.0)) for v in (0.0, 0.25, 0.5, 1.0)]
    shifts = [f.label_shift for f in found]
    assert shifts == pytest.approx([0.0, 0.2, 0.4, 0.8], abs=0.02)
    assert max(f.feature_shift for f in found) < 0.1
    assert all(f.size_ratio < 1.1 for f in found)


def test_the_feature_dial_moves_pixels_only_and_in_order():
    found = [view(dialled(0.0, v)) for v in (0.0, 0.3, 0.6, 1.0)]
    shifts = [f.feature_shift for f in found]
    assert shifts[0] < 0.1 < shifts[1] < shifts[2] < shifts[3]
    assert max(f.label_shift for f in found) < 0.02


def test_dials_keep_every_image_once_and_check_their_range():
    x = torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1).expand(60, 3, 4, 4).contiguous()
    made = shift(x, torch.arange(60) % 3, list("abc"), 4, label=0.7)
    held = torch.cat([part.x[:, 0, 0, 0] for site in made.sites for part in site.splits.values()])
    assert torch.equal(held.sort().values, torch.arange(60, dtype=torch.uint8))
    with pytest.raises(BadInput, match="label must be 0 to 1, got 2; feature must be 0 to 1"):
        shift(x, torch.arange(60) % 3, list("abc"), 4, label=2, feature=-1)


def test_dials_by_name():
    found = federation("digits-dials(clients=4, label=1, feature=0.5)", size=8)
    assert found.shape == (3, 8, 8)
    assert len(found.clients) == 4
    assert view(found).label_shift > 0.6
    for text in ("digits-dials(label=x)", "digits-dials(seed=1)", "digits-dialss(label=1)", "digits-dials(label=2)"):
        with pytest.raises(BadInput, match=r"dials|label must be 0 to 1"):
            federation(text)


# -- other embedded federations -------------------------------------------------------------------------------------
def test_corrupted_digits_by_name():
    found = federation("digits-corrupted(severity=2)", size=8, val=0, test=0.1)
    assert [site.name for site in found.sites] == list(CORRUPTIONS)
    assert {len(site.test) for site in found.sites} == {180}
    assert found.sites[0].val is None
    held = {site.name: site.test.y.tolist() for site in found.sites}
    assert len(set(map(tuple, held.values()))) == 1, "the same images are tested at every client"
    assert len(federation("digits-corrupted", size=8).sites[0].val) == 180
    for text in ("digits-corrupted(severity=9)", "digits-corrupted(severity=1.5)", "digits-corrupted(clients=3)"):
        with pytest.raises(BadInput, match=r"severity must be 1 to 5|options are the numbers severity"):
            federation(text)


def test_styles_of_digits_by_name():
    found = federation("digits-styles", seed=1)
    assert [site.name for site in found.sites] == ["handwritten", "blended", "rendered"]
    assert found.shape == (3, 16, 16)
    assert sum(len(split) for site in found.sites[:2] for split in site.splits.values()) == 1797
    assert found.fingerprint() == federation("digits-styles", seed=1).fingerprint()
    assert found.fingerprint() != federation("digits-styles").fingerprint()
    with pytest.raises(BadInput, match="has no options"):
        federation("digits-styles(clients=3)")
