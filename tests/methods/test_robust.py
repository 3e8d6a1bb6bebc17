"""Robust aggregation: one hostile client of five does not take the model over; honest rounds keep their identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fednorms import Recipe, resume, run
from fednorms.core.round import server_update
from fednorms.core.tree import mean
from fednorms.methods.maxweight import _cap
from fednorms.methods.registry import method
from tests.reference import robust
from tests.support.attacks import ATTACKS, SIZES, a_round, attacked, distance, flat, sent
from tests.support.tiny import Run, close, play, rounds, same, tiny_data

ROBUST = ["median", "trimmedmean", "krum", "krum(keep=3)", "normbound", "normbound(bound=0.5, relative=0)"]


def combined(text, sizes=SIZES, **settings):
    """The new model as a vector, and the clients' models as rows."""
    task, state, uploads = a_round(text, sizes, **settings)
    after = server_update(task, state, uploads).model
    return (
        flat(sent(after, task)),
        np.array([flat(sent(u.model, task)) for u in uploads]),
        flat(sent(state.model, task)),
    )


# -- breakdown --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attack", ATTACKS)
def test_one_hostile_client_takes_over_the_plain_mean(attack):
    assert distance(*a_round("fedavg"), attack) > 100


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("text", [*ROBUST, "fedbn + median", "silobn + krum(keep=2)", "fedprox + trimmedmean"])
def test_one_hostile_client_of_five_moves_the_model_no_further_than_honest_ones(text, attack):
    assert distance(*a_round(text), attack) < 1.5


@pytest.mark.parametrize("text", ["median", "trimmedmean", "krum"])
def test_two_hostile_clients_of_five_break_trimming_one_but_not_the_median(text):
    task, state, uploads = a_round(text)
    hit = attacked(task, state, attacked(task, state, uploads, ATTACKS[0]), ATTACKS[0], who=4)
    moved = sent(server_update(task, state, hit).model, task) - sent(state.model, task)
    assert (float(moved.sqnorm().sqrt()) > 100) == (text == "trimmedmean")


@pytest.mark.parametrize("text", ROBUST)
def test_a_hostile_client_does_not_spoil_a_variance_or_a_counter(text):
    task, state, uploads = a_round(text)
    after = server_update(task, state, attacked(task, state, uploads, ATTACKS[2])).model
    assert (after["norm.running_var"] >= 0).all()
    counted = "norm.num_batches_tracked"
    assert any(torch.equal(after[counted], u.model[counted]) for u in uploads)  # Krum leaves clients out
    assert after[counted].dtype == torch.int64


# -- the papers' definitions ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:4], SIZES[:3], SIZES[:2]])
def test_the_median_is_the_papers(sizes):
    found, rows, _ = combined("median", sizes)
    np.testing.assert_allclose(found, robust.median(rows), atol=1e-14)


@pytest.mark.parametrize("sizes", [SIZES, (1, 1, 2), (3, 4, 5, 2, 4), (8, 1, 1)])
def test_a_weighted_median_has_half_of_the_weight_on_either_side(sizes):
    sizes = tuple(2 * n for n in sizes)  # a batch needs two images
    found, rows, _ = combined("median", sizes, weighting="size")
    np.testing.assert_allclose(found, robust.median(rows, list(map(float, sizes))), atol=1e-14)


@pytest.mark.parametrize(("fraction", "n", "b"), [(0.2, 5, 1), (0.2, 4, 1), (0.4, 5, 2), (0.5, 4, 1), (0.01, 3, 1)])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_the_trimmed_mean_is_the_papers(fraction, n, b, weighting):
    found, rows, _ = combined(f"trimmedmean(fraction={fraction})", SIZES[:n], weighting=weighting)
    weights = None if weighting == "uniform" else list(map(float, SIZES[:n]))
    np.testing.assert_allclose(found, robust.trimmed_mean(rows, b, weights), atol=1e-14)


@pytest.mark.parametrize(("f", "keep"), [(1, 1), (1, 2), (2, 1), (0, 3), (1, 4)])
def test_krum_keeps_the_papers_clients(f, keep):
    found, rows, _ = combined(f"krum(byzantine={f}, keep={keep})")
    np.testing.assert_allclose(found, rows[robust.krum(rows, f, keep)].mean(axis=0), atol=1e-14)


def test_a_fixed_norm_bound_is_the_papers_for_parameters_and_statistics_each():
    text = "normbound(bound=0.1, relative=0)"
    task, state, uploads = a_round(text, weighting="uniform")
    after = server_update(task, state, uploads).model
    for names in (task.net.sent_params, task.net.statistics):
        start = flat(state.model.pick(names))
        rows = np.array([flat(u.model.pick(names)) - start for u in uploads])
        assert max(np.linalg.norm(rows, axis=1)) > 0.1
        np.testing.assert_allclose(flat(after.pick(names)), start + robust.bounded(rows, 0.1).mean(axis=0), atol=1e-14)


