"""Test a running door as an outsider would: every way in that is known must be refused.

A stranger has no key of the deployment. With a site's key, the probe also tests what that site could do to others.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import warnings
import zipfile
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import control_pb2, fab_pb2, fleet_pb2, message_pb2, node_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from google.protobuf.message import Message

from fednorms.core.errors import BadInput, RunFailed
from fednorms.flower.certificates import authority
from fednorms.flower.door import FLEET, KIB, ROUTES

SECONDS = 30.0
PAGES = ("/", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/health", "/v1", "/v1/fleet", "/metrics")
DETOURS = (
    FLEET + "../control/list-nodes",
    FLEET + "%2e%2e/control/list-nodes",
    FLEET + "pull-messages/../../control/list-nodes",
    "//v1/control/list-nodes",
    "/V1/control/list-nodes",
    "/v1/control/list-nodes/",
    "/v1%2fcontrol%2flist-nodes",
    "/v1/control/list-nodes?x=" + FLEET,
)


@dataclass(frozen=True)
class Finding:
    """One attempt: what was tried, whether it was refused, and what the door answered."""

    attempt: str
    refused: bool
    answer: str

    def __str__(self) -> str:
        return f"{'refused' if self.refused else 'OPEN   '}  {self.attempt}: {self.answer}"


@dataclass(frozen=True)
class Door:
    """A door somewhere, and the certificate authority that it must have its certificate from."""

    host: str
    port: int
    ca: Path
    trust: ssl.SSLContext

    def ask(
        self, path: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, bytes]:
        """Send one request, exactly as written; status and body of the answer. 0: the connection was closed."""
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=SECONDS, context=self.trust)
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise RunFailed(f"{self.host}:{self.port} has no certificate of {self.ca} ({error}).") from None
        except OSError as error:
            raise RunFailed(f"Cannot reach {self.host}:{self.port} ({error}).") from None
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            told = {"content-type": PROTOBUF_MEDIA_TYPE, "content-length": str(len(body)), **(headers or {})}
            for name, value in told.items():
                connection.putheader(name, value)
            with contextlib.suppress(OSError):  # a door may answer and close before it has the whole body
                connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.read(KIB)
        except (http.client.HTTPException, OSError):
            return 0, b""
        finally:
            connection.close()


def probe(
    host: str, port: int, ca: Path, site: str, key: ec.EllipticCurvePrivateKey | None = None
) -> Iterator[Finding]:
    """Try every known way in, one after the other. RunFailed if there is no door, or not one with this authority."""
    try:
        trust = ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise BadInput(f"{ca} is not a file of certificates ({error}).") from None
    door = Door(host, port, ca, trust)
    door.ask("/")
    yield _without_tls(door)
    yield _old_tls(door)
    yield _other_authority(door)
    control = [path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/control/")]
    runtime = [path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/runtime/")]
    yield _hidden(door, f"Control API, {len(control)} routes", control)
    yield _hidden(door, f"Runtime API, {len(runtime)} routes", [*runtime, "/v1/responses"])
    yield _hidden(door, "pages and descriptions", PAGES, "GET")
    yield _hidden(door, "routes of nodes with GET", ROUTES, "GET")
    yield _hidden(door, "detours to the Control API", DETOURS)
    stranger = ec.generate_private_key(ec.SECP384R1())
    yield _request(door, "register a key", FLEET + "register-node", _register(stranger), stranger)
    yield _request(
        door,
        f'register a key as site "{site}"',
        "/v1/control/register-node",
        control_pb2.RegisterNodeRequest(public_key=_pem(stranger), name=site),
        stranger,
    )
    bundle = _bundle()
    run = control_pb2.StartRunRequest(fab=fab_pb2.Fab(hash_str=sha256(bundle).hexdigest(), content=bundle))
    yield _request(door, "start a run with a bundle that no site has", "/v1/control/start-run", run, stranger)
    activate = fleet_pb2.ActivateNodeRequest(public_key=_pem(stranger), heartbeat_interval=30)
    yield _request(door, "join with an unknown key", FLEET + "activate-node", activate, stranger, 401)
    yield _request(door, "join without a key", FLEET + "activate-node", activate, None, 401)
    found = door.ask(FLEET + "push-object", _ZEROS)
    yield Finding("send a large body without a key", *_judge(found, 401, early=True))
    if key is not None:
        yield from _as_site(door, key, stranger)


def _as_site(door: Door, key: ec.EllipticCurvePrivateKey, stranger: ec.EllipticCurvePrivateKey) -> Iterator[Finding]:
    """What the holder of a site's key could do to other sites."""
    other = node_pb2.Node(node_id=1)  # Flower's numbers are random; this one is its own
    pull = fleet_pb2.PullMessagesRequest(node=other)
    yield _request(door, "as a site: read another node's messages", FLEET + "pull-messages", pull, key, 401)
    reply = message_pb2.Message(metadata=message_pb2.Metadata(src_node_id=1))
    push = fleet_pb2.PushMessagesRequest(
        node=other, messages_list=[reply], message_object_trees=[message_pb2.ObjectTree()]
    )
    yield _request(door, "as a site: answer for another node", FLEET + "push-messages", push, key, 401)
    activate = fleet_pb2.ActivateNodeRequest(public_key=_pem(stranger), heartbeat_interval=30)
    yield _request(door, "as a site: activate another key", FLEET + "activate-node", activate, key, 401)
    old = _identity(key, datetime(2020, 1, 1, tzinfo=UTC).isoformat())
    found = door.ask(FLEET + "pull-messages", pull.SerializeToString(), old)
    yield Finding("as a site: use an old signature", *_judge(found, 401))
    found = door.ask(FLEET + "pull-messages", _ZEROS, _identity(key))
    yield Finding("as a site: send a body that is too large", *_judge(found, 413, early=True))
    yield _request(door, "as a site: register a key", FLEET + "register-node", _register(stranger), key)


