"""A part with a down-link per client: each starts between the server's model and its own last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fednorms.core.part import REGISTRY, Part, part
from fednorms.core.tree import Tree, branch

NAME = "test_halfway"


@part(NAME)
class Halfway(Part):
    """Send (w + w_k) / 2 to client k, w_k its last upload, and pull its classifier's bias to that of w_k."""

    def remember(self, r):
        new = {f"{k}/{n}": t for k, model in zip(r.clients, r.models, strict=True) for n, t in model.items()}
        return Tree({**r.mine, **new})

    def model_to(self, model, mine, client):
        own = branch(mine, client)
        return Tree({n: (t + own[n]) / 2 if n in own else t for n, t in model.items()})

    def down_to(self, mine, client):
        own = branch(mine, client)
        return own.pick([name for name in own if name.endswith("bias")][-1:])

    def loss(self, s):
        return 0.5 * (s.params.pick(s.down) - s.down).sqnorm() if s.down else 0.0


del REGISTRY[NAME]  # other tests look at every registered part


@contextmanager
def halfway() -> Iterator[Part]:
    """The part, while it is registered."""
    REGISTRY[NAME] = Halfway
    yield Halfway()
    REGISTRY.pop(NAME, None)
