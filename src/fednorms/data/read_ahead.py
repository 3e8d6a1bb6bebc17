"""Read the next batch while this one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def read_ahead(read: Callable[[A], B], wanted: Iterable[A]) -> Iterator[B]:
    """Yield `read(one)` for everything wanted, in order; a thread reads one ahead, and its errors are raised here.

    >>> list(read_ahead(lambda n: n * n, [3, 1, 2]))
    [9, 1, 4]
    """
    waiting: deque[Future[B]] = deque()
    with ThreadPoolExecutor(1, "read ahead") as thread:
        try:
            for one in wanted:
                waiting.append(thread.submit(read, one))
                if len(waiting) > 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for unused in waiting:
                unused.cancel()
