"""Hooks select tensors by module type: the same bits as by name, in every engine."""

import pytest
import torch
from typing_extensions import override

import fednorms as fn
from fednorms.core.norms import is_batchnorm
from fednorms.core.part import REGISTRY, Part
from fednorms.core.round import initial_state
from fednorms.core.tree import Tree
from fednorms.core.views import Context
from tests.support.tiny import play, same, tiny_data, tiny_task

NORM = ("norm.weight", "norm.bias")  # of the tiny network
HEAD = ("head.weight", "head.bias")


def of_batchnorm(slot):
    return is_batchnorm(slot.module)


@fn.part("calm")
class Calm(Part):
    """Every hook that sees a context treats BatchNorm layers and the head in its own way."""

    uploads = True

    def norm(self, seen):
        return seen.names(of_batchnorm)

    def head(self, seen):
        return seen.names(lambda slot: slot.head)

    @override
    def init(self, w):
        return w.pick(self.norm(w)).zeros(), w.pick(self.head(w))

    @override
    def begin(self, model, b):
        return Tree({**model, **(model.pick(self.head(b.context)) * 1.0)})

    @override
    def loss(self, s):
        return 0.1 * s.params.pick(self.norm(s.context)).sqnorm()

    @override
    def grad(self, g, s):
        return Tree({**g, **(g.pick(self.head(s.context)) * 0.5)})

    @override
    def finish(self, e):
        return e.params.pick(self.head(e.context)), e.delta.pick(self.norm(e.context)) * 2.0

    @override
    def send(self, delta, e):
        return Tree({**delta, **(delta.pick(self.head(e.context)) * 0.25)})

    @override
    def server(self, delta, r):
        return Tree({**delta, **(delta.pick(self.norm(r.context)) * 0.75)}), r.up

    @override
    def stats(self, delta, r):
        return Tree({**delta, **(delta.pick(self.norm(r.context)) * 0.5)})


@fn.part("calmbyname")
class CalmByName(Calm):
    """The same with the names written out."""

    @override
    def norm(self, seen):
        return (*NORM, "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")

    @override
    def head(self, seen):
        return HEAD


PARTS = {name: REGISTRY.pop(name) for name in ("calm", "calmbyname")}


@pytest.fixture(autouse=True)
def registered(parts_as_before):
    REGISTRY.update(PARTS)


def test_selection_by_module_is_selection_by_name():
    by_module, by_name = (play(text, n=2) for text in ("calm", "calmbyname"))
    assert same(by_module.model, by_name.model)
    assert set(by_module.server.parts["calm"]) == set(NORM)
    assert set(by_module.states["a"].parts["calm"]) == set(HEAD)
    assert not same(by_module.model, play("fedavg", n=2).model)


def test_init_passes_on_tensors_only():
    class Keeper(Part):
        @override
        def init(self, w):
            return w, w

    fn.part("keeper")(Keeper)
    task = tiny_task("keeper", tiny_data())
    assert type(initial_state(task).parts["keeper"]) is Tree


def test_init_selects_among_the_tensors_it_sees():
    seen = []

    class Looker(Part):
        @override
        def init(self, w):
            seen.append(w.names(of_batchnorm))
            return Tree(), Tree()

    fn.part("looker")(Looker)
    initial_state(tiny_task("looker", tiny_data()))
    initial_state(tiny_task("looker + fedbn", tiny_data()))  # batch normalization is not sent
    assert seen == [NORM, ()]


def test_a_context_without_a_model_names_nothing():
    context = Context(0, 1, 0.1, 0.1, 0.0, False, 4, "a", 4, 1.0, 1)
    assert context.names(of_batchnorm) == ()


def test_worker_processes_select_the_same():
    torch.manual_seed(0)
    sites = {name: (torch.rand(12, 3, 8, 8), torch.arange(12) % 3) for name in ("north", "south")}
    federation = fn.from_arrays(sites)
    models = [
        fn.run("calm", federation, model="cnn-small", rounds=2, engine=kind).model().state_dict()
        for kind in ("loop", "workers")
    ]
    assert same(*models)
