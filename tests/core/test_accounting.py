"""Epsilon compared with calculations that do not use the package: closed formulas, integrals, counting."""

import math
from collections import Counter

import numpy as np
import pytest

from fednorms.core.accounting import Guarantee
from fednorms.core.sampling import Participation
from fednorms.core.views import Mechanism
from fednorms.explain.leaves import what_leaves
from fednorms.methods.registry import method

DELTA = 1e-5


def guarantee(text, noise=1.0, clients=20, where="server", delta=DELTA, secret=True, seed=0):
    names = [f"c{i:03d}" for i in range(clients)]
    return Guarantee("dp", Mechanism(1.0, noise, delta, where), Participation.read(text), names, seed, secret)


def gaussian_delta(z, epsilon):
    """The exact delta of Gaussian noise of std z on a sum of sensitivity 1 (Balle and Wang 2018)."""

    def tail(x):
        return math.erfc(x / math.sqrt(2)) / 2

    return tail(epsilon * z - 1 / (2 * z)) - math.exp(epsilon) * tail(epsilon * z + 1 / (2 * z))


def normal(x, mean, z):
    return np.exp(-((x - mean) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi))


def hockey_stick(p, q, epsilon, step):
    """The smallest delta for two densities on a grid, in the worse direction."""
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * step) for a, b in ((p, q), (q, p)))


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("t", [1, 7, 100])
def test_every_client_in_every_round_is_the_exact_gaussian(noise, t):
    epsilon = guarantee("all", noise).epsilon(t)
    if epsilon < 300:  # beyond this, exp overflows in this formula
        assert gaussian_delta(noise / math.sqrt(t), epsilon) == pytest.approx(DELTA, rel=1e-4)
    renyi = min(t * a / (2 * noise**2) + math.log(1 / DELTA) / (a - 1) for a in np.linspace(1.01, 400, 40000))
    assert epsilon <= renyi  # the closed formula for Renyi divergence is an upper bound
    assert epsilon >= renyi * 0.6


@pytest.mark.parametrize(("noise", "t"), [(1.0, 1), (4.0, 25)])
def test_noise_at_the_clients_hides_twice_the_clip(noise, t):
    local, half = guarantee("all", noise, where="client"), guarantee("all", noise / 2)
    assert local.epsilon(t) == half.epsilon(t)
    assert gaussian_delta(noise / 2 / math.sqrt(t), local.epsilon(t)) == pytest.approx(DELTA, rel=1e-4)
    assert local.relation == "any two updates of one client"


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.4, 1.5), (0.05, 0.7)])
def test_bernoulli_clients_in_one_round_against_an_integral(rate, noise):
    x = np.linspace(-25, 25, 400_001)
    step = x[1] - x[0]
    there = (1 - rate) * normal(x, 0, noise) + rate * normal(x, 1, noise)
    away = normal(x, 0, noise)
    epsilon = guarantee(f"bernoulli:{rate}", noise).epsilon(1)
    assert hockey_stick(there, away, epsilon, step) <= DELTA
    assert hockey_stick(there, away, 0.5 * epsilon, step) > DELTA  # and not far above what is needed


def test_bernoulli_clients_in_many_rounds_against_a_convolution_of_losses():
    rate, noise, t, width = 0.2, 1.0, 8, 2e-3
    x = np.linspace(-12, 13, 500_001)
    away, there = normal(x, 0, noise), (1 - rate) * normal(x, 0, noise) + rate * normal(x, 1, noise)
    epsilon = guarantee(f"bernoulli:{rate}", noise).epsilon(t)
    for p, q in ((there, away), (away, there)):
        loss = np.log(p) - np.log(q)
        low = loss.min()
        cells = np.floor((loss - low) / width).astype(int)  # rounded down: the true delta is no smaller
        mass = np.bincount(cells, weights=p * (x[1] - x[0]))
        total = np.array([1.0])
        for _ in range(t):
            total = np.convolve(total, mass)
        losses = t * low + width * np.arange(len(total))
        delta = float((total * np.maximum(1 - np.exp(epsilon - losses), 0)).sum())
        assert delta <= DELTA
        if p is there:
            assert float((total * np.maximum(1 - np.exp(0.6 * epsilon - losses), 0)).sum()) > DELTA


