"""A deployment's keys and certificates in a folder, requests as a node of Flower's signs them, and a door that runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import control_pb2, node_pb2
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fednorms.flower.certificates import FOLDER, make_certificates
from fednorms.flower.door import Door
from fednorms.flower.keys import FILE, Watched, private_key
from fednorms.flower.limits import Limits, listen
from fednorms.flower.link import door_server, renew_certificates

NUMBERS = {"north": 11, "south": 22}  # of the nodes that the link knows


class Keys:
    """The keys of two sites, their roster, and the certificates of their server."""

    def __init__(self, folder: Path, days: float = 30) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        make_certificates(folder, "127.0.0.1", list(NUMBERS), days)
        self.roster = folder / FILE
        self.certificates = folder / FOLDER
        self.ca = self.certificates / "ca.crt"

    def private(self, site: str) -> ec.EllipticCurvePrivateKey:
        return private_key(self.certificates / f"{site}.key")

    def public(self, site: str) -> bytes:
        return public_key_to_bytes(self.private(site).public_key())


def signed(key: ec.EllipticCurvePrivateKey, time: str = "") -> dict[str, str]:
    """The headers of a request by a node of Flower's."""
    time = time or now().isoformat()
    return {
        "content-type": "application/protobuf",
        "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": time,
        "flwr-signature": b64encode(sign_message(key, time.encode())).decode(),
    }


class FakeLink:
    """What is behind the door: it notes what reaches it, and knows or registers nodes."""

    def __init__(self, keys: Keys, known: tuple[str, ...] = ("north", "south")) -> None:
        self.nodes = {keys.public(site): NUMBERS[site] for site in known}
        self.asked: list[httpx.Request] = []  # by nodes
        self.registered: list[tuple[str, bytes]] = []
        self.answer = httpx.Response(200, content=b"\x08\x01", headers={"content-type": "application/protobuf"})

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        if request.url.path == "/v1/control/list-nodes":
            nodes = [node_pb2.NodeInfo(node_id=number, public_key=key) for key, number in self.nodes.items()]
            return httpx.Response(200, content=control_pb2.ListNodesResponse(nodes_info=nodes).SerializeToString())
        if request.url.path == "/v1/control/register-node":
            told = control_pb2.RegisterNodeRequest.FromString(request.content)
            self.registered.append((told.name, told.public_key))
            self.nodes[told.public_key] = number = 100 + len(self.nodes)
            return httpx.Response(200, content=control_pb2.RegisterNodeResponse(node_id=number).SerializeToString())
        self.asked.append(request)
        return self.answer

    def door(self, keys: Keys, **limits: float) -> Door:
        return Door("http://link", Watched(keys.roster), httpx.MockTransport(self), Limits(**limits))


@contextlib.contextmanager
def running(server: uvicorn.Server, limits: Limits) -> Iterator[int]:
    """A server in a thread; its port."""
    with listen("127.0.0.1", 0, limits) as listening:

        async def serve() -> None:
            await server.serve(sockets=[listening])

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server has not started"
                threading.Event().wait(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def running_door(keys: Keys, link: FakeLink, **limits: float) -> Iterator[int]:
    """A door with TLS that renews its certificate; its port."""
    door = link.door(keys, **limits)
    server = door_server(door, "127.0.0.1", 0, keys.certificates)
    start = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await start(sockets)
        server.renewal = asyncio.create_task(renew_certificates(server, keys.certificates, every=0.02))

    server.startup = startup
    with running(server, door.limits) as port:
        yield port
