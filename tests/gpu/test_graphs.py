"""The graph engine against the loop, on a GPU: the same method code, the same numbers."""

from __future__ import annotations

import gc
import os
import subprocess

import pytest
import torch

from fednorms.core.errors import Diverged
from fednorms.core.net import Net
from fednorms.core.part import REGISTRY, Part, part
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import PROVIDES
from fednorms.engines.devices import numerics
from fednorms.engines.graphs import Graphs
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import headline
from fednorms.methods.registry import method, names
from fednorms.models import build
from fednorms.runs import driver
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.clients import ClientStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = [
    *(n for n in names() if n != "fedlaw" and all(p.requires <= PROVIDES["graphs"] for p in method(n).parts)),
    "scaffold(control='difference')",
    "scaffold(option='I')",
    "mixbn(kind='learned')",
    "mixbn(kind='global')",
    "mixbn(kind='ensemble')",
    "perfedavg(variant=hessian_free)",
    "scaffold + greg + fedfn",
    "fednn + scaffold",
    "greg + fedprox",
    "greg + fedrdn",
    "fedexp + fedfn",
    "fedbn + fedfn",
    "spherefed(loss_kind=ce)",
    "perfedavg(variant=exact)",
    "feddyn(form=code)",
    "scaffold(variant=feddc)",
    "partialfed(strategy=adaptive)",
    "moon(projection=8)",
    "feddyn + fednn",
    "feddc + fednn",
    "greg + fedfa",
    "greg + fedplvm",
]


SIZES = (22, 17, 24)


def federation(dtype=torch.float64, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k, n in enumerate(sizes):
        x = torch.rand(n, 3, 16, 16, generator=generator, dtype=dtype)
        split = Split(x, torch.arange(n) % 4)
        test = Split(torch.rand(40, 3, 16, 16, generator=generator, dtype=dtype), torch.arange(40) % 4)
        sites.append(Site(f"c{k}", "d", train=split, test=test, attributes={"modality": "ct" if k else "mr"}))
    return Federation("tiny", sites, list("abcd"), Preprocessing.centered(3))


def run(
    kind,
    text,
    rounds,
    dtype=torch.float64,
    streams=2,
    engines=None,
    lr=0.05,
    together=1,
    compiled=False,
    sizes=SIZES,
    **settings,
):
    fed = federation(dtype, sizes)
    chosen = method(text)
    training = fed
    for p in chosen.parts:
        training = p.arrange(training)
    model = build("cnn-small", classes=4, channels=3, size=16, seed=0)
    net = Net(model, chosen, name="cnn-small", dtype=dtype, device="cuda")
    task = Task(
        net=net,
        training=Training(batch_size=8, lr=lr, schedule="exp", decay=0.9, **settings),
        rounds=4,
        seed=0,
        clients=len(training.clients),
        samples=sum(len(s.train) for s in training.clients),
        preprocessing=fed.preprocessing,
        needs_two=net.probe(fed.shape, 4),
    )
    how = {"streams": streams, "together": together, "compiled": compiled} if kind is Graphs else {}
    engine = kind(task, training, fed, ClientStore(2**30), **how)
    if engines is not None:
        engines.append(engine)
    with numerics("float32", deterministic=True):
        state = engine.setup(initial_state(task))
        for _ in range(rounds):
            state = server_update(task, state, engine.train(broadcast(task, state), engine.clients).uploads)
    return state, {n: engine.store.get(n) for n in engine.clients}


def whole(tree):
    return torch.cat([t.double().flatten() for t in tree.values() if t.is_floating_point()]) if tree else torch.zeros(1)


def distance(a, b):
    left, right = whole(a), whole(b)
    return float((left - right).norm() / left.norm().clamp(min=1e-12))


@pytest.mark.parametrize("text", METHODS)
def test_graphs_equal_the_loop_in_float64_and_repeat_bit_for_bit(text):
    engines = []
    loop, loop_clients = run(Loop, text, 3, engines=engines)
    fast, fast_clients = run(Graphs, text, 3, engines=engines)
    again, _ = run(Graphs, text, 3, streams=1)
    assert all(torch.equal(fast.model[k], again.model[k]) for k in fast.model), "repeats with the same bits"
    for owner, tree in fast.parts.items():
        assert all(torch.equal(t, again.parts[owner][k]) for k, t in tree.items())
    plain, quick = (
        e.evaluate(s, headline(e.task), e.clients).sites for e, s in zip(engines, (loop, fast), strict=True)
    )
    for site, score in plain.items():
        assert score.accuracy == quick[site].accuracy
        assert score.loss == pytest.approx(quick[site].loss, rel=1e-9)
    assert not engines[1].notes, engines[1].notes
    assert distance(loop.model, fast.model) < 1e-9
    for owner, tree in loop.parts.items():
        assert distance(tree, fast.parts[owner]) < 1e-9
    for name, state in loop_clients.items():
        if state is None:
            assert fast_clients[name] is None
            continue
        assert distance(state.local, fast_clients[name].local) < 1e-9
        for owner, tree in state.parts.items():
            assert distance(tree, fast_clients[name].parts[owner]) < 1e-9


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "weight_decay": 1e-3},
        {"optimizer": "adam", "weight_decay": 0.05},
        {"optimizer": "adamw", "weight_decay": 0.05},
        {"clip": 0.5},
    ],
)
def test_optimizers_and_clipping(settings):
    text = "scaffold(control=gradient)"  # the other control divides updates by the rate, which Adam does not follow
    loop, _ = run(Loop, text, 3, **settings)
    fast, _ = run(Graphs, text, 3, **settings)
    assert distance(loop.model, fast.model) < 1e-9


