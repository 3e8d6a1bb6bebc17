"""The core: a client's round is `begin`, `step` ... `step`, `finish`; the server's round is `server_update`.

Everything else in the library decides where these functions run, where client state lives, and what is written down.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fednorms import noise
from fednorms.errors import Diverged
from fednorms.part import Part, Phase, Reduction
from fednorms.passes import LocalView, passes, prepare
from fednorms.states import Batch, Broadcast, Carry, Client, ClientState, ServerState, Task, Upload, context_of
from fednorms.training import Optimiser, batch_plan, clipped
from fednorms.tree import Tree, branch, join, mean
from fednorms.views import Begin, Context, End, Round, Step


# -- the start of a round -------------------------------------------------------------------------------------------
def initial_state(task: Task) -> ServerState:
    """The server before round 0."""
    w = task.net.initial.pick(task.net.sent_params)
    parts = {p.name: p.init(w)[0] for p in task.method.parts}
    return ServerState(round=0, model=task.net.initial.clone(), parts=parts, seed=task.seed)


def broadcast(task: Task, state: ServerState) -> Broadcast:
    """What the server sends at the start of a round."""
    parts = {p.name: p.down(state.parts[p.name]) for p in task.method.parts}
    return Broadcast(state.round, state.model, parts)


def own_state(task: Task, sent: Broadcast, state: ClientState | None) -> dict[str, Tree]:
    """Each part's state at a client: what it kept, or its initial value."""
    kept = state.parts if state else {}
    w = sent.model.pick(task.net.sent_params)
    return {p.name: kept[p.name] if p.name in kept else p.init(w)[1] for p in task.method.parts}


def load(task: Task, sent: Broadcast, client: Client, context: Context, mine: dict[str, Tree]) -> Tree:
    """A client's model at the start: the broadcast one, its own tensors, and what parts install."""
    model = Tree(sent.model)
    if client.state:
        model.update(client.state.local)
    for p in task.method.having("begin"):
        owned, received = task.net.owned_by.get(p.name, ()), sent.model.pick(task.net.exchanged)
        model = p.begin(model, Begin(context, sent.parts[p.name], mine[p.name], owned, received))
    return model


def begin(task: Task, sent: Broadcast, client: Client, *, evaluating: bool = False) -> tuple[Carry, dict[str, Tree]]:
    """Load the broadcast model into a carry of its own; also the uploads of passes that ride in this call."""
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
            mine[p.name], early[p.name] = job.client(LocalView(task, p, client, model, context, sent, mine))
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
        mine=mine,
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
    """Start a phase: which tensors move, at which rate, with a fresh optimiser."""
    carry.active = task.net.trainable(phase.train, also_frozen=carry.context.evaluating)
    active = set(carry.active)
    for name, tensor in carry.params.items():
        tensor.requires_grad_(name in active)
    moving = carry.params.pick(carry.active).detach()
    carry.velocity = _velocity(task, carry)
    carry.optimiser = Optimiser.fresh(task.training, moving, rate_of(carry.context, phase), task.like)
    carry.optimiser.first_moment.update(carry.velocity.pick(carry.active).clone())


def rate_of(context: Context, phase: Phase) -> float:
    """The learning rate of a phase: its own, or the round's (fine-tuning: the first round's), times its factor."""
    base = context.lr_0 if context.evaluating else context.lr
    return (base if phase.lr is None else phase.lr) * phase.factor


def _velocity(task: Task, carry: Carry) -> Tree:
    if not task.training.keep_momentum:
        return Tree()
    return Tree({**carry.velocity, **(carry.optimiser.first_moment if carry.optimiser else {})})


