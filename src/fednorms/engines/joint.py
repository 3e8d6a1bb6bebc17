"""A round whose first step all clients take together: one autograd graph, with shared BatchNorm statistics (FedTAN).

Every client's step runs in its own thread, but never two at once. A client computes until a BatchNorm layer needs the
moments of the others; then the next client computes up to the same layer, and so on in turn. So the order of all
operations is fixed, and any network and any parts can be used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fednorms.core.errors import Diverged
from fednorms.core.moments import affine, per_channel, widened
from fednorms.core.net import Net
from fednorms.core.norm_act import is_fused
from fednorms.core.part import Phase
from fednorms.core.round import base_phases, begin, draws, finish, moved, step
from fednorms.core.states import Batch, Broadcast, Carry, Client, ClientState, Task, Upload
from fednorms.core.tree import Tree


@dataclass
class Begun:
    """A client between its first step and the rest of its round."""

    carry: Carry
    early: dict[str, Tree]
    rest: Iterator[tuple[list[Batch], Phase]]


def begin_together(task: Task, sent: Broadcast, clients: Sequence[Client]) -> dict[str, Begun]:
    """Start the round of every client and take the first step of all of them together.

    Moments are m = sum p_i m_i and v = sum p_i mean((x_i - m)^2) over clients i, the gradient is that of
    L = sum p_i L_i, and client i steps along dL/dw_i / p_i; p_i are the weights with which models are averaged. With
    equal models and batches this is the step of one network on the union of all batches.
    """
    begun: dict[str, Begun] = {}
    first: list[tuple[Carry, list[Batch], Phase]] = []
    for client in clients:
        carry, early = begin(task, sent, client)
        rest = draws(task, carry, base_phases(task, carry.context))
        begun[client.name] = Begun(carry, early, rest)
        if found := next(rest, None):  # a client with too few images for a batch takes no step at all
            first.append((carry, *found))
    if not first:
        return begun
    even = task.method.weighting(task.weighting) == "uniform"
    lockstep = Lockstep([1.0 if even else float(carry.context.samples) for carry, _, _ in first])
    lockstep.run([_job(task, lockstep, index, *taken) for index, taken in enumerate(first)])
    for carry, _, _ in first:
        carry.derivative = None
    return begun


def exchanges(net: Net) -> tuple[int, int]:
    """The exchanges of a joint step: 3 per BatchNorm layer; and their bytes each way: 4 floats per channel."""
    channels = [m.num_features for m in net.module.modules() if isinstance(m, _BatchNorm)]
    return 3 * len(channels), 4 * sum(channels) * torch.float32.itemsize


def finish_alone(task: Task, begun: Begun) -> tuple[Upload, ClientState]:
    """Run the rest of a client's round, without the others. Raises Diverged when its update or loss is not finite."""
    for batches, phase in begun.rest:
        step(task, begun.carry, batches, phase)
    upload, state = finish(task, begun.carry, begun.early)
    if not all(tree.finite() for tree in moved(task, upload, state)):
        context = begun.carry.context
        raise Diverged(
            f'Client "{context.client}" has a non-finite update or loss in round {context.round + 1}, after a first '
            f"step together with the other clients. Lower the learning rate (now {context.lr:g}) or set clip."
        )
    return upload, state


def _job(
    task: Task, lockstep: Lockstep, index: int, carry: Carry, batches: list[Batch], phase: Phase
) -> Callable[[], None]:
    net = task.net.duplicate()
    for m in net.module.modules():
        if isinstance(m, _BatchNorm):
            m.forward = _shared_forward(m, lockstep, index)  # type: ignore[method-assign, assignment]
    own = replace(task, net=net)
    carry.derivative = lockstep.derivative(index)
    return lambda: step(own, carry, batches, phase)


