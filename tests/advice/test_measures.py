"""Measures against slow references: loops over images of a plain torch model."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.advice.measures import feature_shift, gradient_dissimilarity, label_skew, measure
from fednorms.advice.summaries import INPUT, SMALL, Moments, SiteSummary, noised, probe
from fednorms.runs.identity import Custom, own_model
from fednorms.runs.recipe import Recipe


class Tiny(nn.Module):
    """One convolution with group normalization: no running statistics, so a rate of 0 keeps the first model."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def federation(counts=((6, 6, 8), (10, 0, 7)), brightness=(1.0, 0.4)):
    r = np.random.default_rng(0)
    sites = {}
    for k, (of_class, bright) in enumerate(zip(counts, brightness, strict=True)):
        y = np.repeat(np.arange(3), of_class)
        x = (r.random((len(y), 5, 5)) * (1 + y[:, None, None]) / 3 * bright * 255).astype(np.uint8)
        sites[f"site-{k}"] = (x, y)
    return fn.from_arrays(sites, ["a", "b", "c"], val=0.0, test=0.0, layout="NHW")


def summaries(data, epsilon=None):
    torch.manual_seed(0)
    model = Tiny()
    recipe = Recipe(model=own_model(model), training={"lr": 0.0, "batch_size": 4}, device="cpu")
    return model, probe(recipe, data, Custom(federation=data, model=model), epsilon)


def site_images(data, site):
    return [data.preprocessing(site.train.x[i : i + 1]) for i in range(len(site.train))]


def test_feature_shift_matches_a_loop_over_images():
    data = federation()
    model, sites = summaries(data)
    seen = {}
    model.norm.register_forward_pre_hook(lambda _, args: seen.setdefault("x", []).append(args[0].detach()))
    values = {}
    for site in data.clients:
        seen.clear()
        for x in site_images(data, site):
            model(x)
        values[site.name] = (torch.cat(seen["x"]).double(), site.train.y)

    def moments(x):
        flat = x.transpose(0, 1).flatten(1).numpy()
        return flat.mean(1), flat.std(1)

    def w2(x, pooled, scale):
        (m, s), (mm, ss) = moments(x), moments(pooled)
        return float(((m - mm) ** 2 + (s - ss) ** 2).sum() / scale)

    pooled = torch.cat([x for x, _ in values.values()])
    scale = float((moments(pooled)[1] ** 2).sum())
    images = {name: len(y) for name, (_, y) in values.items()}
    expected = sum(images[n] * w2(x, pooled, scale) for n, (x, _) in values.items()) / sum(images.values())
    overall, within = feature_shift(sites)
    assert overall.parts["norm"] == pytest.approx(expected, rel=1e-5)
    total = whole = 0.0
    for c in (0, 2):  # class 1 is only at one site
        both = [x[y == c] for x, y in values.values()]
        for x in both:
            total += len(x) * w2(x, torch.cat(both), scale)
            whole += len(x)
    assert within.parts["norm"] == pytest.approx(total / whole, rel=1e-5)
    assert overall.value == pytest.approx((overall.parts["norm"] + overall.parts[INPUT]) / 2)


def test_gradient_dissimilarity_matches_single_images():
    data = federation()
    model, sites = summaries(data)
    gradients, sizes = [], []
    for site in data.clients:
        total = 0
        for x, y in zip(site_images(data, site), site.train.y, strict=True):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y[None]).backward()
            total = total + torch.cat([p.grad.flatten().double() for p in model.parameters()])
        gradients.append(total / len(site.train))
        sizes.append(len(site.train))
    p = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    mean = sum(w * g for w, g in zip(p, gradients, strict=True))
    squares = sum(w * g.square().sum() for w, g in zip(p, gradients, strict=True))
    assert gradient_dissimilarity(sites).value == pytest.approx(float(squares / mean.square().sum()), rel=1e-4)


def of_counts(*rows):
    one = torch.zeros(1, dtype=torch.float64)
    return [SiteSummary(str(i), sum(filter(None, r)), list(r), {}, {}, 0.0, one) for i, r in enumerate(rows)]


