"""What the clients of a round leave until all are done: on the device up to a limit, beyond it in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from fednorms.states import ClientState, Upload
from fednorms.tree import Packed, Tree


@dataclass
class Waiting:
    """Uploads and new states of a round, in the order of training.

    Once they hold more than `limit` bytes on the device, all of them move to host memory in one go (`settle` waits for
    the device first), so that a cohort of any size needs no more than that.
    """

    limit: int
    settle: Callable[[], None]
    device: torch.device
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
            self.settle()
            far = torch.device("cpu")
            self.rows[self.near :] = [(n, _upload_to(u, far), _state_to(s, far)) for n, u, s in self.rows[self.near :]]
            self.near, self.bytes_near = len(self.rows), 0

    def back(self, good: list[bool]) -> Iterator[tuple[str, Upload, ClientState]]:
        """The good rows; each state comes back to the device in turn, and the upload that sums start from."""
        names = [name for (name, _, _), fine in zip(self.rows, good, strict=True) if fine]
        for (name, upload, state), fine in zip(self.rows, good, strict=True):
            if fine:
                first = name == min(names)
                yield name, _upload_to(upload, self.device) if first else upload, _state_to(state, self.device)


def _bytes(tree: Tree) -> int:
    return tree.block.untyped_storage().nbytes() if isinstance(tree, Packed) else tree.nbytes()


def _upload_to(upload: Upload, device: torch.device) -> Upload:
    parts = {name: tree.to(device) for name, tree in upload.parts.items()}
    model = upload.model
    return replace(upload, model=model.moved(device) if isinstance(model, Packed) else model.to(device), parts=parts)


def _state_to(state: ClientState, device: torch.device) -> ClientState:
    parts = {name: tree.to(device) for name, tree in state.parts.items()}
    return replace(state, local=state.local.to(device), parts=parts, velocity=state.velocity.to(device))
