"""The door of a deployment: the only part of Flower's link that other machines reach.

Flower serves its Fleet API (nodes), Control API (start runs, register keys) and Runtime API (apps) on one port, without
accounts. So the link listens on the loopback interface only, and this ASGI application passes on what a node needs:

- ten Fleet routes, POST only; everything else is answered 404, as if it did not exist;
- from keys of the roster (`keys.py`) only, with a valid signature, otherwise 401, before the body is read;
- for the node number that belongs to that key: a node cannot answer in the name of another;
- bodies of bounded size, in bounded time, and a bounded number of requests per site (`limits.py`).

It builds the request to the link itself, from a fixed address, a few headers and the checked body. The body is passed
on unchanged, and so is the link's answer.
"""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from datetime import datetime
from logging import getLogger
from typing import Any

import httpx
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto import control_pb2, fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from google.protobuf.message import DecodeError, Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from fednorms.core.errors import BadInput
from fednorms.flower.keys import Watched
from fednorms.flower.limits import Limits, Refusals

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KIB, MIB = 2**10, 2**20
FLEET = "/v1/fleet/"
# What each route's body is, and how large it may be. Flower cuts tensors into chunks of 5 MiB.
ROUTES: dict[str, tuple[type[Message], int]] = {
    FLEET + "activate-node": (fleet_pb2.ActivateNodeRequest, 16 * KIB),
    FLEET + "deactivate-node": (fleet_pb2.DeactivateNodeRequest, 16 * KIB),
    FLEET + "send-node-heartbeat": (heartbeat_pb2.SendNodeHeartbeatRequest, 16 * KIB),
    FLEET + "pull-messages": (fleet_pb2.PullMessagesRequest, 16 * KIB),
    FLEET + "push-messages": (fleet_pb2.PushMessagesRequest, 16 * MIB),
    FLEET + "get-run": (run_pb2.GetRunRequest, 16 * KIB),
    FLEET + "get-fab": (fab_pb2.GetFabRequest, 16 * KIB),
    FLEET + "push-object": (message_pb2.PushObjectRequest, 32 * MIB),
    FLEET + "pull-object": (message_pb2.PullObjectRequest, 16 * KIB),
    FLEET + "confirm-message-received": (message_pb2.ConfirmMessageReceivedRequest, 16 * KIB),
}
LINK_SECONDS = 120.0
DEFAULTS = Limits()
IDENTITY = (FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER)

log = getLogger("fednorms.door")


