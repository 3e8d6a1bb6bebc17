"""The interface of client states between rounds, and the implementation for worker processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from fednorms.core.states import ClientState
from fednorms.core.tree import Tree  # noqa: F401  (for the doctest)


class ClientStates(Mapping[str, ClientState], ABC):
    """The newest state of every client by name, in sorted order."""

    @abstractmethod
    def put(self, name: str, state: ClientState) -> None:
        """Keep `state` as the client's newest."""

    @property
    @abstractmethod
    def changed(self) -> Mapping[str, ClientState]:
        """The states that were put since `mark_clean`."""

    @abstractmethod
    def mark_clean(self) -> None:
        """Forget which states have changed."""

    @abstractmethod
    def starting_from(self, states: Mapping[str, ClientState]) -> ClientStates:
        """A new, clean store of the same kind and limits that holds these states."""


class InMemory(ClientStates):
    """Client states in memory without a limit, for a worker process.

    >>> states = InMemory({"a": ClientState(1, Tree(), {})})
    >>> states.put("b", ClientState(2, Tree(), {}))
    >>> sorted(states), list(states.changed)
    (['a', 'b'], ['b'])
    """

    def __init__(self, states: Mapping[str, ClientState] | None = None) -> None:
        self._states = dict(states or {})
        self._changed: dict[str, ClientState] = {}

    def __getitem__(self, name: str) -> ClientState:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._states))

    def __len__(self) -> int:
        return len(self._states)

    def put(self, name: str, state: ClientState) -> None:
        """Keep `state` as the client's newest."""
        self._states[name] = self._changed[name] = state

    @property
    def changed(self) -> Mapping[str, ClientState]:
        """The states that were put since `mark_clean`."""
        return dict(sorted(self._changed.items()))

    def mark_clean(self) -> None:
        """Forget which states have changed."""
        self._changed.clear()

    def starting_from(self, states: Mapping[str, ClientState]) -> InMemory:
        """A new, clean store that holds these states."""
        return InMemory(states)
