"""A federation without its data: from a federation, from JSON, and merged from single sites."""

import json
from dataclasses import replace

import torch

from fednorms.data import Federation, Protocol, Site, Split
from fednorms.data.facts import Facts, SiteFacts


def tiny():
    def split(*labels):
        return Split(torch.zeros(len(labels), 1, 4, 4), torch.tensor(labels))

    sites = [
        Site("b", "B", split(0, 0, 1), attributes={"vendor": "x"}),
        Site("a", "A", split(1)),
        Site("u", "U", test=split(0)),
    ]
    return Federation("tiny", sites, ["cat", "dog"], protocol=Protocol("flip"))


def test_facts_describe_a_federation_and_survive_json():
    facts = Facts.of(tiny())
    assert (facts.clients, facts.samples, facts.unseen, facts.dtype) == (("a", "b"), 4, ("u",), "float32")
    assert facts.class_counts == [2, 2]
    assert facts.domain_of == {"b": "B", "a": "A", "u": "U"}
    assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


def test_facts_name_the_clients_that_a_method_arranged():
    facts = Facts.of(tiny(), tiny().pooled("pool"))
    assert (facts.clients, facts.samples) == (("pool",), 4)
    assert [site.name for site in facts.sites] == ["b", "a", "u"]


def test_facts_of_single_sites_are_merged():
    whole = tiny()
    known = {site.name: Facts.of(replace(whole, sites=[site])) for site in whole.clients}
    merged = Facts.merged("all", known, ["a", "b", "late"])
    assert (merged.name, merged.clients, merged.samples) == ("all", ("a", "b", "late"), 4)
    assert merged.sites[2] == SiteFacts("late", "late")
    assert merged.class_counts == [2, 2]
    assert merged.protocol == whole.protocol
