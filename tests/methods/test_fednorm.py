"""FedNorm: one set of normalization tensors per modality."""

import dataclasses

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.part import Route
from fednorms.core.round import broadcast, server_update
from fednorms.data import Federation
from fednorms.evaluation.modes import Mode
from fednorms.runs.use.choose import choose
from tests.support.after import federation, trained
from tests.support.tiny import close, same, tiny_data, tiny_net, tiny_task

SETTINGS = {"precision": "float64"}


def sites(**modality: str) -> Federation:
    """The tiny federation with a modality for some of its sites."""
    given = federation()
    named = [
        dataclasses.replace(s, attributes={"modality": modality[s.name]} if s.name in modality else {})
        for s in given.sites
    ]
    return Federation(given.name, named, given.classes, given.preprocessing)


def of(state, modality):
    """The norm tensors that the server keeps for a modality."""
    kept = state.parts["fednorm"]
    return {k.rsplit("@", 1)[0]: v for k, v in kept.items() if k.rsplit("@", 1)[1] == modality}


def test_one_modality_is_fedavg_bit_for_bit():
    session, state = trained("fednorm", sites=sites(a="CT", b="CT", c="CT", u="CT"), **SETTINGS)
    _, plain = trained("fedavg", **SETTINGS)
    assert same({**state.model, **of(state, "CT")}, plain.model)
    one, other = (
        s.engine.evaluate(t, Mode("global"), "abc") for s, t in ((session, state), trained("fedavg", **SETTINGS))
    )
    assert one.sites == other.sites


def test_one_client_per_modality_is_fedbn():
    data = sites(a="CT", b="MRI", c="X-ray", u="CT")
    _, state = trained("fednorm", sites=data, weighting="uniform", **SETTINGS)
    session, fedbn = trained("fedbn", **SETTINGS)
    for site, modality in (("a", "CT"), ("b", "MRI"), ("c", "X-ray")):
        assert same(of(state, modality), dict(session.engine.store[site].local))
    shared = [n for n, r in session.task.net.routes.items() if r is Route.SHARED]
    assert same({n: state.model[n] for n in shared}, {n: fedbn.model[n] for n in shared})


def test_a_modality_is_averaged_by_size_over_its_clients():
    data = sites(a="CT", b="MRI", c="CT", u="CT")
    session, state = trained("fednorm", n=0, sites=data, **SETTINGS)
    uploads = session.engine.train(broadcast(session.task, state), list("abc")).uploads
    after = server_update(session.task, state, uploads)
    ups = {u.client: u.parts["fednorm"] for u in uploads}
    for name, tensor in of(after, "CT").items():
        if tensor.is_floating_point():
            wanted = (12 * ups["a"][f"{name}@CT"] + 16 * ups["c"][f"{name}@CT"]) / 28
            torch.testing.assert_close(tensor, wanted, atol=1e-13, rtol=0)
    assert same(of(after, "MRI"), {k.rsplit("@", 1)[0]: v for k, v in ups["b"].items()})
    mean = sum(n * u.model["conv1.weight"] for n, u in zip((12, 13, 16), uploads, strict=True)) / 41
    torch.testing.assert_close(after.model["conv1.weight"], mean, atol=1e-13, rtol=0)


def test_an_absent_modality_keeps_its_tensors():
    data = sites(a="CT", b="MRI", c="CT", u="CT")
    session, state = trained("fednorm", n=1, sites=data, **SETTINGS)
    uploads = session.engine.train(broadcast(session.task, state), ["a", "c"]).uploads
    after = server_update(session.task, state, uploads)
    assert same(of(after, "MRI"), of(state, "MRI"))
    assert not same(of(after, "CT"), of(state, "CT"))


def test_norm_parameters_train_and_clients_keep_nothing():
    session, state = trained("fednorm", sites=sites(a="CT", b="MRI", c="CT", u="MRI"), **SETTINGS)
    net = session.task.net
    assert {net.routes[n].name for n in net.routes if n.split(".")[0] in ("norm1", "norm2", "norm3")} == {"OWNED"}
    assert not torch.equal(of(state, "CT")["norm1.weight"], net.initial["norm1.weight"])
    assert not torch.equal(of(state, "CT")["norm1.weight"], of(state, "MRI")["norm1.weight"])
    assert not any(session.engine.store.get(n) and session.engine.store[n].local for n in "abc")


def test_an_unseen_site_is_tested_with_its_modality():
    tested = {}
    for modality in ("CT", "MRI"):
        session, state = trained("fednorm", sites=sites(a="CT", b="MRI", c="CT", u=modality), **SETTINGS)
        tested[modality] = choose(session.task, session.facts, session.engine.test_broadcast(state, []), {}, "u")
        for name, tensor in of(state, modality).items():
            assert torch.equal(tested[modality].tensors[name], tensor)
        assert session.engine.evaluate(state, Mode("unseen"), "abc").sites["u"].samples == 9


def test_sites_without_the_attribute_are_named_at_once():
    with pytest.raises(BadInput, match=r'"modality" of every site.*: c, u\.'):
        trained("fednorm", n=0, sites=sites(a="CT", b="MRI"), **SETTINGS)


def test_a_model_without_a_modality_is_refused():
    session, state = trained("fednorm", sites=sites(a="CT", b="MRI", c="CT", u="CT"), **SETTINGS)
    with pytest.raises(BadInput, match=r"one model per modality \(CT, MRI\)"):
        choose(session.task, session.facts, session.engine.test_broadcast(state, []), {}, None)


def test_what_another_part_keeps_local_is_not_averaged():
    # SiloBN keeps the statistics: only gamma and beta are left per modality.
    task = tiny_task("silobn + fednorm", tiny_data())
    assert task.net.owned_by["fednorm"] == ("norm.weight", "norm.bias")
    with pytest.raises(BadInput, match="fednorm has nothing to act on"):
        tiny_task("fedbn + fednorm", tiny_data())
    with pytest.raises(BadInput, match="both own"):
        tiny_task("fbn + fednorm", tiny_data())


def test_group_norm_is_kept_per_modality_too():
    net = tiny_task("gn(groups=2) + fednorm", tiny_data(), model=tiny_net()).net
    assert net.owned_by["fednorm"] == ("norm.weight", "norm.bias")
    close(net.initial, tiny_task("gn(groups=2)", tiny_data()).net.initial, atol=0)
