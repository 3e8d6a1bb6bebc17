"""Worker processes give the same bits as the loop, devices the same sums; neither leaves a process or a file behind."""

import copy
import glob
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms import run
from fednorms.core.error_origin import place
from fednorms.core.errors import BadInput, Diverged, RunFailed
from fednorms.core.method import Method
from fednorms.core.part import REGISTRY, Part
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import Broadcast
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import EngineSettings
from fednorms.engines.loop import Loop
from fednorms.engines.many_devices import Devices, Rank
from fednorms.engines.workers import transport
from fednorms.engines.workers.auto import Auto, loop_or_workers
from fednorms.engines.workers.engine import Worker, Workers
from fednorms.engines.workers.pool import Pool
from fednorms.engines.workers.transport import Receiver, Sender
from fednorms.evaluation.modes import Mode
from fednorms.methods.registry import method
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.clients import ClientStore
from tests.support.addressed import halfway
from tests.support.tiny import CLASSES, same, tiny_data, tiny_net, tiny_task

SIZES = (11, 7, 14, 9, 12)
NAMES = "abcde"
TWO = EngineSettings(workers=2)


def federation(*, bright=1.0) -> Federation:
    data, test = tiny_data(*SIZES), tiny_data(*SIZES, seed=1)
    sites = [
        Site(k, k, Split((bright * data[k].x).float(), data[k].y), test=Split((bright * test[k].x).float(), test[k].y))
        for k in NAMES
    ]
    sites.append(Site("new", "new", test=Split(test["a"].x.float(), test["a"].y)))
    return Federation("tiny", sites, [str(c) for c in range(CLASSES)], Preprocessing.centered(3))


FEDERATION = federation()


def task_of(text, dtype=torch.float32, **settings):
    data = {s.name: s.train for s in FEDERATION.clients}
    return tiny_task(text, data, model=tiny_net(dtype=dtype), dtype=dtype, **settings)


def engines(kind, pool, task, on_divergence="stop"):
    """The loop, and an engine that uses the pool of this module."""
    extra = {"devices": ["cpu"] * len(pool.workers)} if kind is Devices else {}
    settings = EngineSettings(on_divergence=on_divergence, workers=len(pool.workers))
    loop = Loop(task, FEDERATION, FEDERATION, ClientStore(2**30), settings)
    other = kind(task, FEDERATION, FEDERATION, ClientStore(2**30), settings, **extra)
    other._prepare(pool, replace(settings, on_divergence="skip") if kind is Devices else settings)
    other.pool = pool
    return loop, other


def play(engine, rounds=2, modes=()):
    state, task = engine.setup(initial_state(engine.task)), engine.task
    for t in range(rounds):
        cohort = ["d", "a", "c"] if t else list(NAMES)
        done = engine.train(broadcast(task, state), cohort, score=True)
        state = server_update(task, state, done.combined or done.uploads)
    scores = {str(m): engine.evaluate(state, m, cohort) for m in modes}
    return state, done, scores


@pytest.fixture(scope="module")
def pool():
    made = Pool(Worker, ["cpu", "cpu"])
    yield made
    made.close()
    assert not left_behind(made)


@pytest.fixture(scope="module")
def ranks():
    made = Pool(Rank, ["cpu", "cpu"])
    path = os.path.join(tempfile.gettempdir(), f"fednorms-{made.token}-meet")
    made.call_all(
        "join", "gloo", {w.process.pid: i for i, w in enumerate(made.workers)}, path, (True, False, False, False)
    )
    yield made
    made.close()
    assert not left_behind(made)


def left_behind(pool):
    return [
        p for folder in (transport.SHARED_MEMORY, tempfile.gettempdir()) for p in glob.glob(f"{folder}/*{pool.token}*")
    ]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# -- messages -------------------------------------------------------------------------------------------------------
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
tensors = st.builds(
    lambda shape, dtype, turned, seed: (
        torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .permute(turned[: len(shape)])
        if sorted(turned[: len(shape)]) == list(range(len(shape)))
        else torch.full(shape, seed).to(dtype)
    ),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtypes,
    st.permutations(range(3)),
    st.integers(0, 99),
)


