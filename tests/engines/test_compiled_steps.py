"""Compiled steps give the loop's results, with the CPU as the device; what cannot be compiled runs as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fednorms.core.training import Training
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs, fused
from fednorms.engines.graphs import engine as graphs_engine
from fednorms.engines.graphs.capture import CpuDevice
from fednorms.engines.graphs.fused import agree, can_compile, rounded
from fednorms.engines.graphs.grouping import Grouping, Trials
from fednorms.engines.loop import Loop
from tests.engines.test_graphs_on_host import assert_same, distance, federation, play, setting
from tests.support.engines import FITTING
from tests.support.tiny import TinyNet

UNEQUAL = federation((17, 17, 22, 17))  # last batches of 1 and 6 images, and a client without a match of its size


@pytest.fixture
def traced(monkeypatch):
    """A compiler that returns the traced operations as they are: tracing is tested in little time."""
    monkeypatch.setattr(fused, "_inductor", lambda: lambda graph, tensors: graph)


def compared(text, together, fed=UNEQUAL, **options):
    """Three rounds of the loop and of compiled steps, which must end alike; returns the engine."""
    how = {"streams": 2, "together": together, "compiled": True, "device": options.pop("device", None)}
    task, engine = setting(Graphs, FITTING.get(text, text), fed=fed, **how, **options)
    _, loop = setting(Loop, FITTING.get(text, text), fed=fed, **options)
    assert_same(task, play(task, loop), play(task, engine), loop, engine)
    return engine


class Dropped(TinyNet):
    """A network with keyed dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(self.conv, nn.Dropout(0.5))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("text", ["scaffold", "fedbn", "fednn", "fedrep", "fedala", "ditto", "fedsmoo"])
def test_traced_steps_give_the_loops_results(text, together):
    engine = compared(text, together)
    assert engine.steps.programs
    assert all(engine.steps.programs.values())
    assert not engine.notes, engine.notes


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("fedavg", {"model": Dropped}),
        ("scaffold", {"training": Training(batch_size=8, momentum=0.9, keep_momentum=True, weight_decay=1e-3)}),
        ("fedrep", {"training": Training(batch_size=8, optimizer="adamw", lr=1e-3, weight_decay=0.05)}),
        ("fedprox", {"training": Training(batch_size=5, epochs=2, clip=0.5, warmup=2)}),
        ("fedavg", {"device": CpuDevice(memory=1000)}),  # the data of a client are copied with it
    ],
)
def test_traced_steps_follow_every_way_of_training(text, options, together):
    assert all(compared(text, together, **options).steps.programs.values())


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.parametrize("text", ["fedbn", "scaffold + fedprox"])
@pytest.mark.parametrize("together", [1, 3])
def test_compiled_steps_give_the_loops_results(text, together):
    engine = compared(text, together, fed=federation((16, 16, 16)), model=Dropped)
    assert all(engine.steps.programs.values())
    assert not engine.notes, engine.notes


# -- programs that are wrong ------------------------------------------------------------------------------------------
def lazy(graph, tensors):
    """A program that writes nothing."""
    return lambda *_: None


def forgetful(graph, tensors):
    """A program that never writes the tensor that should move least in its first run."""
    left_out = []

    def run(*given):
        before = [t.clone() for t in given]
        graph(*given)
        moves = {k: float((t - before[k]).norm()) for k, t in enumerate(given) if t.is_floating_point()}
        left_out.append(min((k for k, move in moves.items() if move > 1e-12), key=lambda k: moves[k]))
        given[left_out[0]].copy_(before[left_out[0]])

    return run


def blank(graph, tensors):
    """A program that writes numbers that are none."""

    def run(*given):
        before = [t.clone() for t in given]
        graph(*given)
        for t, old in zip(given, before, strict=True):
            if t.is_floating_point() and not torch.equal(t, old):
                t.fill_(torch.nan)

    return run


