"""A round: a client's is `begin`, `step` ... `step`, `finish`; the server's is `server_update`.

Everything else in the library decides where these functions run, where client state is kept, and what is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from fednorms.core import checks, noise
from fednorms.core.addressing import Addressing
from fednorms.core.batches import batch_plan
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.individual import combine_individually
from fednorms.core.optim import Optimizer, clipped
from fednorms.core.option_names import option
from fednorms.core.part import Part, Phase
from fednorms.core.passes import LocalView, passes
from fednorms.core.protection import protected, released
from fednorms.core.reductions import combine
from fednorms.core.states import (
    Batch,
    Broadcast,
    Carry,
    Client,
    ClientState,
    Combined,
    ServerState,
    Task,
    Upload,
    context_of,
)
from fednorms.core.step import full_gradient, gradient_functions, seen_by, step_view, watch
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import NOT_ASKED_FOR, Begin, Context, End, Local, Round, Weights


# -- the start of a round -------------------------------------------------------------------------------------------
def initial_state(task: Task) -> ServerState:
    """The server before round 0."""
    parts = {p.name: _first_state(task, p, task.net.initial)[0] for p in task.method.parts}
    return ServerState(round=0, model=task.net.initial.clone(), parts=parts, seed=task.seed)


def _first_state(task: Task, p: Part, model: Tree) -> tuple[Tree, Tree]:
    seen = model.pick(task.net.seen_by(p))
    server, client = checks.two_trees(p, "init", p.init(Weights(seen, task.net.slots)))
    return Tree(server), Tree(client)  # a part may return the very tree that it got, whose slots are not state


def broadcast(task: Task, state: ServerState) -> Broadcast:
    """What the server sends at the start of a round, to all clients and to each (`Broadcast.to`)."""
    parts = {p.name: checks.tree(p, "down", p.down(state.parts[p.name])) for p in task.method.parts}
    addressing = None
    if own := task.method.addressing:
        kept = {p.name: state.parts[p.name] for p in own}
        addressing = Addressing(tuple(own), kept, tuple(task.net.exchanged))
    return Broadcast(state.round, state.model, parts, addressing)


def own_state(task: Task, sent: Broadcast, state: ClientState | None) -> dict[str, Tree]:
    """Each part's state at a client: what it kept, or its initial value."""
    kept = state.parts if state else {}
    return {p.name: kept[p.name] if p.name in kept else _first_state(task, p, sent.model)[1] for p in task.method.parts}


def site_state(task: Task, sent: Broadcast, client: Client) -> dict[str, Tree]:
    """Each part's state at a site; a site that joined later runs the setup passes on its own data."""
    context = context_of(task, sent.round, client, evaluating=True)
    mine = own_state(task, sent, client.state)
    for p, job in passes(task, "setup"):
        if client.state is None or p.name not in client.state.parts:
            view = LocalView(task, p, client, sent.model, context, sent, mine)
            mine[p.name], _ = checks.two_trees(p, "client of a pass", job.client(view))
    return mine


def load(task: Task, sent: Broadcast, client: Client, context: Context, mine: dict[str, Tree]) -> Tree:
    """A client's model at the start: the received one, its own tensors, and what parts install."""
    model = Tree(sent.model)
    if client.state:
        model.update(client.state.local)
    for p in task.method.having("begin"):
        owned, received = task.net.owned_by.get(p.name, ()), sent.model.pick(task.net.exchanged)
        before, view = Tree(model), Begin(context, sent.parts[p.name], mine[p.name], owned, received)
        model = checks.model(p, p.begin(model, view), before)
    return model


def begin(task: Task, sent: Broadcast, client: Client, *, evaluating: bool = False) -> tuple[Carry, dict[str, Tree]]:
    """Load the received model into a new carry; also return the uploads of passes before training."""
    sent = sent.to(client.name)
    context = context_of(task, sent.round, client, evaluating=evaluating)
    mine, model, early = arrive(task, sent, client, context)
    return carry_of(task, sent, client, context, mine, model), early