@pytest.mark.parametrize(("m", "noise"), [(2, 2.0), (5, 3.0), (10, 4.0)])
def test_a_fixed_number_of_clients_hides_one_that_is_replaced_by_its_opposite(m, noise):
    """The others send nothing; one client sends +C in one case and -C in the other, if it is drawn in that round."""
    q = m / 20
    x = np.linspace(-40, 40, 400_001)
    one, other = ((1 - q) * normal(x, 0, noise) + q * normal(x, c, noise) for c in (1, -1))
    drawn = guarantee(f"fixed:{m}", noise)
    assert hockey_stick(one, other, drawn.epsilon(1), x[1] - x[0]) <= DELTA
    assert drawn.relation == "a client replaced by any other"
    assert drawn.epsilon(50) <= guarantee("all", noise / 2).epsilon(50)  # drawing clients never costs privacy


def test_all_clients_drawn_is_all_clients():
    assert guarantee("fixed:20").epsilon(3) == guarantee("all").epsilon(3)
    assert guarantee("bernoulli:1").epsilon(3) == guarantee("all").epsilon(3)


@pytest.mark.parametrize("text", ["all", "bernoulli:0.2", "fixed:4"])
def test_epsilon_rises_with_rounds_and_falls_with_noise_and_delta(text):
    base = guarantee(text, 2.0)
    values = [base.epsilon(t) for t in (0, 1, 2, 10, 50)]
    assert values[0] == 0
    assert values == sorted(set(values))
    assert guarantee(text, 3.0).epsilon(10) < base.epsilon(10) < guarantee(text, 1.0).epsilon(10)
    assert (
        guarantee(text, 2.0, delta=1e-3).epsilon(10) < base.epsilon(10) < guarantee(text, 2.0, delta=1e-8).epsilon(10)
    )


def test_fewer_clients_a_round_use_up_less():
    for kind, rates in (("bernoulli", ("0.05", "0.2", "0.8")), ("fixed", ("1", "4", "16"))):
        values = [guarantee(f"{kind}:{rate}", 2.0).epsilon(10) for rate in rates]
        assert values == sorted(set(values))


@pytest.mark.parametrize("where", ["server", "client"])
@pytest.mark.parametrize("text", ["fixed:3", "bernoulli:0.3"])
def test_where_cohorts_are_known_the_most_frequent_client_counts(text, where):
    known = guarantee(text, 2.0, where=where, secret=False, seed=5)
    for t in (12, 4, 30):  # in any order
        came = Counter(c for r in range(t) for c in known.participation.cohort(known.clients, 5, r))
        most = max(came.values())
        assert 0 < most < t
        assert known.epsilon(t) == guarantee("all", 2.0, where=where).epsilon(most)


def test_no_noise_is_no_guarantee():
    participation = Participation.read("all")
    assert Guarantee.of(method("fedprox"), participation, ["a"], 0) is None
    assert Guarantee.of(method("dpcentral(noise=0)"), participation, ["a"], 0) is None
    assert Guarantee.of(method("dpcentral"), participation, ["a"], 0).part == "dpcentral"


def test_what_leaves_says_what_is_protected():
    said = repr(what_leaves("dplocal(noise=2, clip=0.5) + fedbn"))
    assert "updates no longer than 0.5, noise of std 1 on each, added at the site" in said
    assert f"{guarantee('all', 2.0, where='client').epsilon(10):.3g} after 10 rounds" in said
    assert "not counted in epsilon" in said
    assert "epsilon" not in repr(what_leaves("fedbn")).lower()
    assert "no differential privacy" in repr(what_leaves("dpcentral(noise=0)"))
