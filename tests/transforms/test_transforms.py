"""Transforms: torchvision's results for the same parameters, plain loops, keyed numbers, nothing read on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fednorms.core import noise
from fednorms.core.passes import prepare_test
from fednorms.core.round import begin, broadcast, draws, initial_state, local_update, step
from fednorms.core.states import Client, context_of
from fednorms.core.step import step_view
from fednorms.data import Preprocessing
from fednorms.methods.registry import method
from fednorms.transforms import (
    CHAINS,
    adjust,
    affine,
    between,
    center_crop,
    color_constancy,
    crop,
    cutout,
    draw_center,
    draw_crop,
    flip,
    normalize,
    rotate,
)
from tests.support.tiny import TinyNet, play, rounds, same, tiny_data, tiny_task

TF = pytest.importorskip("torchvision.transforms.functional")


def images(n=5, channels=3, height=9, width=12, seed=0):
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))


def each(function, x, *columns):
    return torch.stack([function(x[i], *(c[i].item() for c in columns)) for i in range(len(x))])


def uniforms(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.rand(shape, generator=generator)


# -- torchvision ----------------------------------------------------------------------------------------------------
def test_crop_and_flip_are_torchvisions():
    x = images()
    top, left = draw_crop(uniforms()(5, 2), x.shape, (7, 10), padding=4)
    expected = each(lambda i, t, l: TF.crop(TF.pad(i, 4), t, l, 7, 10), x, top, left)
    assert torch.equal(crop(x, top, left, (7, 10), padding=4), expected)
    which = torch.tensor([True, False, True, False, True])
    assert torch.equal(flip(x, which), each(lambda i, w: TF.hflip(i) if w else i, x, which))
    assert torch.equal(flip(x, which, -2), each(lambda i, w: TF.vflip(i) if w else i, x, which))
    assert torch.equal(center_crop(images(2, 3, 8, 10), (4, 6)), TF.center_crop(images(2, 3, 8, 10), [4, 6]))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_affine_and_rotation_are_torchvisions(mode):
    x, draw = images(height=16), uniforms(1)
    angle, right, down = between(draw(5), -50, 50), between(draw(5), -3, 3).round(), between(draw(5), -2, 2).round()
    scale, shear = between(draw(5), 0.8, 1.2), between(draw(5), -15, 15)
    kind = TF.InterpolationMode(mode)
    expected = each(
        lambda i, a, r, d, s, h: TF.affine(i, a, [r, d], s, [h, 0.0], kind), x, angle, right, down, scale, shear
    )
    close(affine(x, angle, right, down, scale, shear, mode), expected, mode)
    close(rotate(x, angle, mode), each(lambda i, a: TF.rotate(i, a, kind), x, angle), mode)


def close(ours, theirs, mode):
    off = (ours - theirs).abs() > 1e-4
    # A source halfway between two pixels may round to either; then one pixel in a hundred may differ.
    assert off.float().mean() <= (0.01 if mode == "nearest" else 0.0)


def test_normalize_and_covering_are_torchvisions():
    x, mean, std = images(), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    assert torch.allclose(normalize(x, mean, std), TF.normalize(x, mean, std), atol=1e-6)
    row, column = draw_center(uniforms()(5, 2), x.shape)

    def covered(i, r, c):
        top, left = max(r - 2, 0), max(c - 2, 0)
        return TF.erase(i, top, left, min(r + 2, 9) - top, min(c + 2, 12) - left, torch.tensor(0.3))

    assert torch.equal(cutout(x, row, column, 4, 0.3), each(covered, x, row, column))


def test_tone_is_torchvisions_brightness():
    x, k = images(), torch.full((5,), 0.2)
    assert torch.allclose(adjust(x, torch.zeros(5), k), TF.adjust_brightness(x, 1.2), atol=1e-6)


# -- other references -----------------------------------------------------------------------------------------------
def test_color_constancy_is_its_formula():
    x = images(2).double()
    for image, ours in zip(x.numpy(), color_constancy(x).numpy(), strict=True):
        e = np.array([(c**6).mean() ** (1 / 6) for c in image])
        e = e / np.sqrt((e**2).sum())
        assert np.allclose(ours, np.clip(image / (np.sqrt(3) * e[:, None, None]), 0, 1))
    lamp = torch.tensor([0.5, 0.8, 0.3]).view(1, 3, 1, 1).double()
    dim = x * 0.1
    assert torch.allclose(color_constancy(dim * lamp), color_constancy(color_constancy(dim * lamp)), atol=1e-6)
    assert not color_constancy(torch.zeros(1, 3, 4, 4)).any()


def test_identities():
    x = images(height=8, width=8)
    nil, one = torch.zeros(5), torch.ones(5)
    assert torch.equal(affine(x, nil, nil, nil, one, nil), x)
    four = x
    for _ in range(4):
        four = rotate(four, one * 90)
    assert torch.equal(four, x)
    assert torch.equal(rotate(x, one * 90), x.rot90(1, (2, 3)))
    assert torch.equal(crop(x, torch.full((5,), 4), torch.full((5,), 4), (8, 8), 4), x)
    assert torch.equal(flip(flip(x, one > 0), one > 0), x)


def test_drawers_reach_every_place_and_none_outside():
    u = torch.tensor([[0.0, 1 - 2**-24], [1.0, 0.5]])
    top, left = draw_crop(u, (8, 8), (8, 8), 4)
    assert top.tolist() == [0, 8]
    assert left.tolist() == [8, 4]
    counts = torch.bincount(draw_crop(uniforms()(4000, 2), (4, 4), (3, 3), 1)[0])
    assert len(counts) == 4
    assert counts.min() > 850


def test_padding_with_a_color():
    x = torch.zeros(1, 3, 2, 2)
    y = crop(x, torch.tensor([0]), torch.tensor([0]), (1, 1), 1, (0.1, 0.2, 0.3))
    assert torch.allclose(y.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    assert crop(x[:, :1], torch.tensor([0]), torch.tensor([0]), (1, 1), 1, (0.1, 0.2, 0.3)).item() == pytest.approx(0.2)


# -- chains ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("channels", [1, 3])
def test_chains_stay_in_range_and_change_something(name, channels):
    x = images(6, channels, 24, 24)
    y = CHAINS[name](x, uniforms(), (24, 24))
    assert y.shape == x.shape
    assert y.min() >= 0
    assert y.max() <= 1
    assert not torch.equal(y, x)
    assert torch.equal(y, CHAINS[name](x, uniforms(), (24, 24)))
    assert CHAINS[name](x.double(), lambda *s: uniforms()(*s).double(), (24, 24)).dtype == torch.float64


@pytest.mark.parametrize("name", CHAINS)
def test_chains_read_nothing_on_the_host(name):
    with FakeTensorMode():  # a tensor without values: asking for one is an error
        CHAINS[name](torch.rand(4, 3, 16, 16), lambda *shape: torch.rand(shape), (16, 16))


@pytest.mark.parametrize("name", CHAINS)
def test_an_image_does_not_depend_on_its_neighbors(name):
    def keyed(x):
        with noise.keyed(torch.tensor([3, 5])):
            return CHAINS[name](x, lambda *shape: noise.uniform(shape, 7, x), (16, 16))

    x = images(6, 3, 16, 16)
    assert torch.allclose(keyed(x)[:2], keyed(x[:2]), atol=1e-6)


# -- the part -------------------------------------------------------------------------------------------------------
def test_training_sees_other_images_each_step_and_tests_see_the_same():
    data = tiny_data(8, 6)
    plain, augmented = play("fedavg", data, n=1), play("augment", data, n=1)
    assert not same(plain.model, augmented.model)
    assert same(augmented.model, play("augment", data, n=1).model)
    task = tiny_task("augment(chain=flip_rotate)", data)
    sent = broadcast(task, initial_state(task))
    client = Client("a", data["a"])
    x = prepare_test(
        task, data["a"].batch([0, 1]), context_of(task, 0, client, evaluating=True), {"augment": {}}, sent
    )[0]
    assert torch.equal(x, task.preprocessing(data["a"].batch([0, 1])[0], x.dtype))


@pytest.mark.parametrize("text", ["augment", "fedrdn"])
def test_fine_tuning_sees_images_as_training_does(text):
    data = tiny_data(8, 6)
    task = tiny_task(f"{text} + finetune(epochs=2)", data)
    run = rounds(task, data, 1)
    client = Client("a", data["a"], run.states.get("a"))
    carry, _ = begin(task, broadcast(task, run.server), client, evaluating=True)
    for batches, phase in draws(task, carry, task.method.evaluation().phases):
        view = step_view(task, carry, batches[0], 0)
        tested = prepare_test(task, batches[0], carry.context, carry.mine, carry.broadcast)[0]
        assert not torch.equal(view.x, tested)
        step(task, carry, batches, phase)


def test_isic_trains_on_a_random_square_and_tests_on_the_middle():
    data = tiny_data(4)
    seen = []

    class Watched(TinyNet):
        def forward(self, x):
            seen.append(tuple(x.shape[-2:]))
            return super().forward(x)

    task = replace(tiny_task("augment(chain=isic)", data, model=Watched()), preprocessing=Preprocessing(crop=7))
    sent, client = broadcast(task, initial_state(task)), Client("a", data["a"])
    raw = data["a"].batch([0])
    x = prepare_test(task, raw, context_of(task, 0, client, evaluating=True), {"augment": {}}, sent)[0]
    assert torch.equal(x, center_crop(task.preprocessing.unit(raw[0], x.dtype), (7, 7)))
    seen.clear()
    upload, _ = local_update(task, sent, client)
    assert upload.model.finite()
    assert set(seen) == {(7, 7)}
    # Numbers near 1 switch every other transform off; the fourth draw decides which square it is.
    draws = count()
    pixels = torch.arange(64.0).view(1, 1, 8, 8).repeat(40, 1, 1, 1) / 64
    cut = CHAINS["isic"](pixels, lambda *s: uniforms()(*s) if next(draws) == 3 else torch.ones(s), (7, 7))
    assert sorted(set((cut[:, 0, 0, 0] * 64).round().tolist())) == [0, 1, 8, 9]


def test_covered_squares_of_isic_are_whole():
    def covering(*shape):
        return uniforms()(*shape) if shape[1:] == (2,) and next(draws) >= 2 else torch.ones(shape)

    draws = count()
    covered = CHAINS["isic"](torch.ones(200, 1, 200, 200), covering, (200, 200)) == 0
    some = covered.flatten(1).sum(1)
    assert some[some > 0].min() >= 16 * 16, "no square is cut off at the border"


def test_the_text_form():
    assert str(method("augment(chain=feddyn) + fedbn")) == "augment(chain='feddyn') + fedbn"