def arrive(
    task: Task, sent: Broadcast, client: Client, context: Context
) -> tuple[dict[str, Tree], Tree, dict[str, Tree]]:
    """What a client starts from: parts' own state, its model (not copied), and uploads of passes before training."""
    mine = own_state(task, sent, client.state)
    model = load(task, sent, client, context, mine)
    early: dict[str, Tree] = {}
    if not context.evaluating:
        for p, job in passes(task, "before"):
            view = LocalView(task, p, client, model, context, sent, mine)
            mine[p.name], early[p.name] = checks.two_trees(p, "client of a pass", job.client(view))
        if early:
            model = load(task, sent, client, context, mine)  # `begin` sees what a pass keeps
    return mine, model, early


def carry_of(
    task: Task, sent: Broadcast, client: Client, context: Context, mine: dict[str, Tree], model: Tree
) -> Carry:
    """A carry that starts from `model`; fine-tuning (`context.evaluating`) may also move what training froze."""
    trained = task.net.trainable("all", also_frozen=context.evaluating)
    moving = {*trained, *task.net.buffers}
    return Carry(
        client=client,
        context=context,
        broadcast=sent,
        params=model.pick(trained).clone(),
        fixed=Tree({k: v for k, v in model.items() if k not in moving}),
        buffers=model.pick(task.net.buffers).clone(),
        start=model.pick(trained).detach(),
        start_buffers=model.pick(task.net.buffers),
        mine={**mine, **{p.name: mine[p.name].clone() for p in task.method.writing}},
        path=task.method.path(context),
        key=torch.tensor([noise_word(task, context), 0], device=task.like.device),
        loss_sum=torch.zeros_like(task.like),
        grad_sum=model.pick(trained).zeros() if task.uses_mean_gradient else Tree(),
        velocity=client.state.velocity if client.state and not context.evaluating else Tree(),
    )


def noise_word(task: Task, context: Context) -> int:
    """The 32 bits that key all randomness of a client in a round."""
    return noise.seed_of("noise", task.seed, context.round, context.client, context.evaluating) & 0xFFFFFFFF


def enter(task: Task, carry: Carry, phase: Phase) -> None:
    """Start a phase: which tensors move, at which rate, with a fresh optimizer."""
    carry.active, carry.fresh = task.net.trainable(phase.train, also_frozen=carry.context.evaluating), True
    active = set(carry.active)
    for name, tensor in carry.params.items():
        tensor.requires_grad_(name in active)
    moving = carry.params.pick(carry.active).detach()
    carry.velocity = _velocity(task, carry)
    training = task.training
    if phase.plain:
        training = replace(training, optimizer="sgd", momentum=0.0, weight_decay=0.0, keep_momentum=False)
    elif phase.weight_decay is not None:
        training = replace(training, weight_decay=phase.weight_decay)
    make = None if phase.plain else task.optimizer
    carry.optimizer = Optimizer.fresh(training, moving, rate_of(carry.context, phase), task.like, make, task.net.rates)
    for name, moment in carry.optimizer.first_moment.items():
        if name in carry.velocity:
            moment.copy_(carry.velocity[name])


def rate_of(context: Context, phase: Phase) -> float:
    """The learning rate of a phase: its own, or the round's (fine-tuning: the first round's), times its factor."""
    base = context.lr_0 if context.evaluating and not phase.plain else context.lr
    return (base if phase.lr is None else phase.lr) * phase.factor


def _velocity(task: Task, carry: Carry) -> Tree:
    if not task.training.keep_momentum:
        return Tree()
    return Tree({**carry.velocity, **(carry.optimizer.first_moment if carry.optimizer else {})})


# -- one step -------------------------------------------------------------------------------------------------------
def step(task: Task, carry: Carry, batches: list[Batch], phase: Phase) -> None:
    """One local step: gradient (loss, oracle), corrections (grad), clipping, optimizer; advances the carry in place."""
    assert carry.optimizer is not None
    carry.key[1] += 1
    kept = [(p, carry.mine[p.name].marks()) for p in task.method.parts if carry.fresh and not p.writes_state]
    views = [step_view(task, carry, batch, draw) for draw, batch in enumerate(batches)]
    gradf, views[0].hessian = gradient_functions(task, carry, views, phase)
    for p in task.hooks["oracle"]:
        gradf = p.oracle(gradf, seen_by(p, views[0], carry))
        if not callable(gradf):
            raise checks.wrong(p, "oracle", checks.kind(gradf))
    g = gradf(carry.params, 0)
    with torch.no_grad():
        for p in task.hooks["oracle"][-1:]:
            g = _looked_at(carry, p, "oracle", g, carry.active)
        if carry.grad_sum:
            _accumulate(carry, g)
        for p in task.hooks["grad"]:
            g = _looked_at(carry, p, "grad", p.grad(g, seen_by(p, views[0], carry)), carry.active)
            watch(carry, g.values(), p.name, "grad")
        if task.training.clip is not None and not phase.plain:
            g = clipped(g, task.training.clip, task.net.rates)
        for p in task.hooks["decay"]:
            g = g + _looked_at(carry, p, "decay", p.decay(seen_by(p, views[0], carry)), carry.params)
        carry.optimizer.update(carry.params, g)
    for p, marks in kept:
        if not carry.mine[p.name].is_as(marks):
            raise BadInput(
                f"{p.name}: a step changed tensors of s.mine, which are the client's state of its last round. "
                "Set writes_state = True in the part's class, or change a copy."
            )
    carry.fresh = False
    carry.steps += 1
    carry.exchanged_steps += not set(carry.active).isdisjoint(task.net.sent_params)


