"""Tests with batch statistics: shuffled batches that mix classes, the same in every round, run and engine."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.passes import LocalView, shuffled_rows
from fednorms.core.round import broadcast, own_state
from fednorms.core.states import Client, context_of
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.data.mapped import MappedImages
from fednorms.evaluation.modes import Mode, model_for
from fednorms.evaluation.scores import Tally
from fednorms.layers.hybrid_norm import HybridNorm
from tests.support.after import CLASSES, images, order_of, trained


def sorted_sites(*tests):
    """Sites "a", "b", ... with these numbers of test images, sorted by class as readers return them."""
    generator = torch.Generator().manual_seed(0)

    def split(n, k):
        y = torch.arange(n).mul(3).div(n, rounding_mode="floor")
        return Split(images(y, k, generator), y)

    sites = [Site("abc"[k], "abc"[k], split(12, k), None, split(n, k)) for k, n in enumerate(tests)]
    return Federation("sorted", sites, CLASSES, Preprocessing.centered(3))


def with_test(sites, name, test):
    changed = [Site(s.name, s.domain, s.train, None, test if s.name == name else s.test) for s in sites.sites]
    return Federation(sites.name, changed, CLASSES, sites.preprocessing)


def scores(session, state, mode):
    return session.engine.evaluate(state, Mode.read(mode), session.engine.clients).sites


def by_hand(session, tree, data, batches, *, train):
    """Score batches of rows with only a torch module."""
    module = copy.deepcopy(session.task.net.module)
    module.load_state_dict(tree)
    module.train(train)
    tally = Tally(len(CLASSES))
    with torch.no_grad():
        for rows in batches:
            tally.add(module((data.x[rows].float() / 255 - 0.5) / 0.5), data.y[rows])
    return tally.score()


@pytest.fixture
def labels_seen(monkeypatch):
    """The labels of each batch, in the order in which they are scored."""
    seen = []
    add = Tally.add
    monkeypatch.setattr(Tally, "add", lambda tally, logits, y: (seen.append(y.tolist()), add(tally, logits, y))[1])
    return seen


@pytest.mark.parametrize(("mode", "size"), [("batch", 4), ("batch:4", 4), ("batch:7", 7), ("batch:500", 500)])
def test_scores_are_those_of_shuffled_batches(mode, size):
    session, state = trained("fedavg", sites=sorted_sites(30, 41))  # training batches have four images
    found = scores(session, state, f"global/{mode}")
    for site in session.federation.clients:
        rows = order_of(site.name, len(site.test)).split(size)
        expected = by_hand(session, state.model, site.test, rows, train=True)
        assert found[site.name].recall == expected.recall
        assert found[site.name].loss == pytest.approx(expected.loss, rel=1e-6)
        assert found[site.name].samples == len(site.test)


def test_batches_of_data_sorted_by_class_mix_classes(labels_seen):
    session, state = trained("fedavg", sites=sorted_sites(96, 60))
    scores(session, state, "global/batch:16")
    assert [len(y) for y in labels_seen] == [16] * 6 + [16, 16, 16, 12]
    assert all(len(set(y)) == 3 for y in labels_seen)
    assert sorted(label for y in labels_seen[:6] for label in y) == session.federation.site("a").test.y.tolist()


def test_the_order_depends_only_on_the_sites_name_and_size(labels_seen):
    sites = sorted_sites(30, 30)
    seen = []
    for rounds, seed, method in ((1, 0, "fedavg"), (2, 0, "fedavg"), (1, 5, "fedbn")):
        session, state = trained(method, rounds, sites, seed=seed)
        labels_seen.clear()
        scores(session, state, "personal/batch")
        seen.append(copy.deepcopy(labels_seen))
    assert seen[0] == seen[1] == seen[2]
    orders = [shuffled_rows(name, n).tolist() for name, n in (("a", 30), ("b", 30), ("a", 31))]
    assert orders[0] == order_of("a", 30).tolist()
    assert orders[0] != orders[1]
    assert orders[0] != [row for row in orders[2] if row < 30]


@pytest.mark.parametrize(("other", "same_batches"), [(1, True), (-1, False)])
def test_images_that_change_places_within_a_batch_change_no_score(other, same_batches):
    sites = sorted_sites(32)
    session, state = trained("fedavg", sites=sites)
    rows = order_of("a", 32)
    places = torch.arange(32)
    places[rows[0]], places[rows[other]] = rows[other].clone(), rows[0].clone()
    again, _ = trained("fedavg", 0, with_test(sites, "a", sites.site("a").test.subset(places)))
    before, after = (scores(s, state, "global/batch")["a"] for s in (session, again))
    assert (after.loss == pytest.approx(before.loss, rel=1e-6)) is same_batches
    if same_batches:
        assert after.recall == before.recall


@pytest.mark.parametrize("mode", ["global", "personal"])
def test_stored_statistics_are_tested_in_stored_order_bit_for_bit(mode):
    session, state = trained("fedavg", sites=sorted_sites(300))  # two batches: sums depend on the order
    data = session.federation.site("a").test
    expected = by_hand(session, state.model, data, torch.arange(300).split(256), train=False)
    assert scores(session, state, mode)["a"] == expected


def untracked():
    """A network whose BatchNorm keeps no statistics; tests normalize by batch, too."""
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    layers = nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers)


def test_networks_without_stored_statistics_are_tested_in_batches_that_mix_classes(labels_seen):
    sites = sorted_sites(300, 257)
    session, state = trained("fedavg", 1, sites, model=untracked())
    found = scores(session, state, "global")
    assert [len(y) for y in labels_seen] == [256, 44, 257]  # the last of 257 images would be alone in its batch
    assert all(len(set(y)) == 3 for y in labels_seen)
    for name, sizes in (("a", (256, 44)), ("b", (257,))):
        data = sites.site(name).test
        expected = by_hand(session, state.model, data, order_of(name, len(data)).split(sizes), train=False)
        assert found[name].recall == expected.recall
        assert found[name].loss == pytest.approx(expected.loss, rel=1e-6)


def two_shades():
    """A site whose first half is black and of one class, and whose second half is white and of the other."""
    y = torch.arange(64) // 32
    x = (255 * y).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()
    return Federation("shades", [Site("a", "a", Split(x, y), None, Split(x, y))], CLASSES, Preprocessing.centered(3))


def test_statistics_estimated_from_data_sorted_by_class_see_all_classes():
    norm_first = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    session, state = trained("fedavg", 0, two_shades(), model=norm_first)
    mode = Mode.read("global/re-estimated").resolved(session.task)
    sent = broadcast(session.task, state)
    client = Client("a", session.federation.site("a").train, None)
    found, _ = model_for(session.task, sent, client, mode)
    # Batches of one class would say 0; batches of four, mixed, say 1 in expectation (pixels are -1 and 1).
    assert 0.7 < float(found["0.running_var"].mean()) < 1.4


def test_a_pass_over_data_sorted_by_class_sees_them_shuffled_in_each_round():
    norm_first = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    session, state = trained("hbn", 0, two_shades(), model=norm_first)
    task, sent = session.task, broadcast(session.task, state)
    client = Client("a", session.federation.site("a").train, None)
    seen = []
    for number in (0, 1):
        now = replace(sent, round=number)
        context = context_of(task, number, client)
        view = LocalView(task, task.method.parts[0], client, sent.model, context, now, own_state(task, now, None))
        seen.append(torch.cat([x["0"] for x in view.layer_inputs(lambda m: isinstance(m, HybridNorm))])[:, 0, 0, 0])
    batches = seen[0].view(16, 4)
    assert int((batches.amin(1) < batches.amax(1)).sum()) > 8
    assert not torch.equal(*seen)
    assert torch.equal(*(s.sort().values for s in seen))


def test_images_on_disk_are_tested_in_the_same_batches(tmp_path):
    sites = sorted_sites(30)
    test = sites.site("a").test
    np.save(tmp_path / "x.npy", test.x.numpy())
    on_disk = with_test(sites, "a", Split(MappedImages(tmp_path / "x.npy"), test.y))
    session, state = trained("fedavg", sites=sites)
    other, _ = trained("fedavg", 0, on_disk)
    assert scores(session, state, "global/batch") == scores(other, state, "global/batch")


def test_a_batch_size_is_part_of_a_modes_name():
    session, state = trained("fedavg", sites=sorted_sites(30))
    assert str(Mode.read("global/batch:032").resolved(session.task)) == "global/batch:32"
    found = session.engine.evaluate(state, Mode.read("global/batch:8"), session.engine.clients)
    assert found.label == "global/batch:8"
    assert [Mode.read(f"global/{s}").batch_size(session.task) for s in ("batch", "batch:8", "global")] == [4, 8, None]


@pytest.mark.parametrize(
    "mode", ["global/batch:", "global/batch:1", "global/batch:-4", "global/batch:x", "global/own:4"]
)
def test_sizes_that_mean_nothing_are_refused(mode):
    with pytest.raises(BadInput, match="as in global/batch:32"):
        Mode.read(mode)


def test_a_size_needs_layers_with_statistics_too():
    session, _ = trained("gn", 0)
    with pytest.raises(BadInput, match="no layer with stored statistics"):
        Mode.read("global/batch:8").resolved(session.task)
