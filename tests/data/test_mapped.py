"""Images beyond the memory limit are read and written in parts: their pages do not add up in the process."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fednorms.data import mapped
from fednorms.data.folders import cached
from fednorms.data.readers import enlarged as module
from fednorms.data.readers.digits_five import as_rgb

STATUS = Path("/proc/self/status")


def pages():
    """Bytes of files that are mapped into this process and in memory."""
    return 1024 * int(re.search(r"RssFile:\s+(\d+)", STATUS.read_text())[1])


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux says which pages a process has")
def test_images_on_disk_do_not_fill_the_memory(tmp_path, monkeypatch):
    small = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 3), np.uint8)
    seen = [pages()]

    def watched(images, size):
        seen.append(pages())
        return as_rgb(images, size)

    monkeypatch.setattr(module, "as_rgb", watched)
    monkeypatch.setattr(module, "_BLOCK", 10)
    for place in (mapped, cached):
        monkeypatch.setattr(place, "HELD", 2**20)
    images = module.enlarged("here", {"train": small}, 256, tmp_path, memory_limit=1000)["train"]
    for start in range(0, len(small), 10):
        assert torch.equal(images[start : start + 10], torch.from_numpy(as_rgb(small[start : start + 10], 256)))
        seen.append(pages())
    assert max(seen) - seen[0] < 2**24 < small.nbytes * 32**2
