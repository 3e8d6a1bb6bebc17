"""What the graph engine asks of a device: streams, graphs, memory. A second one on the CPU lets its logic be tested."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

Job = Callable[[], None]
WARM_UPS = 3  # runs of a job before it is recorded: libraries choose and allocate in the first ones


class Device(Protocol):
    """Streams on which work is queued, and steps that can be recorded once and repeated."""

    def stream(self) -> Any:  # noqa: ANN401
        """A new queue of work."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401
        """Within this context, work is queued on `stream`."""
        ...

    def fork(self, streams: list[Any]) -> None:
        """Let streams wait for what the current one has queued."""
        ...

    def join(self, streams: list[Any]) -> None:
        """Let the current stream wait for all streams."""
        ...

    def pool(self) -> Any:  # noqa: ANN401
        """Memory that the graphs of one slot share."""
        ...

    def record(self, job: Job, stream: Any, pool: Any) -> Job:  # noqa: ANN401
        """Record a job; what comes back repeats it. Raises RuntimeError where the job cannot be recorded."""
        ...

    def settle(self) -> None:
        """Wait until everything queued is done."""
        ...

    def forget(self) -> None:
        """Give unused memory back."""
        ...

    def free(self) -> int:
        """Bytes of memory that are free."""
        ...

    def used(self) -> int:
        """Bytes of memory that are reserved."""
        ...

    def pinned(self, tensor: Tensor) -> Tensor:
        """A host tensor that can be copied while the host goes on."""
        ...

    def away(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, complete once the device has settled."""
        ...

    def borrow(self, tensors: Iterable[Tensor], stream: Any) -> None:  # noqa: ANN401
        """Say that `stream` reads these tensors: their memory is not reused before it has."""
        ...


class Cuda:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> torch.cuda.Stream:
        """A new CUDA stream."""
        return torch.cuda.Stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Make a stream the current one."""
        return torch.cuda.stream(stream)

    def fork(self, streams: list[torch.cuda.Stream]) -> None:
        """Streams wait for the current one."""
        here = torch.cuda.current_stream(self.device)
        for stream in streams:
            stream.wait_stream(here)

    def join(self, streams: list[torch.cuda.Stream]) -> None:
        """The current stream waits for streams."""
        here = torch.cuda.current_stream(self.device)
        for stream in streams:
            here.wait_stream(stream)

    def pool(self) -> Any:  # noqa: ANN401
        """A memory pool: graphs that run side by side must not share one."""
        return torch.cuda.graph_pool_handle()

    def record(self, job: Job, stream: torch.cuda.Stream, pool: Any) -> Job:  # noqa: ANN401
        """Capture a job as a CUDA graph."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # a graph of an earlier engine that is destroyed now would break the capture
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                job()
        finally:
            if collecting:
                gc.enable()
        return graph.replay

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Empty torch's cache."""
        torch.cuda.empty_cache()

    def free(self) -> int:
        """Free bytes of the device."""
        return torch.cuda.mem_get_info(self.device)[0]

    def used(self) -> int:
        """Bytes that torch has reserved."""
        return torch.cuda.memory_reserved(self.device)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Page-locked memory."""
        return tensor.pin_memory()

    def away(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory, queued on the current stream."""
        far = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format, pin_memory=True)
        return far.copy_(tensor, non_blocking=True)

    def borrow(self, tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
        """Note the stream at each tensor on the device."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class Host:
    """The CPU as a device without streams: a recorded job is the job itself. Same scheduling, same buffers, no GPU."""

    def __init__(self, memory: int = 2**40) -> None:
        self.memory = memory
        self.recorded = 0

    def stream(self) -> None:
        """There is one queue only."""

    def on(self, stream: None) -> AbstractContextManager[Any]:
        """Nothing to switch."""
        return nullcontext()

    def fork(self, streams: list[None]) -> None:
        """Nothing to wait for."""

    def join(self, streams: list[None]) -> None:
        """Nothing to wait for."""

    def pool(self) -> None:
        """Nothing to share."""

    def record(self, job: Job, stream: None, pool: None) -> Job:
        """The job itself; like a capture, recording runs it once."""
        self.recorded += 1
        job()
        return job

    def settle(self) -> None:
        """Everything is done already."""

    def forget(self) -> None:
        """Nothing is kept."""

    def free(self) -> int:
        """As many bytes as a test says."""
        return self.memory

    def used(self) -> int:
        """Nothing to speak of."""
        return 0

    def pinned(self, tensor: Tensor) -> Tensor:
        """Host memory is near enough."""
        return tensor

    def away(self, tensor: Tensor) -> Tensor:
        """A copy, so that a test sees whether anything still looks at the original."""
        return tensor.clone()

    def borrow(self, tensors: Iterable[Tensor], stream: None) -> None:
        """Nothing runs later than it is asked for."""


def device_of(device: torch.device) -> Device:
    """The device on which a task's tensors are.

    >>> type(device_of(torch.device("cpu"))).__name__
    'Host'
    """
    return Cuda(device) if device.type == "cuda" else Host()