class Refused(Exception):
    """A request that is not passed on: the status, and the reason for the operator's log."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Door:
    """The ASGI application in front of a link at `http://127.0.0.1:PORT`."""

    def __init__(
        self,
        link: str,
        roster: Watched,
        transport: httpx.AsyncBaseTransport | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        self.roster, self.limits = roster, limits
        self._refusals = Refusals(limits.refused_per_minute)
        endless = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._link = httpx.AsyncClient(
            base_url=link, transport=transport, timeout=LINK_SECONDS, limits=endless, trust_env=False
        )
        self._nodes: dict[bytes, int] = {}  # the link's number for each key
        self._registering = asyncio.Lock()
        self._busy: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            path = self._route(scope)
            site, key = self._who(scope)
            if self._busy[key] >= self.limits.requests_per_site:
                raise Refused(503, f'site "{site}" has {self._busy[key]} requests open')
            self._busy[key] += 1
            try:
                body = await self._body(scope, receive, min(ROUTES[path][1], self.limits.body_mib * MIB))
                await self._check(path, body, site, key)
                await self._forward(path, scope, body, send)
            finally:
                self._busy[key] -= 1
        except Refused as refused:
            who = _address(scope)
            self._refusals.add(who)
            log.warning("refused %s %.80r from %s: %s", scope["method"], scope["path"], who, refused)
            close = [(b"connection", b"close"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": refused.status, "headers": close})
            await send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        """Close the connections to the link."""
        await self._link.aclose()

    # -- who may pass -------------------------------------------------------------------------------------------
    def _route(self, scope: Scope) -> str:
        """The route of a request, if it is one of those that a node needs, written exactly so."""
        path: str = scope["path"]
        exact = path in ROUTES and scope.get("raw_path", path.encode()) == path.encode() and not scope["query_string"]
        if not exact or scope["method"] != "POST":
            raise Refused(*self._unknown(scope, 404, "not a route of nodes"))
        return path

    def _unknown(self, scope: Scope, status: int, reason: str) -> tuple[int, str]:
        """The answer to a stranger. Sites at the same address as a flood still pass: they have a key."""
        if self._refusals.too_many(_address(scope)):
            return 429, f"more than {self._refusals.most} refused requests in a minute"
        return status, reason

    def _who(self, scope: Scope) -> tuple[str, bytes]:
        """The site and the key of a request; it is refused without a valid signature by a key of the roster."""
        owners = self._owners()
        try:
            public, signed_at, signature = (_header(scope, name) for name in IDENTITY)
            key = b64decode(public, validate=True)
            if (site := owners.get(key)) is None:
                raise Refused(*self._unknown(scope, 401, "its key is not in the roster"))
            age = (now() - datetime.fromisoformat(signed_at)).total_seconds()
            if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
                raise Refused(401, f'the clock of site "{site}" is off by {age:.0f} s')
            loaded = serialization.load_pem_public_key(key)
            assert isinstance(loaded, ec.EllipticCurvePublicKey)  # as every key of the roster
            loaded.verify(b64decode(signature, validate=True), signed_at.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, InvalidSignature, binascii.Error) as error:
            raise Refused(401, f"it is not signed ({type(error).__name__})") from None
        if _header(scope, "content-type") != PROTOBUF_MEDIA_TYPE:
            raise Refused(415, "its body is not protobuf")
        return site, key

    def _owners(self) -> Mapping[bytes, str]:
        try:
            return self.roster.owners()
        except BadInput as error:
            raise Refused(503, str(error)) from None

    async def _body(self, scope: Scope, receive: Receive, limit: int) -> bytes:
        length = _header(scope, "content-length")
        if length and (not length.isascii() or not length.isdigit() or int(length[:20]) > limit):
            raise Refused(413, f"its body has more than {limit} bytes")
        found = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    event = await receive()
                    if event["type"] != "http.request":
                        raise Refused(400, "it ended too early")
                    found += event.get("body", b"")
                    if len(found) > limit:
                        raise Refused(413, f"its body has more than {limit} bytes")
                    if not event.get("more_body"):
                        return bytes(found)
        except TimeoutError:
            raise Refused(408, f"its body took more than {self.limits.body_seconds:g} s") from None

    async def _check(self, path: str, body: bytes, site: str, key: bytes) -> None:
        """Refuse a body that speaks for another node than the one of its key."""
        request: Any = ROUTES[path][0]()
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise Refused(400, "its body cannot be read") from None
        number = await self._number(site, key)
        if self._owners().get(key) != site:
            raise Refused(401, f'the key of site "{site}" was revoked while it sent')
        if isinstance(request, fleet_pb2.ActivateNodeRequest):
            if request.public_key != key:
                raise Refused(401, f'site "{site}" activates another key')
            return
        claimed = request.node_id if isinstance(request, fleet_pb2.DeactivateNodeRequest) else request.node.node_id
        senders = {claimed}
        if isinstance(request, fleet_pb2.PushMessagesRequest):
            if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
                raise Refused(400, "it has not exactly one message")
            senders.add(request.messages_list[0].metadata.src_node_id)
        if senders != {number}:
            raise Refused(401, f'site "{site}" is node {number} and speaks for {sorted(senders - {number})}')

    # -- the link -----------------------------------------------------------------------------------------------
    async def _number(self, site: str, key: bytes) -> int:
        """The number of a key's node; a key of the roster that the link does not know yet is registered there."""
        async with self._registering:
            if key not in self._nodes:
                nodes = control_pb2.ListNodesResponse()
                nodes.ParseFromString(await self._control("list-nodes", control_pb2.ListNodesRequest()))
                self._nodes = {n.public_key: n.node_id for n in nodes.nodes_info if not n.unregistered_at}
            if key not in self._nodes:
                made = control_pb2.RegisterNodeResponse()
                register = control_pb2.RegisterNodeRequest(public_key=key, name=site)
                made.ParseFromString(await self._control("register-node", register))
                self._nodes[key] = made.node_id
            return self._nodes[key]

    async def _control(self, route: str, request: Message) -> bytes:
        try:
            answer = await self._link.post(
                f"/v1/control/{route}",
                content=request.SerializeToString(),
                headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise Refused(503, f"the link does not answer {route} ({error})") from None
        return answer.content

    async def _forward(self, path: str, scope: Scope, body: bytes, send: Send) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"] if name.startswith(b"flwr-")}
        headers |= {"content-type": PROTOBUF_MEDIA_TYPE.encode(), "accept": PROTOBUF_MEDIA_TYPE.encode()}
        request = self._link.build_request("POST", path, content=body, headers=headers)
        request.headers["accept-encoding"] = "identity"
        try:
            answer = await self._link.send(request)
        except httpx.TimeoutException:
            raise Refused(504, f"the link takes more than {LINK_SECONDS:.0f} s") from None
        except httpx.HTTPError as error:
            raise Refused(503, f"the link cannot be reached ({type(error).__name__})") from None
        kind = answer.headers.get("content-type", "application/octet-stream")
        told = [(b"content-type", kind.encode("latin-1")), (b"content-length", str(len(answer.content)).encode())]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": told})
        await send({"type": "http.response.body", "body": answer.content})


def impatient(seconds: float) -> type[H11Protocol]:
    """Uvicorn's protocol, but connections that send no request are closed after some seconds."""

    class Impatient(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Give the first request a deadline."""
            super().connection_made(transport)
            self.loop.call_later(seconds, self._close_if_silent)

        def _close_if_silent(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return Impatient


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("?",))[0])


def _header(scope: Scope, name: str) -> str:
    """A header that occurs at most once; empty if it is missing."""
    found = [value for key, value in scope["headers"] if key.lower() == name.encode()]
    if len(found) > 1:
        raise Refused(400, f"it has the header {name} twice")
    return found[0].decode("latin-1") if found else ""