# -- one step -------------------------------------------------------------------------------------------------------
def step(task: Task, carry: Carry, batches: list[Batch], phase: Phase) -> None:
    """One local step: gradient (loss, oracle), corrections (grad), clipping, optimiser; advances the carry in place."""
    assert carry.optimiser is not None
    carry.key[1] += 1
    views = [_step_view(task, carry, batch, draw) for draw, batch in enumerate(batches)]
    gradf, views[0].hessian = _gradient_functions(task, carry, views, phase)
    for p in task.hooks["oracle"]:
        gradf = p.oracle(gradf, _seen_by(p, views[0], carry))
    g = gradf(carry.params, 0)
    with torch.no_grad():
        if carry.grad_sum:
            _accumulate(carry, g)
        for p in task.hooks["grad"]:
            g = p.grad(g, _seen_by(p, views[0], carry))
            _watch(carry, g.values(), p.name, "grad")
        if task.training.clip is not None:
            g = clipped(g, task.training.clip)
        for p in task.hooks["decay"]:
            g = g + p.decay(_seen_by(p, views[0], carry))
        carry.optimiser.update(carry.params, g)
    carry.steps += 1
    carry.exchanged_steps += not set(carry.active).isdisjoint(task.net.sent_params)


def _gradient_functions(
    task: Task, carry: Carry, views: list[Step], phase: Phase
) -> tuple[Callable[[Tree, int], Tree], Callable[[Tree, Tree, int], Tree]]:
    touched = False  # the first pass of a step updates the running statistics, later ones do not

    def loss_at(params: Tree, draw: int) -> tuple[Tensor, Tree]:
        nonlocal touched
        s = copy.copy(views[draw])
        if params is not carry.params:
            active = set(carry.active)
            params = Tree({k: v.detach().requires_grad_(k in active) for k, v in params.items()})
        s.params = params
        buffers = carry.buffers.clone() if touched else carry.buffers
        touched = True
        with noise.keyed(_key(carry, draw)):
            s.logits, s.features = task.net.forward(
                {**carry.fixed, **params, **buffers}, s.x, train=True, batch_statistics=phase.norm == "batch"
            )
            total = _base_loss(task, carry, s)
            _watch(carry, [total], "the model", "loss")
            for p in task.hooks["loss"]:
                term = (p.twin if task.second else p.loss)(_seen_by(p, s, carry))
                if isinstance(term, Tensor):  # a part that has nothing to add returns the number 0.0
                    total = total + term
                    _watch(carry, [term], p.name, "loss")
        return total, params.pick(carry.active)

    def gradf(params: Tree, draw: int) -> Tree:
        total, leaves = loss_at(params, draw)
        if draw == 0:
            carry.loss_sum += total.detach()
        g = _derivative(carry, total, leaves)
        _watch(carry, g.values(), "the model", "gradient")
        return g

    def hessian(params: Tree, v: Tree, draw: int) -> Tree:
        total, leaves = loss_at(params, draw)
        slope = _derivative(carry, total, leaves, create_graph=True).dot(v)
        again = _derivative(carry, slope, leaves) if slope.requires_grad else Tree()  # a loss may be linear
        return leaves.zeros() + again

    return gradf, hessian


def _derivative(carry: Carry, y: Tensor, leaves: Tree, *, create_graph: bool = False) -> Tree:
    take = carry.derivative or torch.autograd.grad
    found = take(y, list(leaves.values()), allow_unused=True, create_graph=create_graph) if leaves else ()
    return Tree({k: g for k, g in zip(leaves, found, strict=True) if g is not None})


def _base_loss(task: Task, carry: Carry, s: Step) -> Tensor:
    if replaced := task.hooks["objective"]:
        return replaced[0].objective(_seen_by(replaced[0], s, carry))
    return task.loss(s.logits, s.y)


def _key(carry: Carry, draw: int) -> Tensor:
    return carry.key if draw == 0 else torch.cat([carry.key[:1] + draw, carry.key[1:]])


