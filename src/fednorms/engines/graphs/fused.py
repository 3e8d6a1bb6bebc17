"""A step as one compiled program: its operations are traced below autograd and `torch.func.vmap`, and Inductor fuses
them into few kernels.

Tracing runs the step once and writes down what it does to the tensors of a space, as recording a CUDA graph does. So
any step that can be recorded can be traced, whatever Python code decided about it.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._triton import has_triton
from typing_extensions import override

from fednorms.core.optim import sgd
from fednorms.engines.graphs.capture import Job

Groups = Sequence[Sequence[Tensor]]
"""Tensors that a step changes; those of a group move at one scale."""

_tracing: ContextVar[bool] = ContextVar("fednorms_tracing", default=False)


def tracing() -> bool:
    """Whether a step is being traced: operations must then be torch's own, no kernels of this package."""
    return _tracing.get()


_last_seconds = 60.0  # that compiling a step took; before the first one, what it took where we measured it


def seconds_to_compile() -> float:
    """How many seconds compiling a step will take: as many as the last one of this process took."""
    return _last_seconds


def can_compile(device: torch.device) -> bool:
    """Whether what Inductor needs is there: Triton for a GPU, a C++ compiler for the CPU."""
    if device.type == "cuda":
        return bool(has_triton())
    return shutil.which(os.environ.get("CXX", "g++")) is not None


@dataclass
class Program:
    """A compiled step; `constants` are tensors that it reads besides the memory of a space."""

    call: Callable[..., object]
    used: list[int]  # places in the memory that it reads or writes
    constants: list[Tensor]

    def on(self, memory: Sequence[Tensor]) -> Job:
        """The program as a job on the memory of a space."""
        tensors = [memory[k].detach() for k in self.used] + self.constants

        def run() -> None:
            with torch.no_grad():
                self.call(*tensors)

        return run


def compiled(job: Job, memory: Sequence[Tensor]) -> Program:
    """Trace a job that works on these tensors, and compile it. Raises whatever a compiler raises."""
    global _last_seconds
    started = time.perf_counter()
    graph = _traced(job, memory)
    constants = _constants_as_inputs(graph)
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    used = [k for k, node in enumerate(inputs[: len(memory)]) if node.users]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    tensors = [memory[k].detach() for k in used] + constants
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about speed, to people who write models
        call = _inductor()(graph, tensors)
    _last_seconds = time.perf_counter() - started
    return Program(call, used, constants)


def rounded(start: Groups) -> list[list[Tensor]]:
    """The same values, except that half of the floats are a few units in the last place larger, and half smaller."""
    return [[_rounded(t) if t.is_floating_point() else t for t in group] for group in start]


def agree(found: Groups, expected: Groups, nearby: Groups, start: Groups) -> bool:
    """Whether two ways from `start` end in the same tensors, apart from rounding.

    An error is compared with how far its group has moved, and less strictly with how far its own tensor has: so a
    tensor that was not written never passes, but a bias before a normalization may, whose gradient is a small sum of
    large numbers. A tensor that should not move at all moves by rounding errors of its group. Where a step enlarges
    rounding errors, the error may be as large as what rounding the start changes in the moves of the original step,
    which then ended `nearby`.
    """
    return all(_alike(*group) for group in zip(found, expected, nearby, start, strict=True))


def _alike(
    found: Sequence[Tensor], expected: Sequence[Tensor], nearby: Sequence[Tensor], start: Sequence[Tensor]
) -> bool:
    rows = list(zip(found, expected, nearby, start, strict=True))
    if not all(torch.equal(a, b) for a, b, *_ in rows if not a.is_floating_point()):
        return False
    floats = [row for row in rows if row[0].is_floating_point()]
    if not floats:
        return True
    lengths = torch.tensor(
        [[_norm(b - s), _norm(a - b), _norm((n - _rounded(s)) - (b - s)), _norm(b)] for a, b, n, s in floats],
        dtype=torch.float64,
    )
    if not lengths.isfinite().all():
        return False
    move, error, spread, size = lengths.T
    dtype = floats[0][0].dtype
    # Short products (TF32, bfloat16) have two to three digits.
    share = 1e-8 if dtype == torch.float64 else 0.02 if torch.backends.cuda.matmul.allow_tf32 else 1e-3
    noise = 1e-12 if dtype == torch.float64 else 1e-5
    last = 4 * torch.finfo(dtype).eps * size
    together = error.norm() <= share * move.norm() + spread.norm() + last.norm()
    each = error <= min(50 * share, 0.1) * move + spread + noise * move.norm() + last
    return bool(together and each.all())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _rounded(tensor: Tensor) -> Tensor:
    """Larger and smaller in turn; stacks are large, so there is only one copy."""
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    for first, sign in ((0, 1), (1, -1)):
        flat[first::2] *= 1 + sign * 8 * torch.finfo(tensor.dtype).eps
    return flat.view(tensor.shape)


def _inductor() -> Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., object]]:
    import torch._inductor  # takes a second, and few runs need it

    return torch._inductor.compile  # type: ignore[return-value]


def _traced(job: Job, memory: Sequence[Tensor]) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    def one_step(*_: Tensor) -> None:
        job()  # works on the very tensors that are traced

    with _plain_operations(), torch.autograd.set_multithreading_enabled(False):
        graph: torch.fx.GraphModule = make_fx(one_step)(*memory)
    return graph


def _constants_as_inputs(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Read tensors from outside the memory at every call: their values may change."""
    found: dict[str, torch.fx.Node] = {}
    constants: list[Tensor] = []
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    for node in list(graph.graph.find_nodes(op="get_attr")):
        name = str(node.target)
        if name not in found:
            constants.append(getattr(graph, name))
            with graph.graph.inserting_after(last):
                last = found[name] = graph.graph.placeholder(name)
        node.replace_all_uses_with(found[name])
        graph.graph.erase_node(node)
    return constants


@contextmanager
def _plain_operations() -> Iterator[None]:
    token = _tracing.set(True)
    try:
        with _Plainly():
            yield
    finally:
        _tracing.reset(token)


class _Plainly(TorchFunctionMode):
    """Replaces fused operations by simple ones, which a compiler can fuse with others."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch._fused_sgd_:
            how = kwargs or {}
            return sgd(*args, **{name: how[name] for name in ("lr", "weight_decay", "momentum")})
        return func(*args, **(kwargs or {}))
