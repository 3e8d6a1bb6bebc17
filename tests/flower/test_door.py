"""The door in front of Flower's link: what passes, what does not, and that nothing else reaches the link."""

import asyncio
import inspect
import re
import socket
import ssl

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import fleet_pb2, message_pb2, node_pb2
from flwr.supercore.date import now
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.fleet_http_client import FleetHttpClient

from fednorms.flower import door as door_module
from fednorms.flower.certificates import days_left, make_certificates
from fednorms.flower.door import ROUTES
from fednorms.flower.keys import new_key, read_keys
from tests.support.door import NUMBERS, FakeLink, Keys, running_door, signed
from tests.support.waiting import HANG

PULL = "/v1/fleet/pull-messages"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("project"))


@pytest.fixture
def keys(given):
    """The keys, with their first roster after every test."""
    before = given.roster.read_bytes()
    yield given
    given.roster.write_bytes(before)


@pytest.fixture
def link(keys):
    return FakeLink(keys)


def ask(link, keys, *requests, **options):
    """Send requests one after the other through a door; the responses."""

    async def send():
        transport = httpx.ASGITransport(link.door(keys, refused_per_minute=1000))
        async with httpx.AsyncClient(transport=transport, base_url="https://door") as client:
            return [await client.request(*request, **options) for request in requests]

    return asyncio.run(send())


def pull(site):
    return fleet_pb2.PullMessagesRequest(node=node_pb2.Node(node_id=NUMBERS[site])).SerializeToString()


def push(site, sender, count=1):
    reply = message_pb2.Message(metadata=message_pb2.Metadata(src_node_id=NUMBERS[sender]))
    return fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=NUMBERS[site]),
        messages_list=[reply] * count,
        message_object_trees=[message_pb2.ObjectTree()] * count,
    ).SerializeToString()


def refused(link, keys, status, path, body, headers, method="POST"):
    (answer,) = ask(link, keys, (method, path), content=body, headers=headers)
    assert (answer.status_code, answer.content) == (status, b"")
    assert answer.headers["connection"] == "close"
    assert link.asked == []
    assert link.registered == []


def test_the_routes_are_those_that_a_node_of_flowers_calls():
    called = set(re.findall(r'path="(/v1/fleet/[a-z-]+)"', inspect.getsource(FleetHttpClient)))
    assert set(ROUTES) == called - {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    assert all(PROTOBUF_REQUEST_TYPES["POST", path] is kind for path, (kind, _) in ROUTES.items())


def test_no_other_route_of_the_link_exists_outside(link, keys):
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES} - set(ROUTES)
    assert len(paths) > 60
    paths |= {
        "/",
        "/docs",
        "/openapi.json",
        "/health",
        "/v1/responses",
        "/docs/oauth2-redirect",
        PULL + "/",
        "/" + PULL,
    }
    paths |= {"/v1/fleet/%70ull-messages", PULL + "?a=b", PULL.upper(), "/v1/fleet/../control/list-nodes"}
    for method in ("POST", "GET"):
        answers = ask(
            link,
            keys,
            *((method, path) for path in sorted(paths)),
            content=pull("north"),
            headers=signed(keys.private("north")),
        )
        assert {(a.status_code, a.content) for a in answers} == {(404, b"")}
    assert link.asked == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "CONNECT"])
def test_only_post_passes(method, link, keys):
    refused(link, keys, 404, PULL, pull("north"), signed(keys.private("north")), method)


def changed(key, **headers):
    return signed(key) | {f"flwr-{name.replace('_', '-')}": value for name, value in headers.items()}


def test_only_keys_of_the_roster_with_their_signature_pass(link, keys):
    north, south, stranger = keys.private("north"), keys.private("south"), ec.generate_private_key(ec.SECP384R1())
    soon = now().replace(year=now().year + 1).isoformat()
    tries = {
        "no key": {"content-type": "application/protobuf"},
        "an unknown key": signed(stranger),
        "a signature of another key": changed(north, signature=signed(south)["flwr-signature"]),
        "a signature of another time": changed(north, timestamp=now().isoformat()),
        "an old signature": signed(north, "2020-01-01T00:00:00+00:00"),
        "a signature of the future": signed(north, soon),
        "a time without a zone": signed(north, "2026-01-01T00:00:00"),
        "no time": signed(north, "today"),
        "no signature": changed(north, signature=""),
        "not base64": changed(north, public_key="!"),
        "not a key": changed(north, public_key="AAAA"),
    }
    for headers in tries.values():
        refused(link, keys, 401, PULL, pull("north"), headers)
    twice = [*signed(north).items(), ("flwr-public-key", signed(south)["flwr-public-key"])]
    refused(link, keys, 400, PULL, pull("north"), twice)
    refused(link, keys, 415, PULL, pull("north"), signed(north) | {"content-type": "text/plain"})
    assert ask(link, keys, ("POST", PULL), content=pull("north"), headers=signed(north))[0].status_code == 200


