"""The reference engine: one client after the other, eagerly, on the CPU or one GPU. Use it to debug the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from fednorms.core.errors import Diverged
from fednorms.core.part import Part, Pass
from fednorms.core.round import local_update
from fednorms.core.states import Broadcast
from fednorms.core.tree import Tree
from fednorms.engines.base import Trained
from fednorms.engines.joint import Begun, begin_together, finish_alone
from fednorms.engines.local import LocalEngine
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore


class Loop(LocalEngine):
    """Runs clients in a Python loop."""

    name: ClassVar[str] = "loop"

    def measure(self, p: Part, job: Pass, sent: Broadcast, names: Sequence[str]) -> dict[str, tuple[Tree, Tree]]:
        """Run an extra pass at clients, one after the other."""
        return self.local.measure(p, job, sent, names)

    def train(self, sent: Broadcast, cohort: Sequence[str], *, score: bool = False) -> Trained:
        """Train the clients of a cohort one after the other."""
        return train_in_turn(self, sent, cohort, score=score)

    def score_sites(self, jobs: Mapping[str, Broadcast], split: str, mode: Mode) -> dict[str, SiteScore]:
        """Test a mode at sites, one after the other."""
        return {name: self.score_site(name, sent, split, mode) for name, sent in jobs.items()}


def train_in_turn(engine: LocalEngine, sent: Broadcast, cohort: Sequence[str], *, score: bool) -> Trained:
    """Train the clients of an engine one after the other, eagerly."""
    done, local, task = Trained([]), engine.local, engine.task
    clients = [local.client(name) for name in cohort]
    begun: dict[str, Begun] = {}
    if any("joint" in p.requires for p in task.method.parts):
        with local.seeded("joint", sent.round):
            begun = begin_together(task, sent, clients)
    for client in clients:
        name = client.name
        try:
            with local.seeded("train", sent.round, name):
                if name in begun:
                    upload, state = finish_alone(task, begun.pop(name))
                else:
                    upload, state = local_update(task, sent, client)
        except Diverged as error:
            if engine.settings.on_divergence == "stop":
                raise
            done.diverged[name] = str(error)
            continue
        done.uploads.append(upload)
        if score and (test := local.sites[name].test) is not None:
            done.after_local[name] = local.score_upload(sent, replace(client, state=state), upload, test)
        local.keep(name, state)
    return done