def test_repeats_are_bit_identical_whatever_the_number_of_streams():
    a, _ = run(Graphs, "scaffold + greg", 3, torch.float32, streams=1)
    b, _ = run(Graphs, "scaffold + greg", 3, torch.float32, streams=3)
    assert all(torch.equal(a.model[k], b.model[k]) for k in a.model)


@pytest.mark.parametrize("text", ["fedavg", "scaffold", "fednn", "greg", "fedwon"])
def test_float32_agrees_after_one_step(text):
    loop, _ = run(Loop, text, 1, torch.float32, steps=1)
    fast, _ = run(Graphs, text, 1, torch.float32, steps=1)
    assert distance(loop.model, fast.model) < 1e-5


def test_what_cannot_be_captured_runs_eagerly_and_is_named():
    @part("peek")
    class Peek(Part):
        def loss(self, s):
            return 0.1 * s.logits.square().mean() if s.logits.sum().item() > -1e9 else 0.0

    try:
        engines = []
        loop, _ = run(Loop, "peek", 2)
        fast, _ = run(Graphs, "peek", 2, engines=engines)
        assert distance(loop.model, fast.model) < 1e-9
        assert any("peek (loss)" in note for note in engines[0].notes), engines[0].notes
    finally:
        REGISTRY.pop("peek")


def test_data_that_do_not_fit_are_copied_with_their_client(monkeypatch):
    loop, _ = run(Loop, "scaffold", 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 1000))
    engines = []
    fast, _ = run(Graphs, "scaffold", 2, engines=engines)
    assert engines[0].data.resident is None
    assert distance(loop.model, fast.model) < 1e-9


def test_a_diverging_client_is_named_as_in_the_loop():
    messages = []
    for kind in (Loop, Graphs):
        with pytest.raises(Diverged) as caught:
            run(kind, "fedavg", 3, torch.float32, lr=1e30)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_the_number_of_streams_is_chosen_by_trial_and_changes_nothing():
    engines = []
    a, _ = run(Graphs, "fedavg", 5, torch.float32, streams=0, engines=engines)
    b, _ = run(Graphs, "fedavg", 5, torch.float32, streams=1)
    assert all(torch.equal(a.model[k], b.model[k]) for k in a.model)
    assert len(engines[0].trials.seconds) > 1
    assert {g.together for g in engines[0].trials.seconds} == {1}, "a repeatable run does not try stacks"


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float64"])
def test_a_run_on_the_gpu_in_every_precision(precision):
    recipe = Recipe(precision=precision, device="cuda", threads=1)
    result = driver.run("greg", "digits-shift", rounds=2, lr=0.1, recipe=recipe)
    assert result.recipe.engine == "graphs"
    assert result.accuracy > 0.12


def test_memory_after_twenty_runs_is_that_after_ten():
    texts = ["fedavg", "scaffold", "greg", "fedwon", "fednn", "ditto", "fedbn", "fedavg", "hbn", "fedavg"]

    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), memory_of_this_process()

    after = []
    for text in [*texts, *texts]:
        assert driver.run(text, "digits-shift", rounds=2, recipe=Recipe(device="cuda")).recipe.engine == "graphs"
        after.append(used())  # nothing holds the result, which has the model on the device
    assert len({reserved for reserved, _ in after}) == 1, after
    # CUDA loads the kernels of a layer when it is first used, and keeps them.
    assert after[-1] == after[len(texts) - 1], after


def memory_of_this_process():
    """What the driver says that this process has on the device, in MiB; None where it does not tell."""
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = [line.split(", ") for line in told.splitlines()]
    return next((row[1] for row in rows if row[0] == str(os.getpid())), None)


@pytest.mark.parametrize("text", ["fedavg", "scaffold", "fedbn", "fednn", "perfedavg", "hbn", "gn(groups=2)"])
def test_stacks_give_the_loops_results_and_repeat(text):
    sizes, engines = (22, 22, 17, 22), []
    loop, _ = run(Loop, text, 3, sizes=sizes)
    fast, again = (run(Graphs, text, 3, streams=n, together=2, sizes=sizes, engines=engines)[0] for n in (1, 2))
    assert engines[0].stacks.spaces
    assert not engines[0].notes
    assert distance(loop.model, fast.model) < 1e-9
    assert all(torch.equal(fast.model[k], again.model[k]) for k in fast.model), "repeats with the same bits"


@pytest.mark.parametrize("text", ["scaffold", "fednn", "gn(groups=2)"])
@pytest.mark.parametrize("together", [1, 3])
def test_compiled_steps_give_the_loops_results_and_repeat(text, together):
    sizes, engines = (16, 16, 16), []
    loop, _ = run(Loop, text, 3, sizes=sizes)
    how = {"streams": 1, "together": together, "compiled": True, "sizes": sizes, "engines": engines}
    fast, again = (run(Graphs, text, 3, **how)[0] for _ in range(2))
    assert not engines[0].notes, engines[0].notes
    assert all(engines[0].steps.programs.values())
    assert distance(loop.model, fast.model) < 1e-9
    assert all(torch.equal(fast.model[k], again.model[k]) for k in fast.model), "repeats with the same bits"


def test_a_limit_on_memory_changes_no_bit():
    free = driver.run("scaffold", "digits-shift", rounds=2, recipe=Recipe(device="cuda"))
    tight = driver.run("scaffold", "digits-shift", rounds=2, recipe=Recipe(device="cuda", memory=0.01))
    assert free.scores().to_dict() == tight.scores().to_dict()