_ZEROS = b"\0" * (64 * KIB)


def _request(
    door: Door, attempt: str, path: str, message: Message, key: ec.EllipticCurvePrivateKey | None, expected: int = 404
) -> Finding:
    found = door.ask(path, message.SerializeToString(), _identity(key) if key else {})
    return Finding(attempt, *_judge(found, expected))


def _hidden(door: Door, attempt: str, paths: Iterable[str], method: str = "POST") -> Finding:
    """All these paths must look as if they did not exist."""
    for path in paths:
        refused, answer = _judge(door.ask(path, method=method), 404)
        if not refused:
            return Finding(attempt, False, f"{path} answered {answer}")
    return Finding(attempt, True, "404")


def _judge(found: tuple[int, bytes], expected: int, *, early: bool = False) -> tuple[bool, str]:
    """The door refuses with this status and an empty body; anything else may come from what is behind it.

    `early`: a large body is refused before it is read, so the connection may close before the status is seen.
    """
    status, body = found
    refused = not body and (status in (expected, 429) or (early and status == 0))  # 429: after many attempts
    return refused, f"{status or 'closed'}{f' {body[:60]!r}' if body else ''}"


def _without_tls(door: Door) -> Finding:
    attempt = "connect without TLS"
    try:
        with socket.create_connection((door.host, door.port), SECONDS) as s:
            s.sendall(b"POST /v1/control/list-nodes HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            answer = s.recv(16)
    except OSError as error:
        return Finding(attempt, True, type(error).__name__)
    return Finding(attempt, not answer.startswith(b"HTTP/"), repr(answer) if answer else "closed")


def _old_tls(door: Door) -> Finding:
    attempt = "connect with TLS 1.1"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that it is old is the point
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    except (ssl.SSLError, ValueError):
        return Finding(attempt, True, "this machine has no TLS 1.1 either")
    return _handshake(door, attempt, context)


def _other_authority(door: Door) -> Finding:
    """A node that trusts another authority must not accept this server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other = authority(ec.generate_private_key(ec.SECP384R1()))
    context.load_verify_locations(cadata=other.public_bytes(serialization.Encoding.PEM).decode())
    return _handshake(door, "trust another authority", context)


def _handshake(door: Door, attempt: str, context: ssl.SSLContext) -> Finding:
    try:
        with (
            socket.create_connection((door.host, door.port), SECONDS) as s,
            context.wrap_socket(s, server_hostname=door.host) as secured,
        ):
            return Finding(attempt, False, str(secured.version()))
    except OSError as error:
        return Finding(attempt, True, getattr(error, "reason", "") or type(error).__name__)


def _identity(key: ec.EllipticCurvePrivateKey, time: str = "") -> dict[str, str]:
    """The headers with which a node of Flower's shows who it is."""
    time = time or now().isoformat()
    signature = key.sign(time.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(_pem(key)).decode(),
        TIMESTAMP_HEADER: time,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
    }


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(pem, form)


def _register(key: ec.EllipticCurvePrivateKey) -> Message:
    return fleet_pb2.RegisterNodeFleetRequest(public_key=_pem(key))


def _bundle() -> bytes:
    """An app bundle that nobody has pinned; it does nothing."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("pyproject.toml", '[project]\nname = "probe"\nversion = "1.0.0"\n')
    return file.getvalue()
