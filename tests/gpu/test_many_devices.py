"""Several workers on one GPU, and one worker per GPU, against the loop on that GPU."""

from __future__ import annotations

import pytest
import torch

from fednorms.core.net import Net
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import Task
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.base import Engine
from fednorms.engines.devices import numerics
from fednorms.engines.loop import Loop
from fednorms.engines.many_devices import Devices, gpus
from fednorms.evaluation.modes import Mode
from fednorms.methods.registry import method
from fednorms.models import build
from fednorms.runs.store.clients import ClientStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    sites = []
    for k, n in enumerate((20, 13, 17, 8, 25)):
        x = torch.randint(0, 256, (n, 3, 16, 16), generator=generator, dtype=torch.uint8)
        split = Split(x, torch.randint(0, 10, (n,), generator=generator))
        sites.append(Site(f"c{k}", "none", train=split, test=split))
    return Federation("synthetic", sites, [str(c) for c in range(10)], Preprocessing.centered(3))


def play(engine: Engine):
    task, state = engine.task, engine.setup(initial_state(engine.task))
    for _ in range(3):
        done = engine.train(broadcast(task, state), engine.clients)
        state = server_update(task, state, done.combined or done.uploads)
    mode = Mode("personal" if task.personal else "global").resolved(task)
    return state, engine.evaluate(state, mode, engine.clients)


@pytest.mark.parametrize("devices", ["shared", "all"])
@pytest.mark.parametrize("text", ["scaffold + fedbn", "hbn"])
def test_devices_sum_to_the_loops_results(text: str, devices: str) -> None:
    data = federation()
    net = Net(
        build("cnn-small", classes=10, channels=3, size=16, seed=0), method(text), dtype=torch.float64, device="cuda"
    )
    samples = sum(len(s.train) for s in data.clients if s.train is not None)
    task = Task(net, Training(batch_size=8, lr=0.05), 3, 0, len(data.clients), samples, data.preprocessing)
    names = ["cuda:0", "cuda:0"] if devices == "shared" else gpus()
    with numerics("float64", deterministic=True):
        one, scores = play(Loop(task, data, data, ClientStore(2**30)))
        engine = Devices(task, data, data, ClientStore(2**30), devices=names)
        try:
            two, again = play(engine)
        finally:
            engine.close()
    for name, tensor in one.model.items():
        assert two.model[name].device == tensor.device
        torch.testing.assert_close(two.model[name], tensor, rtol=1e-9, atol=1e-9)
    assert scores is not None
    assert again is not None
    assert {k: s.accuracy for k, s in scores.sites.items()} == {k: s.accuracy for k, s in again.sites.items()}


if __name__ == "__main__":  # without pytest
    for text in ("scaffold + fedbn", "hbn"):
        for devices in ("shared", "all"):
            test_devices_sum_to_the_loops_results(text, devices)
            print("passed:", text, devices)
