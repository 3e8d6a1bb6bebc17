"""Inside a step: what hooks see, the loss with all its terms, and its derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from fednorms.core import checks, noise
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.part import Part, Phase
from fednorms.core.passes import prepare
from fednorms.core.stacked import follows, gradient, leaf
from fednorms.core.states import Batch, Carry, Task, loss_name
from fednorms.core.tree import Tree
from fednorms.core.views import Step


def gradient_functions(
    task: Task, carry: Carry, views: list[Step], phase: Phase
) -> tuple[Callable[[Tree, int], Tree], Callable[[Tree, Tree, int], Tree]]:
    """The gradient of the loss at any parameters, and its Hessian times a vector, on the batches of one step."""
    touched = False  # the first pass of a step updates the running statistics, later ones do not

    def loss_at(params: Tree, draw: int) -> tuple[Tensor, Tree]:
        nonlocal touched
        if draw >= len(views):
            raise BadInput(
                f"An oracle asked for batch number {draw} (counted from 0) of a step that has {len(views)}. Ask for "
                "more in plan, with dataclasses.replace(phase, draws=...); a later plan must keep that number."
            )
        s = copy.copy(views[draw])
        if params is not carry.params:
            active = set(carry.active)
            params = Tree({k: leaf(v, moves=k in active) for k, v in params.items()})
        s.params = params
        buffers = carry.buffers.clone() if touched else carry.buffers
        touched, s.buffers = True, buffers
        with noise.keyed(step_key(carry, draw)), _watching(task, s):
            s.logits, s.features = task.net.forward(
                {**carry.fixed, **params, **buffers}, s.x, train=True, batch_statistics=phase.norm == "batch"
            )
            total = _whole_loss(task, carry, s)
        if carry.active and not follows(total):
            raise _without_gradient(task)
        return total, params.pick(carry.active)

    def gradf(params: Tree, draw: int) -> Tree:
        first = not touched  # an oracle may ask for the first batch again, at other parameters
        total, leaves = loss_at(params, draw)
        if draw == 0 and first:
            carry.loss_sum += total.detach()
        g = _derivative(carry, total, leaves)
        watch(carry, g.values(), "the model", "gradient")
        return g

    def hessian(params: Tree, v: Tree, draw: int) -> Tree:
        total, leaves = loss_at(params, draw)
        slope = _derivative(carry, total, leaves, create_graph=True).dot(v)
        again = _derivative(carry, slope, leaves) if follows(slope) else Tree()  # a loss may be linear
        return leaves.zeros() + again

    return gradf, hessian


@contextmanager
def _watching(task: Task, s: Step) -> Iterator[None]:
    """Note the inputs of the layers that parts ask for."""
    if not task.hooks["watches"]:
        yield
        return
    with task.net.watching(task.watches) as s.inputs:
        yield


def _derivative(carry: Carry, y: Tensor, leaves: Tree, *, create_graph: bool = False) -> Tree:
    take = carry.derivative or gradient
    found = take(y, list(leaves.values()), allow_unused=True, create_graph=create_graph) if leaves else ()
    return Tree({k: g for k, g in zip(leaves, found, strict=True) if g is not None})


def base_loss(task: Task, carry: Carry, s: Step) -> Tensor:
    """The base loss: the recipe's, or that of the part that replaces it."""
    if replaced := task.hooks["objective"]:
        return checks.objective(replaced[0], replaced[0].objective(seen_by(replaced[0], s, carry)))
    return task.loss_of(s.logits, s.y)


def _without_gradient(task: Task) -> BadInput:
    replaced = task.hooks["objective"]
    whose = f"{replaced[0].name}: objective" if replaced else f"The loss {loss_name(task.loss)}"
    return BadInput(
        f"{whose} must return a number with a gradient, got one that depends on no trained tensor. Compute it from "
        "the logits, without .detach(), .item(), argmax or torch.no_grad()."
    )


def step_key(carry: Carry, draw: int) -> Tensor:
    """The key for the randomness of one batch of a step."""
    return carry.key if draw == 0 else torch.cat([carry.key[:1] + draw, carry.key[1:]])


