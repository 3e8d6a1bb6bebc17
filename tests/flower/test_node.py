"""A site's node: it runs only its own code, whatever a bundle holds, and logs what it was asked and what it sent."""

import hashlib
import io
import json
import stat
import sys
import threading
import zipfile

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supercore.task_identity import TaskIdentity

from fednorms.core.errors import BadInput, RunFailed
from fednorms.flower.audit import AuditLog
from fednorms.flower.project import write_project
from fednorms.flower.settings import read
from fednorms.flower.task import Responder, check_bundle, load_app
from tests.support.flower_in_process import config_of, travelled

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower builds bundles so


@pytest.fixture
def config(tmp_path):
    return config_of("fedavg", tmp_path)


@pytest.fixture
def project(tmp_path, config):
    write_project(tmp_path / "p", *read(config))
    return tmp_path / "p"


@pytest.fixture(autouse=True)
def _forget():
    """Every test imports the app of its own project."""
    yield
    sys.modules.pop("fednorms_app", None)


def rewritten(bundle, **files):
    """A bundle with some files changed or added."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(bundle)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name not in files:
                new.writestr(name, old.read(name))
        for name, content in files.items():
            new.writestr(name, content)
    return made.getvalue()


def check(project, bundle):
    check_bundle(project, bundle, hashlib.sha256(bundle).hexdigest())


def hello(run=7):
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    message = Message(RecordDict({"about": ConfigRecord({})}), 1, "query.hello")
    message.metadata.__dict__["_run_id"] = run
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def replied(responder, bundle, config, message=None):
    context = Context(7, 1, {"site": "clean"}, RecordDict(), dict(config))
    digest = hashlib.sha256(bundle).hexdigest()
    return responder.reply(message or hello(), context, Fab(digest, bundle, {}), digest)


# -- bundles ----------------------------------------------------------------------------------------------------------
def test_the_bundle_of_the_sites_own_project_is_accepted(project):
    bundle = build_fab_from_disk(project)
    check(project, bundle)
    names = zipfile.ZipFile(io.BytesIO(bundle)).namelist()
    assert sorted(names) == [".info/CONTENT", "fednorms_app.py", "pyproject.toml"]


def test_a_bundle_with_other_settings_is_accepted(project):
    """What a run may ask of a site is another question than whose code runs."""
    settings = (project / "pyproject.toml").read_bytes().replace(b"rounds = 2", b"rounds = 9")
    assert b"rounds = 9" in settings
    check(project, rewritten(build_fab_from_disk(project), **{"pyproject.toml": settings}))


@pytest.mark.parametrize(
    "name",
    [
        "fednorms_app.py",
        "more.py",
        "sub/fednorms_app.py",
        "../outside.py",
        "sub/../fednorms_app.py/../../outside.py",
        "{root}/outside.py",
        "roster.toml",
        ".info/more",
    ],
)
def test_a_bundle_with_other_files_is_refused(name, project, tmp_path):
    (tmp_path / "outside.py").write_bytes(b"evil")
    bundle = rewritten(build_fab_from_disk(project), **{name.replace("{root}", str(tmp_path)): b"evil"})
    with pytest.raises(BadInput, match="is not the one of this site"):
        check(project, bundle)


def test_a_bundle_that_is_not_one_is_refused(project, tmp_path):
    good = build_fab_from_disk(project)
    with pytest.raises(BadInput, match="does not have the hash"):
        check_bundle(project, good, "0" * 64)
    app = zipfile.ZipFile(io.BytesIO(good)).getinfo("fednorms_app.py")
    start = app.header_offset + 30 + len(app.filename)
    flips = range(start, start + app.compress_size, 7)
    damaged = [good[:i] + bytes([good[i] ^ 64]) + good[i + 1 :] for i in flips]
    for bundle in (b"", b"no zip", good[: len(good) // 2], *damaged):
        with pytest.raises(BadInput):
            check(project, bundle)
    with pytest.raises(BadInput, match="is not the one of this site"):
        check(project, rewritten(good, **{"bomb.py": b"\0" * 2**24}))
    (project / "link.py").symlink_to(tmp_path / "secret.py")
    (tmp_path / "secret.py").write_bytes(b"secret")
    with pytest.raises(BadInput, match="is not the one of this site"):
        check(project, rewritten(good, **{"link.py": b"secret"}))


def test_code_that_comes_with_a_run_is_never_run(project, config, tmp_path, monkeypatch):
    """The attack of the issue: a stranger's bundle ran at the sites. Its code would leave a file behind."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    trace = tmp_path / "it ran"
    code = f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n" + (project / "fednorms_app.py").read_text()
    bundle = rewritten(build_fab_from_disk(project), **{"fednorms_app.py": code})
    reply = replied(Responder(project, tmp_path / "audit.jsonl"), bundle, config)
    assert "A site runs only the code of its own copy" in reply.content["about"]["reason"]
    assert not trace.exists()
    assert not (tmp_path / "flwr").exists()
    asked, refused = AuditLog(tmp_path / "audit.jsonl").lines()
    assert (asked["event"], refused["event"]) == ("asked", "refused")
    assert asked["bundle"] == hashlib.sha256(bundle).hexdigest()
    # The same file does run where it is the site's own.
    (project / "fednorms_app.py").write_text(code)
    assert "card" in replied(Responder(project, tmp_path / "audit.jsonl"), bundle, config).content["about"]
    assert trace.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: (p / "pyproject.toml").unlink(), "names no clientapp"),
        (lambda p: (p / "pyproject.toml").write_text("[tool]"), "names no clientapp"),
        (lambda p: (p / "fednorms_app.py").unlink(), "Cannot import"),
        (lambda p: (p / "fednorms_app.py").write_text("server = 1"), "Cannot import"),
    ],
)
def test_a_project_without_an_app_is_named(change, said, project):
    change(project)
    before = list(sys.path)
    with pytest.raises(BadInput, match=said):
        load_app(project)
    assert sys.path == before


