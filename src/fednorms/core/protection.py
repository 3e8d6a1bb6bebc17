"""Differential privacy in a round: what a client sends of the model is one vector, protected last, released first.

The hook is `Part.privacy`; a round without such a part never comes here.
"""

from __future__ import annotations

from dataclasses import replace

from fednorms.core import checks
from fednorms.core.errors import BadInput
from fednorms.core.norms import statistics_of
from fednorms.core.options import few
from fednorms.core.part import Part, Slot
from fednorms.core.states import Carry, Combined, ServerState, Task
from fednorms.core.tree import Tree
from fednorms.core.views import End, Privacy, Round


def protected(
    task: Task, carry: Carry, model: Tree, uploads: dict[str, Tree], p: Part, privacy: Privacy, e: End
) -> Tree:
    """A client's exchanged tensors after `protect`; counters stay as received, since they count the client's data."""
    if leaking := sorted(name for name, tree in uploads.items() if tree):
        who = leaking[0]
        raise BadInput(
            f"{who}: finish or a pass sends its own tensors ({few(sorted(uploads[who]))}), which {p.name} does not "
            f"protect. Leave out {who} or {p.name}. Declare uploads = True in the class of {who}, and the two are "
            "refused before training starts."
        )
    received = carry.broadcast.model  # not the client's start: of tensors that it keeps, that is its own secret
    start = received.pick(floats(task))
    update = model.pick(start) - start
    changed = checks.update(p, "protect", privacy.protect(update, e), start)
    if changed is update:
        return model
    counters = received.pick(n for n in model if n not in start)
    return Tree({**model, **counters, **possible(task, start + changed)})


def released(task: Task, state: ServerState, got: Combined, p: Part, privacy: Privacy, r: Round) -> Combined:
    """What the server continues with: the mean update after `release`; without any client the update is zero."""
    if privacy.release is None:
        return got
    before = state.model.pick(floats(task))
    update = got.model.pick(before) - before if got.sampled else before.zeros()
    changed = checks.update(p, "release", privacy.release(update, r), before)
    if changed is update and got.sampled:
        return got
    checks.still_finite(p, "release", changed, state.round)
    return replace(got, model=Tree({**got.model, **possible(task, before + changed)}))


def floats(task: Task) -> list[str]:
    """The floating tensors that are sent: parameters and running statistics."""
    return [*task.net.sent_params, *task.net.statistics]


def possible(task: Task, model: Tree) -> Tree:
    """Noise may make a variance negative; correcting what is known to be impossible costs no privacy."""
    variances = [n for n in task.net.statistics if is_variance(task.net.slots[n])]
    return Tree({**model, **{n: model[n].clamp(min=0) for n in variances}})


def is_variance(slot: Slot) -> bool:
    """Whether a tensor of the model holds variances; a trained tensor may be one of another scale, such as log_var."""
    statistics = statistics_of(slot.module)
    named = slot.kind == "buffer" and slot.leaf.endswith("var")
    return named or (statistics is not None and slot.leaf == statistics.var)
