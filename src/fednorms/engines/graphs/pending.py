"""Results of a round that wait until all clients are done: on the device up to a limit, beyond it in host memory."""

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
class PendingResults:
    """Uploads and new states of a round, in the order of training.

    Once they hold more than `limit` bytes on the device, all of them move to host memory at once. So a cohort of any
    size needs no more device memory than that.
    """

    limit: int
    device: Device
    home: torch.device  # where tensors come back to
    stay: frozenset[str] = frozenset()  # parts whose uploads stay on the device: they are not only summed
    rows: list[tuple[str, Upload, ClientState]] = field(default_factory=list)
    moved: int = 0  # number of rows that moved to host memory
    bytes_on_device: int = 0

    def add(self, name: str, upload: Upload, state: ClientState) -> None:
        """Keep the results of a client; the host waits for the device only if the limit is exceeded."""
        self.rows.append((name, upload, state))
        trees = (*upload.parts.values(), *state.parts.values(), state.local, state.velocity)
        self.bytes_on_device += _bytes(upload.model) + sum(map(_bytes, trees))
        if self.bytes_on_device > self.limit:
            self.device.synchronize()  # clients run on different streams
            move = self.device.to_host
            self.rows[self.moved :] = [
                (n, self._move_upload(move, u), _move_state(move, s)) for n, u, s in self.rows[self.moved :]
            ]
            self.device.synchronize()
            self.moved, self.bytes_on_device = len(self.rows), 0

    def results(self, good: list[bool]) -> Iterator[tuple[str, Upload, ClientState]]:
        """The good rows. States come back to the device one by one, and of uploads the one that sums start from."""
        names = [name for (name, _, _), fine in zip(self.rows, good, strict=True) if fine]
        for (name, upload, state), fine in zip(self.rows, good, strict=True):
            if fine:
                first = name == min(names)
                yield name, self._move_upload(self._back, upload) if first else upload, _move_state(self._back, state)

    def _move_upload(self, move: Move, upload: Upload) -> Upload:
        parts = {name: tree if name in self.stay else tree.map(move) for name, tree in upload.parts.items()}
        model = upload.model
        return replace(upload, model=model.moved(move) if isinstance(model, Packed) else model.map(move), parts=parts)

    def _back(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.home)


def _bytes(tree: Tree) -> int:
    if not isinstance(tree, Packed):
        return tree.nbytes()
    whole = tree.block if tree.block._base is None else tree.block._base
    return whole[0].nbytes if whole.dim() == 2 else whole.nbytes  # a row of several clients' block, or a whole block


def _move_state(move: Move, state: ClientState) -> ClientState:
    parts = {name: tree.map(move) for name, tree in state.parts.items()}
    return replace(state, local=state.local.map(move), parts=parts, velocity=state.velocity.map(move))
