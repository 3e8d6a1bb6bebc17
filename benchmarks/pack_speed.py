"""Images per second of a pack against torchvision's ImageFolder with a DataLoader, and memory with 1,000 clients.

Makes a folder of JPEG images (noise over gradients), packs it, and reads both in the same run in shuffled batches:
images resized, as bytes. torchvision decodes and resizes in every epoch, which is what a pack saves. All files are in
the page cache, so this compares work, not disks. A compressed pack keeps some decoded images; every pass here starts
with none of them, or it would be measured without decoding. Readers take turns and each shows its best turn, because
other processes of a machine disturb single measurements. Goal: at least ten times faster with the default pack (raw).

    python benchmarks/pack_speed.py [--images 400] [--pixels 640 480] [--sizes 224 256] [--workers 0 2] [--turns 3]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fednorms.data import Federation, Site, Split
from fednorms.data.folders import from_folders
from fednorms.data.pack import pack
from fednorms.data.packed import unpacked

BATCH = 32


def make_folder(root, images, pixels):
    rng = np.random.default_rng(0)
    wide, high = pixels
    rows, columns = np.linspace(0, 1, high)[:, None, None], np.linspace(0, 1, wide)[None, :, None]
    for i in range(images):
        smooth = 120 + 80 * np.sin(6 * (rows * rng.random(3) + columns * rng.random(3)) + rng.random(3) * 6)
        picture = np.clip(smooth + rng.normal(0, 12, (high, wide, 3)), 0, 255).astype(np.uint8)
        folder = root / f"site{i % 4}" / f"class{i // 4 % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{i:05d}.jpg", quality=90)


def torchvision_speed(root, size, workers, images):
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    data = ImageFolder(str(root), transforms.Compose([transforms.Resize((size, size)), transforms.PILToTensor()]))
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    for _ in loader:  # start the workers and fill the page cache
        break
    start = time.perf_counter()
    count = sum(len(y) for _, y in loader)
    assert count == images
    return count / (time.perf_counter() - start)


def pack_speed(path, passes=2):
    """Images per second over some passes, each from a newly opened pack."""
    seconds, count = 0.0, 0
    for _ in range(passes):
        split = unpacked(path).pooled().clients[0].train
        assert not split.x._store._cache
        order = torch.randperm(len(split)).split(BATCH)
        start = time.perf_counter()
        for at in order:
            x, y = split.batch(at)
            assert x.shape[0] == len(y)
            count += len(y)
        seconds += time.perf_counter() - start
        del split  # the next pass opens the file again
    return count / seconds


def thousand_clients(folder):
    """Peak memory of processes that open 1,000 clients (200 MB of images) and use a cohort of 100."""
    x = torch.randint(0, 256, (10_000, 3, 84, 84), dtype=torch.uint8)
    y = torch.arange(10_000) % 10
    sites = [Site(f"c{i:04d}", "d", Split(x[10 * i : 10 * i + 10], y[10 * i : 10 * i + 10])) for i in range(1000)]
    path = pack(Federation("many", sites, [str(c) for c in range(10)]), folder / "many.fnpack")
    code = (
        "import sys, time\n"
        "from fednorms.data.packed import unpacked\n"
        "def used(what):\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(what))\n"
        "anonymous, mapped, start = used('RssAnon'), used('RssFile'), time.perf_counter()\n"
        "many = unpacked(sys.argv[1])\n"
        "opened = time.perf_counter() - start\n"
        "held = [site.train.batch(range(10)) for site in many.clients[::10]]\n"
        "print(opened, used('RssAnon') - anonymous, used('RssFile') - mapped)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    opened, private, mapped = map(float, told.stdout.split())
    return opened, private / 1024, mapped / 1024, 1000 * 3 * 84 * 84 / 2**20, path.stat().st_size / 2**20


def one_size(root, scratch, size, options):
    federation = from_folders(root, size=size, val=0, test=0, cache=False)
    packs = {
        "pack, raw (default)": pack(federation, scratch / f"raw{size}.fnpack"),
        "pack, png": pack(federation, scratch / f"png{size}.fnpack", codec="png"),
        "pack, jpeg 90": pack(federation, scratch / f"jpeg{size}.fnpack", quality=90),
    }
    readers = {
        f"torchvision ImageFolder, {w} workers": partial(torchvision_speed, root, size, w, options.images)
        for w in options.workers
    }
    for name, path in packs.items():
        start = time.perf_counter()
        unpacked(path)
        opened = 1000 * (time.perf_counter() - start)
        readers[f"{name} ({path.stat().st_size / 2**20:.0f} MiB, opens in {opened:.0f} ms)"] = partial(pack_speed, path)
    turns = [{name: read() for name, read in readers.items()} for _ in range(options.turns)]
    speeds = {name: max(turn[name] for turn in turns) for name in readers}
    best = max(speed for name, speed in speeds.items() if name.startswith("torchvision"))
    wide, high = options.pixels
    print(f"{options.images} JPEG images of {wide}x{high}, read at {size}x{size}, batches of {BATCH}")
    for name, speed in speeds.items():
        print(f"  {name:<50} {speed:>9,.0f} images/s  {speed / best:>6.1f}x the best of torchvision")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--pixels", type=int, nargs=2, default=(640, 480), metavar=("WIDE", "HIGH"))
    parser.add_argument("--sizes", type=int, nargs="+", default=(224, 256))
    parser.add_argument("--workers", type=int, nargs="+", default=(0, 2))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "images"
        make_folder(root, options.images, options.pixels)
        for size in options.sizes:
            one_size(root, Path(scratch), size, options)
        opened, private, mapped, cohort, whole = thousand_clients(Path(scratch))
        print(
            f"1,000 clients from one pack of {whole:.0f} MiB: opened in {1000 * opened:.0f} ms; with a cohort of 100 "
            f"clients ({cohort:.1f} MiB of images) the process has {private:.1f} MiB of its own more, and {mapped:.1f} "
            "MiB of mapped file pages, which the system takes back when it needs them"
        )


if __name__ == "__main__":
    main()