def test_a_relative_norm_bound_follows_the_median_of_the_rounds():
    """By hand: three rounds, of which the bound of the third is from the medians of all three."""
    data, medians = tiny_data(*SIZES), []
    task, state, _ = a_round("normbound(relative=1)")
    now = Run(state)
    for _ in range(3):
        before = now.server
        now = rounds(task, data, 1, run=now)
        start = flat(before.model.pick(task.net.sent_params))
        rows = np.array([flat(u.model.pick(task.net.sent_params)) - start for u in now.uploads.values()])
        medians.append(np.median(np.linalg.norm(rows, axis=1)))
        most = sorted(medians)[(len(medians) - 1) // 2]
        expected = np.average(robust.bounded(rows, most), axis=0, weights=SIZES)
        np.testing.assert_allclose(flat(now.model.pick(task.net.sent_params)), start + expected, atol=1e-13)
        np.testing.assert_allclose(now.server.parts["normbound"]["parameters"], medians, atol=1e-13)


def test_weights_are_capped_at_the_share():
    _, _, uploads = a_round("fedavg", (24, 4, 4))
    task, state, _ = a_round("maxweight(share=0.5)", (24, 4, 4))
    after = server_update(task, state, uploads).model
    assert same(after, mean([u.model for u in uploads], [8.0, 4.0, 4.0]))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_truncated_weights_have_the_largest_cap_that_keeps_the_share(share):
    generator = np.random.default_rng(0)
    for _ in range(50):
        weights = list(generator.integers(1, 100, generator.integers(1, 8)).astype(float))
        cap = _cap(weights, share)
        at, beyond = (np.minimum(weights, c) / np.minimum(weights, c).sum() for c in (cap, cap * 1.001))
        assert at.max() <= max(share, 1 / len(weights)) + 1e-12
        assert cap == max(weights) or share * len(weights) < 1 or beyond.max() > share


# -- identities -------------------------------------------------------------------------------------------------------
IDENTICAL = [
    ("trimmedmean(fraction=0)", "fedavg", "uniform"),
    ("krum(keep=5)", "fedavg", "uniform"),
    ("krum(keep=99)", "fedavg", "uniform"),
    ("maxweight(share=1)", "fedavg", None),
    ("maxweight(share=0.3)", "fedavg", None),  # the largest has 9 of 35
    ("maxweight(share=0.1)", "fedavg", "uniform"),  # below 1/n: all the same
    ("normbound(relative=1000)", "fedavg", None),
    ("normbound(bound=1000, relative=0)", "fedavg", None),
    ("normbound(relative=0)", "fedavg", None),
    ("normbound(relative=1000) + scaffold + fedbn", "scaffold + fedbn", None),
    ("krum(keep=5) + feddyn", "feddyn", "uniform"),
    ("trimmedmean(fraction=0) + fedadam", "fedadam", "uniform"),
]


@pytest.mark.parametrize(("text", "plain", "weighting"), IDENTICAL)
def test_a_part_that_does_not_act_changes_no_bit(text, plain, weighting):
    data = tiny_data(*SIZES)
    assert same(play(text, data).model, play(plain, data, weighting=weighting).model)


def test_the_median_of_three_is_what_trimming_one_leaves():
    data = tiny_data(6, 7, 8)
    close(play("median", data).model, play("trimmedmean(fraction=0.5)", data).model, atol=1e-14)


@pytest.mark.parametrize("text", ["median", "trimmedmean", "krum", "maxweight(share=0.1)", "normbound"])
def test_a_single_client_gives_back_its_model_bit_for_bit(text):
    task, state, uploads = a_round(text, (8,))
    assert same(server_update(task, state, uploads).model.pick(uploads[0].model), uploads[0].model)


@pytest.mark.parametrize(
    "text", ["median", "trimmedmean", "krum(keep=2)", "maxweight(share=0.22)", "normbound(relative=1)"]
)
def test_the_clients_names_do_not_matter(text):
    """The same uploads under other names: the order in which clients are combined changes."""
    task, state, uploads = a_round(text)
    renamed = [type(u)(name, u.weight, u.model, u.parts, u.metrics) for u, name in zip(uploads, "cebad", strict=True)]
    one, two = (sent(server_update(task, state, some).model, task) for some in (uploads, renamed))
    close(one, two, atol=1e-13)


def test_a_tiny_factor_does_not_vanish_in_single_precision():
    task, state, uploads = a_round("normbound", dtype=torch.float32)
    hit = attacked(task, state, uploads, lambda update: update * 1e30)
    moved = sent(server_update(task, state, hit).model, task)
    assert moved.finite()
    assert float((moved - sent(server_update(task, state, uploads).model, task)).sqnorm()) > 0


# -- in a run ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text", ["normbound(relative=1) + fedbn", "median + scaffold", "krum(keep=2) + fedavgm + maxweight"]
)
def test_an_interrupted_run_ends_with_the_same_bits(text, tmp_path):
    recipe = Recipe(data={"size": 8}, threads=1, engine="loop")
    settings = dict(federation="digits-shift", model="cnn-small", rounds=3, lr=0.05, recipe=recipe)
    whole = run(text, out=tmp_path / "whole", **settings)

    class Stop(Exception):
        pass

    def stop(event):
        if event.round == 1:
            raise Stop

    with pytest.raises(Stop):
        run(text, out=tmp_path / "half", callback=stop, **settings)
    again = resume(tmp_path / "half")
    assert same(whole._state.model, again._state.model)
    assert all(same(tree, again._state.parts[name]) for name, tree in whole._state.parts.items())


@pytest.mark.parametrize(
    "rival", ["trimmedmean + median", "median + dpcentral", "krum + dpcentral", "normbound + dpcentral"]
)
def test_what_cannot_be_combined_is_refused_by_name(rival):
    first, second = rival.split(" + ")
    with pytest.raises(ValueError, match=f"{first}.*{second}.*keep one of them"):
        method(rival)