def test_label_skew_matches_its_definition():
    tv, hellinger = label_skew(of_counts((10, 30), (20, 0)))
    p = np.array([[0.25, 0.75], [1.0, 0.0]])
    pooled = np.array([30, 30]) / 60
    by_site_tv = np.abs(p - pooled).sum(1) / 2
    by_site_h = np.sqrt(((np.sqrt(p) - np.sqrt(pooled)) ** 2).sum(1) / 2)
    assert tv.value == pytest.approx((40 * by_site_tv[0] + 20 * by_site_tv[1]) / 60)
    assert hellinger.value == pytest.approx((40 * by_site_h[0] + 20 * by_site_h[1]) / 60)


def test_equal_sites_have_no_skew_and_disjoint_ones_much():
    assert label_skew(of_counts((7, 9), (7, 9)))[0].value == 0
    assert label_skew(of_counts((10, 0, 0), (0, 10, 0), (0, 0, 10)))[0].value == pytest.approx(2 / 3)


def test_label_skew_is_not_mistaken_for_feature_shift():
    data = federation(counts=((30, 6, 6), (6, 6, 30)), brightness=(1.0, 1.0))
    overall, within = feature_shift(summaries(data)[1])
    assert within.value < overall.value / 3


def test_small_classes_do_not_leave_a_site():
    data = federation(counts=((SMALL - 1, 6, 8), (10, 0, 7)))
    for site in summaries(data)[1]:
        assert all(n is None or n >= SMALL for n in site.counts)
        assert all(site.counts[c] is not None for of in site.by_class.values() for c in of)
    assert summaries(data)[1][0].counts[0] is None


def test_moments_of_classes_do_not_tell_the_true_counts():
    """With noise on the counts, every number of images that leaves a site is a noised one; means stay as they are."""
    data = federation(counts=((26, 30, 38), (40, 27, 33)))
    exact, noisy = summaries(data)[1], summaries(data, epsilon=0.2)[1]
    assert any(a.counts != b.counts for a, b in zip(exact, noisy, strict=True))
    for a, b in zip(exact, noisy, strict=True):
        for layer, of_class in b.by_class.items():
            positions = a.layers[layer].count / a.images
            for c, moments in of_class.items():
                assert moments.count / positions == pytest.approx(b.counts[c])
                assert torch.allclose(moments.mean, a.by_class[layer][c].mean)
                assert torch.allclose(moments.var, a.by_class[layer][c].var, atol=1e-12)


def test_measures_say_what_they_reveal():
    found = measure(summaries(federation())[1])
    assert all(m.says and m.reveals for m in found)
    assert len({m.name for m in found}) == len(found)


def test_no_shared_class_is_said():
    within = feature_shift(summaries(federation(counts=((9, 0, 0), (0, 9, 0))))[1])[1]
    assert within.value is None
    assert "not measured" in within.says


def test_noise_on_counts_has_the_promised_scale():
    epsilon, counts = 0.5, [1000] * 4000
    drawn = np.array(noised(counts, "a", 0, epsilon)) - 1000
    ratio = math.exp(-epsilon)
    expected = 2 * ratio / (1 - ratio) ** 2  # variance of the discrete Laplace distribution
    assert abs(drawn.mean()) < 4 * math.sqrt(expected / len(drawn))
    assert drawn.var() == pytest.approx(expected, rel=0.15)
    zero, one = (drawn == 0).sum(), (drawn == 1).sum()
    assert one / zero == pytest.approx(ratio, rel=0.2)  # neighboring answers differ by the factor exp(-epsilon)
    assert noised(counts, "a", 0, epsilon) == noised(counts, "a", 0, epsilon)
    assert noised(counts, "b", 0, epsilon) != noised(counts, "a", 0, epsilon)


def test_moments_of_parts_add_up():
    x = torch.randn(7, 3, 4, dtype=torch.float64)
    parts = [Moments(len(p) * 4, p.sum((0, 2)), p.square().sum((0, 2))) for p in (x[:2], x[2:])]
    whole = parts[0] + parts[1]
    flat = x.transpose(0, 1).flatten(1)
    assert torch.allclose(whole.mean, flat.mean(1))
    assert torch.allclose(whole.var, flat.var(1, correction=0))


def test_batches_of_one_are_probed_with_group_normalization():
    data = fn.federation("digits-dials(clients=2)", size=8, val=0.5, test=0.45)
    recipe = Recipe(training={"batch_size": 1}, device="cpu")
    found = {m.name: m.value for m in measure(probe(recipe, data, Custom()))}
    assert found["feature_w2"] is not None
