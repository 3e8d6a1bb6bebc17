"""Recorded tests of the graph engine give the loop's scores, even when several sites share a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.graphs import Graphs, evaluation
from fednorms.engines.graphs.capture import CpuDevice
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import Mode, headline
from fednorms.methods.registry import names
from tests.support.engines import FITTING, engine_of
from tests.support.tiny import TinyNet


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return Split(torch.rand(n, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(n) % 3)


def federation(tests=(9, 40, 5)):
    sites = [
        Site(f"c{k}", f"d{k % 2}", train=images(16, k), test=images(n, 100 + k), attributes={"modality": "ct"})
        for k, n in enumerate(tests)
    ]
    return Federation("tiny", sites, list("abc"), Preprocessing.centered(3))


def setting(kind, text, fed=None, **options):
    return engine_of(kind, text, fed or federation(), **options)


def scores(kind, text, modes=(), *, fed=None, model=TinyNet, **options):
    task, engine = setting(kind, text, fed, model=model, **options)
    state = engine.setup(initial_state(task))
    for number in range(2):
        done = engine.train(
            broadcast(task, state), engine.clients, score=number == 1 and not task.method.having("send")
        )
        state = server_update(task, state, done.uploads)
    wanted = [Mode.read(m) for m in modes] or [headline(task)]
    return done.after_local, [engine.evaluate(state, mode, engine.clients).sites for mode in wanted], engine


def assert_same(one, two):
    assert list(one) == list(two)
    for site, a in one.items():
        b = two[site]
        assert (a.accuracy, a.samples, a.balanced_accuracy) == (b.accuracy, b.samples, b.balanced_accuracy)
        assert math.isclose(a.loss, b.loss, rel_tol=1e-9)
        assert [None if math.isnan(r) else r for r in a.recall] == [None if math.isnan(r) else r for r in b.recall]


@pytest.mark.parametrize("text", sorted(n for n in names() if n != "fedtan"))
def test_scores_are_those_of_the_loop(text):
    text = FITTING.get(text, text)
    local, (plain,), _ = scores(Loop, text)
    fast_local, (fast,), engine = scores(Graphs, text, device=CpuDevice())
    assert_same(plain, fast)
    assert_same(local, fast_local)
    assert engine.evaluator.graphs


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("fedavg", ["global", "personal", "global/batch", "global/batch:3", "global/re-estimated"]),
        ("fedbn", ["personal", "personal/batch", "personal/re-estimated"]),
        ("silobn", ["personal", "global/own", "global/batch"]),
        ("fedbabu", ["global", "adapted"]),
        ("fedrep", ["personal", "adapted"]),
        ("atp(after=0, eta=5.0)", ["global", "global/test-time:3", "global/global"]),
        ("fedavg + finetune(epochs=2, factor=1.0)", ["global", "adapted", "adapted/global"]),
    ],
)
def test_every_mode_has_the_loops_scores(text, modes):
    _, plain, _ = scores(Loop, text, modes)
    _, fast, _ = scores(Graphs, text, modes, device=CpuDevice())
    for one, two in zip(plain, fast, strict=True):
        assert_same(one, two)


class Counting(CpuDevice):
    """Counts how often recorded jobs run."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def record(self, job, stream, pool):
        def counted():
            self.runs += 1
            job()

        job()
        return counted


@pytest.mark.parametrize(("text", "batches"), [("fedavg", 1), ("fedbn", 30)])
def test_sites_that_test_the_same_model_share_batches(text, batches):
    fed = federation(tests=[4] * 30)
    task, engine = setting(Graphs, text, fed, device=Counting())
    state = engine.setup(initial_state(task))
    state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    before = engine.device.runs
    found = engine.evaluate(state, headline(task), engine.clients)
    assert engine.device.runs - before == batches
    assert sum(s.samples for s in found.sites.values()) == 120


def test_a_model_with_batch_statistics_is_tested_site_by_site():
    """Images of another site (or padding) in the same batch would change a site's scores."""

    def untracked():
        model = TinyNet()
        for name, module in model.named_children():
            if isinstance(module, nn.BatchNorm2d):
                setattr(model, name, nn.BatchNorm2d(module.num_features, track_running_stats=False))
        return model

    _, (plain,), _ = scores(Loop, "fedavg", model=untracked)
    _, (fast,), engine = scores(Graphs, "fedavg", model=untracked, device=CpuDevice())
    assert_same(plain, fast)
    assert not engine._evaluator().graphs


class Cramped(CpuDevice):
    """A device on which a large batch does not fit."""

    def record(self, job, stream, pool):
        job()
        if isinstance(job.__closure__, tuple) and any(
            isinstance(c.cell_contents, torch.Tensor) and c.cell_contents.shape[:1] == (128,) for c in job.__closure__
        ):
            raise torch.OutOfMemoryError("no room")
        return job


def test_smaller_batches_where_large_ones_do_not_fit():
    fed = federation(tests=(90, 30))
    _, (plain,), _ = scores(Loop, "fedavg", fed=fed)
    _, (fast,), engine = scores(Graphs, "fedavg", fed=fed, device=Cramped())
    assert_same(plain, fast)
    assert engine.evaluator.sizes == (32,)


def test_test_images_that_would_fill_the_device_are_not_cached():
    _, (plain,), _ = scores(Loop, "fedbn")
    _, (fast,), engine = scores(Graphs, "fedbn", device=CpuDevice(memory=200_000))
    assert_same(plain, fast)
    assert not engine.evaluator.images_on_device


def test_a_model_that_draws_in_tests_is_tested_from_the_sites_seeds():
    """Sampled gates of AGN: the loop is repeatable, and recorded tests must be, too."""
    _, (plain,), _ = scores(Loop, "agn(eval_mode=sample)")
    _, (fast,), engine = scores(Graphs, "agn(eval_mode=sample)", device=CpuDevice())
    assert_same(plain, fast)
    assert any("draws random numbers in tests" in note for note in engine.notes)


def test_the_cache_of_test_images_is_limited():
    task, engine = setting(Graphs, "fedavg", federation(tests=[4] * 9), device=CpuDevice())
    state = engine.setup(initial_state(task))
    for name in engine.clients:
        engine.train(broadcast(task, state), [name], score=True)
    assert len(engine.evaluator.images_on_device) == evaluation.CACHED