def step_view(task: Task, carry: Carry, batch: Batch, draw: int) -> Step:
    """What hooks see in a step: the prepared batch, and a way to run the model again without changing buffers."""

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

    s = Step(carry.params, carry.start, *batch, carry.context, task.net.head_names, carry.path, again, task.loss_of)
    s.start_buffers = carry.start_buffers
    watch(carry, [s.x], "its data", "images")
    with noise.keyed(step_key(carry, draw)):
        s.x, s.y = prepare(task, s, lambda p: seen_by(p, s, carry), lambda p, x: watch(carry, [x], p.name, "batch"))
    return s


def seen_by(p: Part, s: Step, carry: Carry) -> Step:
    """The view of one part: with what the server sent to it and its own state, and no other part's."""
    view = copy.copy(s)
    view.part, view.down, view.mine = p.name, carry.broadcast.parts[p.name], carry.mine[p.name]
    return view


def watch(carry: Carry, tensors: Iterable[Tensor], who: str, hook: str) -> None:
    """While a diverged round is repeated: raise at the first value that is not finite, naming its origin."""
    if carry.watch and not all(bool(torch.isfinite(t).all()) for t in tensors):
        also, advice = "", f"Lower the learning rate (now {carry.context.lr:g}) or set clip"
        if hook == "images":
            advice = "Fix the data"
        elif hook == "batch":
            advice = "Look for a division by zero or a logarithm of zero in it"
        elif any(bool(t.isnan().any()) for t in carry.broadcast.parts.get(who, Tree()).values()):
            also = ", as what the server sent to it is not"
            advice = f"Look at what {who} (server) keeps"
        raise Diverged(
            f'Client "{carry.client.name}" diverged in round {carry.context.round + 1}, step {carry.steps + 1}: '
            f"{who} ({hook}) is not finite{also}. {advice}, "
            'or drop such clients from the average with on_divergence="skip".'
        )


def _whole_loss(task: Task, carry: Carry, s: Step) -> Tensor:
    """The base loss and what parts add to it."""
    total = s.value = base_loss(task, carry, s)
    if carry.watch:
        made = task.hooks["objective"] if bool(torch.isfinite(s.logits).all()) else []
        watch(carry, [total], made[0].name if made else "the model", "objective" if made else "loss")
    for p in task.hooks["loss"]:
        view = seen_by(p, s, carry)
        term = checks.term(p, *(("twin", p.twin(view)) if task.trains_twin else ("loss", p.loss(view))))
        if isinstance(term, Tensor):
            total = total + term
            watch(carry, [term], p.name, "loss")
    watch(carry, [total], "the sum of all terms", "loss")
    return total


def full_gradient(task: Task, carry: Carry, params: Tree) -> Tree:
    """The gradient of the loss, all terms, over all of a client's data at `params`: train mode, buffers unchanged.

    Trainable tensors that `params` does not name (LOCAL ones) have their values from the start of the round. Layers
    normalize as in this round's phases (FixBN: with the running statistics).
    """
    total, n = Tree(), len(carry.client.data)
    fixed = {**carry.fixed, **carry.start.detach()}
    running = task.method.phases([Phase()], carry.context)[-1].norm == "running"
    point = Tree({k: v.detach().requires_grad_() for k, v in params.items()})
    for rows in torch.split(torch.arange(n), task.training.batch_size):
        x, y = carry.client.data.batch(rows)
        s = step_view(task, carry, (x.to(task.like.device), y.to(task.like.device)), 0)
        stored = running or (len(rows) == 1 and task.needs_two)
        with noise.keyed(carry.key), torch.enable_grad(), _watching(task, s):
            s.buffers = carry.buffers.clone()
            tensors = {**fixed, **point, **s.buffers}
            s.params = Tree({**carry.start.detach(), **point})
            s.logits, s.features = task.net.forward(tensors, s.x, train=True, batch_statistics=not stored)
            grads = torch.autograd.grad(_whole_loss(task, carry, s), list(point.values()), allow_unused=True)
        share = Tree({k: g * (len(rows) / n) for k, g in zip(point, grads, strict=True) if g is not None})
        total = share + total
    return total
