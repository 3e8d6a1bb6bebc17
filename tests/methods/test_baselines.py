"""The two baselines: every client by itself, and all data in one place."""

import torch

import fednorms as fn
from fednorms.data import Federation, Site, Split
from fednorms.methods.registry import method
from tests.support.tiny import client_model, close, play, rounds, same, tiny_data, tiny_task


def test_standalone_sends_nothing_and_the_server_never_changes():
    data = tiny_data()
    task = tiny_task("standalone", data)
    run = rounds(task, data, 2)
    assert run.uploads["a"].model == {}
    assert same(run.model, task.net.initial)


def test_a_standalone_client_does_not_depend_on_the_others():
    data = tiny_data()
    other = {**data, "b": Split(data["b"].x * 3 + 1, (data["b"].y + 1) % 3)}
    for text in ("standalone", "standalone + scaffold", "standalone + fedprox(mu=0.1)"):
        one, two = play(text, data, n=3), play(text, other, n=3)
        assert same(one.states["a"].local, two.states["a"].local)
        assert not same(one.states["b"].local, two.states["b"].local)


def test_a_standalone_client_is_fedavg_with_one_client():
    data = tiny_data(9)
    task = tiny_task("standalone", data)
    run = rounds(task, data, 3)
    assert same(client_model(task, data, run, "a"), play("fedavg", data, n=3).model)


def test_centralised_is_fedavg_with_one_client_holding_everything():
    data = tiny_data()
    sites = [Site(name, name, split, test=split) for name, split in data.items()]
    federation = Federation("f", sites, ["0", "1", "2"])
    for p in method("centralised").parts:
        federation = p.arrange(federation)
    (client,) = federation.clients
    assert client.name == "centralised"
    assert [s.name for s in federation.sites if s.test is not None] == ["a", "b", "c"]
    x, y = torch.cat([s.x for s in data.values()]), torch.cat([s.y for s in data.values()])
    pooled = {client.name: client.train}
    everything = {"centralised": Split(x, y)}
    close(play("centralised", pooled, n=2).model, play("fedavg", everything, n=2).model, atol=0)


def test_both_spellings_are_read_and_one_is_stored():
    assert str(method("Centralized + fedbn")) == "centralised + fedbn"
    assert fn.Recipe(method="centralized").method == "centralised"
    for old, new in (("Centralised", "Centralized"), ("WeightStandardisation", "WeightStandardization")):
        assert getattr(fn.methods, old) is getattr(fn.methods, new)
        assert old not in fn.methods.__all__


def test_a_custom_part_may_have_the_other_spelling(parts_as_before):
    @fn.part("centralized")
    class Mine(fn.Part):
        """Do nothing."""

    assert method("centralized").parts == (Mine(),)


def test_parts_that_do_not_arrange_keep_the_federation():
    data = tiny_data()
    federation = Federation("f", [Site(k, k, s) for k, s in data.items()], ["0", "1", "2"])
    assert method("fedbn").parts[0].arrange(federation) is federation
