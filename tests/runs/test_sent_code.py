"""Code from a notebook in worker processes: the same results, or an error before anything trains."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.part import REGISTRY, Part, part
from fednorms.methods.registry import method
from fednorms.runs.callables import Callables
from fednorms.runs.cells import run_cells
from fednorms.runs.identity import Custom, code_hash, own_parts
from fednorms.runs.sent_code import packed, unpack
from tests.support.after import federation
from tests.support.tiny import TinyNet
from tests.support.waiting import HANG


def doubled(logits, y):
    return 2 * nn.functional.cross_entropy(logits, y)


@pytest.mark.usefixtures("parts_as_before")
def test_what_a_new_process_could_not_import_is_refused_without_cloudpickle(monkeypatch):
    @part("typed")
    class Typed(Part):
        pass

    class Block(nn.ReLU):
        pass

    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # an import now fails
    monkeypatch.setattr("fednorms.runs.cells.get_context", lambda kind: pytest.fail("a process would be started"))
    for given, named in (
        ({"methods": ["fedavg + typed"]}, 'part "typed"'),
        ({"model": nn.Sequential(Block(), nn.Flatten(), nn.Linear(192, 3))}, 'model "Sequential"'),
        ({"loss": lambda logits, y: doubled(logits, y)}, 'loss "<lambda>"'),
        ({"schedule": lambda t: 1.0}, 'schedule "<lambda>"'),
        ({"optimizer": partial(lambda params, lr: torch.optim.SGD(params, lr=lr))}, 'optimizer "<lambda>"'),
    ):
        with pytest.raises(BadInput, match=f"cannot import {named}.*pip install cloudpickle.*jobs=1"):
            fn.compare(**({"methods": ["fedavg"], "federation": federation(), "rounds": 1, "jobs": 2} | given))


def test_importable_code_needs_no_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    custom = Custom(federation(), TinyNet(), doubled, Callables(torch.optim.SGD))
    back = unpack(packed(custom, ["fedbn"]))
    assert (back.loss, back.training.optimizer, type(back.model)) == (doubled, torch.optim.SGD, TinyNet)
    assert back.federation is None  # it goes another way, through shared memory


@pytest.mark.usefixtures("parts_as_before")
def test_a_part_arrives_with_its_name_and_the_hash_of_its_code():
    pytest.importorskip("cloudpickle")

    @part("typed")
    class Typed(Part):
        by: float = 0.5

    sent, code = packed(Custom(), ["typed(by=0.25)"]), code_hash(Typed)
    del REGISTRY["typed"]
    unpack(sent)
    assert str(method("typed(by=0.25)")) == "typed(by=0.25)"
    assert own_parts(method("typed")) == {"typed": code}


def test_nothing_is_packed_for_one_job(monkeypatch):
    monkeypatch.setattr("fednorms.runs.cells.packed", lambda *_: pytest.fail("packed"))
    assert run_cells([], 1) == []
    assert not fn.compare(["fedavg"], federation(), rounds=1, seeds=1, loss=lambda z, y: doubled(z, y)).failed


NOTEBOOK = """
import sys
import torch
from torch import nn
import fednorms as fn

half = 0.5

@fn.part("shy")
class Shy(fn.Part):
    by: float = fn.option(0.5, above=0.0)

    def server(self, delta, r):
        return self.by * half * delta, r.mine

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))

torch.manual_seed(0)
net, sites = Net(), fn.federation("digits-shift", size=8)
given = {"rounds": 1, "seeds": 2, "schedule": lambda t: 0.5, "loss": lambda z, y: 2 * nn.functional.cross_entropy(z, y)}
tables = []
for jobs, out in ((1, None), (2, sys.argv[1]), (1, sys.argv[1])):  # the last one finds the runs of the second
    found = fn.compare([Shy(by=0.25) + fn.methods.FedBN()], sites, net, jobs=jobs, out=out, **given)
    assert not found.failed, found.failed
    tables.append(found.table())
assert tables[0] == tables[1] == tables[2], tables
print("same")
"""


@pytest.mark.slow
def test_a_notebook_compares_in_processes(tmp_path):
    pytest.importorskip("cloudpickle")
    settings = os.environ | {"PYTHONPATH": str(Path(fn.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NOTEBOOK, str(tmp_path / "out")]  # __main__ has no file, as in a notebook
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=HANG)
    assert done.stdout.strip() == "same", done.stderr
