"""Analyses of plain tensors: known properties, and slow references written with loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fednorms.papers.analysis.channels import variance_across
from fednorms.papers.analysis.divergence import divergence, divergences, of_moments
from fednorms.papers.analysis.embedding import balanced_rows, embedding
from fednorms.papers.analysis.feature_maps import drawn_maps, map_cosines
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.four_factors import four_factors
from fednorms.papers.analysis.norms import seen_and_unseen


def cosine(a, b):
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(x) ** 2 for x in a)) / math.sqrt(sum(float(y) ** 2 for y in b))


def features(n=24, d=5, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g) + 1, torch.arange(n) % classes, torch.randn(classes, d, generator=g)


@pytest.mark.parametrize("first", [False, True])
def test_four_factors_against_loops(first):
    f, y, w = features()
    found = four_factors(f, y, w, normalise_first=first)
    if first:
        f = torch.stack([x / x.norm() for x in f])
    means = [f[y == c].mean(0) for c in range(3)]
    for i in range(3):
        inside = [cosine(x, means[i]) for x in f[y == i]]
        assert found.within[i] == pytest.approx(sum(inside) / len(inside), rel=1e-5)
        assert found.alignment[i] == pytest.approx(cosine(means[i], w[i]), rel=1e-5)
        for j in range(3):
            assert found.weights[i, j] == pytest.approx(cosine(w[i], w[j]), rel=1e-5)
            assert found.between[i, j] == pytest.approx(cosine(means[i], means[j]), rel=1e-5)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = sum(found.between[p] for p in pairs) / len(pairs)
    assert found.scalars["similarity between classes"] == pytest.approx(expected)
    assert found.scalars["alignment of weights"] == pytest.approx(found.alignment.mean())


def test_features_of_other_length_change_no_cosine_of_weights_and_one_class_may_be_missing():
    f, y, w = features()
    there = y != 2
    found = four_factors(f[there], y[there], w)
    assert np.isnan(found.within[2])
    assert np.isnan(found.between[2, 0])
    assert np.isfinite(list(found.scalars.values())).all()
    assert np.allclose(four_factors(f, y, 3 * w).alignment, four_factors(f, y, w).alignment)


def test_norms_of_seen_and_unseen_classes():
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]])
    assert seen_and_unseen(rows.norm(dim=1), torch.arange(3), {0}) == (5.0, 1.5)
    seen, unseen = seen_and_unseen(rows.norm(dim=1), torch.arange(3), {0, 1, 2})
    assert seen == pytest.approx(8 / 3)
    assert math.isnan(unseen)  # even data: every class is seen


def test_variance_across_clients_is_that_of_the_population():
    assert variance_across([torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.0])]) == 0.5
    s = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    slow = [sum((float(v) - float(s[:, c].mean())) ** 2 for v in s[:, c]) / 4 for c in range(6)]
    assert variance_across(list(s)) == pytest.approx(sum(slow) / 6, rel=1e-5)


@pytest.mark.parametrize(("b", "expected"), [((2, 1), 4.0), ((0, 4), 1.125), ((1, 4), 1.75), ((0, 1), 0.0)])
def test_divergence_of_normal_distributions(b, expected):
    one = torch.ones(1)
    for x, y in (((0, 1), b), (b, (0, 1))):  # symmetric
        assert of_moments((x[0] * one, x[1] * one), (y[0] * one, y[1] * one)) == pytest.approx(expected)


def test_divergence_is_the_kl_of_torchs_distributions_and_dead_channels_are_left_out():
    a, b = features(seed=1)[0], 2 * features(seed=2)[0]
    normals = [torch.distributions.Normal(x.double().mean(0), x.double().std(0, unbiased=False)) for x in (a, b)]
    kl = torch.distributions.kl_divergence
    assert divergence(a, b) == pytest.approx(float((kl(*normals) + kl(*normals[::-1])).mean()), rel=1e-6)
    dead, nearly = torch.zeros(24, 1), 1e-4 * a[:, :1]
    for at_a, at_b in ((dead, dead), (dead, b[:, :1]), (nearly, b[:, :1])):
        found = divergences([torch.cat([a, at_a], 1), torch.cat([b, at_b], 1)])
        assert found.matrix[0, 1] == pytest.approx(divergence(a, b))
        assert (found.dead, found.channels) == (1, a.shape[1] + 1)
    matrix = divergences([a, b, a]).matrix
    assert np.allclose(matrix, matrix.T)
    assert matrix[0, 2] == 0
    assert matrix[0, 1] == pytest.approx(divergence(a, b))


def test_similarity_of_maps():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 4, 2, 5, generator=g) for _ in range(2))
    assert map_cosines(a, a).tolist() == pytest.approx([1] * 12)
    slow = [cosine(a[n, c].flatten(), b[n, c].flatten()) for n in range(3) for c in range(4)]
    assert map_cosines(a, b).tolist() == pytest.approx(slow, rel=1e-5)
    b[:, 1] = 0  # a channel that never fires
    rest = [v for i, v in enumerate(slow) if i % 4 != 1]
    assert map_cosines(a, b).tolist() == pytest.approx(rest, rel=1e-5)
    drawn = drawn_maps(a, (8, 8))
    assert drawn.shape == (3, 8, 8)
    assert (drawn.amin((1, 2)) == 0).all()
    assert drawn.amax((1, 2)).tolist() == pytest.approx([1.0] * 3)


def test_an_embedding_takes_the_same_number_of_images_from_every_site_and_keeps_groups_apart():
    sites = torch.tensor([0] * 100 + [1] * 7 + [2] * 60)
    rows = balanced_rows(sites, 30)
    assert [int((sites[rows] == s).sum()) for s in range(3)] == [10, 7, 10]
    assert torch.equal(rows, balanced_rows(sites, 30))
    assert len(rows.unique()) == len(rows)
    g = torch.Generator().manual_seed(0)
    near, far = torch.randn(40, 6, generator=g), torch.randn(40, 6, generator=g) + 30
    a, b = embedding([near, far])
    assert a.shape == b.shape == (40, 2)
    spread = max(a.std(), b.std())
    assert np.linalg.norm(a.mean(0) - b.mean(0)) > spread
    assert all(np.array_equal(x, y) for x, y in zip((a, b), embedding([near, far]), strict=True))


def test_findings_survive_json_with_what_is_not_finite():
    found = Findings({"a": math.nan}, {"s": [(3, 0.5), (4, math.inf)]}, {"m": np.eye(2), "n": np.arange(3)}, {"w": "x"})
    back = Findings.of(found.plain())
    assert math.isnan(back.scalars["a"])
    assert math.isnan(back.series["s"][1][1])
    assert back.series["s"][0] == (3, 0.5)
    assert np.array_equal(back.arrays["m"], np.eye(2))
    assert back.plain() == found.plain()
