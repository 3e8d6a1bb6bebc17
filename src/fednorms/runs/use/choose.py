"""Choose a model of a run: a site's own, the global one, or the mean of personal ones if that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.norms import tests_by_batch
from fednorms.core.options import nearest
from fednorms.core.part import Part, Route
from fednorms.core.states import Broadcast, Client, ClientState, Task
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.data.facts import Facts, SiteFacts
from fednorms.data.folders.preparations import preparation
from fednorms.data.on_demand import Numbered
from fednorms.evaluation.modes import Mode, keeps_statistics, model_for, unseen_broadcast
from fednorms.runs.option_names import flag, option


@dataclass(frozen=True)
class Chosen:
    """A model's tensors with everything that belongs to them; `notes` say what a user may not expect.

    `mode` is the evaluation mode that tests exactly this model; `site` is the client whose own model it is.
    """

    mode: Mode
    site: str | None
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
    averaged: bool = False,
) -> Chosen:
    """Choose the model of a site, or (site=None) the one for all; `data` are images for parts that measure them.

    A method whose clients keep tensors has no model for all sites, nor for sites that never trained. With `averaged`,
    these tensors are averaged over the clients that trained. `sent` is what an evaluation broadcasts.
    """
    kept = [n for n, r in task.net.routes.items() if r is Route.LOCAL]
    found = None if site is None else known_site(facts, site)
    state = None if site is None else states.get(site)
    own = site in facts.clients
    _check_trained(task, kept, states, site if own else None)
    _check_averaged(task, facts, kept, site, own, averaged)
    notes = [] if found is None else _notes_on_site(task, found.name, own)
    if kept and not own:
        sent = unseen_broadcast(task, sent, states.values())
        notes.append(_note_on_mean(task, kept, states))
    attributes, samples = ({}, 0) if found is None else (dict(found.attributes), found.samples)
    client = Client(site or "everybody", data or _empty(facts, samples), state, attributes)
    mode = Mode("personal" if own else "unseen")
    sent = mode.received(sent, client.name)
    tensors, mine = model_for(task, sent, client, mode)
    measuring = [p for p in input_normalizers(task) if state is None or p.name not in state.parts]
    mode, whose = _mode(task, own or len(facts.clients) == 1, bool(kept)), site if own else None
    return Chosen(mode, whose, tensors, mine, sent, client, bool(measuring), notes)


def _mode(task: Task, own: bool, kept: bool) -> Mode:
    """The mode that tests a chosen model: with the statistics that it holds."""
    if own and task.personal:
        return Mode("personal", "own" if keeps_statistics(task) else "global")
    return Mode("averaged" if kept else "global", "global")


def _check_averaged(task: Task, facts: Facts, kept: list[str], site: str | None, own: bool, averaged: bool) -> None:
    """Refuse a mean of personal models that was not asked for, and one that does not exist."""
    if averaged and not kept:
        raise BadInput(f'"{task.method}" has a global model, so nothing is averaged. Leave out {flag("averaged")}.')
    if averaged and own:
        raise BadInput(f'Site "{site}" has its own model. Leave out {flag("averaged")}, or {option("site")}.')
    if kept and not own and not averaged and len(facts.clients) > 1:  # the model of a single client is nobody's mean
        whose = "no global model" if site is None else f'no model for site "{site}", which did not train as a client'
        raise BadInput(
            f'"{task.method}" has {whose}: clients keep {len(kept)} tensors ({kept[0]}, ...). Name a client '
            f"({option('site')}: {_some(facts.clients)}), or take the mean over clients with {flag('averaged')}. That "
            "model can be much worse: test it first with `fednorms evaluate RUN --modes averaged`."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")


def known_site(facts: Facts, name: str, *, trained: bool = False) -> SiteFacts:
    """What is known of a site of the run; with `trained`, the site must be a client."""
    if isinstance(facts.clients, Numbered) and name in facts.clients:  # facts are known of those that are tested
        return facts.site(name) or SiteFacts(name, name)
    if (found := facts.site(name)) is None:
        raise BadInput(f'This run has no site "{name}": {nearest(name, [s.name for s in facts.sites])}')
    if trained and name not in facts.clients:
        raise BadInput(
            f'Site "{name}" did not train as a client, so it has no model of its own. Clients: {_some(facts.clients)}.'
        )
    return found


def check_kept(task: Task, states: Mapping[str, ClientState], client: str | None) -> None:
    """Refuse if the tensors that clients keep are at the sites of a run across machines."""
    kept = [n for n, r in task.net.routes.items() if r is Route.LOCAL]
    second = bool(task.method.doubling) and client is not None
    if (kept or second) and states and not any(_has_own(task, state) for state in states.values()):
        what = f"{len(kept)} tensors ({kept[0]}, ...)" if kept else "a model of their own"
        raise BadInput(
            f'Clients of "{task.method}" keep {what}. In a run across machines these are '
            "at the sites. Export a site's model there, with `fednorms deploy export`."
        )


def _has_own(task: Task, state: ClientState | None) -> bool:
    """Whether a client's state holds the tensors that it keeps, or its second model."""
    if state is None:
        return False
    kept = Route.LOCAL in task.net.routes.values()
    return bool(state.local if kept else any(state.parts.get(p.name) for p in task.method.doubling))