def _step_view(task: Task, carry: Carry, batch: Batch, draw: int) -> Step:
    def again(
        params: Tree,
        x: Tensor,
        stats: Literal["batch", "broadcast"] = "batch",
        mode: Literal["train", "evaluate"] = "train",
    ) -> tuple[Tensor, Tensor]:
        if mode == "evaluate":
            tensors = {**carry.fixed, **carry.start_buffers, **params}
            return task.net.forward(tensors, x, train=False, batch_statistics=False)
        buffers = carry.start_buffers if stats == "broadcast" else carry.buffers
        tensors = {**carry.fixed, **params, **buffers.clone()}
        return task.net.forward(tensors, x, train=True, batch_statistics=stats == "batch")

    s = Step(carry.params, carry.start, *batch, carry.context, task.net.head_names, carry.path, again, task.loss)
    with noise.keyed(_key(carry, draw)):
        s.x, s.y = prepare(task, s, lambda p: _seen_by(p, s, carry))
    return s


def _seen_by(p: Part, s: Step, carry: Carry) -> Step:
    view = copy.copy(s)
    view.part, view.down, view.mine = p.name, carry.broadcast.parts[p.name], carry.mine[p.name]
    return view


def _accumulate(carry: Carry, g: Tree) -> None:
    torch._foreach_add_([carry.grad_sum[k] for k in g], list(g.values()))
    for name in g:
        carry.grad_steps[name] = carry.grad_steps.get(name, 0) + 1


def _watch(carry: Carry, tensors: Iterable[Tensor], who: str, hook: str) -> None:
    if carry.watch and not all(bool(torch.isfinite(t).all()) for t in tensors):
        raise Diverged(
            f'Client "{carry.client.name}" diverged in round {carry.context.round}, step {carry.steps}: '
            f"{who} ({hook}) is not finite. Lower the learning rate (now {carry.context.lr:g}) or set clip, "
            'or drop such clients from the average with on_divergence="skip".'
        )


# -- the end of a round ---------------------------------------------------------------------------------------------
def finish(task: Task, carry: Carry, early: dict[str, Tree] | None = None) -> tuple[Upload, ClientState]:
    """The client's upload and new state; `early` are the uploads of passes that rode in this call."""
    net, after = task.net, carry.model()
    parts, uploads, model = dict(carry.mine), dict(early or {}), after.pick(net.exchanged)
    if task.twin:
        parts[task.twin.name] = train_twin(task, carry, task.twin)
    for p, job in passes(task, "after"):
        view = LocalView(task, p, carry.client, after, carry.context, carry.broadcast, parts)
        parts[p.name], uploads[p.name] = job.client(view)
    if task.method.having("finish") or task.method.having("send"):
        params, start = after.pick(net.sent_params), carry.start.pick(net.sent_params)
        delta = params - start
        mean_grad = Tree({k: carry.grad_sum[k] / n for k, n in carry.grad_steps.items() if k in params})
        ends = {
            p.name: End(
                params=params,
                start=start,
                delta=delta,
                mean_grad=mean_grad,
                buffers=carry.buffers,
                steps=max(carry.exchanged_steps, 1),
                gradient=lambda w: full_gradient(task, carry, w),
                context=carry.context,
                down=carry.broadcast.parts[p.name],
                mine=parts[p.name],
                model=after,
                owned=net.owned_by.get(p.name, ()),
            )
            for p in task.method.parts
        }
        for p in task.method.having("finish"):
            parts[p.name], sent = p.finish(ends[p.name])
            uploads[p.name] = Tree({**uploads.get(p.name, {}), **sent}).detach()
            leaked = net.private & {k.rsplit("/", 1)[-1] for k in uploads[p.name]}
            if leaked:
                raise RuntimeError(f"{p.name} would upload {min(leaked)}, which is {net.routes[min(leaked)].name}")
        changed = delta
        for p in task.method.having("send"):
            changed = p.send(changed, ends[p.name])
        if changed is not delta:
            model.update(start + changed)
    metrics: dict[str, float | Tensor] = {
        "loss": carry.loss_sum / max(carry.steps, 1),
        "steps": carry.steps,
        "dropped": carry.dropped,
    }
    upload = Upload(carry.client.name, float(carry.context.samples), model, uploads, metrics)
    kept = {k: v.detach() for k, v in parts.items()}
    return upload, ClientState(carry.context.round + 1, after.pick(net.own), kept, _velocity(task, carry))


