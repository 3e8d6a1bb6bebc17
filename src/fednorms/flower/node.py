"""A site's node: Flower's node, which only carries messages, and next to it our own process that answers them.

Flower's node runs with `--isolation process`: it starts no app by itself. It hands messages to whoever knows the secret
that is made here at every start, and that is this process. `task.py` has what happens to a message.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from fednorms.core.errors import BadInput
from fednorms.flower.certificates import SOON, days_left
from fednorms.flower.keys import private_key
from fednorms.flower.processes import end, start, terminable
from fednorms.flower.settings import Scalar
from fednorms.flower.task import Responder
from fednorms.runs.toml import dumps

LOOPBACK = "127.0.0.1"
POLL = 0.25  # seconds between two looks for a message
SHORTEST, LONGEST = 2.0, 60.0  # seconds until Flower's node is started again


@dataclass(frozen=True)
class Node:
    """What a site's node needs."""

    server: str
    ca: Path
    key: Path
    responder: Responder
    config: Mapping[str, Scalar]


def run_node(node: Node, say: Callable[[str], None]) -> int:
    """Run a site's node until it is interrupted; Flower's node is started again whenever it ends."""
    check_node(node, say)
    terminable()
    wait = SHORTEST
    while True:
        began = time.monotonic()
        code = _session(node)
        wait = SHORTEST if time.monotonic() - began > LONGEST else min(2 * wait, LONGEST)
        say(
            f"Flower's node ended (exit code {code}); its messages are above. If the server refuses the site's key, "
            f"ask its operator. Next attempt in {wait:.0f} s."
        )
        time.sleep(wait)


def check_node(node: Node, say: Callable[[str], None]) -> None:
    """Find what would stop a node only after it has started."""
    private_key(node.key)
    if os.name == "posix" and node.key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        say(f"note: other users of this machine can read {node.key}. Run: chmod 600 {node.key}")
    if (left := days_left(node.ca)) <= 0:
        raise BadInput(f"{node.ca} ended {-left:.0f} days ago. Ask the server's operator for the new one.")
    if left < SOON:
        say(f"note: {node.ca} ends in {left:.0f} days. Ask the server's operator for the new one.")
    data = node.config.get("data")
    if data is not None and not Path(str(data)).is_dir():
        raise BadInput(f"{data} is not a folder. --data is the site's folder of CLASS/image.")


def _session(node: Node) -> int:
    """Start Flower's node and answer its messages until it ends; its exit code."""
    secret = secrets.token_bytes(32)
    address = f"{LOOPBACK}:{_free_port()}"
    with tempfile.TemporaryDirectory(prefix="fednorms-node-") as private:  # only this user can read it
        (Path(private) / "secret").write_bytes(secret)
        (Path(private) / "node.toml").write_text(dumps(node.config), encoding="utf-8")
        flower = start("flower-supernode", _options(node, Path(private), address))
        try:
            _answer(node.responder, address, secret, flower)
            return flower.wait()
        finally:
            end(flower)


def _answer(responder: Responder, address: str, secret: bytes, flower: subprocess.Popen[bytes]) -> None:
    """Answer messages, each in its own process: nothing of one is left for the next."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fednorms.flower.client", "fednorms.flower.task"])  # imported once, not per message
    first = context.Process(target=_nothing)  # imports now: a message that waits for it on a slow machine is lost
    first.start()
    first.join()
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # on the loopback interface
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            ),
        ],
    )
    try:
        while flower.poll() is None:
            try:
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            except httpx.TransportError:  # it has not started yet, or it ends
                time.sleep(POLL)
                continue
            if not found.token:
                time.sleep(POLL)
                continue
            worker = context.Process(target=responder.answer, args=(address, found.token), daemon=True)
            worker.start()
            while worker.is_alive() and flower.poll() is None:
                worker.join(POLL)
            if worker.is_alive():
                worker.terminate()
            worker.join()
    finally:
        client.close()


def _nothing() -> None:
    """Work of a process that only has to start."""


def _options(node: Node, private: Path, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return [
        "--superlink", node.server,
        "--root-certificates", str(node.ca),
        "--auth-supernode-private-key", str(node.key),
        "--node-config", str(private / "node.toml"),
        "--isolation", "process",
        "--superexec-auth-secret-file", str(private / "secret"),
        "--host", host,
        "--port", port,
    ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((LOOPBACK, 0))
        port: int = s.getsockname()[1]
        return port
