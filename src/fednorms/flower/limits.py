"""What one address, one site and all together may take of the door: connections, time, bytes and refused requests."""

from __future__ import annotations

import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest

MINUTE = 60.0
ADDRESSES = 4096  # whose refused requests are remembered


class Limits(BaseModel):
    """The limits of a door, `[tool.fednorms.door]` of the project.

    >>> Limits.read({"connections": 100}, "pyproject.toml").connections
    100
    >>> Limits.read({"conections": 100}, "pyproject.toml")
    Traceback (most recent call last):
    fednorms.BadInput: Unknown key "conections" of [tool.fednorms.door] in pyproject.toml: ...
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="forbid")

    connections: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Connections at a time, in all."""
    connections_per_address: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Connections of one address at a time; a node of Flower's has about ten."""
    header_seconds: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """From the connection to the end of the first request's headers."""
    body_seconds: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """For the body of a request."""
    body_mib: Annotated[int, Field(ge=1, le=1024)] = 32
    """Largest body of a request; Flower cuts tensors into chunks of 5 MiB."""
    requests_per_site: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Requests of one site at a time; a node of Flower's has about ten."""
    refused_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] = 600
    """Refused requests of one address in a minute; after them, its requests with an unknown key are not looked at."""

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Limits:
        """The limits of a project; BadInput names a wrong key or value."""
        if unknown := [key for key in values if key not in cls.model_fields]:
            names = nearest(unknown[0], cls.model_fields)
            raise BadInput(f'Unknown key "{unknown[0]}" of [tool.fednorms.door] in {where}: {names}.')
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key, said = first["loc"][0], first["msg"].lower()
            raise BadInput(
                f"Wrong value of {key} in [tool.fednorms.door] of {where}: {said}, got {first['input']!r}."
            ) from None


class Refusals:
    """Counts the refused requests of each address in the present minute, for a bounded number of addresses."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, address: str) -> None:
        """Count one."""
        since, count = self._of(address)
        self._seen[address] = (since, count + 1)
        self._seen.move_to_end(address)
        while len(self._seen) > ADDRESSES:
            self._seen.popitem(last=False)

    def too_many(self, address: str) -> bool:
        """Whether an address has had its share."""
        return self._of(address)[1] >= self.most

    def _of(self, address: str) -> tuple[float, int]:
        now = self._clock()
        since, count = self._seen.get(address, (now, 0))
        return (since, count) if now - since < MINUTE else (now, 0)


class Listener(socket.socket):
    """A listening socket that closes a connection at once, before TLS, if its address or all have too many.

    A connection counts until it is closed, so those that never begin TLS count, too.
    """

    def __init__(self, family: int, limits: Limits) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._limits, self._open = limits, Counter[str]()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; BlockingIOError, as if there was none, for one too many."""
        found, where = super().accept()
        address = str(where[0])
        if (
            self._open[address] >= self._limits.connections_per_address
            or self._open.total() >= self._limits.connections
        ):
            found.close()
            raise BlockingIOError("too many connections")
        self._open[address] += 1
        return _Counted(found, lambda: self._freed(address)), where

    def _freed(self, address: str) -> None:
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]


class _Counted(socket.socket):
    """A connection that says when it is closed, once."""

    def __init__(self, found: socket.socket, closed: Callable[[], None]) -> None:
        super().__init__(found.family, found.type, found.proto, fileno=found.detach())
        self._tell: Callable[[], None] | None = closed

    def close(self) -> None:
        """Close it."""
        super().close()
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()


def listen(host: str, port: int, limits: Limits) -> Listener:
    """A socket that listens at an address of this machine."""
    plain = host.strip("[]")
    made = Listener(socket.AF_INET6 if ":" in plain else socket.AF_INET, limits)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((plain, port))
    except OSError as error:
        made.close()
        raise BadInput(
            f"Cannot listen at {host}:{port} ({error.strerror or error}). Choose another --host or --port."
        ) from None
    return made
