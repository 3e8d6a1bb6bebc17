"""One table over everything `names()` lists: text, pickles, types, purity, privacy, restoring."""

import copy
import dataclasses
import pickle

import pytest
import torch

from fednorms.core.net import Net
from fednorms.core.part import REGISTRY, SUMS
from fednorms.core.round import broadcast, initial_state, local_update, server_update
from fednorms.core.states import Client
from fednorms.methods.registry import load_all, method, names
from tests.support.tiny import Run, play, rounds, same, setup, tiny_data, tiny_net, tiny_task

load_all()
NAMES = [n for n in names() if n not in REGISTRY or REGISTRY[n].__module__.startswith("fednorms.methods.")]
COMBINED = [
    "scaffold + greg + fedfn",
    "fedprox(mu=0.1) + fedbn + agc",
    "fedexp + fedbabu + scaffold",
    "mixbn(kind=learned) + scaffold(option=I)",
    "mixbn(kind=ensemble) + fedfr",
    "perfedavg(variant=hessian_free) + silobn",
    "fednn + scaffold(control=difference)",
    "fedrdn + hbn + fedrep(head_epochs=1)",
    "fedbn(upload=true) + spherefed",
    "partialfed(strategy=adaptive) + silobn",
    "moon(projection=5) + fedper",
    "greg + fedfa(after=pool)",
    "fedplvm + greg",
    "ditto + scaffold + fedrdn",
    "fraug(distance=mmd) + fedprox",
    "normbound(relative=0.5) + median + fedbn",
    "krum + maxweight(share=0.4) + scaffold",
]
# Options for the tiny network: FedWon's rule needs at least 8 channels, FedRep's ten epochs take time.
FITTING = {
    "gn": "gn(groups=2)",
    "fedrep": "fedrep(head_epochs=1)",
    "fedfa": "fedfa(after=pool)",
    "fedwsq": "fedwsq(first=true)",
}
TEXTS = [FITTING.get(n, n) for n in NAMES] + COMBINED


