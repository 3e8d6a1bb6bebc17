"""What a pickle would build, counted from its opcodes before anything is built.

A few hundred bytes can describe a tuple of 2**60 entries, by naming the same inner tuple twice at every level. Whoever
hashes, copies or converts it never ends. An honest pickle of arrays is flat and names each value about once.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass

from fednorms.core.errors import BadInput

MOST_VALUES = 20_000_000  # if everything shared were written out
DEEPEST = 100  # containers inside each other
_CHANGE = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # change the object below their arguments


@dataclass
class _Value:
    """A value on the unpickler's stack: how many values it is made of, and how deep."""

    count: int = 1
    depth: int = 0

    def holding(self, inner: list[_Value]) -> _Value:
        self.count += sum(value.count for value in inner)
        self.depth = max([self.depth, *(value.depth + 1 for value in inner)])
        if self.count > MOST_VALUES or self.depth > DEEPEST:
            raise too_large()
        return self


def too_large() -> BadInput:
    """The error for a pickle that is too large or too deep."""
    return BadInput(
        f"it builds more than {MOST_VALUES:,} values, or more than {DEEPEST} containers inside each other, which no "
        "pickle of arrays does."
    )


def check_cost(data: bytes) -> None:
    """Refuse a pickle that would build too many values, too deep, or number them to fill the memory.

    >>> import pickle
    >>> check_cost(pickle.dumps([(1, 2), {"a": 3}]))
    >>> value = ()
    >>> for _ in range(60):
    ...     value = (value, value)
    >>> len(pickle.dumps(value)) < 500
    True
    >>> check_cost(pickle.dumps(value))
    Traceback (most recent call last):
    fednorms.BadInput: it builds more than 20,000,000 values, or more than 100 containers inside each other, ...
    """
    stack: list[_Value | None] = []  # None is a mark
    memo: dict[int, _Value | None] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = len(memo) if argument is None else int(argument)
            if index > len(data):  # the unpickler reserves memory up to this number
                raise BadInput("its values are numbered as no pickle of arrays numbers them.")
            memo[index] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            stack.append(None)
        else:
            taken: list[_Value] = []
            before = opcode.stack_before
            if pickletools.markobject in before:
                while (value := stack.pop()) is not None:
                    taken.append(value)
                before = before[: before.index(pickletools.markobject)]
            below = [value for value in (stack.pop() for _ in before) if value is not None][::-1]
            if opcode.stack_after:
                target, inner = (below[0], below[1:]) if name in _CHANGE else (_Value(), below)
                stack.append(target.holding([*inner, *taken]))