def _looked_at(carry: Carry, p: Part, hook: str, given: object, names: Iterable[str]) -> Tree:
    """Check what a hook of a step returned: names and shapes in the first step of a phase, later only the type."""
    if carry.fresh:
        return checks.fitting(p, hook, given, carry.params.pick(names))
    return checks.one(p, hook, given, Tree)


def _accumulate(carry: Carry, g: Tree) -> None:
    torch._foreach_add_([carry.grad_sum[k] for k in g], list(g.values()))
    for name in g:
        carry.grad_steps[name] = carry.grad_steps.get(name, 0) + 1


# -- the end of a round ---------------------------------------------------------------------------------------------
def finish(
    task: Task, carry: Carry, early: dict[str, Tree] | None = None, twin: Tree | None = None
) -> tuple[Upload, ClientState]:
    """The client's upload and new state.

    `early` are the uploads of passes before training; `twin` is what `train_twin` would return, if the engine has
    trained it already.
    """
    net, after = task.net, carry.model()
    parts, uploads, model = dict(carry.mine), dict(early or {}), after.pick(net.exchanged)
    if task.twin:
        parts[task.twin.name] = twin if twin is not None else train_twin(task, carry, task.twin)
    for p, job in passes(task, "after"):
        view = LocalView(task, p, carry.client, after, carry.context, carry.broadcast, parts)
        parts[p.name], uploads[p.name] = checks.two_trees(p, "client of a pass", job.client(view))
    if task.method.changing or task.method.having("finish"):
        ends = _ends(task, carry, after, parts)
        for p in task.method.having("finish"):
            parts[p.name], sent = checks.two_trees(p, "finish", p.finish(ends[p.name]))
            uploads[p.name] = Tree({**uploads.get(p.name, {}), **sent}).detach()
            _refuse_private(task, p, uploads[p.name])
        model.update(_sent(task, ends))
        if found := task.method.privacy:
            model = protected(task, carry, model, uploads, *found, ends[found[0].name])
    metrics: dict[str, float | Tensor] = {
        "loss": carry.loss_sum / max(carry.steps, 1),
        "steps": carry.steps,
        "dropped": carry.dropped,
    }
    upload = Upload(carry.client.name, float(carry.context.samples), model, uploads, metrics)
    kept = {k: v.detach() for k, v in parts.items()}
    return upload, ClientState(carry.context.round + 1, after.pick(net.own), kept, _velocity(task, carry))


def _ends(task: Task, carry: Carry, after: Tree, mine: dict[str, Tree]) -> dict[str, End]:
    """What each part sees at the end of a client's round."""
    net = task.net
    params, start = after.pick(net.sent_params), carry.start.pick(net.sent_params)
    delta = params - start
    mean_grad = Tree({k: carry.grad_sum[k] / n for k, n in carry.grad_steps.items() if k in params})
    return {
        p.name: End(
            params=params,
            start=start,
            delta=delta,
            mean_grad=mean_grad if p.uses_mean_gradient else NOT_ASKED_FOR,
            buffers=carry.buffers,
            steps=max(carry.exchanged_steps, 1),
            gradient=lambda w: full_gradient(task, carry, w),
            context=carry.context,
            down=carry.broadcast.parts[p.name],
            mine=mine[p.name],
            model=after,
            owned=net.owned_by.get(p.name, ()),
        )
        for p in task.method.parts
    }


