"""A run at one of its rounds, as analyses see it: its models, and what they make of images. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fednorms import noise
from fednorms.core import base_phases, begin, broadcast, draws, step
from fednorms.data import Site
from fednorms.errors import BadInput
from fednorms.evaluation.modes import site_state, tested_state, unseen_broadcast
from fednorms.gradients import step_key, step_view
from fednorms.layers.norms import is_norm
from fednorms.passes import depends_on_batch, mixed_rows, prepare_test
from fednorms.runs.opened import NextRound, OpenRun
from fednorms.states import Broadcast, Client, ClientState, ServerState, context_of
from fednorms.tree import Tree


@dataclass(frozen=True)
class Outputs:
    """What a model makes of images: features before the classifier, logits, and whose images they are."""

    features: Tensor
    logits: Tensor
    labels: Tensor
    sites: Tensor  # number of the site
    maps: dict[str, Tensor]  # of every layer that was asked for


@dataclass
class Subject:
    """A run opened at a round. Sites are those that train and have images to test on."""

    run: OpenRun

    @property
    def round(self) -> int:
        """How many rounds the server's model has seen."""
        return self.run.state.round

    @cached_property
    def sites(self) -> list[Site]:
        """The clients with test images."""
        found = [s for s in self.run.session.federation.clients if s.test is not None]
        if not found:
            raise BadInput(f'Federation "{self.run.session.federation.name}" has no client with test images.')
        return found

    @cached_property
    def server(self) -> Tree:
        """The server's model as it is tested; what clients keep to themselves is the mean over them."""
        return self._server(self.run.state, self.run.clients.values())

    @cached_property
    def server_after(self) -> Tree:
        """The same after the next round."""
        return self._server(self.next_round.state, self.next_round.clients)

    def _server(self, state: ServerState, clients: Iterable[ClientState]) -> Tree:
        sent = broadcast(self.run.task, tested_state(self.run.task, state))
        return unseen_broadcast(self.run.task, sent, clients).model

    @cached_property
    def next_round(self) -> NextRound:
        """The next round made again."""
        return self.run.next_round()

    @property
    def head(self) -> str:
        """The name of the classifier's weights."""
        return f"{self.run.task.net.heads[0]}.weight"

    def seen_by(self, client: str) -> set[int]:
        """The classes of a client's training images."""
        return set(self.run.session.engine.data[client].y.unique().tolist())

    @torch.no_grad()
    def outputs(self, model: Tree, sites: Sequence[Site] | None = None, maps_of: Sequence[str] = ()) -> Outputs:
        """What a model makes of sites' test images (default: of all), in eval mode; on the host.

        `maps_of` names layers whose maps are wanted, too, each behind its activation.
        """
        task, sent = self.run.task, self._sent
        found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        maps: dict[str, list[Tensor]] = {name: [] for name in maps_of}
        for number, site in enumerate(self.sites):
            if sites is not None and site not in sites:
                continue
            assert site.test is not None
            client = Client(site.name, site.train or site.test, self.run.clients.get(site.name), dict(site.attributes))
            context, mine = context_of(task, self.round, client, evaluating=True), site_state(task, sent, client)
            n = len(site.test)
            for rows in mixed_rows(site.name, n) if depends_on_batch(task) else torch.arange(n).split(256):
                x, y = prepare_test(task, site.test.batch(rows), context, mine, sent)
                with activated(task.net.module, maps_of) as seen:
                    logits, features = task.net.forward(model, x, train=False, batch_statistics=False)
                for name in maps_of:
                    maps[name].append(seen[name].cpu())
                found.append((features.flatten(1).cpu(), logits.cpu(), y.cpu(), torch.full((len(y),), number)))
        features, logits, labels, whose = (torch.cat(column) for column in zip(*found, strict=True))
        return Outputs(features, logits, labels, whose, {name: torch.cat(some) for name, some in maps.items()})

    @cached_property
    def _sent(self) -> Broadcast:
        return self.run.test_broadcast

    def training(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """The next round's local steps, one by one: client, labels, and the batch's logits before the step, with the
        batch's own statistics and with those that the server sent.
        """
        task, sent = self.run.task, broadcast(self.run.task, self.run.state)
        engine = self.run.session.engine
        for name in self.run.next_cohort:
            carry, _ = begin(task, sent, engine.client(name))
            for batches, phase in draws(task, carry, base_phases(task, carry.context)):
                ahead = replace(carry, key=carry.key + torch.tensor([0, 1]).to(carry.key))  # as the step will see it
                view = step_view(task, ahead, batches[0], 0)
                with torch.no_grad(), noise.keyed(step_key(ahead, 0)):
                    by_batch, _ = view.forward(view.params, view.x)
                    by_server, _ = view.forward(view.params, view.x, stats="broadcast")
                yield name, view.y, by_batch, by_server
                step(task, carry, batches, phase)


@contextmanager
def activated(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within this context, the dictionary holds the maps of each named layer in the last pass, as its activation shows
    them: behind the normalisations and the activation that follow it, before any layer that does something else.

    A network may use one activation in many places, and call others as functions, which nobody can see: then the maps
    are those before it.
    """
    seen: dict[str, Tensor] = {}
    wanted = {module.get_submodule(name): name for name in names}
    current: list[str] = []

    def notice(layer: nn.Module, args: object, out: Tensor) -> None:
        if layer in wanted:
            current[:] = [wanted[layer]]
            seen[current[0]] = out
        elif current and (isinstance(layer, _ACTIVATIONS) or is_norm(layer)) and out.shape == seen[current[0]].shape:
            seen[current[0]] = out
            if isinstance(layer, _ACTIVATIONS):
                current.clear()
        else:
            current.clear()

    leaves = [m for m in module.modules() if not any(True for _ in m.children()) or m in wanted]
    hooks = [m.register_forward_hook(notice) for m in leaves]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Hardswish)