def test_a_node_speaks_only_for_itself(link, keys):
    """A site's key opens the door for that site's node, not for another one's messages and answers."""
    north = keys.private("north")
    other = fleet_pb2.ActivateNodeRequest(public_key=keys.public("south"), heartbeat_interval=30).SerializeToString()
    leave = fleet_pb2.DeactivateNodeRequest(node_id=NUMBERS["south"]).SerializeToString()
    refused(link, keys, 401, PULL, pull("south"), signed(north))
    refused(link, keys, 401, PULL, b"", signed(north))
    refused(link, keys, 401, "/v1/fleet/push-messages", push("north", sender="south"), signed(north))
    refused(link, keys, 401, "/v1/fleet/push-messages", push("south", sender="north"), signed(north))
    refused(link, keys, 400, "/v1/fleet/push-messages", push("north", "north", count=2), signed(north))
    refused(link, keys, 400, "/v1/fleet/push-messages", push("north", "north", count=0), signed(north))
    refused(link, keys, 401, "/v1/fleet/activate-node", other, signed(north))
    refused(link, keys, 401, "/v1/fleet/deactivate-node", leave, signed(north))
    refused(link, keys, 400, PULL, b"\xff\xff", signed(north))
    (answer,) = ask(
        link, keys, ("POST", "/v1/fleet/push-messages"), content=push("north", "north"), headers=signed(north)
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_route_checks_the_node(path, link, keys):
    kind, _ = ROUTES[path]
    made = kind()
    if path.endswith("/activate-node"):
        made.public_key = keys.public("south")
    elif path.endswith("deactivate-node"):
        made.node_id = NUMBERS["south"]
    else:
        made.node.node_id = NUMBERS["south"]
    status = 400 if path.endswith("push-messages") else 401
    refused(link, keys, status, path, made.SerializeToString(), signed(keys.private("north")))


def test_what_passes_is_unchanged_and_nothing_is_added(link, keys):
    body = message_pb2.PushObjectRequest(
        node=node_pb2.Node(node_id=NUMBERS["north"]), object_id="a" * 64, object_content=bytes(range(256)) * 4000
    ).SerializeToString()
    link.answer = httpx.Response(
        403, content=bytes(range(256)), headers={"content-type": "application/x", "server": "s"}
    )
    sent = signed(keys.private("north")) | {
        "flwr-package-version": "1.41",
        "cookie": "a=b",
        "x-forwarded-for": "1.2.3.4",
    }
    (answer,) = ask(link, keys, ("POST", "/v1/fleet/push-object"), content=body, headers=sent)
    (request,) = link.asked
    assert request.content == body
    assert {k: v for k, v in request.headers.items() if k.startswith("flwr-")} == {
        k: v for k, v in sent.items() if k.startswith("flwr-")
    }
    assert not {"cookie", "x-forwarded-for", "authorization"} & set(request.headers)
    assert (answer.status_code, answer.content) == (403, bytes(range(256)))
    assert set(answer.headers) == {"content-type", "content-length"}


def test_bodies_are_bounded(link, keys):
    north, limit = keys.private("north"), ROUTES[PULL][1]
    padding = fleet_pb2.PullMessagesRequest(node=node_pb2.Node(node_id=11), message_ids=["x" * limit])
    refused(link, keys, 413, PULL, padding.SerializeToString(), signed(north))
    refused(link, keys, 413, PULL, b"", signed(north) | {"content-length": "9" * 5000})
    refused(link, keys, 413, PULL, b"", signed(north) | {"content-length": "-1"})

    async def chunks():
        for _ in range(limit // 1000 + 1):
            yield b"x" * 1000

    refused(link, keys, 413, PULL, chunks(), signed(north))
    padding.message_ids[0] = "x" * (limit - 7)
    largest = padding.SerializeToString()
    assert len(largest) == limit
    assert ask(link, keys, ("POST", PULL), content=largest, headers=signed(north))[0].status_code == 200


def scope_of(keys, site):
    headers = [(name.encode(), value.encode()) for name, value in signed(keys.private(site)).items()]
    return {"type": "http", "method": "POST", "path": PULL, "query_string": b"", "headers": headers, "client": None}


def test_a_body_that_never_ends_is_given_up(link, keys):
    sent = []

    async def never():
        await asyncio.Event().wait()

    async def send(event):
        sent.append(event)

    asyncio.run(link.door(keys, body_seconds=0.01)(scope_of(keys, "north"), never, send))
    assert sent[0]["status"] == 408


def test_a_key_revoked_while_its_body_arrives_is_refused(link, keys):
    sent = []

    async def receive():
        read_keys(keys.roster).without("north").write(keys.roster)
        return {"type": "http.request", "body": pull("north")}

    async def send(event):
        sent.append(event)

    asyncio.run(link.door(keys)(scope_of(keys, "north"), receive, send))
    assert sent[0]["status"] == 401
    assert link.asked == []


def test_one_site_cannot_take_all_places(link, keys):
    sent = []

    async def send(event):
        sent.append(event.get("status"))

    async def crowd():
        door, go = link.door(keys, requests_per_site=2), asyncio.Event()

        async def receive():
            await go.wait()
            return {"type": "http.request", "body": pull("north")}

        waiting = [asyncio.create_task(door(scope_of(keys, "north"), receive, send)) for _ in range(2)]
        await asyncio.sleep(0)
        await door(scope_of(keys, "north"), receive, send)  # answered at once
        go.set()
        await asyncio.gather(*waiting)
        await door(scope_of(keys, "north"), receive, send)

    asyncio.run(crowd())
    assert [status for status in sent if status] == [503, 200, 200, 200]


def test_revoking_a_key_takes_effect_at_the_next_request(link, keys):
    north, south = signed(keys.private("north")), signed(keys.private("south"))

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(link.door(keys)), base_url="https://door") as client:
            answers = [await client.post(PULL, content=pull("north"), headers=north)]
            read_keys(keys.roster).without("north").write(keys.roster)
            answers.append(await client.post(PULL, content=pull("north"), headers=north))
            answers.append(await client.post(PULL, content=pull("south"), headers=south))
            keys.roster.write_text("[keys")  # half an edit: nobody passes, and nodes try again
            answers.append(await client.post(PULL, content=pull("south"), headers=south))
            return [a.status_code for a in answers]

    assert asyncio.run(run()) == [200, 401, 200, 503]


def test_a_key_of_the_roster_is_registered_once_under_its_sites_name(keys):
    link = FakeLink(keys, known=("south",))
    activate = fleet_pb2.ActivateNodeRequest(public_key=keys.public("north"), heartbeat_interval=30).SerializeToString()

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(link.door(keys)), base_url="https://door") as client:
            asked = [
                client.post("/v1/fleet/activate-node", content=activate, headers=signed(keys.private("north")))
                for _ in range(5)
            ]
            return [a.status_code for a in await asyncio.gather(*asked)]

    assert asyncio.run(run()) == [200] * 5
    assert link.registered == [("north", keys.public("north"))]


