"""Worker processes that take letters one at a time; none outlives its pool, and one that dies is reported."""

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

from fednorms.core.blame import note, place
from fednorms.core.errors import FednormsError, RunFailed
from fednorms.engines.workers.transport import Inbox, Letter, Outbox, clean_up

T = TypeVar("T")
Message = tuple[Any, ...]  # the name of a method of the worker's desk, and its arguments


def cores() -> int:
    """How many cores this process may use.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Worker:
    process: BaseProcess
    line: Connection
    outbox: Outbox
    busy: bool = False
    ready: bool = False


class Pool:
    """Processes, one per device named, that each have a desk: an object whose methods are called by name.

    An answer is what the method returned, or the exception it raised. Whatever interrupts an exchange (Ctrl-C, a worker
    that died) ends all processes.
    """

    def __init__(self, desk: Callable[[str], object], devices: Sequence[str], here: str = "cpu") -> None:
        self.token = secrets.token_hex(6)
        self.board, self.inbox = Outbox(self.token, sole=False), Inbox(here)
        self.workers: list[_Worker] = []
        self.closed = False
        context = get_context("spawn")  # a fork would inherit torch's threads in a bad state
        try:
            for device in devices:
                mine, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, desk, device, self.token), daemon=True)
                process.start()
                theirs.close()
                self.workers.append(_Worker(process, mine, Outbox(self.token)))
        except BaseException:
            self.close()
            raise

    @property
    def interrupted(self) -> bool:
        """Whether it was closed, or left with workers that are still at something."""
        return self.closed or any(worker.busy for worker in self.workers)

    def tell(self, *message: object, copy: bool = False, board: Outbox | None = None) -> list[Any]:
        """Send everybody the same message, whose tensors lie in memory once; all answers, or the first exception."""
        board = board or self.board
        letter = board.pack(message, copy=copy)
        answers = self.each([letter] * len(self.workers))
        board.settle()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def each(self, messages: Sequence[Message | Letter]) -> list[Any]:
        """Send every worker a message of its own; the answers, exceptions among them, in the same order."""
        answers: dict[int, Any] = {}
        try:
            for number, message in enumerate(messages):
                self._send(number, message)
            while len(answers) < len(messages):
                answers.update(self._heard())
        except BaseException:
            self.close()
            raise
        return [answers[number] for number in range(len(messages))]

    def share(self, todo: deque[T], message: Callable[[T], Message]) -> Iterator[tuple[T, Any]]:
        """Give each thing to do to the next free worker; yields (thing, answer) as they come in.

        Who iterates may take things out of `todo` meanwhile.
        """
        at: dict[int, T] = {}
        try:
            while todo or at:
                for number, worker in enumerate(self.workers):
                    if todo and not worker.busy:
                        at[number] = todo.popleft()
                        self._send(number, message(at[number]))
                for number, answer in self._heard():
                    yield at.pop(number), answer
        except BaseException:  # also when whoever iterates goes away
            self.close()
            raise

    def _send(self, number: int, message: Message | Letter) -> None:
        worker = self.workers[number]
        letter = message if isinstance(message, Letter) else worker.outbox.pack(message)
        worker.busy = True
        with suppress(ConnectionError):  # it died: waiting for its answer finds out
            worker.line.send(letter)

    def _heard(self) -> list[tuple[int, Any]]:
        """Wait for answers; a worker that died is found out even while others go on."""
        answers = []
        ready = set(wait([w.line for w in self.workers if w.busy]))
        for number, worker in enumerate(self.workers):
            if worker.line not in ready:
                continue
            try:
                said = worker.line.recv()
            except (EOFError, ConnectionError):
                raise self._death(worker) from None
            if said is None:  # it has started
                worker.ready = True
                continue
            worker.busy = False
            answers.append((number, self.inbox.read(said, copy=True)))
        return answers

    def _death(self, worker: _Worker) -> RunFailed:
        worker.process.join(10)
        code = worker.process.exitcode
        if not worker.ready:
            return RunFailed(
                f"A worker process could not start (exit code {code}). In a script, put what runs under "
                '`if __name__ == "__main__":`, or use engine="loop".'
            )
        return RunFailed(
            f"A worker process died (exit code {code}; -9 is often a lack of memory). "
            'Use fewer workers, or engine="loop".'
        )

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self.closed = True
        for worker in self.workers:
            worker.line.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join()
            worker.process.close()
        self.workers = []
        clean_up(self.token)


def _work(line: Connection, make_desk: Callable[[str], object], device: str, token: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which then ends us
    inbox, outbox, desk = Inbox(device), Outbox(token), make_desk(device)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        line.send(None)
        while True:
            letter = line.recv()
            try:
                answer = _do(desk, inbox, letter)
                packed = outbox.pack(answer)
            except Exception as error:
                packed = outbox.pack(_portable(error))
            line.send(packed)


def _do(desk: object, inbox: Inbox, letter: Letter) -> object:
    name, *args = inbox.read(letter)
    return getattr(desk, name)(*args)


def _portable(error: Exception) -> Exception:
    """An exception that can travel; one that nobody raised on purpose says where it arose."""
    if not isinstance(error, FednormsError):
        note(error)
        error.add_note("In a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        arose = f", in {where}" if (where := place(error)) else ""
        return RunFailed(f"{type(error).__name__} in a worker process: {error}{arose}")
    return error