def _refuse_private(task: Task, p: Part, upload: Tree) -> None:
    if leaked := sorted(task.net.private & {k.rsplit("/", 1)[-1] for k in upload}):
        raise BadInput(
            f"{p.name}: finish would upload {leaked[0]}, which is {task.net.routes[leaked[0]].name} and never sent. "
            "Send what comes from e.params, e.start and e.delta, or use another name."
        )


def _sent(task: Task, ends: dict[str, End]) -> Tree:
    """The parameters that the parts' `send` changed; none if no part changed the update."""
    end = next(iter(ends.values()))
    delta, untouched = end.delta, end.delta.marks()
    for p in task.method.having("send"):
        delta = checks.update(p, "send", p.send(delta, ends[p.name]), end.start)
    return Tree() if delta.is_as(untouched) else end.start + delta


def train_twin(task: Task, carry: Carry, p: Part) -> Tree:
    """Train a client's second model for this round, from where it was, anchored at the received one."""
    kept = carry.mine[p.name]
    received = Tree({**carry.fixed, **carry.start, **carry.start_buffers})
    model = Tree({**received, **start_of_twin(task, carry.mine)})
    v = carry_of(task.for_twin, carry.broadcast, carry.client, carry.context, carry.mine, model)
    v.start, v.start_buffers, v.velocity, v.watch = carry.start, carry.start_buffers, branch(kept, "v"), carry.watch
    train(task.for_twin, v, [recipe_phase(task, carry.context)])
    return join(model=v.model().pick(start_of_twin(task, carry.mine)), v=_velocity(task, v))


def start_of_twin(task: Task, mine: dict[str, Tree]) -> Tree:
    """Where a client's second model starts a round: where it was, or the initial model.

    Tensors that parts supply (a temperature, pooled statistics) are the round's. Tensors that parts own and train
    (FedNorm) belong to the second model as well.
    """
    net = task.net
    supplied = set(net.owned) - net.owned_with_trained
    return twin_model(task, mine) or net.initial.pick(n for n in (*net.trained, *net.buffers) if n not in supplied)


def twin_model(task: Task, mine: dict[str, Tree]) -> Tree:
    """The tensors of a client's second model; none before its first round."""
    return branch(mine[task.twin.name], "model") if task.twin else Tree()


def local_update(task: Task, sent: Broadcast, client: Client) -> tuple[Upload, ClientState]:
    """A client's whole round: `finish . fold(step over the batch plan) . begin`.

    Raises Diverged, naming the part and the step, when the update or the loss is not finite.
    """
    carry, early = begin(task, sent, client)
    train(task, carry, base_phases(task, carry.context))
    upload, state = finish(task, carry, early)
    if not all(tree.finite() for tree in moved(task, upload, state)):
        diagnose(task, sent, client)
    return upload, state


def moved(task: Task, upload: Upload, state: ClientState) -> list[Tree]:
    """What must be finite after a client's round: its update, what it keeps, and the loss.

    A loss can be infinite where its gradient is not.
    """
    loss = Tree(loss=torch.as_tensor(upload.metrics["loss"]))
    written = [state.parts[p.name] for p in task.method.writing]
    return [upload.model, state.local, twin_model(task, state.parts), *written, *upload.parts.values(), loss]


def diagnose(task: Task, sent: Broadcast, client: Client) -> None:
    """Repeat a client's round, checking after every hook, and raise Diverged at the first non-finite value."""
    if not sent.model.finite():
        bad = next(name for name, t in sent.model.items() if not Tree({name: t}).finite())
        raise Diverged(
            f'The model that the server sent in round {sent.round + 1} is not finite (first "{bad}"), before any '
            "client trained it. Check the model's first weights, or the server's step of the last round."
        )
    carry, _ = begin(task, sent, client)
    carry.watch = True
    train(task, carry, base_phases(task, carry.context))
    if task.twin:
        train_twin(task, carry, task.twin)
    raise Diverged(
        f'Client "{client.name}" has a non-finite update or loss in round {sent.round + 1}, after its last step.'
    )


def base_phases(task: Task, context: Context) -> list[Phase]:
    """The phases of this round: the recipe's one, as the parts' `plan` changes it."""
    return task.method.phases([recipe_phase(task, context)], context)


def recipe_phase(task: Task, context: Context) -> Phase:
    """The one phase that a recipe asks for at a client."""
    training = task.training
    return Phase(epochs=None if training.steps else training.epochs_of(context.client), steps=training.steps)


