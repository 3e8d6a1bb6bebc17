"""`fednorms deploy probe`: it finds nothing open at our door, and finds what is open at Flower's own link."""

import contextlib
import json
import socket

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import uvicorn

from fednorms.cli import main
from fednorms.core.errors import RunFailed
from fednorms.flower.probe import probe
from tests.support.door import FakeLink, Keys, running, running_door


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("project"))


def test_the_door_refuses_everything_and_nothing_reaches_the_link(keys, capsys):
    link = FakeLink(keys)
    with running_door(keys, link) as port:
        command = ["deploy", "probe", f"127.0.0.1:{port}", "--ca", str(keys.ca), "--site", "south"]
        assert main([*command, "--key", str(keys.certificates / "north.key")]) == 0
    assert link.asked == link.registered == []
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"All {len(said) - 2} attempts were refused."
    assert all(line.startswith("refused  ") for line in said[:-2])
    for attempt in (
        "without TLS", "another authority", "Control API", "Runtime API", "pages", "register a key", 'as site "south"',
        "start a run", "unknown key", "without a key", "large body", "another node's messages", "for another node",
    ):  # fmt: skip
        assert any(attempt in line for line in said), attempt


def test_flowers_own_link_is_found_open(keys, capsys):
    """What the documentation of version 0.1 had the operator start: the link itself, with TLS, for everyone."""
    from flwr.superlink.main import create_app

    files = {"ssl_certfile": keys.certificates / "server.pem", "ssl_keyfile": str(keys.certificates / "server.key")}
    server = uvicorn.Server(
        uvicorn.Config(create_app(), log_config=None, log_level="error", lifespan="off", ws="none", **files)
    )
    with running(server) as port:
        assert main(["deploy", "probe", f"127.0.0.1:{port}", "--ca", str(keys.ca), "--site", "south", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["refused"]
    open_ = {a["attempt"] for a in said["attempts"] if not a["refused"]}
    assert any("Control API" in a for a in open_)
    assert any("Runtime API" in a for a in open_)
    assert {"pages and descriptions", 'register a key as site "south"', "register a key"} <= open_
    assert {"connect without TLS", "trust another authority"}.isdisjoint(open_)


def test_a_door_without_tls_is_found_open(keys):
    server = uvicorn.Server(
        uvicorn.Config(FakeLink(keys).door(keys), log_config=None, log_level="error", lifespan="off", ws="none")
    )
    with running(server) as port, pytest.raises(RunFailed, match="has no certificate"):
        list(probe("127.0.0.1", port, keys.ca, "south"))


def test_no_door_or_another_authoritys_is_said(keys, tmp_path, capsys):
    other = Keys(tmp_path)
    with running_door(keys, FakeLink(keys)) as port:
        assert main(["deploy", "probe", f"127.0.0.1:{port}", "--ca", str(other.ca)]) == 1
        assert "has no certificate of" in capsys.readouterr().err
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))  # nobody listens
        assert main(["deploy", "probe", f"127.0.0.1:{s.getsockname()[1]}", "--ca", str(keys.ca)]) == 1
    assert "Cannot reach" in capsys.readouterr().err
    (tmp_path / "no.crt").write_text("no certificate")
    assert main(["deploy", "probe", "127.0.0.1:1", "--ca", str(tmp_path / "no.crt")]) == 2
    assert "is not a file of certificates" in capsys.readouterr().err
    for address in ("server", "server:0", ":8443", "server:x"):
        assert main(["deploy", "probe", address, "--ca", str(keys.ca)]) == 2
        assert "expected HOST:PORT" in capsys.readouterr().err
