"""Federations whose clients are made on demand: the bits of the same federation as a list, at the cost of a cohort."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fednorms as fn
from fednorms.core.noise import seed_of
from fednorms.core.sampling import Participation
from fednorms.data.facts import Facts
from fednorms.data.on_demand import Numbered
from fednorms.runs.store.directory import RunDirectory

CLASSES = ["cat", "dog"]
METHODS = ["fedavg", "scaffold", "fedbn"]


class Make:
    """The rule of these tests; it counts how often each client is made."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()

    def __call__(self, name: str, number: int) -> fn.Site:
        self.made[name] += 1
        draws = torch.Generator().manual_seed(number)

        def some(n: int) -> fn.Split:
            y = torch.randint(2, (n,), generator=draws)
            noise = torch.randint(100, (n, 1, 8, 8), generator=draws)
            return fn.Split((noise + 100 * y[:, None, None, None]).to(torch.uint8), y)

        return fn.Site(name, f"camera {number % 2}", some(5 + number % 2), some(2), some(4))


def crowd(clients: int, tested: int = 3) -> tuple[fn.Federation, Make]:
    make = Make()
    return fn.Federation("crowd", fn.OnDemand(make, clients, images=5.5, tested=tested), CLASSES), make


def listed(clients: int, tested: int = 3) -> fn.Federation:
    """The same federation as a list of sites."""
    sites = [Make()(name, number) for number, name in enumerate(Numbered("client", clients))]
    sites[tested:] = [replace(site, val=None, test=None) for site in sites[tested:]]
    return fn.Federation("crowd", sites, CLASSES)


def trained(method: str, federation: fn.Federation, rounds: int = 3, **given: object) -> fn.Result:
    recipe = fn.Recipe(
        training={"batch_size": 4, "lr": 0.1},
        engine="loop",
        state_limit_mb=0,
        participation="fixed:4",
        evaluate=["auto", "after_local"],
        evaluate_every=2,
    )
    return fn.run(method, federation, rounds=rounds, recipe=recipe, **given)  # type: ignore[arg-type]


def rows(result: fn.Result) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]


@pytest.mark.parametrize("method", METHODS)
def test_runs_are_those_of_the_same_federation_as_a_list(method):
    lazy, eager = trained(method, crowd(12)[0]), trained(method, listed(12))
    assert rows(lazy) == rows(eager)
    last = Participation.read("fixed:4").cohort(Numbered("client", 12), 0, 2)[-1]
    assert last not in ("client-00", "client-01", "client-02")  # it is not tested
    ours, theirs = (result.model(last).state_dict() for result in (lazy, eager))
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


@pytest.mark.parametrize("method", METHODS[1:])
def test_an_interrupted_run_ends_with_the_same_bits(method, tmp_path: Path):
    class Killed(Exception):
        pass

    def kill(event: fn.RoundEvent) -> None:
        if event.round == 2:
            raise Killed

    whole = trained(method, crowd(12)[0], out=tmp_path / "whole")
    with pytest.raises(Killed):
        trained(method, crowd(12)[0], out=tmp_path / "cut", callback=kill)
    resumed = fn.resume(tmp_path / "cut", federation=crowd(12)[0])
    assert rows(resumed) == rows(whole)
    states = [sorted((path / "checkpoints/clients").iterdir()) for path in (tmp_path / "whole", tmp_path / "cut")]
    assert [p.name for p in states[0]] == [p.name for p in states[1]]
    assert [p.read_bytes() for p in states[0]] == [p.read_bytes() for p in states[1]]


@pytest.mark.parametrize("method", METHODS)
def test_a_billion_clients_cost_as_much_as_their_cohorts(method, tmp_path: Path):
    federation, make = crowd(10**9)
    examined = set(make.made)
    result = trained(method, federation, rounds=3, out=tmp_path / "run")
    cohorts = [Participation.read("fixed:4").cohort(federation.sites.names, 0, t) for t in range(3)]  # type: ignore[attr-defined]
    tested = {site.name for site in federation.scored}
    assert set(make.made) == examined | tested | {name for cohort in cohorts for name in cohort}
    assert set(make.made.values()) <= {1, 2}  # at most once more, after `replace` has begun with an empty memory
    facts = RunDirectory(tmp_path / "run").read_facts()
    assert facts == Facts.of(federation)
    assert len(facts.clients) == 10**9
    assert set(result.scores().sites) == tested


def test_only_a_limited_number_of_clients_stays_in_memory():
    federation, make = crowd(2000, tested=1)
    before = sum(make.made.values())
    for name in [f"client-{k:04d}" for k in range(1, 1001)]:
        federation.site(name)
    assert sum(make.made.values()) - before >= 990
    assert len(federation.sites._kept) <= 257  # type: ignore[attr-defined]


