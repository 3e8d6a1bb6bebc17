"""What the clients of a round leave until all are done: on the device up to a limit, beyond it in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fednorms.core.states import ClientState, Upload
from fednorms.core.tree import Packed, Tree
from fednorms.engines.graphs.capture import Device

Move = Callable[[Tensor], Tensor]


@dataclass
class Waiting:
    """Uploads and new states of a round, in the order of training.

    Once they hold more than `limit` bytes on the device, all of them move to host memory in one go, so that a cohort of
    any size needs no more than that.
    """

    limit: int
    device: Device
    where: torch.device  # where tensors come back to
    stay: frozenset[str] = frozenset()  # parts whose uploads stay near: they are not only summed
    rows: list[tuple[str, Upload, ClientState]] = field(default_factory=list)
    near: int = 0  # where those on the device begin
    bytes_near: int = 0
    most_bytes_near: int = 0

    def add(self, name: str, upload: Upload, state: ClientState) -> None:
        """Keep what a client leaves; nothing waits for the device unless the limit is passed."""
        self.rows.append((name, upload, state))
        self.bytes_near += _bytes(upload.model) + sum(map(_bytes, (*upload.parts.values(), *state.parts.values())))
        self.bytes_near += _bytes(state.local) + _bytes(state.velocity)
        self.most_bytes_near = max(self.most_bytes_near, self.bytes_near)
        if self.bytes_near > self.limit:
            self.device.settle()  # clients run on streams of their own
            away = self.device.away
            self.rows[self.near :] = [
                (n, self._upload_by(away, u), _state_by(away, s)) for n, u, s in self.rows[self.near :]
            ]
            self.device.settle()
            self.near, self.bytes_near = len(self.rows), 0

    def back(self, good: list[bool]) -> Iterator[tuple[str, Upload, ClientState]]:
        """The good rows; each state comes back to the device in turn, and the upload that sums start from."""
        names = [name for (name, _, _), fine in zip(self.rows, good, strict=True) if fine]
        for (name, upload, state), fine in zip(self.rows, good, strict=True):
            if fine:
                first = name == min(names)
                yield name, self._upload_by(self._home, upload) if first else upload, _state_by(self._home, state)

    def _upload_by(self, move: Move, upload: Upload) -> Upload:
        parts = {name: tree if name in self.stay else tree.map(move) for name, tree in upload.parts.items()}
        model = upload.model
        return replace(upload, model=model.moved(move) if isinstance(model, Packed) else model.map(move), parts=parts)

    def _home(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.where)


def _bytes(tree: Tree) -> int:
    return tree.block.untyped_storage().nbytes() if isinstance(tree, Packed) else tree.nbytes()


def _state_by(move: Move, state: ClientState) -> ClientState:
    parts = {name: tree.map(move) for name, tree in state.parts.items()}
    return replace(state, local=state.local.map(move), parts=parts, velocity=state.velocity.map(move))
