"""What an honest site would send: one made-up site in the server's process, trained for a round on made-up images.

Only the form of its uploads is used, and only where the sites disagree and no majority decides, as with two sites.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from fednorms.core.border import Trial
from fednorms.core.part import Part, Pass
from fednorms.core.round import local_update
from fednorms.core.states import Broadcast, Task
from fednorms.core.tree import Tree
from fednorms.data import Federation, Site, Split
from fednorms.data.facts import Facts
from fednorms.engines.local import LocalClients
from fednorms.engines.states import InMemory

NAME = "rehearsal"


class Rehearsal:
    """Rehearses the rounds of a task with two images per class, of the shape that the sites have registered."""

    def __init__(self, task: Task, facts: Facts, threads: int) -> None:
        self.task, self.facts, self.threads = task, facts, threads
        self._found: tuple[int, dict[str, Tree] | None] = (-1, None)  # of one round, for all parts

    def uploads(self, sent: Broadcast, p: Part) -> Trial:
        """What a site would send for a part after training."""
        return partial(self._upload, sent, p)

    def measured(self, sent: Broadcast, p: Part, job: Pass) -> Trial:
        """What a site would send in an extra pass."""
        return partial(self._measure, sent, p, job)

    def _upload(self, sent: Broadcast, p: Part) -> Tree | None:
        if self._found[0] != sent.round:
            try:
                found = local_update(self.task, sent, self._clients().client(NAME))[0].parts
            except Exception:  # of a method that needs more of a site than its images
                found = None
            self._found = (sent.round, found)
        return None if self._found[1] is None else self._found[1].get(p.name, Tree())

    def _measure(self, sent: Broadcast, p: Part, job: Pass) -> Tree | None:
        try:
            return self._clients().measure(p, job, sent, [NAME])[NAME][1]
        except Exception:
            return None

    def _clients(self) -> LocalClients:
        facts = self.facts
        labels = torch.arange(facts.num_classes).repeat(2)
        kind = getattr(torch, facts.dtype)
        pixels = torch.linspace(0, 200, len(labels) * math.prod(facts.shape))
        images = (pixels if kind == torch.uint8 else pixels / 200).reshape(len(labels), *facts.shape).to(kind)
        site = Site(NAME, NAME, train=Split(images, labels))
        federation = Federation(NAME, [site], list(facts.classes), facts.preprocessing)
        return LocalClients(self.task, federation, federation, InMemory(), self.threads)
