"""The data of all clients on the device, as far as its memory allows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fednorms.core.states import Client, Task
from fednorms.data import Preprocessing, Split
from fednorms.engines.graphs.capture import Device
from fednorms.engines.graphs.workspace import Workspace
from fednorms.engines.local import LocalClients


class DeviceData:
    """Training data of all clients as one block on the device (`resident`), and test data.

    Training data are normalized once if no part transforms them; `task` is the task as captured steps see it.
    `resident` is None if the data would take more than half of the free memory: then they are copied with each client.
    """

    def __init__(self, task: Task, local: LocalClients, device: Device) -> None:
        self.given, self.local, self.device = task, local, device
        self.first: dict[str, int] = {}  # the first row of each client in `resident`
        self.tests: dict[int, tuple[Split, Split]] = {}  # by id: the split, and its copy on the device
        self.task = task
        self.resident: tuple[Tensor, Tensor] | None = None
        self.loaded = False
        self.longest = max(map(len, local.data.values()), default=0)  # images of the largest client

    def load(self) -> None:
        """Copy the training data to the device, if they fit into what is free now; nothing if that is done."""
        if self.loaded:
            return
        task, self.loaded = self.given, True
        pixels = sum(len(data) for data in self.local.data.values()) * math.prod(self.local.testing.stored_shape)
        room, size = self.device.free_memory(), task.like.element_size()
        plain = not task.hooks["batch"] and 8 * pixels * size < room
        self.task = replace(task, preprocessing=Preprocessing()) if plain else task
        if 2 * pixels * (size if plain else 1) <= room:
            self.resident = self._load_all()

    def close(self) -> None:
        """Free all data on the device; `load` copies them again."""
        self.resident, self.loaded = None, False
        self.first.clear()
        self.tests.clear()

    def _load_all(self) -> tuple[Tensor, Tensor]:
        xs, ys, n = [], [], 0
        for name, data in self.local.data.items():
            self.first[name] = n
            n += len(data)
            x, y = self._load(data)
            xs.append(x)
            ys.append(y)
        return torch.cat(xs), torch.cat(ys)

    def _load(self, data: Split) -> tuple[Tensor, Tensor]:
        x, y = data.batch(torch.arange(len(data)))
        where = self.given.like.device
        x, y = (self.device.pinned(t).to(where, non_blocking=True) for t in (x, y))  # while other clients compute
        if self.task is not self.given:
            x = self.given.preprocessing(x, self.given.like.dtype)
        return x, y

    def room(self) -> tuple[Tensor, Tensor] | None:
        """Memory for the data of any one client; None if all data are resident."""
        if self.resident:
            return None
        x, y = self._load(next(iter(self.local.data.values())))
        return x.new_empty(self.longest, *x.shape[1:]), y.new_empty(self.longest)

    def fill(self, space: Workspace, client: Client) -> None:
        """Copy the data of a client into its workspace, unless all data are resident."""
        if space.data:
            for room, tensor in zip(space.data, self._load(client.data), strict=True):
                room[: len(tensor)].copy_(tensor)

    def test(self, data: Split) -> Split:
        """Test data, kept on the device after their first use if they take little of its memory."""
        if id(data) not in self.tests:
            x, y = data.batch(torch.arange(len(data)))
            if 16 * x.numel() * x.element_size() > self.device.free_memory():
                return data
            where = self.given.like.device
            self.tests[id(data)] = data, Split(x.to(where), y.to(where))
        return self.tests[id(data)][1]
