"""Transforms give the same images on a GPU as on the CPU, from the same keyed numbers."""

from __future__ import annotations

import pytest
import torch

from fednorms.core import noise
from fednorms.transforms import CHAINS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def chained(name, x, key=None):
    with noise.keyed(torch.tensor([3, 5], device=x.device) if key is None else key):
        return CHAINS[name](x, lambda *shape: noise.uniform(shape, 7, x), (x.shape[2] - 4, x.shape[3] - 4))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_images_on_both_devices(name, dtype):
    x = torch.rand(16, 3, 32, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
    there = chained(name, x.cuda()).cpu()
    # In a nearest-neighbor rotation, a pixel halfway between two others may be rounded either way.
    off = (there - chained(name, x)).abs() > 1e-4
    assert off.double().mean() < 1e-3


@pytest.mark.parametrize("name", CHAINS)
def test_a_captured_chain_follows_its_key(name):
    x, key = torch.rand(8, 3, 16, 16, device="cuda"), torch.tensor([3, 5], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chained(name, x, key)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # reading a value on the host is an error here
        y = chained(name, x, key)
    key.copy_(torch.tensor([4, 9]))
    graph.replay()
    assert torch.equal(y, chained(name, x, key))
