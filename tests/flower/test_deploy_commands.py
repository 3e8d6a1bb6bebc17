"""The commands of a deployment's server and of a site: what they write, and what they refuse before anything starts."""

import json
import logging
import socket

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from fednorms.cli import main
from fednorms.flower import link as link_module
from fednorms.flower import processes
from fednorms.flower.audit import AuditLog
from fednorms.flower.keys import SiteKeys, new_key, read_keys
from tests.flower.test_deploy import INIT, images
from tests.support.door import Keys


@pytest.fixture
def project(tmp_path):
    """A project with its certificates."""
    assert main(["deploy", "init", str(tmp_path / "p"), *INIT, "--host", "127.0.0.1"]) == 0
    assert main(["deploy", "certificates", str(tmp_path / "p")]) == 0
    return tmp_path / "p"


@pytest.fixture(autouse=True)
def _no_process(monkeypatch):
    """No test here starts a program of Flower's."""

    def start(name, options, environment=None):
        raise AssertionError(f"{name} was started")

    for module in ("link", "node"):
        monkeypatch.setattr(f"fednorms.flower.{module}.start", start)
    monkeypatch.setattr(processes, "start", start)


def test_certificates_are_made_once_and_renewed_on_request(project, capsys):
    capsys.readouterr()
    assert main(["deploy", "certificates", str(project), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": []}
    assert main(["deploy", "certificates", str(project), "--renew", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["files"]
    assert [path.rpartition("/")[2] for path in made] == ["server.key", "server.pem"]
    assert main(["deploy", "certificates", str(project), "--days", "0"]) == 2
    assert "--days is 1 to 3650" in capsys.readouterr().err


def test_enroll_and_revoke_change_the_roster(project, tmp_path, capsys):
    before = read_keys(project / "roster.toml")
    public = new_key()[1]
    (tmp_path / "new.pub").write_text(public + " north@example")
    enroll = ["deploy", "enroll", str(project), "--key", str(tmp_path / "new.pub")]
    assert main([*enroll, "--site", "north"]) == 0
    after = read_keys(project / "roster.toml")
    assert after.keys == {**before.keys, "north": public}
    assert after.revoked == {before.keys["north"]: "north"}
    assert main(["deploy", "revoke", str(project), "--site", "north"]) == 0
    assert list(read_keys(project / "roster.toml").keys) == ["south"]
    last = (project / "roster.toml").read_bytes()
    for arguments, said in {
        (*enroll, "--site", "north"): "was revoked",
        (*enroll, "--site", "nord"): 'did you mean "north"',
        (*enroll[:4], str(project / "README.md"), "--site", "north"): "is not a public key",
        (*enroll[:4], str(project / "nowhere"), "--site", "north"): "Cannot read --key",
        (*enroll[:3], "--site", "north"): "give --key, --images, or both",
        (*enroll[:3], "--site", "north", "--images", "0"): "--images is at least 1; got 0",
        ("deploy", "revoke", str(project), "--site", "north"): 'Site "north" has no key',
        ("deploy", "revoke", str(tmp_path), "--site", "north"): "Cannot read the roster",
    }.items():
        capsys.readouterr()
        assert main(list(arguments)) == 2
        assert said in capsys.readouterr().err
    assert (project / "roster.toml").read_bytes() == last


def test_a_link_that_cannot_work_is_not_started(project, tmp_path, capsys):
    command = ["deploy", "link", str(project)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([*command, "--link-port", str(taken.getsockname()[1])]) == 2
    assert "is in use. Choose another one with --link-port" in capsys.readouterr().err
    for site in ("north", "south"):
        assert main(["deploy", "revoke", str(project), "--site", site]) == 0
    assert main(command) == 2
    assert "No site has a key" in capsys.readouterr().err
    (project / "roster.toml").unlink()
    assert main(command) == 2
    assert f"has no roster.toml. Write it: fednorms deploy certificates {project}" in " ".join(
        capsys.readouterr().err.split()
    )
    over = Keys(tmp_path / "over", days=-3)
    (project / "certificates" / "server.pem").write_bytes((over.certificates / "server.pem").read_bytes())
    assert main(command) == 2
    assert "server.pem ended 3 days ago" in capsys.readouterr().err
    (project / "certificates" / "ca.crt").unlink()
    assert main(command) == 2
    assert main(["deploy", "link", str(tmp_path / "nowhere")]) == 2
    assert "is not a project" in capsys.readouterr().err


def test_flowers_link_is_started_on_loopback_only(project, monkeypatch, capsys):
    started = []

    def start(name, options, environment=None):
        started.append((name, options, environment))
        raise KeyboardInterrupt

    monkeypatch.setattr(link_module, "start", start)
    monkeypatch.setattr(link_module, "terminable", lambda: None)
    monkeypatch.setattr(link_module, "_log_to_stderr", lambda: None)
    monkeypatch.setattr(link_module.os, "umask", lambda mask: None)
    assert main(["deploy", "enroll", str(project), "--site", "north", "--images", "60"]) == 0
    capsys.readouterr()
    assert main(["deploy", "link", str(project), "--host", "0.0.0.0"]) == 130
    assert "note: The roster has no number of images for south" in capsys.readouterr().err
    assert main(["deploy", "enroll", str(project), "--site", "south", "--images", "60"]) == 0
    started.clear()
    assert main(["deploy", "link", str(project), "--host", "0.0.0.0"]) == 130
    assert "note:" not in capsys.readouterr().err
    ((name, options, environment),) = started
    assert name == "flower-superlink"
    assert options[options.index("--host") + 1] == "127.0.0.1"
    assert "0.0.0.0" not in options
    roster, lock = (str((project / name).resolve()) for name in ("roster.toml", "link.db.lock"))
    assert environment == {"FEDNORMS_ROSTER": roster, "FEDNORMS_LINK": lock}
    assert options[options.index("--isolation") + 1] == "process"  # so that running an app needs the secret
    assert not list(project.glob("link.db*"))


def test_a_node_that_cannot_work_is_not_started(project, tmp_path, capsys):
    made = project / "certificates"
    data = images(tmp_path / "north")
    good = {"--site": "north", "--data": data, "--ca": made / "ca.crt", "--key": made / "north.key"}
    over = Keys(tmp_path / "over", days=-3)
    (tmp_path / "locked").write_text("no key")
    for change, said in (
        ({"--site": "nord"}, 'did you mean "north"'),
        ({"--data": tmp_path / "nowhere"}, "--data is the site's folder"),
        ({"--ca": tmp_path / "nowhere"}, "Cannot read the certificate"),
        ({"--ca": over.certificates / "server.pem"}, "ended 3 days ago"),
        ({"--key": tmp_path / "locked"}, "Cannot read the private key"),
        ({"--key": made / "north.pub"}, "Cannot read the private key"),
        ({"--server": "server"}, "expected HOST:PORT"),
        ({"--config": "modality"}, "--config takes KEY=VALUE"),
        ({"--config": "site=south"}, 'does not take "site"'),
    ):
        words = [str(word) for pair in {**good, **change}.items() for word in pair]
        assert main(["deploy", "node", str(project), *words]) == 2, change
        assert said in capsys.readouterr().err


def test_the_audit_log_is_shown_and_checked(tmp_path, capsys):
    log = AuditLog(tmp_path / "audit-north.jsonl")
    log.write("asked", {"run": 7, "kind": "train", "round": 1, "method": "fedbn", "bytes": 10})
    log.write("sent", {"run": 7, "kind": "train", "round": 1, "method": "fedbn", "bytes": 1234})
    log.write("refused", {"run": 8, "kind": "hello", "round": 0, "method": "x", "bytes": 99, "reason": "[other] code"})
    assert main(["deploy", "audit", str(log.path)]) == 0
    said = capsys.readouterr().out
    assert "[other] code" in said
    assert "No line was changed. 1 reply, 1,234 bytes sent." in said
    assert main(["deploy", "audit", str(log.path), "--json"]) == 0
    assert [line["event"] for line in json.loads(capsys.readouterr().out)["lines"]] == ["asked", "sent", "refused"]
    log.path.write_bytes(log.path.read_bytes().replace(b"1234", b"1"))
    assert main(["deploy", "audit", str(log.path)]) == 1
    assert "Line 3 of" in capsys.readouterr().err
    assert main(["deploy", "audit", str(tmp_path / "nowhere")]) == 2


def test_a_flood_of_refusals_does_not_fill_the_log():
    sparse, written = link_module.Sparse(), []
    for i in range(1000):
        record = logging.LogRecord("door", logging.WARNING, "", 0, "refused %s", (i,), None)
        record.created = 1e9 + (i == 999) * 60
        if sparse.filter(record):
            written.append(record.getMessage())
    assert len(written) == link_module.LINES + 1
    assert written[-1] == f"refused 999 ({999 - link_module.LINES} lines before this one were left out)"


@pytest.mark.parametrize("speaker", ["fednorms.door", "uvicorn.error", "asyncio"])
def test_nobody_fills_the_log_through_the_server_of_the_door(speaker, monkeypatch, capsys):
    """Uvicorn writes a line about every request that is not HTTP, before the door sees it."""
    for name in ("fednorms.door", "uvicorn.error", "asyncio"):
        for attribute in ("handlers", "propagate"):
            monkeypatch.setattr(logging.getLogger(name), attribute, getattr(logging.getLogger(name), attribute))
    link_module._log_to_stderr()
    for _ in range(1000):
        logging.getLogger(speaker).warning("Invalid HTTP request received.")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == link_module.LINES
    assert all(line.endswith("door: Invalid HTTP request received.") for line in lines)


def test_enroll_fixes_the_number_of_images(project, capsys):
    path = project / "roster.toml"
    before = read_keys(path) if path.exists() else SiteKeys()
    assert main(["deploy", "enroll", str(project), "--site", "north", "--images", "1200"]) == 0
    assert 'Site "north" may have at most 1,200 training images.' in capsys.readouterr().out
    found = read_keys(path)
    assert (found.images, found.keys) == ({"north": 1200}, before.keys)
    path.write_text(path.read_text().replace("1200", '"many"'))
    assert main(["deploy", "enroll", str(project), "--site", "north", "--images", "9"]) == 2
    assert "expected a number of at least 1, found 'many'" in capsys.readouterr().err
