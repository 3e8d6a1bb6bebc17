"""The embedded federation serves its purpose: averaging batch normalization costs at least ten points."""

from __future__ import annotations

import pytest

from fednorms.runs.driver import run


@pytest.mark.slow
def test_fedavg_with_batch_normalization_stays_ten_points_below_fedbn_over_five_seeds():
    means = {
        name: sum(run(name, "digits-shift", "cnn-small", 30, seed=seed, lr=0.1).accuracy for seed in range(5)) / 5
        for name in ("fedavg", "fedbn")
    }
    assert means["fedbn"] - means["fedavg"] >= 0.10, means