# -- the audit log ----------------------------------------------------------------------------------------------------
def test_the_log_holds_what_was_asked_and_what_was_sent(project, config, tmp_path):
    message = hello(run=7)
    responder = Responder(project, tmp_path / "logs" / "audit.jsonl")
    reply = replied(responder, build_fab_from_disk(project), config, message)
    asked, sent = AuditLog(responder.audit).lines()
    assert {k: asked[k] for k in ("event", "run", "kind", "round", "method")} == {
        "event": "asked", "run": 7, "kind": "hello", "round": 0, "method": "fedavg",
    }  # fmt: skip
    assert (sent["event"], sent["kind"]) == ("sent", "hello")
    assert asked["hash"] == message.object_id
    assert sent["hash"] == travelled(reply).object_id
    assert sent["bytes"] == sum(sent["records"].values()) >= len(reply.content["about"]["card"])
    assert stat.S_IMODE(responder.audit.stat().st_mode) == 0o600


def test_the_log_names_the_method_wherever_the_run_says_it(project, config, tmp_path):
    """A run may bring a whole recipe as one text; the log must not call that "no method"."""
    responder = Responder(project, tmp_path / "audit.jsonl")
    others = {key: value for key, value in config.items() if key != "method"}
    replied(responder, build_fab_from_disk(project), others | {"recipe": 'method = "scaffold + fedbn"'})
    replied(responder, build_fab_from_disk(project), config | {"recipe": 'method = "scaffold"', "method": "fedbn"})
    replied(responder, build_fab_from_disk(project), config | {"method": "no such method ("})
    asked = [line["method"] for line in AuditLog(responder.audit).lines() if line["event"] == "asked"]
    assert asked[:2] == ["scaffold + fedbn", "fedbn"]
    assert len(asked) == 3


def test_nothing_is_answered_that_cannot_be_written_down(project, config, tmp_path):
    (tmp_path / "target").write_text("")
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "target")
    with pytest.raises(BadInput, match="Nothing was answered"):
        replied(Responder(project, tmp_path / "audit.jsonl"), build_fab_from_disk(project), config)
    assert (tmp_path / "target").read_text() == ""


def test_a_failing_app_is_written_down(project, config, tmp_path):
    (project / "fednorms_app.py").write_text("def client(message, context):\n    raise ZeroDivisionError('oh')\n")
    reply = replied(Responder(project, tmp_path / "a.jsonl"), build_fab_from_disk(project), config)
    assert reply.error.reason == "ZeroDivisionError: oh"
    assert AuditLog(tmp_path / "a.jsonl").lines()[1]["reason"] == "ZeroDivisionError: oh"


def test_changed_and_missing_lines_are_noticed(tmp_path):
    log = AuditLog(tmp_path / "a.jsonl")
    for i in range(5):
        log.write("asked", {"round": i, "text": "x" * 3000 * i})
    lines = log.path.read_bytes().splitlines(keepends=True)
    assert [line["round"] for line in log.lines()] == [0, 1, 2, 3, 4]
    for number, damaged in {
        3: [*lines[:2], lines[2].replace(b'"round": 2', b'"round": 9'), *lines[3:]],
        2: [lines[0], *lines[2:]],
        1: lines[1:],
        5: [*lines[:4], lines[4][:-5]],
    }.items():
        log.path.write_bytes(b"".join(damaged))
        if number == 3:
            number = 4  # the line after the changed one tells
        with pytest.raises(RunFailed, match=f"Line {number} of"):
            log.lines()


def test_many_writers_make_one_chain(tmp_path):
    log = AuditLog(tmp_path / "a.jsonl")
    threads = [
        threading.Thread(target=lambda i=i: [log.write("sent", {"who": i, "n": n}) for n in range(5)]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(line["who"], line["n"]) for line in log.lines()]
    assert sorted(found) == [(i, n) for i in range(4) for n in range(5)]
    assert [json.loads(line)["event"] for line in log.path.read_text().splitlines()] == ["sent"] * 20
