"""Differential privacy in a round: all that a client sends of the model is one vector, changed last and noised first.

The hooks are `Part.protect` and `Part.release`; a round without such a part never comes here.
"""

from __future__ import annotations

from dataclasses import replace

from fednorms.core import checks
from fednorms.core.errors import BadInput
from fednorms.core.options import few
from fednorms.core.part import Part
from fednorms.core.states import Carry, Combined, ServerState, Task
from fednorms.core.tree import Tree
from fednorms.core.views import End, Round


def protected(task: Task, carry: Carry, model: Tree, uploads: dict[str, Tree], p: Part, e: End) -> Tree:
    """A client's exchanged tensors after `protect`; counters stay as they came, since they count the client's data."""
    if leaking := sorted(name for name, tree in uploads.items() if tree):
        who = leaking[0]
        raise BadInput(
            f"{who}: finish or a pass sends tensors of its own ({few(sorted(uploads[who]))}), which {p.name} does not "
            f"protect. Leave out {who} or {p.name}, and declare uploads = True in the class of {who}, so that the two "
            "are refused at once."
        )
    received = carry.broadcast.model  # not what the client began with: of tensors that it keeps, that is its own secret
    start = received.pick(_floats(task))
    update = model.pick(start) - start
    changed = checks.update(p, "protect", p.protect(update, e), start)
    if changed is update:
        return model
    counters = received.pick(n for n in model if n not in start)
    return Tree({**model, **counters, **_possible(task, start + changed)})


def released(task: Task, state: ServerState, got: Combined, p: Part, r: Round) -> Combined:
    """What the server goes on with: the mean update after `release`; nobody having sent any is an update of zero."""
    before = state.model.pick(_floats(task))
    update = got.model.pick(before) - before if got.sampled else before.zeros()
    changed = checks.update(p, "release", p.release(update, r), before)
    if changed is update and got.sampled:
        return got
    checks.still_finite(p, "release", changed, state.round)
    return replace(got, model=Tree({**got.model, **_possible(task, before + changed)}))


def _floats(task: Task) -> list[str]:
    return [*task.net.sent_params, *task.net.statistics]


def _possible(task: Task, model: Tree) -> Tree:
    """Noise may make a variance negative; what is known to be impossible may be corrected without any loss."""
    variances = [n for n in task.net.statistics if task.net.slots[n].leaf.endswith("var")]
    return Tree({**model, **{n: model[n].clamp(min=0) for n in variances}})
