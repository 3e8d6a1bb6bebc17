"""What holds for every engine: one interface, one table of abilities, states that are passed on."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import PROVIDES, Engine, EngineSettings
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.engines.many_devices import Devices
from fednorms.engines.open import open_engine
from fednorms.engines.states import InMemory
from fednorms.engines.workers import Workers
from fednorms.engines.workers.auto import Auto
from fednorms.evaluation.modes import Mode
from tests.support.tiny import CLASSES, same, tiny_data, tiny_net, tiny_task

KINDS = (Loop, Graphs, Workers, Auto)


def setting(kind, text="fedbn"):
    data = tiny_data(6, 8)
    sites = [Site(n, f"domain of {n}", train=s, test=s if n == "a" else None) for n, s in data.items()]
    new = Split(data["a"].x, data["a"].y)
    fed = Federation(
        "tiny", [*sites, Site("new", "new", test=new)], [str(c) for c in range(CLASSES)], Preprocessing.centered(3)
    )
    task = tiny_task(text, data, model=tiny_net())
    return task, kind(task, fed, fed, InMemory(), EngineSettings(workers=1))


def test_every_engine_has_its_abilities_in_the_table():
    assert {kind.name for kind in (*KINDS, Devices)} == set(PROVIDES) - {"flower"}
    with pytest.raises(TypeError, match="abstract"):
        Engine(None)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_sites_and_sizes(kind):
    _, engine = setting(kind)
    assert engine.clients == ["a", "b"]
    assert [engine.samples(n) for n in engine.clients] == [6, 8]
    assert engine.tested("test") == {"a": "domain of a"}
    assert engine.tested("test", unseen=True) == {"new": "new"}
    assert engine.tested("val") == {}


@pytest.mark.parametrize("kind", KINDS)
def test_client_states_are_handed_over_and_come_back(kind):
    task, engine = setting(kind)
    state = initial_state(task)
    engine.use(InMemory())
    before = engine.store
    other = InMemory({"a": ClientState(3, Tree(w=torch.ones(1)), {})})
    with engine.using(other):
        assert engine.store is other
    assert engine.store is before
    with pytest.raises(AttributeError):
        engine.store = other
    with engine.using(InMemory()):
        first = engine.train(broadcast(task, state), engine.clients).uploads
    assert not list(before)
    again = engine.train(broadcast(task, state), engine.clients).uploads
    assert all(same(x.model, y.model) for x, y in zip(first, again, strict=True))
    assert list(before) == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_engine_still_trains_in_this_process(kind):
    task, engine = setting(kind)
    sent = broadcast(task, initial_state(task))
    engine.train(sent, engine.clients)
    engine.close()
    for _ in range(2):
        assert len(engine.train(sent, engine.clients).uploads) == 2


def test_a_test_without_data_is_none_and_costs_nothing(monkeypatch):
    task, engine = setting(Loop, "hbn")
    state = engine.setup(initial_state(task))
    state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    assert list(engine.evaluate(state, Mode("unseen"), engine.clients).sites) == ["new"]
    monkeypatch.setattr(Loop, "measure", None)
    assert engine.evaluate(state, Mode("personal"), engine.clients, "val") is None
    with pytest.raises(BadInput, match="while a run trains"):
        engine.evaluate(state, Mode("after_local"), engine.clients)


def test_engines_are_opened_by_name():
    task, loop = setting(Loop)
    fed = loop.local.testing
    for name, kind in {"loop": Loop, "graphs": Graphs, "workers": Workers, "auto": Auto}.items():
        assert type(open_engine(name, task, fed, fed, InMemory(), EngineSettings())) is kind


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: replace(u, model=u.model.map(lambda t: t.unsqueeze(0))), "sent .* as .*, expected "),
        (lambda u: replace(u, model=u.model.map(torch.Tensor.half)), "sent .* as .*, expected "),
        (lambda u: replace(u, parts={"stranger": Tree()}), 'sent an upload of "stranger"'),
    ],
)
def test_a_simulation_checks_the_form_of_uploads(change, words):
    task, engine = setting(Loop)
    with closing(engine):
        state = initial_state(task)
        done = engine.train(broadcast(task, state), ["a", "b"])
        assert engine.average(state, done).round == 1
        done.uploads[1] = change(done.uploads[1])
        with pytest.raises(BadInput, match=f'Client "b" {words}'):
            engine.average(state, done)


def _changed(upload, part, name, change):
    tree = upload.parts[part]
    return replace(upload, parts={**upload.parts, part: Tree({**tree, name: change(tree[name])})})


def _variance(upload):
    name = next(n for n in upload.model if n.endswith("running_var"))
    return replace(upload, model=Tree({**upload.model, name: upload.model[name] - 100}))


def _counter(upload):
    name = next(n for n in upload.model if n.endswith("num_batches_tracked"))
    return replace(upload, model=Tree({**upload.model, name: upload.model[name] - 100}))


VALUES = {
    "a negative variance": ("fedavg", _variance, r"sent .*running_var, a variance, with negative entries"),
    "a negative counter": ("fedavg", _counter, r"sent .*num_batches_tracked, a counter, with negative entries"),
    "a negative entry that a part declares": (
        "fedproto",
        lambda u: _changed(u, "fedproto", "count", lambda t: t - 100),
        "sent fedproto/count with negative entries",
    ),
    "more images than there are": (
        "fedproto",
        lambda u: _changed(u, "fedproto", "count", lambda t: t + 100),
        "sent fedproto/count for more than its 8 training images",
    ),
    "not finite": (
        "scaffold",
        lambda u: replace(u, parts={"scaffold": u.parts["scaffold"].map(lambda t: t * float("nan"))}),
        "sent scaffold/.*, which is not finite",
    ),
    "another form than most": (
        "scaffold",
        lambda u: replace(u, parts={"scaffold": u.parts["scaffold"].map(lambda t: t.unsqueeze(0))}),
        "sent .* of shape .*, most sites send ",
    ),
}


@pytest.mark.parametrize("kind", [Loop, Graphs, Workers])
@pytest.mark.parametrize("case", VALUES)
def test_a_simulation_checks_the_values_of_uploads_as_a_deployment_does(case, kind):
    text, change, words = VALUES[case]
    task, engine = setting(kind, text)
    with closing(engine):
        state = engine.setup(initial_state(task))
        done = engine.train(broadcast(task, state), ["a", "b"])
        done.uploads[1] = change(done.uploads[1])
        with pytest.raises(BadInput, match=f'Client "b" {words}'):
            engine.average(state, done)


@pytest.mark.parametrize("kind", [Loop, Graphs, Workers])
def test_a_simulation_checks_what_extra_passes_measure(kind, monkeypatch):
    task, engine = setting(kind, "fedrdn")
    measure = kind.measure

    def negative(self, p, job, sent, names):
        found = measure(self, p, job, sent, names)
        kept, up = found["b"]
        return {**found, "b": (kept, Tree({**up, "std": -up["std"]}))}

    monkeypatch.setattr(kind, "measure", negative)
    with closing(engine), pytest.raises(BadInput, match='Client "b" sent fedrdn/std with negative entries'):
        engine.setup(initial_state(task))


def test_a_simulation_lets_a_run_diverge():
    """Lengths are not compared there: a run that diverges is a result."""
    task, engine = setting(Loop, "fedavg")
    with closing(engine):
        state = initial_state(task)
        done = engine.train(broadcast(task, state), ["a", "b"])
        long = {n: t * 1e9 if t.is_floating_point() else t for n, t in done.uploads[1].model.items()}
        done.uploads[1] = replace(done.uploads[1], model=Tree(long))
        assert engine.average(state, done).round == 1
