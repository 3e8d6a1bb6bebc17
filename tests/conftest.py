"""Makes every test start alike on every machine: one thread, fixed seeds, no network, nothing in the home."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from importlib.util import find_spec

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts; the processes that tests start inherit it
os.environ["MKL_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

# The same few examples each time, however long they take: a failure on one machine is a failure on all.
hypothesis.settings.register_profile(
    "fednorms",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fednorms")

collect_ignore = ["support/patient"]  # for the processes of a Flower cluster, not for this one
_scratch = tempfile.TemporaryDirectory(prefix="fednorms-tests-")
_connect = socket.socket.connect


def _connect_here(self, address):
    internet = self.family in (socket.AF_INET, socket.AF_INET6)
    if internet and address[0] not in ("127.0.0.1", "::1", "localhost"):
        self.close()
        raise RuntimeError(f"tests must not use the network, but one tried to reach {address!r}")
    return _connect(self, address)


class _WithoutFlower:
    """Leaves the doctests of modules that import Flower out where that optional extra is not installed."""

    def pytest_ignore_collect(self, collection_path):
        flower = (
            "flower" in (collection_path.parent.name, collection_path.name.split("_")[0])
            and collection_path.suffix == ".py"
        )
        if flower and not collection_path.name.startswith("test_"):  # tests skip themselves, and say why
            return True if "flwr" in collection_path.read_text(encoding="utf-8") else None
        return None


def pytest_configure(config):
    if find_spec("flwr") is None:
        config.pluginmanager.register(_WithoutFlower())
    # For the whole session and not as fixtures: the doctests in src/ run under it too.
    torch.set_num_threads(1)
    socket.socket.connect = _connect_here
    os.environ.pop("FEDNORMS_CACHE", None)
    os.environ.update(
        XDG_CACHE_HOME=_scratch.name,
        TORCH_HOME=_scratch.name,
        HF_HOME=_scratch.name,
        HF_HUB_OFFLINE="1",
        MPLBACKEND="agg",
    )


def pytest_unconfigure(config):
    socket.socket.connect = _connect
    _scratch.cleanup()


@pytest.fixture(autouse=True)
def _same_start():
    random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def parts_as_before():
    """Parts that a test makes leave the registry again; those of the library are all in it."""
    from fednorms.core.part import REGISTRY
    from fednorms.methods.registry import load_all

    load_all()
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