def test_names_are_those_of_a_list():
    names = Numbered("client", 101)
    plain = [f"client-{k:03d}" for k in range(101)]
    assert list(names) == plain == sorted(plain)
    assert [names.index(name) for name in plain] == list(range(101))
    assert names[-1] == plain[-1]
    assert names[5:100:7] == plain[5:100:7]
    for other in ("client-101", "client-1", "client--01", "client-", "clients-001", "client-00１", 7):
        assert other not in names
        with pytest.raises(ValueError, match="not a name"):
            names.index(other)
    with pytest.raises(IndexError):
        names[101]


@pytest.mark.parametrize(
    ("text", "clients"), [("fixed:3", 30), ("fixed:0.3", 20_000), ("bernoulli:0.2", 50), ("all", 9)]
)
def test_cohorts_do_not_depend_on_how_names_are_kept(text, clients):
    names, sampler = Numbered("client", clients), Participation.read(text)
    for t in range(5):
        rng = np.random.default_rng(seed_of("cohort", 7, t))
        if sampler.kind == "fixed":
            chosen = set(rng.choice(clients, size=int(sampler.expected(clients)), replace=False).tolist())
        elif sampler.kind == "bernoulli":
            rng = np.random.default_rng(seed_of("cohort", 7, t, 0))
            chosen = {i for i, u in enumerate(rng.random(clients)) if u <= 0.2}
        else:
            chosen = set(range(clients))
        expected = [name for i, name in enumerate(names) if i in chosen]
        assert sampler.cohort(names, 7, t) == sampler.cohort(list(names), 7, t) == expected


def test_the_fingerprint_knows_size_and_content():
    def shifted(name: str, number: int) -> fn.Site:
        return replace(Make()(name, number + 1), name=name)

    same = {crowd(50)[0].fingerprint(), crowd(50)[0].fingerprint()}
    other = fn.Federation("crowd", fn.OnDemand(shifted, 50, images=5.5, tested=3), CLASSES)
    assert len({*same, crowd(51)[0].fingerprint(), crowd(50, tested=4)[0].fingerprint(), other.fingerprint()}) == 4


def test_mistakes_are_errors_before_training():
    make = Make()
    with pytest.raises(fn.BadInput, match="tested must be at most 3"):
        fn.OnDemand(make, 3, images=5, tested=4)
    with pytest.raises(fn.BadInput, match="clients must be 1 or more, got 0"):
        fn.OnDemand(make, 0, images=5)
    with pytest.raises(fn.BadInput, match=r'make\("client-0", 0\) must return a site of this name'):
        fn.Federation("f", fn.OnDemand(lambda name, number: make("me", number), 3, images=5), CLASSES)
    with pytest.raises(fn.BadInput, match="no training images"):
        fn.Federation("f", fn.OnDemand(lambda name, number: fn.Site(name, "d"), 3, images=5), CLASSES)
    with pytest.raises(fn.BadInput, match="labels must be 0 to 0"):
        fn.Federation("f", fn.OnDemand(make, 30, images=5), ["cat"])
    with pytest.raises(fn.BadInput, match=r"class is not known.* Give the class weights as numbers"):
        fn.run("fedavg", crowd(9)[0], rounds=1, recipe=fn.Recipe(class_weights="balanced"))


def test_a_client_is_checked_when_it_is_made():
    def make(name: str, number: int) -> fn.Site:
        site = Make()(name, number)
        return replace(site, train=fn.Split(site.train.x, site.train.y + 5)) if number == 10 else site

    federation = fn.Federation("f", fn.OnDemand(make, 100, images=5), CLASSES)
    with pytest.raises(fn.BadInput, match=r'client 10 of 100: site "client-10", train: labels must be 0 to 1'):
        federation.site("client-10")


def test_the_crowd_of_digits_repeats_and_never_trains_on_a_tested_digit():
    spec = "digits-crowd(clients=1000000, images=15, tested=2)"
    one, two = fn.federation(spec), fn.federation(spec)
    for name in ("client-000001", "client-654321"):
        for part, split in one.site(name).splits.items():
            assert torch.equal(split.x, two.site(name).splits[part].x)
    assert {len(site.test) for site in one.scored} == {4}
    assert one.site("client-654321").test is None
    other = fn.federation(spec, seed=1)
    assert not torch.equal(one.site("client-654321").train.x, other.site("client-654321").train.x)
    pools = one.sites.make.pools  # type: ignore[attr-defined]
    assert not set(pools["train"]) & (set(pools["test"]) | set(pools["val"]))
    assert len({site.domain for site in one.sites[:60]}) == 5
    with pytest.raises(fn.BadInput, match="images must be 1 to"):
        fn.federation("digits-crowd(images=5000)")
