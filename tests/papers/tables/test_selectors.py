"""Column selectors against numbers computed by hand, from scores as the driver writes them to the stored form."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.data.facts import SiteFacts
from fednorms.evaluation.scores import Scores, SiteScore, Tally
from fednorms.papers.tables.record import MOST_SITES, compact, record
from fednorms.papers.tables.selectors import Selector
from fednorms.runs.cells import Outcome
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result

# Three clients of two domains: accuracy, balanced accuracy, images.
SITES = {"a1": (0.9, 0.8, 10), "a2": (0.7, 0.6, 30), "b1": (0.5, 0.1, 60)}
DOMAINS = {"a1": "a", "a2": "a", "b1": "b", "c1": "c"}
IMAGES = {"a1": 10, "a2": 30, "b1": 60, "c1": 8}


def facts(domains, images):
    """Sites with these numbers of images, half of them of each class."""
    half = {name: [n // 2, n // 2] for name, n in images.items()}
    return {name: SiteFacts(name, d, images={"test": half[name], "val": half[name]}) for name, d in domains.items()}


def scores(name, sites, domains=DOMAINS):
    return Scores(*name.split("/"), {k: SiteScore(a, b, 1.0, m, [b, b]) for k, (a, b, m) in sites.items()}, domains)


def moved(by):
    return {name: (a + by, b + by, n) for name, (a, b, n) in SITES.items()}


def row(t, by, val, seconds):
    """A row of metrics, as the driver writes it."""
    tested = {"global/global/test": moved(by), "unseen/global/test": {"c1": (0.25 + by, 0.2, 8)}}
    tested["global/global/val"] = {"a1": (val, val, 10)}
    cost = {"clients": 2, "bytes_up": 100, "bytes_down": 300, "seconds": seconds}
    return {"round": t, **cost, "scores": {name: scores(name, sites).to_dict() for name, sites in tested.items()}}


def outcome(history, domains, best=None):
    return Outcome.of("x", Result("fedavg", Recipe(), "global/global", history, best, domain_of=domains))


@pytest.fixture
def run():
    history = [row(1, -0.2, 0.3, 9.0), row(2, -0.1, 0.8, 1.0), row(3, 0.1, 0.2, 2.0), row(4, 0.0, 0.7, 2.0)]
    ended = outcome(history, DOMAINS, {"round": 2, "val": 0.8})
    return record(ended, Recipe(), facts(DOMAINS, IMAGES), curve=True, about={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mean", 70.0),
        ("pooled", 100 * (0.9 * 10 + 0.7 * 30 + 0.5 * 60) / 100),
        ("domain:a", 100 * (0.9 * 10 + 0.7 * 30) / 40),
        ("domain:b", 50.0),
        ("domain-mean", 62.5),
        ("domains:a,b", 62.5),
        ("domains: b", 50.0),
        ("site:a2", 70.0),
        ("worst", 50.0),
        ("spread", 100 * sqrt((0.04 + 0 + 0.04) / 3)),
        ("balanced mean", 50.0),
        ("balanced domain:a", 100 * (0.8 * 10 + 0.6 * 30) / 40),
        ("balanced worst", 10.0),
        ("mean@global", 70.0),
        ("mean@global/global", 70.0),
        ("domain:c@unseen", 25.0),
        ("mean@unseen", 25.0),
        ("seconds", 2.0),
        ("bytes", 200.0),
        ("rounds-to:0.6", 2.0),
        ("rounds-to:0.95", None),
        ("rounds-to:0.6,2", 2.0),
        ("rounds-to:0.75,2", None),  # the last round falls back
        ("peak:mean", 80.0),
        ("peak:pooled", 100 * (0.9 * 10 + 0.7 * 30 + 0.5 * 60) / 100 + 10),
        ("peak:mean@unseen", 35.0),
        ("peak:mean@adapted", None),
        ("domain:c", None),  # not among the clients
        ("mean@adapted", None),
        ("mean@global/batch", None),
        ("site:zz", None),
    ],
)
def test_against_numbers_by_hand(run, text, expected):
    found = Selector.read(text).value(run)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-3))


def test_the_best_validation_round_is_reported_when_the_table_says_so(run):
    assert Selector.read("mean").value(run, "best-val") == pytest.approx(60.0)
    assert run["best"]["round"] == 2
    without = run | {"best": None}
    assert Selector.read("mean").value(without, "best-val") == pytest.approx(70.0)


def test_the_highest_pooled_accuracy_is_unknown_if_a_file_has_only_means(run):
    old = run | {"curve": {mode: [point[:2] for point in curve] for mode, curve in run["curve"].items()}}
    assert Selector.read("peak:pooled").value(old) is None
    assert Selector.read("peak:mean").value(old) == pytest.approx(80.0)
    assert Selector.read("rounds-to:0.6").value(old) == 2.0


def test_many_sites_are_kept_as_domains_only():
    many = {f"s{i}": (0.01 * i, 0.5, 4) for i in range(MOST_SITES + 1)}
    domains = {name: "odd" if int(name[1:]) % 2 else "even" for name in many}
    tested = {"global/global/test": scores("global/global/test", many, domains).to_dict()}
    history = [row(1, 0.0, 0.5, 1.0) | {"scores": tested}]
    sites = facts(domains, dict.fromkeys(many, 4))
    kept = record(outcome(history, domains), Recipe(), sites, curve=False, about={})
    assert "sites" not in kept["last"]["global/global"]
    assert "curve" not in kept
    assert Selector.read("domain:even").value(kept) == pytest.approx(10.0)
    assert Selector.read("domain:odd").value(kept) == pytest.approx(10.0)
    assert Selector.read("worst").value(kept) == pytest.approx(0.0)


def test_a_domain_is_scored_as_its_images_at_one_site_would_be():
    generator = torch.Generator().manual_seed(0)
    classes, sizes = 4, {"a1": 5, "a2": 40, "b1": 9, "b2": 1, "b3": 30}
    y = {name: torch.randint(0, classes - (name[0] == "a"), (n,), generator=generator) for name, n in sizes.items()}
    logits = {name: torch.randn(n, classes, generator=generator) for name, n in sizes.items()}

    def score(*names):
        tally = Tally(classes)
        tally.add(torch.cat([logits[n] for n in names]), torch.cat([y[n] for n in names]))
        return tally.score()

    sites = {n: SiteFacts(n, n[0], images={"test": torch.bincount(y[n], minlength=classes).tolist()}) for n in sizes}
    found = Scores("global", "global", "test", {n: score(n) for n in sizes}, {n: n[0] for n in sizes})
    stored = compact(found, sites)
    for domain in "ab":
        whole = score(*(n for n in sizes if n[0] == domain))
        assert stored["domains"][domain]["balanced"] == pytest.approx(whole.balanced_accuracy, abs=1e-6)
        assert stored["domains"][domain]["accuracy"] == pytest.approx(whole.accuracy, abs=1e-6)
        assert stored["domains"][domain]["images"] == whole.samples
    assert stored["sites"]["b2"]["balanced"] == score("b2").balanced_accuracy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("avg", "Known: bytes"),
        ("domain:", "after a colon"),
        ("domain:a,b", "domains:"),
        ("mean:a", "takes no name"),
        ("rounds-to:80", "between 0 and 1"),
        ("rounds-to:0.8,x", "rounds-to:0.8,3"),
        ("rounds-to:0.8,3,1", "rounds-to:0.8,3"),
        ("balanced seconds", "no balanced form"),
        ("peak:", 'as in "peak:mean"'),
        ("peak:worst", "peak:pooled"),
        ("peak:mean,pooled", "takes one name"),
        ("balanced peak:mean", "no balanced form"),
        ("balanced pooled", "no balanced form"),
        ("seconds@global", "evaluation mode"),
        ("mean@", "evaluation mode"),
        ("mean@own", "Unknown evaluation mode"),
    ],
)
def test_what_selects_nothing_is_an_error(text, words):
    with pytest.raises(BadInput, match=words):
        Selector.read(text)


def test_names_that_the_data_do_not_have_are_found_before_anything_runs():
    assert not Selector.read("domains:a,b").missing(DOMAINS)
    [text] = Selector.read("domains:a,bb").missing(DOMAINS)
    assert 'did you mean "b"' in text or "Known: a, b, c" in text
    assert Selector.read("site:a").missing(DOMAINS)
    assert not Selector.read("worst").missing(DOMAINS)
