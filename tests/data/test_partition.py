"""Partitions: disjoint, exhaustive, deterministic, always ending; sizes and class lists as the papers have them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.errors import BadInput
from fednorms.data import Federation, MappedImages, Preprocessing, Site, Split, from_arrays
from fednorms.data.label_rules import DirichletClass
from fednorms.data.partition import Partition, partition, plan
from fednorms.data.rules import RULES, rule, rules
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session, open_federation

rules()  # registers them


def labels(n=200, classes=10, seed=0):
    return np.random.RandomState(seed).permutation(np.arange(n) % classes)


def tiny(domains=("d0", "d1"), n=40, test=20, classes=4):
    """Every pixel encodes domain and position, which identify a sample anywhere."""
    sites = []
    for d, name in enumerate(domains):
        parts = []
        for base, count in ((0, n), (100, test)):
            x = torch.full((count, 2, 2, 2), 0, dtype=torch.uint8)
            x[:, 0] = (base + torch.arange(count)).to(torch.uint8).view(-1, 1, 1)
            x[:, 1] = d
            parts.append(Split(x, torch.arange(count) % classes))
        sites.append(Site(name, name, parts[0], test=parts[1], attributes={"scanner": name}))
    return Federation("tiny", sites, list("abcd"[:classes]), Preprocessing())


def assert_whole(shares, n):
    everything = np.concatenate(list(shares.values()))
    assert len(everything) == n
    assert (np.sort(everything) == np.arange(n)).all()


ALL = [
    "iid(clients=7)",
    "iid(clients=7, balanced=true)",
    "iid(clients=7, sigma=0.3)",
    "dirichlet_client(clients=8, beta=0.3)",
    "dirichlet_client(clients=8, beta=0.3, sigma=0.3)",
    "dirichlet(clients=8, beta=0.3)",
    "sharding(clients=20, shards=2)",
    "group_sizes(clients=10, group=2, delta=3, shards=2)",
    "even_domain_split(clients=6)",
    "one_domain_per_client",
    "heterogeneity(level=10)",
]


@pytest.mark.parametrize("text", ALL)
def test_every_rule_is_disjoint_exhaustive_and_determined_by_the_seed(text):
    y, chosen = labels(), rule(text)
    shares = chosen(y, seed=3)
    assert len(shares) == chosen.clients
    assert all(len(at) for at in shares.values())
    assert_whole(shares, len(y))
    np.random.seed(5)  # noqa: NPY002  (the global state must not matter)
    again, other = chosen(y, seed=3), chosen(y, seed=4)
    assert all((shares[k] == again[k]).all() for k in shares)
    if chosen.clients > 1 and chosen.name != "heterogeneity":
        assert any(list(shares[k]) != list(other[k]) for k in shares)
    assert rule(str(chosen)) == chosen


def test_no_rule_is_forgotten_here():
    assert set(RULES) == {text.split("(")[0] for text in ALL}


@given(st.integers(1, 12), st.floats(1e-6, 1e6), st.integers(1, 6), st.integers(0, 99))
def test_dirichlet_rules_end_and_are_whole_for_any_concentration(clients, beta, classes, seed):
    y = labels(130, classes, seed)
    assert_whole(rule(f"dirichlet(clients={clients}, beta={beta})")(y, seed), len(y))
    shares = rule(f"dirichlet_client(clients={clients}, beta={beta})")(y, seed)
    assert_whole(shares, len(y))
    assert len({len(at) for at in list(shares.values())[1:]}) <= 1


# -- the known hangs ------------------------------------------------------------------------------------------------
def test_a_minimum_that_no_draw_reaches_is_repaired(monkeypatch):
    # The public code draws again forever: 20 clients of exactly 10 samples each is not a Dirichlet draw.
    y, draw, drawn = labels(200), DirichletClass._draw, []

    def counted(self, *given):
        drawn.append(self)
        assert len(drawn) <= 101, "it draws again and again"
        return draw(self, *given)

    monkeypatch.setattr(DirichletClass, "_draw", counted)
    shares = rule("dirichlet(clients=20, beta=0.01)")(y)
    assert {len(at) for at in shares.values()} == {10}
    assert_whole(shares, 200)


def test_an_impossible_minimum_is_an_error():
    with pytest.raises(BadInput, match="21 clients of at least 10 samples need 210 samples, but there are 200"):
        rule("dirichlet(clients=21, beta=0.3)")(labels(200))
    with pytest.raises(BadInput, match="there are 3"):
        rule("iid(clients=4)")([0, 1, 0])


def test_late_clients_without_mass_on_what_is_left_do_not_wait():
    # Every client's mass is on one class to within 1e-300; most must take what they have no mass on.
    y = np.repeat(np.arange(4), [97, 1, 1, 1])
    shares = rule("dirichlet_client(clients=10, beta=0.0001)")(y)
    assert_whole(shares, 100)
    assert {len(at) for at in shares.values()} == {10}


def test_a_class_that_does_not_exist_is_never_drawn():
    y = np.array([0, 3] * 20)
    for name in ("dirichlet", "dirichlet_client"):
        assert_whole(rule(f"{name}(clients=2, beta=0.1)")(y, classes=6), 40)


# -- each rule ------------------------------------------------------------------------------------------------------
def test_balanced_iid_gives_everyone_the_same_of_each_class():
    y = labels(200, 10)
    for at in rule("iid(clients=5, balanced=true)")(y).values():
        assert (np.bincount(y[at], minlength=10) == 4).all()
    odd = [
        np.bincount(labels(203, 10)[at], minlength=10)
        for at in rule("iid(clients=5, balanced=true)")(labels(203)).values()
    ]
    assert np.ptp(np.stack(odd), axis=0).max() <= 1
    assert np.ptp([c.sum() for c in odd]) <= 1


def test_lognormal_sizes_spread_with_sigma():
    y = labels(3000)
    spread = [np.std([len(a) for a in rule(f"iid(clients=30, sigma={s})")(y).values()]) for s in (0.0, 0.3, 1.0)]
    assert spread[0] == 0 < spread[1] < spread[2]


def test_dirichlet_concentration_decides_the_skew_of_labels():
    y = labels(1000)

    def skew(beta):
        rows = [
            np.bincount(y[a], minlength=10) / len(a)
            for a in rule(f"dirichlet_client(clients=10, beta={beta})")(y).values()
        ]
        return np.abs(np.stack(rows) - 0.1).sum(1).mean()

    assert skew(0.05) > skew(0.5) > skew(50.0)


def test_dirichlet_by_class_holds_the_minimum():
    y = labels(2000)
    sizes = [len(a) for a in rule("dirichlet(clients=10, beta=0.3)")(y).values()]
    assert min(sizes) >= 10
    assert np.ptp(sizes) > 0


def test_sharding_as_the_papers_count():
    y = labels(5000)
    shares = rule("sharding(clients=100, shards=2)")(y)
    assert {len(at) for at in shares.values()} == {50}
    assert all(len(set(y[at])) <= 2 for at in shares.values())
    with pytest.raises(BadInput, match="multiple of 10"):
        rule("sharding(clients=3, shards=3)")(y)


def test_group_sizes_step_by_step_and_pairs_share_classes():
    y = labels(1000)
    shares = rule("group_sizes(clients=20, group=5, delta=10, shards=2)")(y)
    sizes = np.array([len(shares[k]) for k in range(20)])
    assert np.abs(sizes - (50 + 10 * (np.repeat([1, 2, 3, 4], 5) - 2.5))).max() <= 1
    assert all(set(y[shares[k]]) == set(y[shares[19 - k]]) for k in range(10))
    with pytest.raises(BadInput, match="ower delta"):
        rule("group_sizes(clients=20, group=5, delta=100, shards=2)")(y)


def test_the_digits_sizes_of_fedbn_and_fedwon():
    y = np.zeros(7438, np.int64)
    assert {len(a) for a in rule("even_domain_split(clients=20)")(y).values()} == {371, 372}
    assert {len(a) for a in rule("even_domain_split(clients=200)")(y).values()} == {37, 38}
    ladder = rule("heterogeneity(level=10)")(y)
    assert [len(a) for a in ladder.values()][:4] == [743, 744, 744, 744]
    assert_whole(ladder, 7438)
    assert all((rule("heterogeneity(level=3)")(y)[k] == ladder[k]).all() for k in range(3))


# -- federations ----------------------------------------------------------------------------------------------------
def seen(federation, part):
    """(domain, position) of every sample, by client."""
    return {
        s.name: {(int(x[1, 0, 0]), int(x[0, 0, 0])) for x in s.splits[part].x}
        for s in federation.clients
        if part in s.splits
    }


@pytest.mark.parametrize("text", ["iid(clients=4)", "dirichlet(clients=2, beta=0.5, within=domain)"])
def test_a_federation_keeps_every_sample_once(text):
    before = tiny()
    after = partition(before, text, seed=1)
    for part, n in (("train", 80), ("test", 40)):
        held = seen(after, part).values()
        assert sum(map(len, held)) == n
        assert set.union(*held) == set.union(*seen(before, part).values())
    assert after.fingerprint() == partition(before, text, seed=1).fingerprint()
    assert after.source["partition"]["hash"] == plan(before, text, 1).hash


def test_within_a_domain_clients_stay_in_it():
    after = partition(tiny(), "iid(clients=3, within=domain)")
    assert [s.name for s in after.sites] == ["d0-0", "d0-1", "d0-2", "d1-0", "d1-1", "d1-2"]
    for site, samples in seen(after, "train").items():
        assert {d for d, _ in samples} == {int(site[1])}
        assert after.site(site).attributes == {"scanner": site[:2]}
    assert partition(tiny(), "iid(clients=3)").domains == ("mixed",)


def test_sharded_tests_have_the_classes_that_were_trained():
    after = partition(tiny(("d",), n=80, test=32), "sharding(clients=8, shards=2)")
    for site in after.clients:
        assert set(site.train.y.tolist()) == set(site.test.y.tolist())
        assert len(site.train) == 10
        assert len(site.test) == 4


def test_personal_tests_have_the_mix_that_was_trained():
    before = tiny(("d",), n=80, test=40)
    after = partition(before, "dirichlet(clients=4, beta=0.3, test=personal)")
    for site in after.clients:
        trained, tested = (torch.bincount(s.y, minlength=4) for s in (site.train, site.test))
        assert torch.equal(tested, trained.clamp(max=10))
        assert len(seen(after, "test")[site.name]) == len(site.test)


def test_whole_tests_are_shared_and_not_copied():
    before = tiny()
    after = partition(before, "heterogeneity(level=2, parts=4)")
    assert [len(s.train) for s in after.clients] == [10] * 4
    assert all(s.test is before.site(s.domain).test for s in after.clients)


def test_unseen_sites_stay():
    after = partition(tiny().hold_out("d1"), "iid(clients=2)")
    assert [s.name for s in after.unseen] == ["d1"]
    assert len(after.clients) == 2


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_a_saved_partition_gives_the_same_federation(tmp_path, suffix):
    before, text = tiny(), "dirichlet(clients=4, beta=0.5)"
    made, file = plan(before, text, 2), tmp_path / f"p.{suffix}"
    assert made.save(file) == made.hash == Partition.load(file).hash
    assert partition(before, f"file:{file}").fingerprint() == partition(before, text, 2).fingerprint()
    with pytest.raises(BadInput, match=r"was made for 80 train, 40 test, but .* 60 train"):
        partition(tiny(n=30), file)


def test_damaged_partitions_are_refused(tmp_path):
    file = tmp_path / "p.json"
    plan(tiny(), "iid(clients=2)").save(file)
    changed = json.loads(file.read_text())
    changed["clients"][0]["train"][0] += 1
    file.write_text(json.dumps(changed))
    with pytest.raises(BadInput, match="changed or damaged"):
        Partition.load(file)
    for name, content in (("p.npz", b"PK\x03\x04 no archive"), ("q.json", b"{"), ("r.json", b"[1]")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match="annot read"):
            Partition.load(tmp_path / name)
    with pytest.raises(BadInput, match="annot read"):
        Partition.load(tmp_path / "none.json")
    with pytest.raises(BadInput, match=r"\.json or \.npz"):
        plan(tiny(), "iid(clients=2)").save(tmp_path / "p.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichlet(beta=0)", "beta must be a number > 0"),
        ("dirichlet(alpha=1)", 'no option "alpha"'),
        ("shards(clients=2)", "Known: dirichlet"),
        ("iid(3)", "Cannot read"),
        ("iid(clients=", "Cannot read"),
        ("iid(clients=2.5)", "must be an integer"),
        ("iid(within=site)", "one of 'all', 'domain'"),
        ("iid + iid", "Cannot read"),
    ],
)
def test_mistakes_in_a_rule_are_explained(text, message):
    with pytest.raises(BadInput, match=message):
        rule(text)


def test_alike_needs_a_class_list():
    with pytest.raises(BadInput, match="needs a rule with a class list"):
        partition(tiny(), "iid(clients=2, test=alike)")


def test_a_recipe_divides_its_federation():
    recipe = Recipe(data={"partition": "iid(clients=2,within=domain)", "hold_out": ["foggy"]})
    assert recipe.data.partition == "iid(clients=2, within='domain')"
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    found = open_federation(recipe)
    assert Session.open(recipe).facts.partition["hash"] == found.source["partition"]["hash"]
    assert len(found.clients) == 8
    assert [s.name for s in found.unseen] == ["foggy"]
    with pytest.raises(BadInput, match='Unknown partition "lda"'):
        Recipe.make({"data": {"partition": "lda(beta=1)"}})
    with pytest.raises(BadInput, match="cannot divide a custom federation"):
        Session.open(Recipe(federation="custom:mine", data={"partition": "iid(clients=2)"}), tiny())


def test_images_on_disk_stay_there(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(40 * 12, dtype=np.int64).astype(np.uint8).reshape(40, 3, 2, 2))
    y = torch.arange(40) % 4
    sites = [
        Site(n, n, Split(MappedImages(path, at), y[at])) for n, at in (("a", np.arange(20)), ("b", np.arange(20, 40)))
    ]
    before = Federation("mapped", sites, list("abcd"), Preprocessing())
    after = partition(before, "iid(clients=3)")
    assert all(isinstance(s.train.x, MappedImages) for s in after.clients)
    rows = np.concatenate([s.train.x.rows for s in after.clients])
    assert (np.sort(rows) == np.arange(40)).all()
    assert all((s.train.x.rows % 4 == s.train.y.numpy()).all() for s in after.clients)


def test_heterogeneity_of_data_sorted_by_class_is_noted():
    x, y = np.zeros((60, 2, 2), np.uint8), np.repeat(np.arange(6), 10)
    order = np.random.RandomState(0).permutation(60)
    for labels, expected in ((y, 1), (y[order], 0)):
        made = from_arrays({"a": {"train": (x, labels)}, "b": {"train": (x, labels)}})
        notes = partition(made, "heterogeneity(level=6, parts=6)").source.get("notes", [])
        assert sum("sorted by class" in note for note in notes) == expected
    made = from_arrays({"a": {"train": (x, y)}})
    assert not partition(made, "sharding(clients=6, shards=1)").source.get("notes", []), "one class is what it says"
