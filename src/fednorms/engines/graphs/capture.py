"""What the graph engine needs of a device: streams, graphs, memory. With the CPU as device, its logic can be tested."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Job = Callable[[], None]
WARM_UPS = 3  # runs of a job before it is recorded: libraries choose algorithms and allocate in the first ones


class Device(Protocol):
    """Streams on which work is queued, and jobs that can be recorded once and repeated."""

    def stream(self, number: int) -> Any:  # noqa: ANN401
        """The queue of work with this number. All engines of a process share them: libraries keep memory per queue."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401
        """Within this context, work is queued on `stream`."""
        ...

    def fork(self, streams: list[Any]) -> None:
        """Let streams wait for the work queued on the current one."""
        ...

    def join(self, streams: list[Any]) -> None:
        """Let the current stream wait for all streams."""
        ...

    def pool(self) -> Any:  # noqa: ANN401
        """Memory that the graphs of one workspace share."""
        ...

    def record(self, job: Job, stream: Any, pool: Any) -> Job:  # noqa: ANN401
        """Record a job and return a function that repeats it. Raises RuntimeError if the job cannot be recorded."""
        ...

    def forget(self, recorded: Job) -> None:
        """Free the memory of a recorded job now, without waiting for the garbage collector."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        ...

    def empty_cache(self) -> None:
        """Release unused memory."""
        ...

    def free_memory(self) -> int:
        """Memory in bytes that may be taken now."""
        ...

    def held_by_others(self) -> bool:
        """Whether other processes hold a good part of the device's memory, so waiting may help."""
        ...

    def used_memory(self) -> int:
        """Reserved memory in bytes."""
        ...

    def pinned(self, tensor: Tensor) -> Tensor:
        """A host tensor that can be copied asynchronously."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, complete after `synchronize`."""
        ...

    def mark_used(self, tensors: Iterable[Tensor], stream: Any) -> None:  # noqa: ANN401
        """Record that `stream` reads these tensors, so their memory is not reused before it has."""
        ...


_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and number; cuBLAS keeps a workspace for each


class CudaDevice:
    """A CUDA device; `memory` limits what is taken of it, as a share (up to 1) or in bytes (0: what is free)."""

    def __init__(self, device: torch.device, memory: float = 0.0) -> None:
        self.device, self.memory = device, memory

    def stream(self, number: int) -> torch.cuda.Stream:
        """A CUDA stream of this process."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        if (index, number) not in _STREAMS:
            _STREAMS[index, number] = torch.cuda.Stream(self.device)
        return _STREAMS[index, number]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Make this stream the current one."""
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
        """A memory pool: graphs that run at the same time must not share one."""
        return torch.cuda.graph_pool_handle()

    def record(self, job: Job, stream: torch.cuda.Stream, pool: Any) -> Job:  # noqa: ANN401
        """Capture a job as a CUDA graph."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # destroying a graph of an earlier engine during the capture would break it
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                job()
        finally:
            if collecting:
                gc.enable()
        return graph.replay

    def forget(self, recorded: Job) -> None:
        """Free a graph and its share of the pool."""
        if isinstance(graph := getattr(recorded, "__self__", None), torch.cuda.CUDAGraph):
            graph.reset()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Empty torch's cache."""
        torch.cuda.empty_cache()

    def free_memory(self) -> int:
        """Free memory of the device in bytes, up to the limit of this process."""
        free, total = torch.cuda.mem_get_info(self.device)
        if not self.memory:
            return free
        limit = self.memory * total if self.memory <= 1 else self.memory
        return max(0, min(free, int(limit) - torch.cuda.memory_reserved(self.device)))

    def held_by_others(self) -> bool:
        """Whether others hold more than a tenth of the device."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device) > total / 10

    def used_memory(self) -> int:
        """Memory that torch has reserved, in bytes."""
        return torch.cuda.memory_reserved(self.device)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Page-locked memory."""
        return tensor.pin_memory()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory, queued on the current stream."""
        host = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark_used(self, tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
        """Record the stream at each tensor on the device."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class CpuDevice:
    """The CPU as a device without streams, for tests: same scheduling and buffers; a recorded job is the job itself."""

    def __init__(self, memory: int = 2**40) -> None:
        self.memory = memory
        self.recorded = 0

    def stream(self, number: int) -> None:
        """There is only one queue."""

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
        """Run the job once, like a capture, and return a function that runs it."""
        self.recorded += 1
        job()
        return partial(job)

    def forget(self, recorded: Job) -> None:
        """Count that a job is gone."""
        self.recorded -= 1

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def empty_cache(self) -> None:
        """Nothing to release."""

    def free_memory(self) -> int:
        """The bytes that were given when the device was created."""
        return self.memory

    def held_by_others(self) -> bool:
        """Nobody else."""
        return False

    def used_memory(self) -> int:
        """Nothing is counted."""
        return 0

    def pinned(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy: tests see if anything still reads the original."""
        return tensor.clone()

    def mark_used(self, tensors: Iterable[Tensor], stream: None) -> None:
        """Nothing to record: all work is done at once."""


def device_of(device: torch.device, memory: float = 0.0) -> Device:
    """The interface to a torch device; `memory` is the limit of `CudaDevice`.

    >>> type(device_of(torch.device("cpu"))).__name__
    'CpuDevice'
    """
    return CudaDevice(device, memory) if device.type == "cuda" else CpuDevice()
