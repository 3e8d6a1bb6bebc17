"""What all drivers of the race share: the models, the data, and what is recorded of a run. It needs torch and numpy.

A folder holds the job: job.json, data.npz (normalized images and labels by client, and a test set) and start.npz (the
first weights). A driver trains the job and calls `Record.round` with the server's model after every round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.backends.cudnn.allow_tf32 = False  # float32 in every library


class LeNet(nn.Module):
    """LeNet with group normalization, 798,218 parameters."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 64, 5), nn.GroupNorm(2, 64)
        self.conv2, self.norm2 = nn.Conv2d(64, 64, 5), nn.GroupNorm(2, 64)
        self.fc1, self.fc2, self.head = nn.Linear(1600, 384), nn.Linear(384, 192), nn.Linear(192, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = torch.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.head(torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1))))))


class SmallBN(nn.Module):
    """A small network with batch normalization."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(2048, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = torch.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.head(x.flatten(1))


MODELS = {"lenet-gn": LeNet, "small-bn": SmallBN}


class Job:
    """A job in a folder: its settings as attributes, `clients` as pairs of images and labels, and `model()`."""

    def __init__(self, folder: str | Path, device: str = "cpu"):
        self.folder, self.device = Path(folder).absolute(), device
        self.__dict__.update(json.loads((self.folder / "job.json").read_text()))
        with np.load(self.folder / "data.npz") as stored:
            arrays = {name: torch.from_numpy(stored[name]).to(device) for name in stored}
        self.clients = [(arrays[f"x{k}"], arrays[f"y{k}"]) for k in range(self.n)]
        self.test = arrays["x"], arrays["y"]

    def model(self) -> nn.Module:
        """The network with the first weights."""
        model = MODELS[self.net]()
        with np.load(self.folder / "start.npz") as stored:
            model.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored})
        return model.to(self.device)

    def train(self, model: nn.Module, k: int) -> None:
        """One epoch of client k, by hand, for frameworks that leave the loop to their users."""
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        x, y = self.clients[k]
        for rows in torch.arange(len(y)).split(self.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


class Record:
    """Writes the server's model after the first and the newest round, and the time at the end of every round."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        before = self.folder / "ends.json"  # of another process of the same run
        self.ends = json.loads(before.read_text()) if before.exists() else [time.time()]
        self.spent = 0.0  # seconds for writing, which no framework has to pay for
        before.write_text(json.dumps(self.ends))

    def round(self, state) -> None:
        """The server's model after a round: a state dict, or names and arrays."""
        arrays = {
            k: v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for k, v in state.items()
        }
        now = time.time()  # a GPU has finished: its model was copied
        self.ends.append(now - self.spent)
        if len(self.ends) == 2:
            np.savez(self.folder / "first.npz", **arrays)
        np.savez(self.folder / "last.npz", **arrays)
        (self.folder / "ends.json").write_text(json.dumps(self.ends))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            (self.folder / "gpu_mb.json").write_text(json.dumps(torch.cuda.max_memory_reserved() / 2**20))
        self.spent += time.time() - now


def given() -> tuple[Job, Record]:
    """The job and the record that the command line names: DRIVER JOB OUT."""
    return Job(sys.argv[1], os.environ.get("DEVICE", "cpu")), Record(sys.argv[2])
