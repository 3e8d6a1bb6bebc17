"""What the server does with each client's upload before they are combined: `receive`, `weigh`, `remember`, `aggregate`.

A round without a part that has one of these hooks never comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fednorms.core import checks
from fednorms.core.errors import Diverged
from fednorms.core.part import Part
from fednorms.core.protection import floats, possible
from fednorms.core.reductions import combine, upload_weights
from fednorms.core.states import Combined, ServerState, Task, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Received


def combine_individually(
    task: Task, state: ServerState, uploads: list[Upload], proxies: Mapping[str, Local]
) -> tuple[Combined, dict[str, Tree]]:
    """Combine uploads as the parts ask for: their updates, then their weights, then the rule that combines models.

    A client whose weight is 0 is left out of everything, also of what other parts remember or reduce. `proxies` are the
    server's own images, by part. Return the parts' new states as well.
    """
    method, parts = task.method, dict(state.parts)
    if not uploads:
        return combine(task, []), parts
    uploads = sorted(uploads, key=lambda u: u.client)
    plain = [1.0] * len(uploads)
    weights = plain if any(p.sets_weights for p in method.parts) else upload_weights(task, uploads)

    def seen_by(p: Part) -> Received:
        return view_of(task, state, p, parts[p.name], uploads, weights, proxies.get(p.name))

    for p in method.having("receive"):
        uploads, parts[p.name] = received(task, p, seen_by(p), uploads)
    for p in method.having("weigh"):
        factors, parts[p.name] = checks.factors(p, p.weigh(seen_by(p)), len(uploads), state.round)
        weights = [w * factor for w, factor in zip(weights, factors, strict=True)]
    used = [(u, w) for u, w in zip(uploads, weights, strict=True) if w > 0]
    if not used:
        who = " and ".join(p.name for p in method.having("weigh"))
        raise Diverged(
            f"No client has a weight above 0 in round {state.round + 1}: {who} left all {len(uploads)} of them out. "
            "Use fewer such parts, or let them keep more clients."
        )
    uploads, weights = [u for u, _ in used], [w for _, w in used]
    for p in method.having("remember"):
        parts[p.name] = checks.tree(p, "remember", p.remember(seen_by(p)))
    if not (rules := method.having("aggregate")):
        return combine(task, uploads, weights), parts
    rule, view = rules[0], seen_by(rules[0])

    def average(models: list[Tree], weights: list[float]) -> Tree:
        answer = rule.aggregate(replace(view, weights=tuple(weights)))
        found, parts[rule.name] = checks.aggregated(rule, answer, view.model)
        checks.still_finite(rule, "aggregate", found, state.round)
        return Tree({**models[0], **possible(task, found)})  # counters are the first client's

    return combine(task, uploads, weights, average), parts


def received(task: Task, p: Part, seen: Received, uploads: list[Upload]) -> tuple[list[Upload], Tree]:
    """The uploads after a part's `receive`, and its new state; `seen` is the part's view of them.

    An upload that it does not change is the same object, and a tensor that it does not change keeps its bits.
    """
    before = seen.model
    marks = [update.marks() for update in seen.updates]
    updates, new = checks.updates(p, p.receive(seen), len(uploads), before)
    found = list(uploads)
    for i, (update, untouched) in enumerate(zip(updates, marks, strict=True)):
        same = {k for k, t, version in untouched if update.get(k) is t and t._version == version}
        if len(same) < len(before):
            checks.still_finite(p, "receive", update, seen.context.round)
            moved = possible(task, before + update)
            changed = moved.pick(k for k in before if k not in same)
            found[i] = replace(uploads[i], model=Tree({**uploads[i].model, **changed}))
    return found, new


def view_of(
    task: Task,
    state: ServerState,
    p: Part,
    mine: Tree,
    uploads: list[Upload],
    weights: list[float],
    proxy: Local | None = None,
) -> Received:
    """What a part sees of these uploads."""
    before = state.model.pick(floats(task))
    return Received(
        clients=tuple(u.client for u in uploads),
        samples=tuple(u.weight for u in uploads),
        losses=tuple(float(u.metrics.get("loss", float("nan"))) for u in uploads),
        models=tuple(Tree({k: u.model[k].to(t.device) for k, t in before.items()}) for u in uploads),
        weights=tuple(weights),
        ups=tuple(u.parts.get(p.name, Tree()).to(task.like.device) for u in uploads),
        model=before,
        mine=mine,
        total=task.clients,
        context=context_of(task, state.round, None),
        images=proxy,
    )