def tensors(thing):
    """Every tensor inside nested dataclasses, dictionaries and lists."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for v in thing.values():
            yield from tensors(v)
    elif isinstance(thing, (list, tuple)):
        for v in thing:
            yield from tensors(v)
    elif dataclasses.is_dataclass(thing):
        for f in dataclasses.fields(thing):
            yield from tensors(getattr(thing, f.name))


class Untouched:
    """Check that inside this context no given value changes and no tensor of theirs is written to."""

    def __init__(self, *things):
        self.found = [t for thing in things for t in tensors(thing)]

    def __enter__(self):
        self.before = [(t.clone(), t._version, t.requires_grad) for t in self.found]

    def __exit__(self, kind, error, trace):
        if kind is None:
            for t, (value, version, grad) in zip(self.found, self.before, strict=True):
                assert torch.equal(t, value)
                assert t._version == version
                assert t.requires_grad == grad


def started(text, n=1, dtype=torch.float64, **settings):
    """A task with its data after `n` rounds, when every state exists."""
    data = tiny_data(7, 6)
    task = tiny_task(text, data, dtype=dtype, **settings)
    return task, data, rounds(task, data, n)


# -- text and pickles -----------------------------------------------------------------------------------------------
def changed(cls):
    """A part with every option off its default."""
    new = {}
    for f in dataclasses.fields(cls):
        if f.metadata["choices"]:
            new[f.name] = next(c for c in f.metadata["choices"] if c != f.default)
        elif type(f.default) is bool:
            new[f.name] = not f.default
        elif type(f.default) is str:
            new[f.name] = "body.0, pool"
        elif type(f.default) is int:
            new[f.name] = f.default + 1
        else:
            high = f.metadata["at_most"]
            new[f.name] = (f.default or 0.0) / 3 + 0.01 if high is None else (f.default + high) / 2
            if new[f.name] == f.default:
                new[f.name] = f.default / 2
    return cls(**new)


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_pickle_round_trips(text):
    m = method(text)
    assert method(str(m)) == m == pickle.loads(pickle.dumps(m)) == copy.deepcopy(m)
    assert repr(m) == f"method({str(m)!r})"


@pytest.mark.parametrize("name", sorted(n for n in NAMES if n in REGISTRY))
def test_changed_options_survive_text_and_pickle(name):
    default, other = REGISTRY[name](), changed(REGISTRY[name])
    for f in dataclasses.fields(other):
        assert getattr(other, f.name) != getattr(default, f.name)
    for p in (default, other):
        assert method(str(p)).parts == (p,)
        assert pickle.loads(pickle.dumps(p)) == p
        assert hash(pickle.loads(pickle.dumps(p))) == hash(p)


@pytest.mark.parametrize("name", sorted(SUMS))
def test_sums_are_made_of_registered_parts(name):
    assert all(type(p) in REGISTRY.values() for p in SUMS[name]())


# -- types ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", TEXTS)
def test_types_are_kept_and_counters_stay_integers(text, dtype):
    task, _, run = started(text, n=2, dtype=dtype)
    start = task.net.initial
    for tree in (run.model, *(s.local for s in run.states.values()), *(u.model for u in run.uploads.values())):
        for name, tensor in tree.items():
            assert tensor.dtype == start[name].dtype
            assert tensor.shape == start[name].shape
            assert not tensor.requires_grad
    states = [t for s in run.states.values() for t in s.parts.values()] + list(run.server.parts.values())
    assert {t.dtype for tree in states for t in tree.values()} <= {dtype, torch.int64}
    counters = {n for n, t in start.items() if not t.is_floating_point()}
    assert all(start[n].dtype == run.model[n].dtype == torch.int64 for n in counters)


@pytest.mark.parametrize("text", TEXTS)
def test_names_are_those_of_the_module(text):
    task, _, run = started(text)
    assert list(run.model) == list(task.net.initial)
    assert set(run.model) == set(task.net.module.state_dict())
    task.net.module.load_state_dict(run.model)


# -- purity ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", TEXTS)
def test_a_clients_round_changes_nothing_it_was_given(text):
    task, data, run = started(text)
    sent = broadcast(task, run.server)
    client = Client("a", data["a"], run.states["a"])
    with Untouched(sent, run.server, client.state, data["a"], task.net.initial):
        one = local_update(task, sent, client)
        two = local_update(task, sent, client)
    for a, b in zip(tensors(one), tensors(two), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("text", TEXTS)
def test_the_servers_round_changes_nothing_it_was_given(text):
    task, _, run = started(text)
    state = dataclasses.replace(run.server, round=run.server.round)
    with Untouched(state, *run.uploads.values()):
        one, two = (server_update(task, state, list(run.uploads.values())) for _ in range(2))
    for a, b in zip(tensors(one), tensors(two), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("text", TEXTS)
def test_the_users_model_is_never_changed(text):
    model = tiny_net()
    before = str(model)
    training = model.training
    with Untouched(dict(model.state_dict(keep_vars=True))):
        data = tiny_data(7, 6)
        rounds(tiny_task(text, data, model=model), data, 2)
    assert str(model) == before
    assert model.training is training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("text", TEXTS)
def test_a_client_does_not_depend_on_who_trained_before(text):
    task, data, run = started(text)
    sent = broadcast(task, run.server)
    b = Client("b", data["b"], run.states["b"])
    fresh = tiny_task(text, data)
    alone = local_update(fresh, sent, b)
    local_update(task, sent, Client("a", data["a"], run.states["a"]))
    after = local_update(task, sent, b)
    for one, other in zip(tensors(alone), tensors(after), strict=True):
        assert torch.equal(one, other)


# -- privacy --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", TEXTS)
def test_no_upload_names_a_private_tensor(text):
    task, _, run = started(text, n=2)
    private = {n for n, r in task.net.routes.items() if r.name in ("LOCAL", "OWNED", "FROZEN")}
    assert private == task.net.private
    for upload in run.uploads.values():
        assert not private & upload.model.keys()
        for tree in upload.parts.values():
            assert not private & {k.rsplit("/", 1)[-1] for k in tree}


@pytest.mark.parametrize("text", TEXTS)
def test_the_servers_copy_of_private_tensors_never_changes(text):
    task, _, run = started(text, n=2)
    for name in task.net.private:
        assert torch.equal(run.model[name], task.net.initial[name])


@pytest.mark.parametrize("text", TEXTS)
def test_client_state_holds_exactly_the_clients_own_tensors(text):
    task, _, run = started(text, n=2)
    assert set(run.states["a"].local) == set(task.net.own)
    assert run.states["a"].parts.keys() == {p.name for p in task.method.parts}


# -- restoring ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", TEXTS)
def test_interrupted_equals_uninterrupted(text):
    data = tiny_data(7, 6)
    keeps = not any(p.divides_updates for p in method(text).parts if getattr(p, "control", "") != "auto")
    settings = {"momentum": 0.5, "keep_momentum": keeps, "schedule": "exp"}
    whole = rounds(tiny_task(text, data, **settings), data, 3)
    first = rounds(tiny_task(text, data, **settings), data, 1)
    server, states = pickle.loads(pickle.dumps((first.server, first.states)))
    again = rounds(tiny_task(text, data, **settings), data, 2, run=Run(server, states))
    assert same(whole.model, again.model)
    for one, other in zip(tensors([whole.server, whole.states]), tensors([again.server, again.states]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("text", TEXTS)
def test_messages_survive_pickling(text):
    task, _, run = started(text)
    for thing in (broadcast(task, run.server), run.uploads["a"], run.states["a"]):
        copied = pickle.loads(pickle.dumps(thing))
        for one, other in zip(tensors(thing), tensors(copied), strict=True):
            assert torch.equal(one, other)


# -- neutral parts --------------------------------------------------------------------------------------------------
NULLS = ["fedprox(mu=0)", "agc(clip=inf)", "greg(alpha=0, rho=1)", "fedfr(mu=0)", "fixbn(switch=1)", "finetune"]
HOSTS = ["fedavg", "scaffold", "fedexp", "fedfn", "wn", "fedrdn", "silobn", "fedbn", "perfedavg", "mixbn"]
# No shared statistics to act on, or a second way to fine-tune: refused on purpose.
REFUSED = {("greg", "silobn"), ("greg", "fedbn"), ("finetune", "perfedavg"), ("fixbn", "mixbn")}


PAIRS = [(h, n) for h in HOSTS for n in NULLS if (n.split("(")[0], h) not in REFUSED]


@pytest.mark.parametrize(("host", "null"), PAIRS)
def test_a_null_part_changes_nothing_in_either_position(host, null):
    data = tiny_data(7, 6)
    settings = {"momentum": 0.9, "weight_decay": 0.01, "clip": 5.0}
    alone = play(host, data, n=3, **settings)
    for text in (f"{host} + {null}", f"{null} + {host}"):
        both = play(text, data, n=3, **settings)
        assert same(alone.model, both.model)
        for name in data:
            assert same(alone.states[name].local, both.states[name].local)
            for p, tree in alone.states[name].parts.items():
                assert same(tree, both.states[name].parts[p])


# -- every registered method does something ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        t
        for t in TEXTS
        if t not in ("fedavg", "finetune", "centralised", "fixbn", "ditto", "apfl", "adabn", "normbound")
    ],
)
def test_a_method_differs_from_fedavg(text):
    data = tiny_data(7, 6)
    plain = play("fedavg", data, n=3)
    run = play(text, data, n=3)
    moved = {**run.model, **run.states["a"].local}
    assert moved.keys() != plain.model.keys() or not same(moved, plain.model)


def test_setup_does_not_change_the_model():
    data = tiny_data(7, 6)
    for text in TEXTS:
        task = tiny_task(text, data)
        assert same(setup(task, data).model, initial_state(task).model)


def test_a_net_is_a_function_of_model_and_method():
    for text in TEXTS:
        one, two = (Net(tiny_net(), method(text), dtype=torch.float64) for _ in range(2))
        assert same(one.initial, two.initial)
        assert one.routes == two.routes