def broken(graph, tensors):
    """A program that fails when it runs."""

    def run(*given):
        raise AssertionError("wrong strides")

    return run


def absent(graph, tensors):
    """A compiler that is not there."""
    raise RuntimeError("Cannot find a compiler.\nInstall one.")


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        (lazy, "other results"),
        (forgetful, "other results"),
        (blank, "other results"),
        (broken, "wrong strides"),
        (absent, "Cannot find a compiler."),
    ],
)
def test_a_program_that_is_wrong_is_not_used_and_a_note_says_why(compiler, told, together, monkeypatch):
    monkeypatch.setattr(fused, "_inductor", lambda: compiler)
    engine = compared("fedavg", together, fed=federation((16, 16)))
    assert not any(engine.steps.programs.values())
    assert [note.endswith(told) for note in engine.notes] == [True]
    assert engine.grouping.together == together


def test_a_compiler_without_memory_leaves_the_steps_as_they_are(monkeypatch):
    def full(graph, tensors):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(fused, "_inductor", lambda: full)
    engine = compared("scaffold", 2)
    assert engine.grouping == Grouping(2, 2)
    assert engine.notes == ["out of memory: steps are not compiled"]


class Peeking(TinyNet):
    """A network that reads a value that is no part of the model."""

    scale = torch.ones((), dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) * float(self.scale)


class Guarded(CpuDevice):
    """A device that cannot record what reads a value on the host, like a GPU."""

    def record(self, job, stream, pool):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "__float__", refuse)
            return super().record(job, stream, pool)


def refuse(tensor):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.usefixtures("traced")
def test_what_cannot_be_recorded_is_not_compiled():
    engine = compared("fedavg", 1, model=Peeking, device=Guarded())
    assert not engine.steps.programs
    assert any("runs eagerly" in note for note in engine.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_programs_are_compared_with_how_far_a_step_moves(dtype):
    start = [[torch.full((50,), 100.0, dtype=dtype), torch.zeros(3, dtype=dtype)], [torch.ones(2, dtype=torch.long)]]
    end = [[start[0][0] - 1e-3, start[0][1] + 1e-3], [start[1][0] + 1]]

    def passes(change):
        found = [[t.clone() for t in group] for group in end]
        change(found)
        return agree(found, end, end, start)

    eps = torch.finfo(dtype).eps
    assert passes(lambda found: None)
    assert passes(lambda found: found[0][0].mul_(1 + eps))
    assert not passes(lambda found: found[0][0].copy_(start[0][0])), "a small step of large weights is not written"
    assert not passes(lambda found: found[0][1].zero_()), "a small tensor is not written"
    assert not passes(lambda found: found[0][1][0].fill_(torch.nan))
    assert not passes(lambda found: found[0][0][0].fill_(torch.inf))
    assert not passes(lambda found: found[1][0].sub_(1))
    start[0][1] = end[0][1].clone()  # should not move
    assert passes(lambda found: found[0][1].add_(eps * 1e-3))
    assert not passes(lambda found: found[0][1].add_(1e-5))


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 0.02), (torch.float64, 2e-7)])
def test_a_small_tensor_may_be_less_exact_and_all_may_where_rounding_leads_as_far(dtype, off):
    start = [[torch.zeros(10_000, dtype=dtype), torch.zeros(3, dtype=dtype)]]
    end = [[t + 1e-3 for t in start[0]]]
    small, all_of_them, far = (
        [[end[0][0] + a * 1e-3, end[0][1] + b * 1e-3]] for a, b in ((0, off), (off, off), (1, 1))
    )
    assert agree(small, end, end, start)
    assert not agree(all_of_them, end, end, start)
    assert agree(all_of_them, end, [[t - off * 1e-3 for t in end[0]]], start)
    assert not agree(far, end, all_of_them, start)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_that_moves_little_is_not_left_out_because_rounding_moves_it_as_far(dtype, size):
    start = [[torch.full((50,), size, dtype=dtype)]]
    move = 8 * torch.finfo(dtype).eps * size
    end, nearby = [[t + move for t in start[0]]], [[t + move for t in rounded(start)[0]]]
    assert agree(end, end, nearby, start)
    assert not agree(start, end, nearby, start)


