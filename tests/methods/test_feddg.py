"""FedDG: low-frequency amplitudes of other clients' images, and an episode of two losses.

The authors' freq_space_interpolation (github.com/liuquande/FedDG-ELCFS) differs from `with_amplitudes` by at most
1.9e-15 on random images of three sizes, at four values of L and random shares.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fednorms as fn
from fednorms.data import Preprocessing
from fednorms.explain.leaves import what_leaves
from fednorms.methods.feddg import FedDG, amplitudes, low_frequencies, with_amplitudes
from tests.reference.feddg import amplitude, feddg, swapped
from tests.support.tiny import (
    close,
    pairs,
    plan_of,
    play,
    rounds,
    same,
    setup,
    tiny_data,
    tiny_net,
    tiny_task,
)


@pytest.mark.parametrize(("low", "step", "clip"), [(0.0, 0.3, 100.0), (0.13, 0.3, 100.0), (0.13, 0.5, 0.01)])
def test_equals_a_plain_torch_loop(low, step, clip):
    """Two clients with one spectrum each: nothing is left to chance."""
    data = tiny_data(8, 12)
    task = tiny_task(f"feddg(low={low}, step={step}, clip={clip}, spectra=1, variant=author)", data)
    run = setup(task, data)
    half = int(low * 8)
    sent = {k: run.server.parts["feddg"][f"{k}/amplitudes"][0] for k in data}
    targets = []
    for k, other in (("a", "b"), ("b", "a")):
        whole = [amplitude(image.numpy()) for image in data[other].x]
        window = slice(4 - half, 4 + half + 1)
        chosen = [a for a in whole if np.allclose(a[:, window, window], sent[other].numpy(), atol=1e-9)]
        assert len(chosen) == 1, k
        targets += chosen
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(2)]
    server = feddg(tiny_net(), pairs(data), targets, plans, 0.1, half, step, clip)
    close(rounds(task, data, 2).model, server.state_dict())


@pytest.mark.parametrize("half", [0, 1, 3])
def test_images_are_those_of_numpys_transform(half):
    torch.manual_seed(0)
    x, t = torch.rand(2, 3, 9, 8, dtype=torch.float64), torch.rand(2, 3, 9, 8, dtype=torch.float64)
    share = torch.tensor([0.3, 1.0]).double()
    got = with_amplitudes(x, amplitudes(low_frequencies(t, half)), share)
    for one, a, b, l in zip(got, x, t, share, strict=True):
        wanted = torch.as_tensor(swapped(a.numpy(), amplitude(b.numpy()), half, float(l)))
        torch.testing.assert_close(one, wanted, atol=1e-12, rtol=0)


def test_it_commutes_with_normalizing():
    torch.manual_seed(0)
    x, t = torch.rand(3, 3, 8, 8, dtype=torch.float64), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    share, normalize = torch.rand(3).double(), Preprocessing((0.9, 0.5, 0.2), (0.1, 0.2, 0.3)).normalize

    def moved(x, t):
        return with_amplitudes(x, amplitudes(low_frequencies(t, 1)), share)

    torch.testing.assert_close(moved(normalize(x), normalize(t)), normalize(moved(x, t)), atol=1e-12, rtol=0)


def test_at_frequency_zero_an_image_gets_the_mean_color_of_another():
    x, t = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    got = with_amplitudes(x, amplitudes(low_frequencies(t, 0)), torch.ones(2))
    torch.testing.assert_close(got - got.mean((2, 3), keepdim=True), x - x.mean((2, 3), keepdim=True))
    torch.testing.assert_close(got.mean((2, 3)), t.mean((2, 3)))
    torch.testing.assert_close(with_amplitudes(x, amplitudes(low_frequencies(t, 0)), torch.zeros(2)), x)


def test_a_client_gets_the_spectra_of_all_others_and_not_its_own():
    data = tiny_data(8, 12, 9)
    task = tiny_task("feddg(spectra=3)", data)
    run = setup(task, data)
    [p], mine = task.method.parts, run.server.parts["feddg"]
    for k in data:
        got = p.down_to(mine, k)["amplitudes"]
        assert got.shape == (6, 3, 1, 1)
        assert torch.equal(got, torch.cat([mine[f"{o}/amplitudes"] for o in data if o != k]))
    assert len(p.down_to(mine, "new")["amplitudes"]) == 9


def test_a_client_whose_name_begins_another_gets_what_others_sent():
    data = dict(zip(("a", "a/b"), tiny_data(8, 12).values(), strict=True))
    task = tiny_task("feddg(spectra=3)", data)
    [p], mine = task.method.parts, setup(task, data).server.parts["feddg"]
    for k, other in (("a", "a/b"), ("a/b", "a")):
        assert torch.equal(p.down_to(mine, k)["amplitudes"], mine[f"{other}/amplitudes"])


def test_one_client_has_nobody_to_learn_from():
    data = tiny_data(12)
    assert same(play("feddg", data).model, play("fedavg", data).model)


def test_shares_are_drawn_for_every_image():
    """A full swap gives each image the other's mean color; otherwise each keeps its own share of its own color."""
    torch.manual_seed(0)
    x, dark = torch.rand(6, 3, 4, 4).double(), torch.zeros(1, 3, 1, 1).double()
    step = SimpleNamespace(x=x, down={"amplitudes": dark}, uniform=lambda *shape: torch.rand(shape).double())
    swapped, shared = (FedDG(variant=v)._shifted(step).mean((2, 3)) / x.mean((2, 3)) for v in ("author", "paper"))
    torch.testing.assert_close(swapped, torch.zeros(6, 3).double())
    torch.testing.assert_close(shared, shared[:, :1].expand(6, 3))  # one share per image
    assert shared[:, 0].std() > 0.05


def test_facts():
    facts, privacy = fn.describe("feddg", "cnn-small"), what_leaves("feddg", "cnn-small")
    assert facts.addressed == ("feddg",)
    assert facts.parts[0].setup_trips == 1
    [once] = [x for x in privacy.leaving if x.when == "once"]
    assert once.statistics
    assert any(x.sender == "feddg" and x.single for x in privacy.received)
