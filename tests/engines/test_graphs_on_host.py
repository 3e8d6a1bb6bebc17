"""The graph engine's scheduling, workspaces, captures and buffers, with the CPU as its device: no GPU needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput, Diverged, RunFailed
from fednorms.core.part import REGISTRY, Part, part
from fednorms.core.reductions import reductions
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.training import Training
from fednorms.core.tree import Packed, Tree, mean
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import PROVIDES, EngineSettings
from fednorms.engines.graphs import Graphs
from fednorms.engines.graphs import engine as graphs_engine
from fednorms.engines.graphs.capture import CpuDevice
from fednorms.engines.graphs.layout import Layout
from fednorms.engines.graphs.pending import PendingResults
from fednorms.engines.loop import Loop
from fednorms.methods.registry import method, names
from tests.support.engines import FITTING, engine_of
from tests.support.tiny import TinyNet

COMBINATIONS = [
    "scaffold(control='difference')",
    "scaffold(option='I')",
    "mixbn(kind='learned')",
    "perfedavg(variant=hessian_free)",
    "scaffold + greg + fedfn",
    "fednn + scaffold",
    "fednn(tau=0.1, freeze_on_saturation=true)",
    "greg + fedrdn",
    "fedexp + fedfn",
    "fedrep + fedprox",
    "normbound(relative=1) + median + feddyn",
    "krum(keep=2) + scaffold + maxweight(share=0.3)",
]


class Full(CpuDevice):
    """A device that runs out of memory unless few clients run side by side."""

    def __init__(self, most_clients):
        super().__init__()
        self.most = most_clients
        self.pools = 0

    def pool(self):
        self.pools += 1
        if self.pools > self.most:
            raise torch.OutOfMemoryError("no room")

    def empty_cache(self):
        self.pools = 0


class Strict(CpuDevice):
    """A device that cannot record."""

    def record(self, job, stream, pool):
        raise RuntimeError("operation not permitted when stream is capturing")


def federation(sizes=(22, 17, 24)):
    generator = torch.Generator().manual_seed(0)
    sites = [
        Site(
            f"c{k}",
            "d",
            train=Split(torch.rand(n, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(n) % 3),
            attributes={"modality": "ct" if k else "mr"},
        )
        for k, n in enumerate(sizes)
    ]
    return Federation("tiny", sites, list("abc"), Preprocessing.centered(3))


def setting(kind, text, *, fed=None, **options):
    return engine_of(kind, text, fed or federation(), **options)


def play(task, engine, rounds=3):
    state = engine.setup(initial_state(task))
    for _ in range(rounds):
        state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    return state


def distance(a, b):
    left = [t.double().flatten() for t in a.values() if t.is_floating_point()]
    right = [b[k].double().flatten() for k, t in a.items() if t.is_floating_point()]
    if not left:
        return 0.0
    one, two = torch.cat(left), torch.cat(right)
    return float((one - two).norm() / one.norm().clamp(min=1e-12))


def assert_same(task, loop, fast, loop_engine, fast_engine):
    assert distance(loop.model, fast.model) < 1e-9
    for owner, tree in loop.parts.items():
        assert distance(tree, fast.parts[owner]) < 1e-9
    for name in loop_engine.clients:
        one, two = loop_engine.store.get(name), fast_engine.store.get(name)
        assert (one is None) == (two is None)
        if one is not None:
            assert distance(one.local, two.local) < 1e-9
            assert all(distance(tree, two.parts[owner]) < 1e-9 for owner, tree in one.parts.items())


@pytest.mark.parametrize("text", [*names(), *COMBINATIONS])
def test_replays_give_the_loops_results(text):
    text = FITTING.get(text, text)
    if any(p.requires - PROVIDES["graphs"] for p in method(text).parts):
        with pytest.raises(BadInput, match="loop"):  # the message names the engine that can run it
            setting(Graphs, text, streams=2)
        return
    task, fast = setting(Graphs, text, streams=2)
    _, loop = setting(Loop, text)
    assert_same(task, play(task, loop), play(task, fast), loop, fast)
    assert fast.device.recorded


def test_a_layer_freezes_within_a_recorded_step():
    text = "fednn(tau=0.1, freeze_on_saturation=true)"
    task, fast = setting(Graphs, text, streams=2)
    _, loop = setting(Loop, text)
    for rounds, frozen in ((1, False), (2, True)):  # free in the first round, frozen in the second
        models = [play(task, engine, rounds).model for engine in (loop, fast)]
        assert [bool(m["norm.choice"].any()) for m in models] == [frozen, frozen]
        assert torch.equal(models[0]["norm.choice"], models[1]["norm.choice"])


@pytest.mark.parametrize(
    "training",
    [
        Training(batch_size=8, momentum=0.9, weight_decay=1e-3),
        Training(batch_size=8, momentum=0.9, keep_momentum=True),
        Training(batch_size=8, optimizer="adamw", lr=1e-3, weight_decay=0.05),
        Training(batch_size=8, optimizer="adam", lr=1e-3, weight_decay=0.05),
        Training(batch_size=8, clip=0.5),
        Training(batch_size=8, warmup=2, client_epochs={"c1": 3}),
        Training(batch_size=5, last="fill", epochs=2),
        Training(batch_size=8, steps=3),
    ],
)
@pytest.mark.parametrize("text", ["scaffold", "fedrep", "ditto", "fraug"])
def test_every_way_of_local_training(training, text):
    task, fast = setting(Graphs, text, streams=2, training=training)
    _, loop = setting(Loop, text, training=training)
    assert_same(task, play(task, loop), play(task, fast), loop, fast)


@pytest.mark.parametrize("together", [1, 2])
def test_a_client_without_steps_does_not_keep_the_momentum_of_another(together):
    training = Training(batch_size=8, momentum=0.9, keep_momentum=True)
    clients = {}
    for kind, options in ((Loop, {}), (Graphs, {"streams": 1, "together": together})):
        task, engine = setting(kind, "atp", fed=federation((16,) * 4), training=training, **options)
        state = engine.setup(initial_state(task))
        for cohort in (engine.clients[:2], engine.clients[:2], engine.clients):  # the third round has no steps
            state = server_update(task, state, engine.train(broadcast(task, state), cohort).uploads)
        clients[kind] = [engine.store.get(name) for name in engine.clients]
    for one, two in zip(*clients.values(), strict=True):
        assert (one is None) == (two is None)
        assert one is None or distance(one.velocity, two.velocity) < 1e-9


def test_a_step_is_recorded_once_per_shape_and_again_when_the_path_changes():
    task, engine = setting(Graphs, "greg", streams=1)  # sizes 22, 17, 24 at batch 8: last batches of 6, 1 and 8
    state = engine.setup(initial_state(task))
    counts = []
    for _ in range(3):
        state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
        counts.append(engine.device.recorded)
    assert counts == [3, 6, 6]


def test_the_number_of_streams_changes_nothing():
    states = []
    for streams in (1, 2, 3, 0):
        task, engine = setting(Graphs, "scaffold + greg", streams=streams)
        states.append(play(task, engine, 4))
    assert all(torch.equal(states[0].model[k], s.model[k]) for s in states for k in s.model)


@pytest.mark.parametrize(
    ("text", "shared"), [("scaffold", True), ("ditto", True), ("fedbn", False), ("fedala", False), ("fedpac", False)]
)
def test_slots_share_the_model_that_all_clients_start_from(text, shared):
    task, engine = setting(Graphs, text, streams=2)
    state = play(task, engine, 2)
    for kept in (2, 1, 0):
        engine.slots.keep(kept)
        engine.train(broadcast(task, state), engine.clients)
        spaces = engine.slots.spaces.values()
        assert len({s.origin.data_ptr() for s in spaces}) == (1 if shared else 2)
        assert all(s.twin is None or s.twin.origin is s.origin for s in spaces)
        if shared:
            (block,) = {s.origin for s in spaces}
            assert all(torch.equal(t, state.model[n]) for n, t in engine.steps.layout.views(block).items())


def test_out_of_memory_halves_the_streams_and_continues():
    fed = federation((10, 11, 12, 9))
    task, engine = setting(Graphs, "scaffold", streams=4, device=Full(2), fed=fed)
    _, loop = setting(Loop, "scaffold", fed=fed)
    assert_same(task, play(task, loop), play(task, engine), loop, engine)
    assert engine.grouping.streams == 2
    assert any("out of memory" in note for note in engine.notes)


def test_a_device_without_room_for_one_client_says_so(monkeypatch):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("no room")

    task, engine = setting(Graphs, "fedavg", streams=2, device=Full(0))
    monkeypatch.setattr("fednorms.engines.loop.local_update", no_room)
    with pytest.raises(RunFailed, match="smaller batch_size"):
        play(task, engine)


@pytest.mark.parametrize("text", ["fedrep + fedprox", "scaffold"])  # SCAFFOLD reads the mean gradient of all steps
def test_what_cannot_be_recorded_runs_eagerly_and_is_noted(text):
    task, engine = setting(Graphs, text, streams=2, device=Strict())
    _, loop = setting(Loop, text)
    assert_same(task, play(task, loop), play(task, engine), loop, engine)
    assert any("runs eagerly" in note for note in engine.notes)


def test_a_pass_before_training_has_the_same_dropout_in_every_engine():
    class Dropped(TinyNet):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(self.conv, nn.Dropout(0.5))

    (task, fast), (_, loop) = (setting(kind, "hbn(rate=0.5)", model=Dropped) for kind in (Graphs, Loop))
    assert_same(task, play(task, loop), play(task, fast), loop, fast)


@pytest.mark.parametrize("text", ["fedavg", "ditto"])
def test_data_that_do_not_fit_are_copied_with_their_client(text):
    task, engine = setting(Graphs, text, streams=2, device=CpuDevice(memory=1000))
    _, loop = setting(Loop, text)
    assert engine.data.resident is None
    assert_same(task, play(task, loop), play(task, engine), loop, engine)


def test_a_diverging_client_is_named_or_skipped_as_in_the_loop():
    training = Training(batch_size=8, lr=1e300)
    told = []
    for kind in (Loop, Graphs):
        task, engine = setting(kind, "fedavg", training=training)
        with pytest.raises(Diverged) as caught:
            play(task, engine)
        told.append(str(caught.value))
    assert told[0] == told[1]
    task, engine = setting(Graphs, "fedavg", training=training, settings=EngineSettings(on_divergence="skip"))
    done = engine.train(broadcast(task, initial_state(task)), engine.clients)
    assert sorted(done.diverged) == engine.clients
    assert not done.uploads


@pytest.mark.usefixtures("parts_as_before")
def test_a_loss_that_is_not_finite_is_named_as_in_the_loop():
    @part("far")
    class Far(Part):
        def loss(self, s):  # its gradient is finite
            return s.logits.sum() * 0.0 + float("inf")

    told = []
    for kind in (Loop, Graphs):
        task, engine = setting(kind, "far")
        with pytest.raises(Diverged) as caught:
            play(task, engine)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "step 1: far (loss) is not finite" in told[0]


def test_a_custom_optimizer_is_refused_by_name():
    with pytest.raises(BadInput, match=r'Engine "graphs" cannot run the custom optimizer "mine@12".*engine="loop"'):
        setting(Graphs, "fedavg", training=Training(optimizer="custom:mine@12"))


def test_inputs_of_a_round_are_not_written_to():
    task, engine = setting(Graphs, "scaffold", streams=2)
    state = engine.setup(initial_state(task))
    state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    sent = broadcast(task, state)
    before = state.model.clone()
    kept = {n: engine.store.get(n).parts["scaffold"].clone() for n in engine.clients}
    old = {n: engine.store.get(n).parts["scaffold"] for n in engine.clients}
    engine.train(sent, engine.clients)
    assert all(torch.equal(before[k], state.model[k]) for k in before)
    assert all(torch.equal(kept[n][k], old[n][k]) for n in kept for k in kept[n])


def test_a_layout_returns_every_tensor_and_puts_exchanged_ones_first():
    task, _ = setting(Graphs, "fedbn")
    layout = Layout(task.net.initial, task.net.exchanged)
    block = layout.block(task.like)
    views = layout.views(block)
    for name, tensor in views.items():
        tensor.copy_(task.net.initial[name])
    again = layout.views(block.clone())
    assert all(torch.equal(again[n], task.net.initial[n]) for n in again)
    assert all(layout.places[n] < layout.exchanged for n in layout.names if n in task.net.exchanged)
    assert all(layout.places[n] >= layout.exchanged for n in layout.names if n not in task.net.exchanged)


def test_the_mean_of_packed_trees_is_the_mean_of_trees():
    blocks = [torch.randn(10, dtype=torch.float32) for _ in range(3)]
    loose = [Tree(a=b[:4].view(2, 2), b=b[6:], n=torch.tensor(3)) for b in blocks]
    packed = [Packed(dict(tree), block) for tree, block in zip(loose, blocks, strict=True)]
    one, two = mean(loose, [1.0, 2.0, 3.0]), mean(packed, [1.0, 2.0, 3.0])
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert two["n"].dtype == torch.int64


def test_parts_see_the_rate_of_the_round_even_in_a_phase_with_another_rate():
    @part("ratewatch")
    class RateWatch(Part):
        def plan(self, phases, c):
            return [replace(p, lr=0.5) for p in phases]

        def loss(self, s):
            return s.context.lr * s.logits.square().mean()

    try:
        task, loop = setting(Loop, "ratewatch")
        fast_task, fast = setting(Graphs, "ratewatch", device=CpuDevice())
        assert_same(task, play(task, loop), play(fast_task, fast), loop, fast)
    finally:
        REGISTRY.pop("ratewatch")


@pytest.mark.parametrize("text", ["fedavg", "scaffold", "fedbn", "fednova"])
def test_results_of_a_large_cohort_stay_on_the_device_up_to_a_limit(text, monkeypatch):
    seen = []

    class Watched(PendingResults):
        def add(self, name, upload, state):
            super().add(name, upload, state)
            seen.append((self.bytes_on_device, self.moved, self.limit))

    monkeypatch.setattr(graphs_engine, "PendingResults", Watched)
    fed = federation(sizes=(12, 9, 10, 16, 8, 11))
    task, loop = setting(Loop, text, fed=fed)
    fast_task, fast = setting(Graphs, text, fed=fed, device=CpuDevice())
    fast.room = 8_000
    assert_same(task, play(task, loop), play(fast_task, fast), loop, fast)
    assert all(held <= limit for held, _, limit in seen)
    assert max(far for _, far, _ in seen) > 0


def test_a_clients_second_model_is_recorded_too():
    counts = []
    for text in ("fedavg", "ditto"):
        task, engine = setting(Graphs, text, streams=1)
        play(task, engine)
        counts.append(engine.device.recorded)
        assert not engine.notes
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize("text", ["fedplvm", "fednorm", "fedproto", "fedrdn"])
def test_uploads_that_are_not_only_summed_stay_on_the_device(text):
    """A list of prototypes, or a mean over the clients that sent a tensor, is not a sum."""
    task, engine = setting(Graphs, text, device=CpuDevice())
    engine.room = 1
    how = reductions(task)
    kept = []

    class Watched(PendingResults):
        def add(self, name, upload, state):
            kept.append({k: [id(t) for t in tree.values()] for k, tree in upload.parts.items()})
            super().add(name, upload, state)
            now = {k: [id(t) for t in tree.values()] for k, tree in self.rows[-1][1].parts.items()}
            for part_name, ids in kept[-1].items():
                assert (now[part_name] == ids) == (how[part_name] in ("list", "grouped") or not ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs_engine, "PendingResults", Watched)
        play(task, engine, rounds=2)
    assert kept


class Busy(Full):
    """A device whose memory another process holds for a while."""

    def __init__(self, refusals):
        super().__init__(0)
        self.refusals = refusals

    def held_by_others(self):
        self.refusals -= 1
        if not self.refusals:
            self.most = 1  # the other process has ended
        return True


def test_without_memory_for_graphs_clients_train_one_after_the_other():
    task, loop = setting(Loop, "scaffold")
    expected = play(task, loop)
    task, engine = setting(Graphs, "scaffold", streams=2, device=Full(0))
    assert_same(task, expected, play(task, engine), loop, engine)
    assert any("one after the other" in note for note in engine.notes)


def test_memory_that_another_process_holds_is_waited_for(monkeypatch):
    pauses = []
    monkeypatch.setattr(graphs_engine.time, "sleep", pauses.append)
    task, loop = setting(Loop, "scaffold")
    expected = play(task, loop)
    task, engine = setting(Graphs, "scaffold", streams=1, device=Busy(3))
    assert_same(task, expected, play(task, engine), loop, engine)
    assert pauses == [graphs_engine.PAUSE] * 3
    assert not engine.in_turn
    assert any("waited" in note for note in engine.notes)


def test_waiting_for_memory_ends(monkeypatch):
    pauses = []
    monkeypatch.setattr(graphs_engine.time, "sleep", pauses.append)
    task, engine = setting(Graphs, "fedavg", streams=1, device=Busy(10**9))
    play(task, engine, 1)
    assert len(pauses) == graphs_engine.WAITS
    assert engine.in_turn


@pytest.mark.parametrize("text", ["fedavg", "ditto", "scaffold + greg"])
def test_a_closed_engine_keeps_nothing_recorded_and_can_go_on(text):
    task, loop = setting(Loop, text)
    expected = play(task, loop)
    device = CpuDevice()
    task, engine = setting(Graphs, text, streams=2, device=device)
    state = engine.setup(initial_state(task))
    for _ in range(3):
        state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
        assert device.recorded > 0
        engine.close()
        assert device.recorded == 0
        assert not engine.slots.spaces
        assert engine.data.resident is None
    assert_same(task, expected, state, loop, engine)


def test_data_that_no_longer_fit_after_a_close_come_with_their_client():
    task, loop = setting(Loop, "scaffold")
    expected = play(task, loop)
    task, engine = setting(Graphs, "scaffold", streams=2, device=CpuDevice())
    state = engine.setup(initial_state(task))
    for number in range(3):
        state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
        assert (engine.data.resident is None) == (number > 0)
        engine.close()
        engine.device.memory = 1000
    assert_same(task, expected, state, loop, engine)


def test_streams_that_are_tried_and_not_kept_free_their_graphs():
    device = CpuDevice()
    task, engine = setting(Graphs, "fedavg", streams=0, device=device, fed=federation((22,) * 20))
    state = engine.setup(initial_state(task))
    for _ in range(14):
        state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    kept = [*engine.slots.spaces.values(), *engine.stacks.spaces.values()]
    assert len(kept) == engine.grouping.streams
    assert device.recorded == sum(len(space.graphs) for space in kept)
