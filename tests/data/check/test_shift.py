"""Shifts between sites: labels and images are told apart, and chance is not a shift."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from fednorms.data.check.images import Seen
from fednorms.data.check.shift import feature_shift, label_shift, wilson
from fednorms.data.folders.look import Look


def images(site, label, n, mean, seed):
    r = np.random.RandomState(seed)
    rows = r.normal(mean, 0.1, (n, 3))
    return [Seen(site, "train", label, "", Look(mean=tuple(row), std=(0.2 + row[0] * 0.01,) * 3)) for row in rows]


@pytest.mark.parametrize(("share", "n"), [(0.8, 32), (0.5, 1), (0.9, 500), (1.0, 10)])
def test_wilson_is_scipys(share, n):
    known = binomtest(round(share * n), n).proportion_ci(method="wilson")
    assert wilson(round(share * n) / n, n) == pytest.approx((known.low, known.high), abs=1e-6)


def test_label_skew_is_not_feature_shift():
    """Two classes of different brightness: the sites have other shares of them, but the same images."""
    dark, bright = images("a", 0, 90, 0.2, 1) + images("b", 0, 10, 0.2, 3), images("a", 1, 10, 0.8, 2)
    found = feature_shift(dark + bright + images("b", 1, 90, 0.8, 4))
    assert max(found.values()) < 0.2
    assert label_shift({"a": [90, 10], "b": [10, 90]}) == pytest.approx({"a": 0.4, "b": 0.4})


def test_a_darker_site_is_a_shift_of_as_many_deviations():
    found = feature_shift(images("a", 0, 400, 0.3, 1) + images("b", 0, 400, 0.5, 2))
    # Means of three channels differ by 2 deviations, the three deviations by 0.002 / 0.001.
    assert found["a"] == pytest.approx(2.0, abs=0.2)


def test_few_images_of_the_same_kind_are_no_shift_on_average():
    def square(k):
        return feature_shift(images("a", 0, 6, 0.5, 2 * k) + images("b", 0, 6, 0.5, 2 * k + 1))["a"] ** 2

    assert np.mean([square(k) for k in range(60)]) < 0.25  # without the correction at least 1/6 + 1/6


def test_sites_that_share_no_class_are_left_out():
    assert feature_shift(images("a", 0, 10, 0.5, 1) + images("b", 1, 10, 0.5, 2)) == {}
    assert feature_shift([]) == {}
