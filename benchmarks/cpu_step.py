"""A local step on one CPU core: plain, compiled, stacked with vmap, as batched products; by default that of job (b).

Arms take turns from the same weights. The table has the median of milliseconds per client and step, how many times
faster than the plain step that is, the seconds that an arm took before its first step (less if the compiler finds its
results of an earlier run on disk), and the distance of the first client's gradient from the plain one. Compiled arms
need a C++ compiler.

    python benchmarks/cpu_step.py [--clients 10] [--turns 7] [--profile]
    python benchmarks/cpu_step.py --arms plain --model cnn-small --method fedavg --size 32 --batch 32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fednorms.core.net import Net
from fednorms.engines.graphs.fused import compiled
from fednorms.engines.graphs.stacked_ops import StackedOperations
from fednorms.methods.registry import method
from fednorms.models import build

RATE, IMAGES = 0.01, 160  # IMAGES: in a turn of an arm


def network(name: str, text: str, size: int) -> nn.Module:
    """A network as a hand-written program would have it."""
    net = Net(build(name, classes=10, channels=3, size=size, seed=0), method(text), name=name)
    for m in net.module.modules():
        m._forward_pre_hooks.clear()
    return net.module.train()


class Plain:
    """What one writes by hand, for one client: torch's modules and optimizer."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, how: str = "") -> None:
        self.model, self.x, self.y, self.count = model, x[0], y[0], 1
        self.on: Callable[[], AbstractContextManager] = nullcontext
        if "channels last" in how:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        if how == "all channels last":
            self.model = self.model.to(memory_format=torch.channels_last)
        if how == "no oneDNN":
            self.on = lambda: torch.backends.mkldnn.flags(enabled=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.forward = torch.compile(self.model) if how == "torch.compile" else self.model

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        with self.on():
            F.cross_entropy(self.forward(self.x), self.y).backward()
        self.optimizer.step()

    def gradient(self) -> Tensor:
        """The gradient of the last step."""
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])


class Whole:
    """A step as a function of the weights; several clients share it if `stack` says how."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, *, stack: str = "", compile: bool = False) -> None:
        self.model, self.x, self.y = model, *((x, y) if stack else (x[0], y[0]))
        self.count, self.rules = len(x) if stack else 1, StackedOperations if stack == "products" else nullcontext
        start = {n: p.detach() for n, p in self.model.named_parameters()}
        self.weights = {n: (p.repeat(len(x), *[1] * p.dim()) if stack else p.clone()) for n, p in start.items()}
        self.slopes = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.stacked = bool(stack)
        self.step: Callable[[], None] = self.one_step
        if compile:
            memory = [*self.weights.values(), *self.slopes.values(), self.x, self.y]
            self.step = compiled(self.one_step, memory).on(memory)
            for n, p in start.items():  # tracing has taken a step
                self.weights[n].copy_(p)

    def loss(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The loss of one client."""
        with self.rules():
            return F.cross_entropy(functional_call(self.model, weights, (x,)), y)

    def one_step(self) -> None:
        """One step of all clients; the gradient of the sum of their losses is the gradient of each."""
        leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        loss = vmap(self.loss)(leaves, self.x, self.y).sum() if self.stacked else self.loss(leaves, self.x, self.y)
        found = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad():
            for name, slope in zip(leaves, found, strict=True):
                self.slopes[name].copy_(slope)
                self.weights[name].sub_(slope, alpha=RATE)

    def gradient(self) -> Tensor:
        """The first client's gradient of the last step."""
        return torch.cat([(s[0] if self.stacked else s).flatten() for s in self.slopes.values()])


Make = Callable[[nn.Module, Tensor, Tensor], Plain | Whole]
ARMS: dict[str, Make] = {
    "plain": Plain,
    "plain, images channels last": partial(Plain, how="images channels last"),
    "plain, all channels last": partial(Plain, how="all channels last"),
    "plain, without oneDNN": partial(Plain, how="no oneDNN"),
    "torch.compile of the network": partial(Plain, how="torch.compile"),
    "whole step compiled": partial(Whole, compile=True),
    "vmap": partial(Whole, stack="vmap"),
    "vmap, compiled": partial(Whole, stack="vmap", compile=True),
    "products": partial(Whole, stack="products"),
    "products, compiled": partial(Whole, stack="products", compile=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--arms", default="", help="those whose names start so")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--method", default="gn(groups=2)")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.clients, args.batch, 3, args.size, args.size, generator=generator)
    y = torch.randint(0, 10, (args.clients, args.batch), generator=generator)
    made, first, expected, off = {}, {}, None, {}
    for name in [name for name in ARMS if name.startswith(args.arms)]:
        model = network(args.model, args.method, args.size)
        started = time.perf_counter()
        arm = ARMS[name](model, x, y)
        arm.step()
        first[name], made[name] = time.perf_counter() - started, arm
        expected = arm.gradient().clone() if expected is None else expected
        off[name] = float((arm.gradient() - expected).norm() / expected.norm())
        print(f"{name}: first step after {first[name]:.1f} s, gradient off by {off[name]:.0e}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.turns):
        for name, arm in made.items():
            steps = max(IMAGES // args.batch // arm.count, 1)
            started = time.perf_counter()
            for _ in range(steps):
                arm.step()
            times[name].append(1e3 * (time.perf_counter() - started) / steps / arm.count)
    plain = statistics.median(times["plain"])
    print(f"torch {torch.__version__}, one thread, {args.clients} clients in a stack, {args.turns} turns, medians")
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:<32} {middle:6.2f} ms  {plain / middle:5.2f}x  (from {min(found):.2f} to {max(found):.2f})")
    if args.profile:
        for name in ("plain", min(times, key=lambda name: statistics.median(times[name]))):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                for _ in range(max(IMAGES // args.batch // made[name].count, 1)):
                    made[name].step()
            print(name, seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=14), sep="\n")


if __name__ == "__main__":
    main()