@given(st.lists(st.dictionaries(st.text(max_size=3), tensors, max_size=5), min_size=1, max_size=4))
def test_messages_arrive_as_they_were_sent(things):
    sender, receiver = Sender("test"), Receiver()
    for thing in things:  # one after the other: files grow as needed
        found = receiver.read(sender.pack(("x", thing, Tree(thing))))
        assert found[0] == "x"
        assert type(found[2]) is Tree
        for name, tensor in thing.items():
            assert found[1][name].dtype == tensor.dtype
            assert found[1][name].stride() == tensor.clone().stride()
            assert torch.equal(found[1][name], tensor)
            assert found[2][name] is found[1][name]
    assert not glob.glob(f"{transport.SHARED_MEMORY}/fednorms-{os.getpid()}-test-*")


def test_tensors_without_elements_keep_their_own_shapes():
    thing = [torch.zeros(0), torch.zeros(3, 0), torch.ones(2), torch.zeros(0)]
    sender = Sender("test")
    assert [t.shape for t in Receiver().read(sender.pack(thing))] == [t.shape for t in thing]


def test_a_read_tensor_is_the_senders_memory_unless_copied():
    sender, receiver, x = Sender("test"), Receiver(), torch.ones(3)
    view, own = receiver.read(sender.pack(x)), receiver.read(sender.pack(x), copy=True)
    sender.pack(2 * x)
    assert torch.equal(view, 2 * x)
    assert torch.equal(own, x)


