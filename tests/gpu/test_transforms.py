"""Transforms give the same images on a GPU as on the CPU, from the same keyed numbers."""

from __future__ import annotations

import pytest
import torch

from fednorms import noise
from fednorms.transforms import CHAINS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def chained(name, x):
    with noise.keyed(torch.tensor([3, 5], device=x.device)):
        return CHAINS[name](x, lambda *shape: noise.uniform(shape, 7, x))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_images_on_both_devices(name, dtype):
    x = torch.rand(16, 3, 32, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
    there = chained(name, x.cuda()).cpu()
    # A pixel halfway between two others may round either way in a nearest-neighbour rotation.
    off = (there - chained(name, x)).abs() > 1e-4
    assert off.double().mean() < 1e-3


@pytest.mark.parametrize("name", CHAINS)
def test_nothing_waits_for_the_host(name):
    x = torch.rand(4, 3, 16, 16, device="cuda")
    chained(name, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chained(name, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