@pytest.mark.parametrize("far", [torch.inf, torch.nan, 1e30])
def test_what_is_not_finite_or_very_large_does_not_excuse_a_program(far):
    start, end = [[torch.zeros(4)]], [[torch.ones(4)]]
    overflown = [[torch.full((4,), far)]]
    assert not agree(start, overflown, overflown, start)
    assert far == 1e30 or not agree(start, end, overflown, start)


class Random(nn.Module):
    """A network that draws from torch's own generator."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, 3, bias=False)

    def forward(self, x):
        return self.head(nn.functional.dropout(x.flatten(1), 0.5, self.training))


@pytest.mark.parametrize("right", [True, False])
def test_a_network_that_draws_random_numbers_does_not_excuse_a_program(right, monkeypatch):
    def short(graph, tensors):
        def run(*given):
            before = [t.clone() for t in given]
            graph(*given)
            for t, old in zip(given, before, strict=True):
                if t.is_floating_point():
                    t.lerp_(old, 0.1)

        return run

    monkeypatch.setattr(fused, "_inductor", lambda: (lambda graph, tensors: graph) if right else short)
    for seed in range(8):
        task, engine = setting(Graphs, "fedavg", fed=federation((16,)), model=Random, streams=1, compiled=True)
        torch.manual_seed(seed)
        play(task, engine, 1)
        assert [program is not None for program in engine.steps.programs.values()] == [right]


# -- when steps are compiled, and what is kept ------------------------------------------------------------------------
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("deterministic", [True, False])
def test_only_runs_that_need_not_repeat_try_compiled_steps(deterministic, monkeypatch):
    monkeypatch.setattr(graphs_engine, "seconds_to_compile", lambda: 0.0)
    monkeypatch.setattr(Trials, "left", lambda self, clients, rounds: 1e9)  # a long run
    with numerics("float64", deterministic=deterministic):
        task, engine = setting(Graphs, "fedavg", fed=UNEQUAL)
        _, loop = setting(Loop, "fedavg", fed=UNEQUAL)
        assert distance(play(task, loop, 16).model, play(task, engine, 16).model) < 1e-9
    assert {g.compiled for g in engine.trials.seconds} == ({False} if deterministic else {False, True})
    assert bool(engine.steps.programs) == (not deterministic)


@pytest.mark.usefixtures("traced")
def test_steps_are_not_compiled_where_a_compiler_is_absent_or_time_is_short(monkeypatch):
    for there, seconds in ((False, 1e9), (True, 0.0)):
        monkeypatch.setattr(graphs_engine, "can_compile", lambda device, there=there: there)
        monkeypatch.setattr(Trials, "left", lambda self, clients, rounds, seconds=seconds: seconds)
        with numerics("float64", deterministic=False):
            task, engine = setting(Graphs, "fedavg", fed=UNEQUAL)
            play(task, engine, 14)
        assert {g.compiled for g in engine.trials.seconds} == {False}
        assert not engine.steps.programs
        assert not engine.notes


@pytest.mark.usefixtures("traced")
def test_a_closed_engine_keeps_no_program_and_no_recording():
    engine = compared("scaffold", 2)
    assert engine.device.recorded > 0
    engine.close()
    assert not engine.steps.programs
    assert engine.device.recorded == 0


@pytest.mark.usefixtures("traced")
def test_spaces_share_a_program_and_other_shapes_get_their_own():
    engine = compared("fedavg", 1)  # two slots, batches of 8, 6 and 1
    assert sorted(key[2] for key in engine.steps.programs) == [(1,), (6,), (8,)]