def test_a_link_that_is_away_is_a_reason_to_try_again(link, keys):
    async def away(request):
        raise httpx.ConnectError("away")

    async def run(transport):
        door = door_module.Door("http://link", door_module.Watched(keys.roster), transport)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="https://door") as client:
            return (await client.post(PULL, content=pull("north"), headers=signed(keys.private("north")))).status_code

    assert asyncio.run(run(httpx.MockTransport(away))) == 503


# -- with TLS, as a server ------------------------------------------------------------------------------------------
def serial(port, ca):
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection(("127.0.0.1", port), HANG) as s,
        context.wrap_socket(s, server_hostname="127.0.0.1") as secured,
    ):
        return secured.getpeercert()["serialNumber"]


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path):
    keys = Keys(tmp_path)
    with running_door(keys, FakeLink(keys)) as port:
        first = serial(port, keys.ca)
        assert serial(port, keys.ca) == first
        make_certificates(tmp_path, "127.0.0.1", [], 30, renew=True)
        while serial(port, keys.ca) == first:
            pass


def test_a_new_authority_replaces_the_old_one_without_a_pause(tmp_path):
    """Sites that trust both authorities connect before and after; one that trusts only the old one, only before."""
    old, new = Keys(tmp_path / "old"), Keys(tmp_path / "new")
    both = tmp_path / "both.crt"
    both.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
    assert days_left(both) > 3000
    with running_door(old, FakeLink(old)) as port:
        before = serial(port, both)
        assert serial(port, old.ca) == before
        for name in ("server.key", "server.pem"):
            (old.certificates / name).write_bytes((new.certificates / name).read_bytes())
        while serial(port, both) == before:
            pass
        assert serial(port, new.ca) == serial(port, both)
        with pytest.raises(ssl.SSLCertVerificationError):
            serial(port, old.ca)


def test_a_node_refuses_a_certificate_that_has_ended_or_is_another_authoritys(tmp_path):
    over, other = Keys(tmp_path / "over", days=-1), Keys(tmp_path / "other")
    with running_door(over, FakeLink(over)) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            serial(port, over.ca)
        with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
            serial(port, other.ca)


def test_a_connection_without_a_request_is_closed(tmp_path):
    keys = Keys(tmp_path)
    context = ssl.create_default_context(cafile=str(keys.ca))
    with (
        running_door(keys, FakeLink(keys), header_seconds=0.05) as port,
        socket.create_connection(("127.0.0.1", port), HANG) as s,
        context.wrap_socket(s, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(b"POST / HTTP/1.1\r\nx: ")
        assert secured.recv(1) == b""


def test_a_site_with_a_new_key_is_let_in_and_its_former_key_is_not(link, keys):
    read_keys(keys.roster).enrolled("north", new_key()[1]).write(keys.roster)
    refused(link, keys, 401, PULL, pull("north"), signed(keys.private("north")))
