"""Choose a model of a run: a site's own, or the one for all sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.core.part import Part, Route
from fednorms.core.states import Broadcast, Client, ClientState, Task
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.data.facts import Facts
from fednorms.evaluation.modes import Mode, model_for, unseen_broadcast


@dataclass(frozen=True)
class Chosen:
    """A model's tensors with everything that belongs to them; `notes` say what a user may not expect."""

    tensors: Tree
    mine: dict[str, Tree]
    sent: Broadcast
    client: Client
    measured_here: bool  # a part normalizes the input, and no site's own statistics are known
    notes: list[str]


def choose(
    task: Task,
    facts: Facts,
    sent: Broadcast,
    states: Mapping[str, ClientState],
    site: str | None = None,
    data: Split | None = None,
) -> Chosen:
    """Choose the model of a site, or (site=None) the one for all; `data` are images for parts that measure them.

    For all sites and for sites that never trained, tensors that clients keep are averaged over the clients that
    trained. `sent` is what an evaluation broadcasts.
    """
    kept = [n for n, r in task.net.routes.items() if r is Route.LOCAL]
    notes: list[str] = []
    state = states.get(site) if site is not None else None
    if kept and states and not any(s.local for s in states.values()):
        raise BadInput(
            f'Clients of "{task.method}" keep {len(kept)} tensors ({kept[0]}, ...). In a run across machines these are '
            "at the sites. Export a site's model there, with `fednorms deploy export`."
        )
    if site is not None:
        found = facts.site(site)
        if found is None:
            raise BadInput(f'This run has no site "{site}": {nearest(site, [s.name for s in facts.sites])}')
        own = site in facts.clients
        if own and kept and not (state and state.local):
            raise BadInput(
                f'Site "{site}" has not trained yet and has no personal model in this run. '
                "Leave out the site to get the mean over the clients that have trained."
            )
        attributes, samples = dict(found.attributes), found.samples
        if not task.personal and not input_normalizers(task):
            notes.append(f'Clients of "{task.method}" keep no tensors, so every site has the global model.')
        elif not own and task.personal:
            notes.append(f'Site "{site}" did not train as a client, so its model is that of an unseen site.')
    else:
        own, attributes, samples = False, {}, 0
    if kept and not own:
        sent = unseen_broadcast(task, sent, states.values())
        trained = [name for name, s in states.items() if s.local]
        over = f"{len(trained)} clients" if len(trained) > 1 else " ".join(["client", *trained])
        notes.append(
            f'Clients of "{task.method}" keep {len(kept)} tensors ({kept[0]}, ...). '
            f"This model has their mean over {over}."
        )
    client = Client(site or "everybody", data or _empty(facts, samples), state, attributes)
    tensors, mine = model_for(task, sent, client, Mode("personal" if own else "unseen"))
    measuring = [p for p in input_normalizers(task) if state is None or p.name not in state.parts]
    return Chosen(tensors, mine, sent, client, bool(measuring), notes)


def averaged_statistics(task: Task, facts: Facts, site: str | None) -> list[str]:
    """A note if tests measure statistics at each site, so the model given out has others than its tests."""
    rule = task.method.evaluation()
    if not rule.statistics and not (rule.unseen and site not in facts.clients):
        return []
    return [
        f'"{task.method}" is tested with normalization statistics measured on the site\'s own images. This model has '
        "averaged ones. `fednorms adapt` measures those of a folder of images."
    ]


def input_normalizers(task: Task) -> list[Part]:
    """The parts that normalize images with the site's own statistics instead of the fixed ones (at most one)."""
    return [p for p in task.method.having("batch") if p.normalizes_input]


def _empty(facts: Facts, samples: int) -> Split:
    """As many images as a site has, all black, in the memory of one: the site's data may be elsewhere."""
    n = max(samples, 2)
    x = torch.zeros(1, *facts.shape, dtype=torch.uint8).expand(n, *facts.shape)
    return Split(x, torch.zeros(n, dtype=torch.int64))