def train_twin(task: Task, carry: Carry, p: Part) -> Tree:
    """A client's second model after this round: `beside` the first, from where it was, anchored at the received one."""
    net, kept = task.net, carry.mine[p.name]
    received = Tree({**carry.fixed, **carry.start, **carry.start_buffers})
    names = [n for n in (*net.trained, *net.buffers) if n not in net.owned]
    model = Tree({**received, **(second_model(task, carry.mine) or net.initial.pick(names))})
    v = carry_of(task.beside, carry.broadcast, carry.client, carry.context, carry.mine, model)
    v.start, v.start_buffers, v.velocity, v.watch = carry.start, carry.start_buffers, branch(kept, "v"), carry.watch
    train(task.beside, v, [recipe_phase(task)])
    return join(model=v.model().pick(names), v=_velocity(task, v))


def second_model(task: Task, mine: dict[str, Tree]) -> Tree:
    """The tensors of the second model that a part gave a client; none before its first round."""
    return branch(mine[task.twin.name], "model") if task.twin else Tree()


def full_gradient(task: Task, carry: Carry, params: Tree) -> Tree:
    """The gradient of the base loss over all of a client's data at `params`: train mode, buffers untouched."""
    total, n = Tree(), len(carry.client.data)
    fixed = {**carry.fixed, **carry.params.detach()}
    point = Tree({k: v.detach().requires_grad_() for k, v in params.items()})
    for rows in torch.split(torch.arange(n), task.training.batch_size):
        x, y = carry.client.data.batch(rows)
        s = _step_view(task, carry, (x.to(task.like.device), y.to(task.like.device)), 0)
        alone = len(rows) == 1 and task.needs_two
        with noise.keyed(carry.key), torch.enable_grad():
            tensors = {**fixed, **point, **carry.buffers.clone()}
            s.logits, s.features = task.net.forward(tensors, s.x, train=True, batch_statistics=not alone)
            grads = torch.autograd.grad(_base_loss(task, carry, s), list(point.values()), allow_unused=True)
        share = Tree({k: g * (len(rows) / n) for k, g in zip(point, grads, strict=True) if g is not None})
        total = share + total
    return total


def local_update(task: Task, sent: Broadcast, client: Client) -> tuple[Upload, ClientState]:
    """A client's whole round: `finish . fold(step over the batch plan) . begin`.

    Raises Diverged, naming the part and the step, when the update is not finite.
    """
    carry, early = begin(task, sent, client)
    train(task, carry, base_phases(task, carry.context))
    upload, state = finish(task, carry, early)
    moved = (upload.model, state.local, second_model(task, state.parts), *upload.parts.values())
    if not all(tree.finite() for tree in moved):
        diagnose(task, sent, client)
    return upload, state


def diagnose(task: Task, sent: Broadcast, client: Client) -> None:
    """Repeat a client's round, checking after every hook, and raise Diverged at the first non-finite value."""
    carry, _ = begin(task, sent, client)
    carry.watch = True
    train(task, carry, base_phases(task, carry.context))
    if task.twin:
        train_twin(task, carry, task.twin)
    raise Diverged(f'Client "{client.name}" sent a non-finite update in round {sent.round}, after its last step.')


def base_phases(task: Task, context: Context) -> list[Phase]:
    """The phases of this round: the recipe's one, as the parts' `plan` changes it."""
    return task.method.phases([recipe_phase(task)], context)


def recipe_phase(task: Task) -> Phase:
    """The one phase that a recipe asks for."""
    training = task.training
    return Phase(epochs=None if training.steps else training.epochs, steps=training.steps)


def train(task: Task, carry: Carry, phases: Iterable[Phase]) -> None:
    """Run phases on a carry, one after the other, over the client's batch plan."""
    for batches, phase in draws(task, carry, phases):
        step(task, carry, batches, phase)