class Lockstep:
    """Threads that compute in turns and exchange values: `average` inside a forward pass, then `derivative`."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = [w / sum(weights) for w in weights]
        self.turns = [threading.Semaphore(0) for _ in weights]
        self.given: list[Any] = []
        self.result: Any = None
        self.exchanges = self.finished = 0
        self.error: BaseException | None = None

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run one job per thread to its end; the first error ends all of them."""
        threads = torch.get_num_threads()

        def work(index: int) -> None:
            torch.set_num_threads(threads)  # this setting is per thread
            self.turns[index].acquire()
            try:
                if self.error is None:
                    jobs[index]()
                self.finished += 1
                self._next(index)
            except BaseException as error:  # handed to the caller's thread; all others wake up and end
                self.error = self.error or error
                for turn in self.turns:
                    turn.release()

        workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(jobs))]
        for worker in workers:
            worker.start()
        self.turns[0].release()
        for worker in workers:
            worker.join()
        if self.error is not None:
            raise self.error

    def _next(self, index: int) -> None:
        self.turns[(index + 1) % len(self.turns)].release()

    def _exchange(self, index: int, value: Any, combine: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401
        """Give a value and wait for this thread's next turn; returns what `combine` made of the values of all."""
        now, alone = self.exchanges, self.finished > 0  # a thread that has finished passes no turn on
        self.given.append(value)
        if len(self.given) == len(self.turns):
            self.result, self.given = combine(self.given), []
            self.exchanges += 1
        if not alone:
            self._next(index)
            self.turns[index].acquire()
        if self.error is not None:
            raise self.error
        if self.exchanges == now:
            raise RuntimeError("the clients of a joint step did not reach the same layers")
        return self.result

    def average(self, index: int, value: Tensor) -> Tensor:
        """The weighted mean of all threads' tensors, with a gradient to each."""
        return self._exchange(index, value, lambda all_: _mean(self.shares, all_))

    def derivative(self, index: int) -> Callable[..., Sequence[Tensor | None]]:
        """A replacement of torch.autograd.grad: the gradient of L = sum p_i L_i at this thread's leaves, over p_i."""

        def take(y: Tensor, leaves: list[Tensor], **how: bool) -> Sequence[Tensor | None]:
            def combine(all_: list[tuple[Tensor, list[Tensor]]]) -> list[list[Tensor | None]]:
                total = _mean(self.shares, [loss for loss, _ in all_])
                found = iter(torch.autograd.grad(total, [w for _, ws in all_ for w in ws], **how))  # type: ignore[call-overload]
                pairs = zip(self.shares, all_, strict=True)
                return [[None if (g := next(found)) is None else g / p for _ in ws] for p, (_, ws) in pairs]

            grads: Sequence[Tensor | None] = self._exchange(index, (y, leaves), combine)[index]
            return grads

        return take


def _mean(shares: list[float], tensors: list[Tensor]) -> Tensor:
    return torch.stack([p * t for p, t in zip(shares, tensors, strict=True)]).sum(0)


def _shared_forward(bn: _BatchNorm, lockstep: Lockstep, index: int) -> Callable[[Tensor], Tensor]:
    """Batch normalization of one client with the moments of all clients, which also update the running statistics.

    The running variance has the factor M / (M - 1), with M values per channel in the local batch.
    """

    def forward(x: Tensor) -> Tensor:
        if not bn.training and bn.running_mean is not None:
            return type(bn).forward(bn, x)
        axes, n = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        wide = widened(x)
        mean = lockstep.average(index, wide.mean(axes))
        var = lockstep.average(index, (wide - per_channel(mean, x)).square().mean(axes))
        if bn.training and bn.running_mean is not None:
            _update_running(bn, mean.detach(), var.detach() * (n / max(n - 1, 1)))
        y = (wide - per_channel(mean, x)) * per_channel(torch.rsqrt(var + bn.eps), x)
        y = affine(y, bn.weight, bn.bias).to(x.dtype)
        if is_fused(bn):
            kept = dict(bn.named_children())
            y = kept["act"](kept["drop"](y) if "drop" in kept else y)
        return y

    return forward


@torch.no_grad()
def _update_running(bn: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    assert bn.num_batches_tracked is not None
    assert bn.running_mean is not None
    assert bn.running_var is not None
    bn.num_batches_tracked.add_(1)
    rate = 1.0 / float(bn.num_batches_tracked) if bn.momentum is None else bn.momentum
    bn.running_mean.lerp_(mean.to(bn.running_mean.dtype), rate)
    bn.running_var.lerp_(var.to(bn.running_var.dtype), rate)
