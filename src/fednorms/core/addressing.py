"""What the server sends to one client only: the hooks `down_to` and `model_to`.

A round without a part that has one of these hooks never comes here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednorms.core import checks
from fednorms.core.part import Part, overrides
from fednorms.core.tree import Tree


@dataclass(frozen=True)
class Addressing:
    """The parts whose messages differ by client, and what the server keeps for them.

    A client's message is made when it is needed, so the server never holds those of all clients at once.
    """

    parts: tuple[Part, ...]
    kept: dict[str, Tree]  # the server's state of each part
    exchanged: tuple[str, ...]  # names of the tensors that are sent

    def model(self, model: Tree, client: str) -> Tree:
        """The model that a client gets; tensors that no part changes are the server's own."""
        for p in self.parts:
            if overrides(p, "model_to"):
                sent = model.pick(self.exchanged)
                own = checks.update(p, "model_to", p.model_to(Tree(sent), self.kept[p.name], client), sent)
                model = Tree({**model, **own})
        return model

    def trees(self, trees: dict[str, Tree], client: str) -> dict[str, Tree]:
        """What a client gets of every part: what all get, and what is for it only."""
        found = dict(trees)
        for p in self.parts:
            if overrides(p, "down_to"):
                own = checks.tree(p, "down_to", p.down_to(self.kept[p.name], client))
                found[p.name] = Tree({**trees[p.name], **own})
        return found
