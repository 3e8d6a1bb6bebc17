"""Clients in stacks: those that take the same steps share one step, whose tensors have one row per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fednorms.core.round import arrive, base_phases
from fednorms.core.states import Broadcast, Client, ClientState, Upload, context_of
from fednorms.core.tree import Packed, Tree
from fednorms.engines.graphs.layout import shapes_of
from fednorms.engines.graphs.slots import Results, finite, hold, leave
from fednorms.engines.graphs.stack import Arrived, Stack, apart
from fednorms.engines.graphs.steps import Steps


class Stacks:
    """A stack per stream, each for `together` clients at a time."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.spaces: dict[int, Stack] = {}

    def groups(
        self, sent: Broadcast, cohort: Sequence[str], client_of: Callable[[str], Client], together: int
    ) -> list[list[str]]:
        """The clients that are trained together: those that take the same steps on batches of the same sizes."""
        task = self.steps.task
        if together < 2 or self.steps.data.resident is None:
            return [[name] for name in cohort]
        alike: dict[object, list[str]] = {}
        for name in cohort:
            client = client_of(name)
            context = context_of(task, sent.round, client)
            phases, path = base_phases(task, context), task.method.path(context)
            key = (len(client.data), repr(phases), tuple(sorted(path.items())))
            alike.setdefault(key, []).append(name)
        groups: list[list[str]] = []
        for names in alike.values():
            for i in range(0, len(names), together):
                some = names[i : i + together]  # a stack has a fixed size, so a few clients would leave it empty
                groups += [some] if 4 * len(some) > together else [[name] for name in some]
        return groups

    def run(self, number: int, sent: Broadcast, clients: Sequence[Client], together: int) -> tuple[Results, Tensor]:
        """The round of a group of clients, and whether each one's results are finite."""
        task, arrived = self.steps.task, []
        for client in clients:
            here, context = sent.to(client.name), context_of(task, sent.round, client)
            mine, model, early = arrive(task, here, client, context)
            arrived.append(Arrived(client, context, here, mine, model, early))
        if len(alike := _alike(arrived)) == 1:
            return self._train(number, sent, arrived, together)
        found: dict[int, tuple[tuple[Upload, ClientState], Tensor]] = {}
        for places in alike:
            results, good = self._train(number, sent, [arrived[k] for k in places], together)
            found |= dict(zip(places, zip(results, good.unbind(), strict=True), strict=True))
        return [found[k][0] for k in range(len(arrived))], torch.stack([found[k][1] for k in range(len(arrived))])

    def _train(self, number: int, sent: Broadcast, arrived: Sequence[Arrived], together: int) -> tuple[Results, Tensor]:
        """The round of clients whose trees have equal shapes."""
        task, first, clients = self.steps.task, arrived[0], [a.client for a in arrived]
        space = self._stack(number, first, together)
        space.fill(sent, sent.model, arrived)
        outer = replace(space.carry, context=first.context, path=task.method.path(first.context), grad_steps={})
        outer.optimizer, outer.steps, outer.exchanged_steps = None, 0, 0  # until the first phase
        kept = [c.state.velocity if c.state else Tree() for c in clients]
        dropped = [0] * len(arrived)
        for count, phase in enumerate(base_phases(task, first.context)):
            lost = self.steps.phase(space, outer, phase, count, clients, kept)
            dropped = [a + b for a, b in zip(dropped, lost, strict=True)]
        after, blocks = space.models()
        losses, sums = space.carry.loss_sum.clone().unbind(0), apart(space.carry.grad_sum.clone(), space.count)
        moving = task.training.keep_momentum and outer.optimizer
        moments: list[Tree] = apart(space.optimizer.first_moment.clone(), space.count) if moving else []
        results = []
        for k, a in enumerate(arrived):
            own = replace(outer, client=a.client, context=a.context, broadcast=a.sent, mine=a.mine, dropped=dropped[k])
            own.loss_sum, own.grad_sum, own.velocity = losses[k], sums[k], kept[k]
            if moments:
                own.optimizer = replace(space.optimizer, first_moment=moments[k])
            hold(task, own, after[k], a.model)
            results.append(leave(task, own, a.early, None, blocks[k][: self.steps.layout.exchanged]))
        good = (torch.isfinite(blocks).all(1) & torch.isfinite(space.carry.loss_sum))[: len(results)]
        if all(isinstance(upload.model, Packed) and not any(upload.parts.values()) for upload, _ in results):
            return results, good
        return results, good & finite(task, results)

    def keep(self, count: int) -> None:
        """Free all stacks but the first `count`."""
        for number in [n for n in self.spaces if n >= count]:
            self.spaces.pop(number).close(self.steps.device)

    def _stack(self, number: int, first: Arrived, together: int) -> Stack:
        steps, known = self.steps, self.spaces.get(number)
        if known and known.count == together and known.fits(first.sent, first.mine):
            return known
        if known:
            known.close(steps.device)
        memory = (steps.streams[number], steps.device.pool())
        self.spaces[number] = Stack.new(
            steps.data.task, steps.layout, together, first, *memory, addressed=bool(steps.task.method.addressing)
        )
        return self.spaces[number]


def _alike(clients: Sequence[Arrived]) -> list[list[int]]:
    """Positions of the clients whose trees have equal shapes: one may be sent, or have kept, what another has not."""
    found: list[tuple[list[dict[str, torch.Size]], list[int]]] = []
    for k, a in enumerate(clients):
        shapes = shapes_of(a.sent.parts, a.mine)
        same = next((places for known, places in found if known == shapes), None)
        if same is None:
            found.append((shapes, [k]))
        else:
            same.append(k)
    return [places for _, places in found]