@pytest.mark.skipif(not os.path.isdir(transport.DESCRIPTORS), reason="files have names here")
def test_a_file_never_has_a_name_and_vanishes_with_its_last_user(monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender, receiver = Sender("test", one_reader=False), Receiver()
    for size in (3, 3000, 300_000):  # whoever is killed anywhere in between leaves nothing
        message = sender.pack(torch.arange(size))
        assert not list(tmp_path.iterdir())
        assert torch.equal(receiver.read(message), torch.arange(size))
    handle = int(message.path.rpartition("/")[2])
    assert os.fstat(handle).st_nlink == 0
    del sender
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_descriptor_used_twice_is_not_mistaken_for_the_file_before():
    sender, receiver = Sender("test", one_reader=False), Receiver()
    first = sender.pack(torch.zeros(3))
    receiver.read(first)
    sender.pack(torch.zeros(3000))  # not read by this receiver
    last = sender.pack(torch.ones(300_000))
    assert torch.equal(receiver.read(last), torch.ones(300_000))


def test_the_next_pool_removes_the_named_files_of_dead_processes_only(monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(transport, "DESCRIPTORS", str(tmp_path / "none"))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (
        f"fednorms-{dead.pid}-0123456789ab-x",
        f"fednorms-{dead.pid}-else",
        f"other-{dead.pid}-0123456789ab-x",
    ):
        (tmp_path / name).touch()
    mine = Sender("0123456789ab", one_reader=False).pack(torch.ones(3)).path
    assert os.path.exists(mine)
    transport.remove_stale()
    left = {f"fednorms-{dead.pid}-else", f"other-{dead.pid}-0123456789ab-x", os.path.basename(mine)}
    assert set(os.listdir(tmp_path)) == left


def test_without_shared_memory_messages_are_in_the_temporary_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "SHARED_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr(transport, "DESCRIPTORS", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender = Sender("test", one_reader=False)
    message = sender.pack(torch.ones(3))
    assert os.path.dirname(message.path) == str(tmp_path)
    assert torch.equal(Receiver().read(message), torch.ones(3))
    sender.remove_file()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(RunFailed, match="No room"):
        Sender("test").pack(torch.ones(3))


# -- workers against the loop ---------------------------------------------------------------------------------------
CASES = {
    "normbound(relative=1) + trimmedmean + fedbn": ["personal"],
    "krum(keep=2) + scaffold + maxweight(share=0.4)": ["global"],
    "fedavg": ["global", "global/batch", "unseen/batch:3", "unseen"],
    "scaffold + fedbn": ["personal", "unseen"],
    "hbn": ["personal"],  # passes before training and before a test
    "fedrdn": ["global"],  # a pass before the first round
    "ditto": ["personal"],
    "fedrep": ["adapted"],
    "atp(after=0, eta=5.0)": ["global", "unseen/test-time:3"],  # adapts to test images
}


@pytest.mark.parametrize("text", CASES)
def test_workers_give_the_bits_of_the_loop(pool, text):
    same_bits(pool, text, CASES[text])


def test_workers_carry_what_is_for_one_client(pool):
    with halfway() as part:
        same_bits(pool, part + method("scaffold + fedbn"), ["personal", "unseen"])
        same_bits(pool, part, ["personal", "global"])


def same_bits(pool, text, asked):
    task = task_of(text)
    loop, workers = engines(Workers, pool, task)
    modes = [Mode.read(m).resolved(task) for m in asked]
    one, two = play(loop, modes=modes), play(workers, modes=modes)
    assert same(one[0].model, two[0].model)
    assert one[0].parts.keys() == two[0].parts.keys()
    assert all(same(tree, two[0].parts[k]) for k, tree in one[0].parts.items())
    assert [u.client for u in two[1].uploads] == ["d", "a", "c"]
    for a, b in zip(one[1].uploads, two[1].uploads, strict=True):
        assert same(a.model, b.model)
        assert {k: float(v) for k, v in a.metrics.items()} == {k: float(v) for k, v in b.metrics.items()}
    assert one[1].after_local == two[1].after_local
    assert one[2] == two[2]
    assert loop.store.names() == workers.store.names()
    for name in loop.store.names():
        a, b = loop.store[name], workers.store[name]
        assert a.round == b.round
        assert same(a.local, b.local)
        assert all(same(tree, b.parts[k]) for k, tree in a.parts.items())
    assert pool.sender.size < FEDERATION.site("a").train.x.nbytes  # the data are not sent again


def test_divergence_is_reported_as_by_the_loop(pool):
    task = task_of("fedavg", lr=1e30)
    cohort = ["e", "b", "a", "c"]
    messages = []
    for engine in engines(Workers, pool, task):
        with pytest.raises(Diverged) as found:
            engine.train(broadcast(task, initial_state(task)), cohort)
        messages.append(str(found.value))
    assert messages[0] == messages[1]
    assert 'Client "e"' in messages[0]
    loop, workers = engines(Workers, pool, task, "skip")
    one, two = (engine.train(broadcast(task, initial_state(task)), cohort) for engine in (loop, workers))
    assert one.diverged == two.diverged
    assert list(one.diverged) == list(two.diverged) == cohort
    assert not two.uploads


class Stretching(Part):
    name = "stretching"  # as `part` would set it, in worker processes as well

    def grad(self, g, s):
        return g.map(torch.mean)


class Crashing(Part):
    name = "crashing"

    def grad(self, g, s):
        return g * (1 / 0)


@pytest.mark.parametrize(("kind", "error"), [(Stretching, BadInput), (Crashing, ZeroDivisionError)])
def test_mistakes_of_custom_parts_are_reported_as_by_the_loop(kind, error, pool, monkeypatch):
    monkeypatch.setitem(REGISTRY, kind.name, kind)
    task = task_of(Method((kind(),)))
    told = []
    for engine in engines(Workers, pool, task):
        with pytest.raises(error) as found:
            engine.train(broadcast(task, initial_state(task)), ["b", "a"])
        told.append((str(found.value), place(found.value) if error is ZeroDivisionError else ""))
    assert told[0] == told[1]
    if error is BadInput:
        assert told[0][0].startswith(
            "stretching: grad must return the gradient, a Tree, got a tensor of () as the entry"
        )
    else:
        assert told[0][1].startswith('part "crashing", hook grad (test_workers.py, line ')


def broken_loss(logits, y):
    if len(y) == 3:  # the last batch of "a" and "b" only
        raise ZeroDivisionError("a custom loss")
    return torch.nn.functional.cross_entropy(logits, y)


def test_an_exception_in_user_code_is_raised_here_and_the_workers_continue(pool):
    task = task_of("fedavg", loss=broken_loss)
    _, workers = engines(Workers, pool, task)
    sent = broadcast(task, initial_state(task))
    with pytest.raises(ZeroDivisionError, match="custom loss") as found:
        workers.train(sent, list(NAMES))
    assert "broken_loss" in "".join(found.value.__notes__)
    assert [u.client for u in workers.train(sent, ["d", "c"]).uploads] == ["d", "c"]


# -- devices against the loop ---------------------------------------------------------------------------------------
# Uploads that are weighted, uniform with an even mean, stacked, summed or listed.
DEVICE_CASES = ["fedavg", "scaffold + fedbn", "feddyn", "feddc", "hbn", "fbn", "fednova", "ditto", "fedplvm"]


@pytest.mark.parametrize("text", DEVICE_CASES)
def test_devices_sum_to_the_loops_results(ranks, text):
    same_sums(ranks, text)


def test_devices_carry_what_is_for_one_client(ranks):
    with halfway() as part:
        same_sums(ranks, part + method("scaffold + fedbn"))


def same_sums(ranks, text):
    task = task_of(text, torch.float64)
    modes = [Mode("personal" if task.personal else "global").resolved(task)]
    loop, devices = engines(Devices, ranks, task)
    one, two = play(loop, modes=modes), play(devices, modes=modes)
    assert [u.client for u in two[1].uploads] == ["d", "a", "c"]
    assert [u.model.nbytes() for u in one[1].uploads] == [u.model.nbytes() for u in two[1].uploads]
    for a, b in ((one[0].model, two[0].model), *((t, two[0].parts[k]) for k, t in one[0].parts.items())):
        assert list(a) == list(b)
        for name in a:
            assert a[name].dtype == b[name].dtype
            torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)
    for mode, scores in one[2].items():
        assert {k: s.accuracy for k, s in scores.sites.items()} == {
            k: s.accuracy for k, s in two[2][mode].sites.items()
        }
    for name in loop.store.names():
        a, b = loop.store[name], devices.store[name]
        for x, y in ((a.local, b.local), *((t, b.parts[k]) for k, t in a.parts.items())):
            assert x.keys() == y.keys()
            assert all(torch.allclose(x[k], y[k], rtol=1e-12, atol=1e-12) for k in x)


@pytest.mark.parametrize(
    "text", ["krum(keep=2) + scaffold", "normbound(relative=1) + median + feddyn", "maxweight(share=0.25) + hbn"]
)
def test_devices_hand_each_upload_over_so_the_server_gets_the_loops_bits(ranks, text):
    task = task_of(text, torch.float64)
    loop, devices = engines(Devices, ranks, task)
    (one, done, _), (two, gathered, _) = play(loop), play(devices)
    assert gathered.combined is None
    assert all(same(a.model, b.model) for a, b in zip(done.uploads, gathered.uploads, strict=True))
    assert same(one.model, two.model)
    assert all(same(tree, two.parts[name]) for name, tree in one.parts.items())


def test_a_device_without_clients_and_one_whose_clients_diverge_do_not_stop_the_others(ranks):
    task = task_of("scaffold", torch.float64)
    loop, devices = engines(Devices, ranks, task)
    sent = broadcast(task, initial_state(task))
    one, two = loop.train(sent, ["b"]), devices.train(sent, ["b"])
    assert two.combined.sampled == 1
    for name, tensor in one.uploads[0].model.items():
        torch.testing.assert_close(two.combined.model[name], tensor, rtol=1e-14, atol=0)
    wild = task_of("fedavg", torch.float64, lr=1e200)
    for on_divergence in ("stop", "skip"):
        loop, devices = engines(Devices, ranks, wild, on_divergence)
        if on_divergence == "stop":
            with pytest.raises(Diverged, match='Client "c"'):
                devices.train(broadcast(wild, initial_state(wild)), ["c", "a", "b"])
        else:
            done = devices.train(broadcast(wild, initial_state(wild)), ["c", "a", "b"])
            assert list(done.diverged) == ["c", "a", "b"]
            assert done.combined is None


def test_shares_have_about_the_same_number_of_images(ranks):
    _, devices = engines(Devices, ranks, task_of("fedavg", torch.float64))
    shares = devices._shares(list(NAMES))
    assert sorted(n for share in shares for n in share) == list(NAMES)
    assert all(share == sorted(share) for share in shares)
    load = [sum(devices.samples(n) for n in share) for share in shares]
    assert max(load) - min(load) <= max(SIZES)


# -- closing ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_worker_that_dies_is_reported_and_nothing_is_left():
    engine = Workers(task_of("fedavg"), FEDERATION, FEDERATION, ClientStore(2**30), TWO)
    sent = broadcast(engine.task, initial_state(engine.task))
    pool = engine.start()
    pids = [w.process.pid for w in pool.workers]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"died \(exit code -9"):
        engine.train(sent, list(NAMES))
    assert all(gone(pid) for pid in pids)
    assert not left_behind(pool)
    engine.close()
    assert len(engine.train(sent, ["a", "b"]).uploads) == 2  # in this process, one after the other
    assert engine.pool is None


