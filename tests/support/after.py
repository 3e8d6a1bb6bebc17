"""A tiny federation of named images and short runs on it, for tests of what comes after training."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from PIL import Image

from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.training import Training
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session

CLASSES = ["cat", "dog", "owl"]
TRAINING = Training(batch_size=4, lr=0.05)


def order_of(site: str, n: int) -> torch.Tensor:
    """The documented rule, written out: a permutation seeded by the hash of the site's name and number of images."""
    text = f"str:test order\x1fstr:{site}\x1fint:{n}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def images(y: torch.Tensor, k: int, generator: torch.Generator, size: int = 8) -> torch.Tensor:
    """Images of classes `y` as site number `k` sees them."""
    x = torch.rand(len(y), 3, size, size, generator=generator) * (100 + 40 * k) + 20 * k + 25 * y.view(-1, 1, 1, 1)
    return x.clamp(0, 255).to(torch.uint8)


def federation(*, val: bool = True, unseen: bool = True, sizes: tuple[int, ...] = (12, 13, 16)) -> Federation:
    """Sites "a", "b", "c" that train and "u" that does not."""
    generator = torch.Generator().manual_seed(0)

    def split(n: int, k: int) -> Split:
        y = torch.arange(n) % 3
        return Split(images(y, k, generator), y)

    sites = [
        Site(name, f"domain {name}", split(n, k), split(6, k) if val else None, split(9 + 3 * k, k))
        for k, (name, n) in enumerate(zip("abc", sizes, strict=False))
    ]
    if unseen:
        sites.append(Site("u", "domain u", test=split(9, 4)))
    return Federation("tiny", sites, CLASSES, Preprocessing.centered(3))


def recipe(method: str, **values: object) -> Recipe:
    made = {"method": method, "rounds": 2, "threads": 1, "training": TRAINING, "federation": "custom:tiny"}
    return Recipe.make(made | values)


def trained(method: str, n: int = 2, sites: Federation | None = None, model=None, **values: object):
    """A session after `n` rounds, and the server's state."""
    session = Session.open(recipe(method, **values), sites or federation(), model)
    state = session.engine.setup(initial_state(session.task))
    for _ in range(n):
        done = session.engine.train(broadcast(session.task, state), session.engine.clients)
        state = server_update(session.task, state, done.uploads)
    return session, state


def write_images(folder: Path, labels: dict[str, int], size: int = 9, k: int = 3) -> Path:
    """folder/class/number.png for every class."""
    generator = torch.Generator().manual_seed(3)
    for label, n in labels.items():
        (folder / label).mkdir(parents=True)
        number = CLASSES.index(label) if label in CLASSES else 0
        for i, x in enumerate(images(torch.full((n,), number), k, generator, size)):
            Image.fromarray(x.permute(1, 2, 0).numpy()).save(folder / label / f"{i}.png")
    return folder
