"""Floods and slow senders at a running door, on loopback: each limit holds, and honest sites still pass."""

import contextlib
import socket
import ssl
import time

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import fleet_pb2, node_pb2

from fednorms.cli import main
from fednorms.core.errors import BadInput
from fednorms.flower.limits import ADDRESSES, Limits, Refusals
from tests.flower.test_deploy import INIT
from tests.support.door import NUMBERS, FakeLink, Keys, running_door, signed
from tests.support.waiting import HANG

PULL = "/v1/fleet/pull-messages"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("project"))


def pull(site):
    return fleet_pb2.PullMessagesRequest(node=node_pb2.Node(node_id=NUMBERS[site])).SerializeToString()


def ask(keys, port, key=None, body=None, path=PULL):
    """One request in its own connection; the status."""
    trust = ssl.create_default_context(cafile=str(keys.ca))
    with httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{port}", timeout=HANG) as client:
        headers = signed(key or keys.private("north"))
        return client.post(path, content=pull("north") if body is None else body, headers=headers).status_code


def answered_in_time(keys, port):
    """The status of an honest site's request, as soon as a place is free."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            return ask(keys, port)
    raise AssertionError("no place is free")


def is_closed(s):
    """Whether the other side closes a connection without a word."""
    try:
        return s.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_address_has_so_many_connections_and_closing_one_makes_room(keys):
    """Connections that never begin TLS count, too."""
    with running_door(keys, FakeLink(keys), connections_per_address=5) as port, contextlib.ExitStack() as held:

        def connect():
            return held.enter_context(socket.create_connection(("127.0.0.1", port), HANG))

        kept = [connect() for _ in range(5)]
        assert all(is_closed(connect()) for _ in range(20))
        with pytest.raises(httpx.TransportError):
            ask(keys, port)
        for s in kept:
            s.close()
        assert answered_in_time(keys, port) == 200


def test_all_addresses_together_have_so_many_connections(keys):
    with running_door(keys, FakeLink(keys), connections=3) as port, contextlib.ExitStack() as held:
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            try:
                s = socket.create_connection(("127.0.0.1", port), HANG, source_address=(host, 0))
            except OSError:
                pytest.skip("this system has one loopback address")
            held.enter_context(s)
        late = held.enter_context(socket.create_connection(("127.0.0.1", port), HANG))
        assert is_closed(late)


def test_a_slow_body_of_a_site_with_a_key_is_given_up(keys):
    link = FakeLink(keys)
    trust = ssl.create_default_context(cafile=str(keys.ca))
    headers = {**signed(keys.private("north")), "host": "127.0.0.1", "content-length": "1000"}
    head = f"POST {PULL} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    with (
        running_door(keys, link, body_seconds=0.2) as port,
        socket.create_connection(("127.0.0.1", port), HANG) as s,
        trust.wrap_socket(s, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(head.encode() + b"x")
        assert secured.recv(12) == b"HTTP/1.1 408"
        assert ask(keys, port) == 200
    assert len(link.asked) == 1


def test_a_body_is_as_large_as_the_project_says(keys):
    link = FakeLink(keys)
    with running_door(keys, link, body_mib=1) as port:
        assert ask(keys, port, body=bytes(2**20 + 1), path="/v1/fleet/push-object") == 413
        assert ask(keys, port, body=bytes(2**14 + 1)) == 413  # this route has a smaller one
    assert link.asked == []


def test_strangers_are_not_looked_at_after_many_refusals_and_a_site_at_their_address_passes(keys):
    stranger, link = ec.generate_private_key(ec.SECP384R1()), FakeLink(keys)
    with running_door(keys, link, refused_per_minute=4) as port:
        found = [ask(keys, port, stranger) for _ in range(4)] + [ask(keys, port, path="/docs") for _ in range(2)]
        assert found == [401] * 4 + [429] * 2
        assert ask(keys, port, stranger) == 429
        assert ask(keys, port) == 200
    assert len(link.asked) == 1


def test_refusals_are_forgotten_after_a_minute_and_their_number_is_bounded():
    now = [0.0]
    refusals = Refusals(2, lambda: now[0])
    for _ in range(2):
        refusals.add("a")
    assert refusals.too_many("a")
    assert not refusals.too_many("b")
    now[0] = 61.0
    assert not refusals.too_many("a")
    for number in range(2 * ADDRESSES):
        refusals.add(str(number))
    assert len(refusals._seen) == ADDRESSES


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("conections = 3", 'Unknown key "conections" .* did you mean "connections"'),
        ("connections = 0", "Wrong value of connections .* got 0"),
        ("body_seconds = 'long'", "Wrong value of body_seconds .* got 'long'"),
    ],
)
def test_wrong_limits_are_refused_before_anything_starts(line, said, tmp_path, capsys):
    project = tmp_path / "p"
    assert main(["deploy", "init", str(project), *INIT]) == 0
    with (project / "pyproject.toml").open("a") as f:
        f.write(f"\n[tool.fednorms.door]\n{line}\n")
    with pytest.raises(BadInput, match=said):
        Limits.read({k.strip(): eval(v) for k, _, v in [line.partition("=")]}, "pyproject.toml")
    assert main(["deploy", "link", str(project)]) == 2
    assert "[tool.fednorms.door]" in " ".join(capsys.readouterr().err.split())