def train(task: Task, carry: Carry, phases: Iterable[Phase]) -> None:
    """Run phases on a carry, one after the other, over the client's batch plan."""
    for batches, phase in draws(task, carry, phases):
        step(task, carry, batches, phase)


def draws(task: Task, carry: Carry, phases: Iterable[Phase]) -> Iterator[tuple[list[Batch], Phase]]:
    """The batches of every step; each phase is entered when it begins, and an engine may take the steps itself."""
    data, device = carry.client.data, task.like.device
    kind = "adapt" if carry.context.evaluating else "data"
    for number, phase in enumerate(phases):
        enter(task, carry, phase)
        seed = noise.seed_of(kind, task.seed, carry.context.round, carry.client.name, number)
        plan, dropped = batch_plan(len(data), task.training, phase, seed, needs_two=task.needs_two)
        carry.dropped += dropped
        steps = len(plan) // phase.draws
        stream = data.stream(plan[: steps * phase.draws])
        try:
            for _ in range(steps):
                yield [(x.to(device), y.to(device)) for x, y in islice(stream, phase.draws)], phase
        except BadInput as problem:  # an image that cannot be decoded
            raise BadInput(f'Client "{carry.client.name}": {problem}') from None


# -- the server -----------------------------------------------------------------------------------------------------


def at_server(task: Task, state: ServerState) -> dict[str, Local]:
    """The server's own images, for each part that requires them: like a client's, with the server's model."""
    names = task.method.using_proxy
    if not names:
        return {}
    if task.proxy is None:
        raise no_proxy(names[0], "this run")
    sent, client = broadcast(task, state).to_all, Client("server", task.proxy)
    mine, context = site_state(task, sent, client), context_of(task, state.round, client)
    parts = [p for p in task.method.parts if p.name in names]
    return {p.name: LocalView(task, p, client, state.model, context, sent, mine) for p in parts}


def no_proxy(part: str, where: str) -> BadInput:
    """The error of a part that learns from images at the server where there are none."""
    return BadInput(
        f"{part} learns from images at the server, and {where} gives it none. Name some with {option('proxy')}: a "
        "fraction of each client's training images (0.05), or a site. They leave their sites."
    )


def server_update(task: Task, state: ServerState, uploads: list[Upload] | Combined) -> ServerState:
    """Average the models, then let parts change the mean update: parameters and statistics on separate chains.

    If no part changes the update, the mean itself is the new model: one participant gives back its model bit for bit.
    Parts that look at each client's upload come first (`core/individual.py`).
    """
    parts, proxies = dict(state.parts), at_server(task, state)
    if isinstance(uploads, Combined):
        got = uploads
    elif task.method.individual:
        got, parts = combine_individually(task, state, uploads, proxies)
    else:
        got = combine(task, uploads)
    riding = dict([*passes(task, "before"), *passes(task, "after")])
    counts, context = (got.sampled, task.clients), context_of(task, state.round, None)
    views = {}
    for p in task.method.parts:
        up, images = got.parts[p.name], proxies.get(p.name)
        even = got.even.pick(task.net.seen_by(p)) - state.model if p.uses_even_mean else NOT_ASKED_FOR
        if p in riding:
            seen = Round(state.model, up, parts[p.name], *counts, context, even, images=images)
            parts[p.name] = checks.tree(p, "server of a pass", riding[p].server(up, seen))
        views[p.name] = Round(state.model, up, parts[p.name], *counts, context, even, images=images)
    if found := task.method.privacy:
        got = released(task, state, got, *found, views[found[0].name])
    new = Tree({**state.model, **got.model})
    for hook, names in (("server", task.net.sent_params), ("stats", task.net.statistics)):
        before = state.model.pick(names)
        delta, changed = got.model.pick(names) - before, False
        for p in task.method.having(hook):
            marks = delta.marks()
            if hook == "server":
                delta, parts[p.name] = checks.two_trees(p, "server", p.server(delta, views[p.name]))
            else:
                delta = checks.tree(p, "stats", p.stats(delta, views[p.name]))
            if not delta.is_as(marks):
                changed = True
                checks.update(p, hook, delta, before)
                checks.still_finite(p, hook, delta, state.round)
        if changed:
            new.update(before + delta)
    return ServerState(state.round + 1, new.detach(), {k: v.detach() for k, v in parts.items()}, state.seed)