def _check_trained(task: Task, kept: list[str], states: Mapping[str, ClientState], client: str | None) -> None:
    """Refuse if the tensors that clients keep, or those of one client, are not in the run."""
    check_kept(task, states, client)
    if (kept or task.method.doubling) and client is not None and not _has_own(task, states.get(client)):
        without = f"without {option('site')}"
        instead = f"the mean over the clients that have trained with {flag('averaged')} and {without}"
        raise BadInput(
            f'Site "{client}" has not trained yet and has no personal model in this run. '
            f"Take {instead if kept else f'the global model, {without}'}."
        )


def _notes_on_site(task: Task, site: str, own: bool) -> list[str]:
    if not task.personal and not input_normalizers(task):
        return [f'Clients of "{task.method}" keep no tensors, so every site has the global model.']
    if task.personal and not own:
        return [f'Site "{site}" did not train as a client, so its model is that of an unseen site.']
    return []


def _note_on_mean(task: Task, kept: list[str], states: Mapping[str, ClientState]) -> str:
    trained = [name for name, s in states.items() if s.local]
    over = f"{len(trained)} clients" if len(trained) > 1 else " ".join(["client", *trained])
    what = f'Clients of "{task.method}" keep {len(kept)} tensors ({kept[0]}, ...).'
    return f"{what} This model has their mean over {over}."


def averaged_statistics(task: Task, facts: Facts, site: str | None) -> list[str]:
    """A note if tests measure statistics at each site, or adapt there, so the model given out is not the tested one."""
    rule = task.method.evaluation()
    if rule.adapt:
        return [
            f'"{task.method}" is tested after adapting to each batch of test images. This model does not adapt: it '
            'answers as "global/global" does in `fednorms evaluate --modes`.'
        ]
    if not rule.statistics and not (rule.unseen and site not in facts.clients):
        return []
    return [
        f'"{task.method}" is tested with normalization statistics measured on the site\'s own images. This model has '
        "averaged ones. `fednorms adapt` measures those of a folder of images."
    ]


def check_statistics(module: nn.Module, name: str) -> None:
    """Refuse to hand out a model whose answer to an image depends on the other images of its batch.

    >>> check_statistics(nn.BatchNorm2d(2, track_running_stats=False), "mine")
    Traceback (most recent call last):
    fednorms.BadInput: Model "mine" keeps no normalization statistics ...
    """
    layers = [path or type(m).__name__ for path, m in module.named_modules() if tests_by_batch(m)]
    if layers:
        raise BadInput(
            f'Model "{name}" keeps no normalization statistics (BatchNorm without running statistics: {layers[0]}'
            f"{f' and {len(layers) - 1} more' if layers[1:] else ''}), so its class for an image depends on the other "
            "images of the batch, and it cannot be used on single images. `fednorms evaluate` tests it on whole sites. "
            "For a model to hand out, run `fednorms export` where the run's data are: it measures statistics. Or train "
            "one with running statistics (track_running_stats=True; resnet18-cifar instead of "
            'resnet18-cifar-untracked), or replace the layers, as the method "gn" does.'
        )


def unknown_preparation(facts: Facts) -> list[str]:
    """A note for users of image files, if the training images were prepared in a way that is not known here."""
    if not facts.prepared or preparation(facts.prepared) is not None:
        return []
    return [f"The training images were prepared ({facts.prepared}). Files are only resized: prepare them the same way."]


def input_normalizers(task: Task) -> list[Part]:
    """The parts that normalize images with the site's own statistics instead of the fixed ones (at most one)."""
    return [p for p in task.method.having("batch") if p.normalizes_input]


def _empty(facts: Facts, samples: int) -> Split:
    """As many images as a site has, all black, in the memory of one: the site's data may be elsewhere."""
    n = max(samples, 2)
    x = torch.zeros(1, *facts.shape, dtype=torch.uint8).expand(n, *facts.shape)
    return Split(x, torch.zeros(n, dtype=torch.int64))
