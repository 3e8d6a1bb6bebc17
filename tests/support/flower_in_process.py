"""A Grid in this process: it passes every message to a ClientApp, through Flower's own serialization."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fednorms.data import Federation
from fednorms.flower.client import client_app
from fednorms.flower.server import serve
from fednorms.flower.settings import read
from fednorms.runs.driver import execute
from fednorms.runs.session import open_federation
from tests.support.tiny import same

RECIPE = {
    "federation": "digits-shift",
    "data.size": 8,
    "model": "cnn-small",
    "rounds": 2,
    "threads": 1,
    "training.batch_size": 64,
    "training.lr": 0.05,
    "evaluate_every": 2,
}
SITES = "clean,faint"
Fault = Callable[[str, Message, Message], Message | None]  # (site, message, reply) -> what the server sees


class LocalGrid:
    """Nodes by number; `fault` may change a reply, or swallow it (None)."""

    def __init__(self, config: dict, folder: Path, nodes: dict[int, dict], fault: Fault | None = None) -> None:
        self.config, self.folder, self.nodes, self.fault = config, folder, dict(nodes), fault
        self.app = client_app()
        self.policy = str(open_policy(folder))  # a node may name another one, or none: ""
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower's processes do
        self.replies: dict[str, Message] = {}
        self.log: list[tuple[str, str]] = []  # (site, kind) of every message that a node worked on
        self.numbers = itertools.count(1)

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message_id = f"message {next(self.numbers)}"
            ids.append(message_id)
            message.metadata.__dict__["_message_id"] = message_id
            node = message.metadata.dst_node_id
            arrived = travelled(message)
            arrived.metadata.__dict__["_message_id"] = message_id
            config = {"state": str(self.folder / "state" / str(node)), "policy": self.policy, **self.nodes[node]}
            self.log.append((str(config.get("site")), message.metadata.message_type))
            context = Context(1, node, config, RecordDict(), dict(self.config))
            try:
                reply = self.app(arrived, context)
            except Exception as error:
                reply = Message(Error(code=0, reason=repr(error)), reply_to=arrived)
            if self.fault is not None:
                reply = self.fault(str(config.get("site")), arrived, reply)
            if reply is not None:
                self.replies[message_id] = travelled(reply)
        return ids

    def pull_messages(self, message_ids):
        return [self.replies.pop(m) for m in list(message_ids) if m in self.replies]


def open_policy(folder: Path) -> Path:
    """A policy that allows everything, to compare a run with the loop in full."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.toml").write_text("class_counts = true\n")
    return folder / "policy.toml"


def travelled(message: Message) -> Message:
    """A message after serialization and back, as Flower sends it."""
    contents = {key: thing.deflate() for key, thing in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, contents)


def config_of(method: str, folder: Path, **changes) -> dict:
    deploy = {"deploy.sites": SITES, "deploy.out": str(folder / "run"), "deploy.wait": 5.0, "deploy.deadline": 5.0}
    return RECIPE | {"method": method} | deploy | {k.replace("__", "."): v for k, v in changes.items()}


def nodes_for(sites: str = SITES) -> dict[int, dict]:
    return {100 + i: {"site": name, "attribute.modality": name} for i, name in enumerate(sites.split(","))}


def run(method: str, folder: Path, *, nodes=None, fault=None, **changes):
    """A run over an in-process grid: the result and the grid."""
    config = config_of(method, folder, **changes)
    grid = LocalGrid(config, folder, nodes or nodes_for(), fault)
    return serve(grid, config), grid


def reference(config: dict, folder: Path):
    """The same run in the reference loop."""
    recipe, _ = read(config)
    found = open_federation(recipe)
    sites = [replace(found.site(n), attributes={"modality": n}) for n in config["deploy.sites"].split(",")]
    return execute(
        recipe, out=folder / "loop", federation=Federation(found.name, sites, found.classes, found.preprocessing)
    )


def same_result(ours, theirs) -> None:
    """Server model, server states of parts and metrics are the same, bit for bit."""
    a, b = ours._state, theirs._state
    assert list(a.model) == list(b.model)
    assert all(torch.equal(a.model[k], b.model[k]) and a.model[k].dtype == b.model[k].dtype for k in b.model)
    assert a.parts.keys() == b.parts.keys()
    for name, tree in b.parts.items():
        assert same(a.parts[name], tree), name
    assert without_times(ours.history) == without_times(theirs.history)


def without_times(rows: list[dict]) -> list[dict]:
    """What two runs must agree on; under differential privacy a site does not send its training loss.

    Across machines all rounds between tests are scored right after training, in one process those that are needed.
    """
    untold = {"seconds", "after_local"}, {"seconds", "after_local", "train_loss", "dropped"}
    return [{k: v for k, v in row.items() if k not in untold["epsilon" in row]} for row in rows]


def repeatable_form(name: str) -> str:
    """The method with noise from the seed instead of the operating system, which makes runs comparable."""
    return f"{name}(draws='seeded')" if name in ("dpcentral", "dplocal") else name
