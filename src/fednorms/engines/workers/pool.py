"""Worker processes that take one call at a time; none outlives its pool, and a process that dies is reported."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from fednorms.core.error_origin import note, place
from fednorms.core.errors import FednormsError, RunFailed
from fednorms.engines.workers.transport import Message, Receiver, Sender, clean_up, remove_stale

T = TypeVar("T")
Call = tuple[Any, ...]  # the name of a method of the worker, and its arguments


def cores() -> int:
    """Number of cores that this process may use.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Handle:
    """The parent's side of a worker process."""

    process: BaseProcess
    pipe: Connection
    sender: Sender
    busy: bool = False
    ready: bool = False


class Pool:
    """Processes, one per device named, that each hold a worker: an object whose methods are called by name.

    The answer to a call is what the method returned, or the exception it raised. Whatever interrupts an exchange
    (Ctrl-C, a process that died) ends all processes.
    """

    def __init__(self, worker: Callable[[str], object], devices: Sequence[str], here: str = "cpu") -> None:
        remove_stale()
        self.token = secrets.token_hex(6)
        self.sender, self.receiver = Sender(self.token, one_reader=False), Receiver(here)
        self.workers: list[_Handle] = []
        self.closed = False
        context = get_context("spawn")  # a fork would inherit torch's threads in a bad state
        try:
            for device in devices:
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, worker, device, self.token), daemon=True)
                process.start()
                theirs.close()
                self.workers.append(_Handle(process, mine, Sender(self.token)))
        except BaseException:
            self.close()
            raise

    @property
    def interrupted(self) -> bool:
        """Whether the pool was closed, or abandoned while workers were busy."""
        return self.closed or any(worker.busy for worker in self.workers)

    def call_all(self, *call: object, copy: bool = False, sender: Sender | None = None) -> list[Any]:
        """Make the same call at all workers, with its tensors in memory once; all answers, or the first exception."""
        sender = sender or self.sender
        message = sender.pack(call, copy=copy)
        answers = self.call_each([message] * len(self.workers))
        sender.remove_file()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def call_each(self, calls: Sequence[Call | Message]) -> list[Any]:
        """Make one call per worker; the answers, including exceptions, in the same order."""
        answers: dict[int, Any] = {}
        try:
            for number, call in enumerate(calls):
                self._send(number, call)
            while len(answers) < len(calls):
                answers.update(self._receive())
        except BaseException:
            self.close()
            raise
        return [answers[number] for number in range(len(calls))]

    def map_unordered(self, todo: deque[T], call: Callable[[T], Call]) -> Iterator[tuple[T, Any]]:
        """Make a call for each item, always at the next free worker; yields (item, answer) as they arrive.

        The caller may remove items from `todo` in the meantime.
        """
        running: dict[int, T] = {}
        try:
            while todo or running:
                for number, worker in enumerate(self.workers):
                    if todo and not worker.busy:
                        running[number] = todo.popleft()
                        self._send(number, call(running[number]))
                for number, answer in self._receive():
                    yield running.pop(number), answer
        except BaseException:  # also when the caller stops iterating
            self.close()
            raise

    def _send(self, number: int, call: Call | Message) -> None:
        worker = self.workers[number]
        message = call if isinstance(call, Message) else worker.sender.pack(call)
        worker.busy = True
        with suppress(ConnectionError):  # it died: `_receive` finds out
            worker.pipe.send(message)

    def _receive(self) -> list[tuple[int, Any]]:
        """Wait for answers; a process that died is noticed even while others are busy."""
        answers = []
        ready = set(wait([w.pipe for w in self.workers if w.busy]))
        for number, worker in enumerate(self.workers):
            if worker.pipe not in ready:
                continue
            try:
                received = worker.pipe.recv()
            except (EOFError, ConnectionError):
                raise self._death(worker) from None
            if received is None:  # it has started
                worker.ready = True
                continue
            worker.busy = False
            answers.append((number, self.receiver.read(received, copy=True)))
        return answers

    def _death(self, worker: _Handle) -> RunFailed:
        worker.process.join(10)
        code = worker.process.exitcode
        if not worker.ready:
            return RunFailed(
                f"A worker process could not start (exit code {code}). In a script, put the call under "
                '`if __name__ == "__main__":`, or use engine="loop".'
            )
        return RunFailed(
            f"A worker process died (exit code {code}; -9 often means out of memory). "
            'Use fewer workers, or engine="loop".'
        )

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self.closed = True
        for worker in self.workers:
            worker.pipe.close()
            worker.process.kill()  # it ignores SIGTERM, and keeps nothing on disk
        for worker in self.workers:
            worker.process.join()
            worker.process.close()
        self.workers = []
        clean_up(self.token)


def _serve(pipe: Connection, make_worker: Callable[[str], object], device: str, token: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # often sent to all processes: the parent handles it and ends them
        signal.signal(number, signal.SIG_IGN)
    receiver, sender, worker = Receiver(device), Sender(token), make_worker(device)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        pipe.send(None)
        while True:
            message = pipe.recv()
            try:
                answer = _answer(worker, receiver, message)
                packed = sender.pack(answer)
            except Exception as error:
                packed = sender.pack(_portable(error))
            pipe.send(packed)


def _answer(worker: object, receiver: Receiver, message: Message) -> object:
    name, *args = receiver.read(message)
    return getattr(worker, name)(*args)


def _portable(error: Exception) -> Exception:
    """An exception that can be pickled; one that is not ours also says where it was raised."""
    if not isinstance(error, FednormsError):
        note(error)
        error.add_note("In a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        raised = f", in {where}" if (where := place(error)) else ""
        return RunFailed(f"{type(error).__name__} in a worker process: {error}{raised}")
    return error
