"""A run at one of its rounds, as analyses see it: its models, and their outputs for images. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.norms import is_norm
from fednorms.core.options import nearest
from fednorms.core.part import Route
from fednorms.core.passes import depends_on_batch, prepare_test, rows_of_test
from fednorms.core.round import base_phases, begin, broadcast, draws, site_state, step
from fednorms.core.states import Broadcast, Client, context_of
from fednorms.core.step import step_key, step_view
from fednorms.core.tree import Tree
from fednorms.data import Site
from fednorms.evaluation.modes import Mode, model_for, unseen_broadcast
from fednorms.runs.use.open import NextRound, OpenRun

Model = Tree | Broadcast
"""Tensors that are the same at every site, or a broadcast from which every site makes its own."""


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for images: features before the classifier, logits, labels and sites."""

    features: Tensor
    logits: Tensor
    labels: Tensor
    sites: Tensor  # index of the site
    maps: dict[str, Tensor]  # by layer


@dataclass
class Subject:
    """A run opened at a round; its sites are the clients with test images."""

    run: OpenRun

    @property
    def round(self) -> int:
        """The number of rounds that the server's model has trained."""
        return self.run.state.round

    @cached_property
    def sites(self) -> list[Site]:
        """The clients with test images."""
        found = [s for s in self.run.session.federation.clients if s.test is not None]
        if not found:
            raise BadInput(f'Federation "{self.run.session.federation.name}" has no client with test images.')
        return found

    # -- models -------------------------------------------------------------------------------------------------
    @cached_property
    def server(self) -> Broadcast:
        """The server's model as it is tested; tensors that clients keep are averaged over them."""
        return unseen_broadcast(self.run.task, self.run.test_broadcast, self.run.clients.values())

    @cached_property
    def next_round(self) -> NextRound:
        """The next round, trained again."""
        return self.run.next_round()

    @property
    def server_after(self) -> Broadcast:
        """The server's model after the next round, as it is tested."""
        return self.next_round.tested

    def _client(self, site: Site) -> Client:
        assert site.test is not None
        return self.run.local.at_test(site, site.test)

    def at_site(self, model: Model, site: Site) -> tuple[Tree, dict[str, Tree]]:
        """The tensors that a site tests, and the states of the parts there."""
        task, client = self.run.task, self._client(site)
        if isinstance(model, Broadcast):
            kept = any(route is Route.LOCAL for route in task.net.routes.values())
            return model_for(task, model, client, Mode("unseen" if kept else "global").resolved(task))
        return model, site_state(task, self.server, client)

    def tensors(self, model: Model) -> Tree:
        """The tensors that the first site tests."""
        return self.at_site(model, self.sites[0])[0]

    def rows_of_classifier(self, model: Model) -> Tensor:
        """The classifier's weights, one row per class."""
        return self.tensors(model)[f"{self.run.task.net.heads[0]}.weight"].detach().double().flatten(1).cpu()

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.run.facts.classes)

    def seen_by(self, client: str) -> set[int]:
        """The classes of a client's training images."""
        return set(self.run.local.data[client].y.unique().tolist())

    # -- outputs for images -------------------------------------------------------------------------------------
    def outputs(self, model: Model, sites: Sequence[Site] | None = None, maps_of: Sequence[str] = ()) -> Outputs:
        """A model's outputs for the test images of some sites (default: all), in eval mode, on the host.

        `maps_of` names layers whose maps are returned, too, each after its activation.
        """
        found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        maps: dict[str, list[Tensor]] = {name: [] for name in maps_of}
        for number, site in enumerate(self.sites):
            if sites is not None and site not in sites:
                continue
            for _, logits, features, y, seen in self._pass(model, site, maps_of):
                for name in maps_of:
                    maps[name].append(seen[name].cpu())
                found.append((features.flatten(1).cpu(), logits.cpu(), y.cpu(), torch.full((len(y),), number)))
        features, logits, labels, whose = (torch.cat(column) for column in zip(*found, strict=True))
        return Outputs(features, logits, labels, whose, {name: torch.cat(some) for name, some in maps.items()})

    def first_maps(self, model: Model, site: Site) -> dict[str, Tensor]:
        """The maps of a site's first test image after every convolution, in the order in which they run."""
        convolutions = [n for n, m in self.run.task.net.module.named_modules() if isinstance(m, nn.Conv2d)]
        for rows, *_, seen in self._pass(model, site, convolutions, first=True):
            at = (rows == 0).nonzero().flatten()
            return {name: maps[at].cpu() for name, maps in seen.items()}
        raise AssertionError("a site has test images")

    @torch.no_grad()
    def _pass(
        self, model: Model, site: Site, maps_of: Sequence[str], *, first: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]]:
        """Row numbers, logits, features, labels and maps of a site's test images, batch by batch; or only of the batch
        with the first image, which holds other images only if the outputs depend on them.
        """
        task, data = self.run.task, site.test
        assert data is not None
        tensors, mine = self.at_site(model, site)
        sent = model if isinstance(model, Broadcast) else self.server
        context = context_of(task, sent.round, self._client(site), evaluating=True)
        batches = rows_of_test(task, site.name, len(data))
        if first:
            batches = [b for b in batches if 0 in b] if depends_on_batch(task) else [torch.arange(1)]
        for rows in batches:
            x, y = prepare_test(task, data.batch(rows), context, mine, sent)
            with activated(task.net.module, maps_of) as seen:
                logits, features = task.net.forward(tensors, x, train=False, batch_statistics=False)
            yield rows, logits, features, y, seen

    def training(self, client: str | None = None) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """The next round's local steps, one by one: client, labels, and the batch's logits before the step, with the
        batch's own statistics and with those that the server sent (for pooled data, with the running ones).

        `client` follows only that one.
        """
        task, sent = self.run.task, broadcast(self.run.task, self.run.state)
        engine = self.run.session.engine
        joint = [p.name for p in task.method.parts if "joint" in p.requires]
        if joint:
            raise BadInput(f"{joint[0]} trains clients together, so their steps cannot be followed one by one.")
        self.run.check_loss()
        pooled = set(engine.clients) != {s.name for s in self.run.session.federation.clients}
        if client is not None and client not in self.run.next_cohort:
            known = nearest(client, self.run.next_cohort)
            raise BadInput(f'Client "{client}" did not train in round {self.round + 1}: {known}')
        for name in self.run.next_cohort if client is None else [client]:
            carry, _ = begin(task, sent, self.run.local.client(name))
            for batches, phase in draws(task, carry, base_phases(task, carry.context)):
                ahead = replace(carry, key=carry.key + torch.tensor([0, 1]).to(carry.key))  # as the step will see it
                view = step_view(task, replace(ahead, start_buffers=carry.buffers) if pooled else ahead, batches[0], 0)
                with torch.no_grad(), noise.keyed(step_key(ahead, 0)):
                    by_batch, _ = view.forward(view.params, view.x)
                    by_server, _ = view.forward(view.params, view.x, stats="broadcast")
                yield name, view.y, by_batch, by_server
                step(task, carry, batches, phase)


@contextmanager
def activated(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record the maps of named layers in the last pass: after the normalizations and the activation that follow each
    layer, and before any other layer.

    Activations that are called as functions cannot be seen; then the maps are those before them.
    """
    seen: dict[str, Tensor] = {}
    wanted = {module.get_submodule(name): name for name in names}
    current: list[str] = []

    def notice(layer: nn.Module, args: object, out: Tensor) -> None:
        if layer in wanted:
            current[:] = [wanted[layer]]
            seen[current[0]] = out
        elif not current or isinstance(layer, _NOTHING):
            return
        elif (isinstance(layer, _ACTIVATIONS) or is_norm(layer)) and out.shape == seen[current[0]].shape:
            seen[current[0]] = out
            if isinstance(layer, _ACTIVATIONS):
                current.clear()
        else:
            current.clear()

    leaves = [m for m in module.modules() if not any(True for _ in m.children()) or m in wanted]
    hooks = [m.register_forward_hook(notice) for m in leaves] if wanted else []
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Hardswish)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)  # replacements of removed normalizations, and dropout