def test_an_interruption_ends_all_workers(monkeypatch):
    pool = Pool(Worker, ["cpu"])
    pids = [w.process.pid for w in pool.workers]
    monkeypatch.setattr(pool, "_receive", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(pool.map_unordered(deque(["a"]), lambda name: ("load_broadcasts", [])))
    assert all(gone(pid) for pid in pids)
    assert pool.interrupted


@pytest.mark.slow
def test_a_run_in_workers_is_the_run_in_the_loop(tmp_path):
    before = set(multiprocessing.active_children())
    settings = {"rounds": 2, "threads": 1, "evaluate": ["auto", "unseen"], "training": {"batch_size": 4}}
    results = [
        run("fedbn", FEDERATION, tiny_net(dtype=torch.float32), recipe=Recipe(engine=e, workers=2, **settings), out=out)
        for e, out in (("loop", None), ("workers", tmp_path / "run"))
    ]
    one, two = (copy.deepcopy(r.history) for r in results)
    for row in (*one, *two):
        del row["seconds"]
    assert one == two
    models = [r.model("a").state_dict() for r in results]
    assert same(*models)
    assert set(multiprocessing.active_children()) <= before


# -- choices, without a process -------------------------------------------------------------------------------------
def test_what_cannot_be_pickled_is_refused_and_auto_stays_with_the_loop():
    task = replace(task_of("fedavg"), loss=lambda logits, y: logits.sum())
    with pytest.raises(BadInput, match=r"loss cannot be sent to worker processes.*engine=.loop"):
        Workers(task, FEDERATION, FEDERATION, ClientStore(2**30))
    for t in (task, task_of("fedtan")):
        assert type(loop_or_workers(t, FEDERATION, FEDERATION, ClientStore(2**30), TWO)) is Loop
    kind = type(loop_or_workers(task_of("fedavg"), FEDERATION, FEDERATION, ClientStore(2**30), TWO))
    assert kind is Auto


def test_auto_takes_the_faster_engine(monkeypatch):
    def engine(rounds, speeds, opens=lambda self: None):
        """Run rounds that take the given seconds in each engine; returns the engine of each round, and the notes."""
        made = Auto(task_of("fedavg", rounds=rounds), FEDERATION, FEDERATION, ClientStore(0), TWO)
        monkeypatch.setattr(Workers, "start", opens)
        clock = [0.0]
        monkeypatch.setattr("fednorms.engines.workers.auto.time.perf_counter", lambda: clock[0])

        def train(self, sent, cohort, *, score=False):
            used.append(self.name)
            clock[0] += speeds[self.name] * len(cohort)

        for kind in (Loop, Workers):
            monkeypatch.setattr(kind, "train", train)
        used = []
        for t in range(rounds):
            made.train(Broadcast(t, Tree(), {}), list(NAMES))
        return used, made.notes

    fast, slow = {"loop": 2.0, "workers": 1.0}, {"loop": 2.0, "workers": 3.0}
    assert engine(8, fast) == (["loop"] * 2 + ["workers"] * 6, [])
    used, notes = engine(8, slow)
    assert used == ["loop"] * 2 + ["workers"] * 2 + ["loop"] * 4
    assert "slower" in notes[0]
    # Starting processes would cost more than it saves.
    assert engine(4, {"loop": 0.1, "workers": 0.01})[0] == ["loop"] * 4

    def refuse(self):
        raise RunFailed("no main guard")

    used, notes = engine(8, fast, refuse)
    assert used == ["loop"] * 8
    assert "no main guard" in notes[0]


def test_a_recipe_names_workers_with_one_thread_each():
    assert Recipe(engine="workers").resolved().threads == 1
    assert Recipe(engine="workers", threads=2).resolved().threads == 2
    assert Recipe(engine="auto", threads=2).resolved().engine == "loop"
    assert Recipe(engine="auto", threads=1).resolved().engine == "auto"