def draws(task: Task, carry: Carry, phases: Iterable[Phase]) -> Iterator[tuple[list[Batch], Phase]]:
    """The batches of every step, each phase entered as it comes: an engine may take these steps itself."""
    data, device = carry.client.data, task.like.device
    kind = "adapt" if carry.context.evaluating else "data"
    for number, phase in enumerate(phases):
        enter(task, carry, phase)
        seed = noise.seed_of(kind, task.seed, carry.context.round, carry.client.name, number)
        plan, dropped = batch_plan(len(data), task.training, phase, seed, needs_two=task.needs_two)
        carry.dropped += dropped
        for i in range(0, len(plan) - phase.draws + 1, phase.draws):
            batches = [data.batch(rows) for rows in plan[i : i + phase.draws]]
            yield [(x.to(device), y.to(device)) for x, y in batches], phase


# -- the server -----------------------------------------------------------------------------------------------------
def reduce_uploads(trees: list[Tree], weights: list[float], how: Reduction) -> Tree:
    """Combine what clients sent for one part; "grouped" is the weighted mean of each entry over those who sent it.

    >>> rows = [Tree(m=torch.tensor([1.0])), Tree(m=torch.tensor([4.0]))]
    >>> [reduce_uploads(rows, [1.0, 2.0], how)["m"].tolist() for how in ("weighted", "uniform", "sum", "stack")]
    [[3.0], [2.5], [5.0], [[1.0], [4.0]]]
    """
    if how == "grouped":
        rows = {
            name: [(t, w) for t, w in zip(trees, weights, strict=True) if name in t] for tree in trees for name in tree
        }
        return Tree({k: mean([t.pick([k]) for t, _ in row], [w for _, w in row])[k] for k, row in rows.items()})
    if not trees or not trees[0]:
        return Tree()
    if how == "list":
        return join(**{str(i): tree for i, tree in enumerate(trees)})
    if how == "stack":
        return Tree({k: torch.stack([t[k] for t in trees]) for k in trees[0]})
    if how == "sum":
        return mean(trees, [1.0] * len(trees)) * float(len(trees))
    return mean(trees, weights if how == "weighted" else [1.0] * len(trees))


def server_update(task: Task, state: ServerState, uploads: list[Upload]) -> ServerState:
    """Average the models, then let parts change the mean update: parameters and statistics on separate chains.

    Uploads are ordered by client name, so the sum never depends on arrival. If no part changes the update, the mean
    itself is the new model: one participant gives back its model bit for bit.
    """
    uploads = sorted(uploads, key=lambda u: u.client)
    uniform = task.method.weighting(task.weighting) == "uniform"
    weights = [1.0 if uniform else u.weight for u in uploads]  # one p_k for models and weighted uploads
    average = mean([u.model for u in uploads], weights)
    new, parts = Tree({**state.model, **average}), dict(state.parts)
    riding = dict([*passes(task, "before"), *passes(task, "after")])
    views = {}
    for p in task.method.parts:
        how = riding[p].reduce if p in riding else p.reduction
        up = reduce_uploads([u.parts.get(p.name, Tree()) for u in uploads], weights, how)
        context = context_of(task, state.round, None)
        even = _even(task, state, uploads, average, uniform) if p.uses_even_mean else Tree()
        views[p.name] = Round(state.model, up, parts[p.name], len(uploads), task.clients, context, even)
        if p in riding:
            parts[p.name] = riding[p].server(up, views[p.name])
            views[p.name] = replace(views[p.name], mine=parts[p.name])
    for hook, names in (("server", task.net.sent_params), ("stats", task.net.statistics)):
        before = state.model.pick(names)
        delta = plain = average.pick(names) - before
        for p in task.method.having(hook):
            if hook == "server":
                delta, parts[p.name] = p.server(delta, views[p.name])
            else:
                delta = p.stats(delta, views[p.name])
        if delta is not plain:
            new.update(before + delta)
    return ServerState(state.round + 1, new.detach(), {k: v.detach() for k, v in parts.items()}, state.seed)


def _even(task: Task, state: ServerState, uploads: list[Upload], average: Tree, uniform: bool) -> Tree:
    plain = average if uniform else mean([u.model for u in uploads], [1.0] * len(uploads))
    return plain.pick(task.net.sent_params) - state.model
