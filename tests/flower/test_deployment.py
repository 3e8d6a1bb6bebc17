"""A deployment as documented, in real processes: a link behind its door, the sites' nodes, and strangers."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from fednorms.flower.audit import AuditLog
from tests.flower.test_processes import PATIENT, assert_equals_the_loop, locked, rows
from tests.support.flower_in_process import SITES, config_of
from tests.support.flower_processes import BIN, Cluster, free_port


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as made:
        yield made


def deployed(cluster, config) -> Path:
    """The project of a config, with its certificates, and its link."""
    project = cluster.project(config)
    assert cluster.deploy("certificates", str(project)).returncode == 0
    cluster.door(project)
    return project


def descendants(process: int) -> list[int]:
    """The numbers of the processes that a process has started, and those of theirs."""
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout.split()
    return [int(n) for n in found] + [n for child in found for n in descendants(int(child))]


def running(process: int) -> bool:
    stat = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False).stdout
    return bool(stat) and not stat.startswith("Z")


def audit(cluster, site) -> list[dict]:
    return AuditLog(cluster.folder / "state" / site / f"audit-{site}.jsonl").lines()


def test_a_deployment_equals_the_loop_and_keeps_its_logs(cluster, tmp_path):
    config = config_of("scaffold + fedbn", tmp_path, **PATIENT)
    project = deployed(cluster, config)
    for site in SITES.split(","):
        cluster.site(project, site)
    out = cluster.finish(config)
    assert "lost" not in rows(out)[0]
    assert_equals_the_loop(out, config, tmp_path)
    for site in SITES.split(","):
        lines = audit(cluster, site)
        told = [(line["event"], line["kind"], line["round"]) for line in lines]
        kinds = [("hello", 0), ("train", 1), ("train", 2), ("evaluate", 2)]
        assert told == [(event, *kind) for kind in kinds for event in ("asked", "sent")]
    log = (tmp_path / "link.log").read_text()
    assert log.count("Activated node_id") == 2


@pytest.mark.slow
def test_no_stranger_gets_in(cluster, tmp_path):
    """Every attempt of the issue's attack, with Flower's own tools: none reaches the link, and the sites train on."""
    config = config_of("fedavg", tmp_path, rounds=1, **PATIENT)
    project, other = deployed(cluster, config), cluster.project(config)
    assert cluster.deploy("certificates", str(other)).returncode == 0
    ours, theirs = project / "certificates", other / "certificates"
    cluster.site(project, "clean", key=theirs / "clean.key", name="wrong-key")
    cluster.site(project, "clean", ca=theirs / "ca.crt", name="wrong-authority")
    plain = [str(BIN / "flower-supernode"), "--superlink", f"127.0.0.1:{cluster.door_port}", "--max-retries", "1"]
    trusting = ["--root-certificates", str(ours / "ca.crt")]
    no_key = cluster._start("no-key", *plain, "--port", str(free_port()), *trusting)
    no_tls = cluster._start("no-tls", *plain, "--port", str(free_port()), "--insecure")
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "config.toml").write_text(
        f'[superlink.door]\naddress = "127.0.0.1:{cluster.door_port}"\n'
        f"root-certificates = {json.dumps(str(ours / 'ca.crt'))}\n"
    )
    outside = cluster.env | {"FLWR_HOME": str(tmp_path / "stranger")}
    for command in (
        ["run", str(other), "door"],
        ["supernode", "register", str(theirs / "clean.pub"), "door", "--name", "clean"],
        ["supernode", "list", "door"],
        ["ls", "door"],
    ):
        done = subprocess.run(
            [str(BIN / "flwr"), *command], env=outside, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0, command
    done = cluster.deploy(
        "probe", f"127.0.0.1:{cluster.door_port}", "--ca", str(ours / "ca.crt"), "--site", "faint",
        "--key", str(ours / "clean.key"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for site in SITES.split(","):
        cluster.site(project, site)
    out = cluster.finish(config)
    assert "lost" not in rows(out)[0]
    assert_equals_the_loop(out, config, tmp_path)
    cluster.wait(lambda: no_key.poll() is not None and no_tls.poll() is not None, "they go on trying")
    for name in ("wrong-key", "wrong-authority"):
        log = tmp_path / f"{name}.log"
        cluster.wait(lambda log=log: "ended (exit code" in log.read_text(), f"{name} was not refused")
    for name in ("wrong-key", "wrong-authority", "no-key", "no-tls"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "SuperNode ID:" not in log, name
        assert "address already in use" not in log
    assert (tmp_path / "link.log").read_text().count("Activated node_id") == 2


@pytest.mark.slow
def test_the_code_of_another_bundle_never_runs_at_a_site(cluster, tmp_path):
    """Even the operator brings no code to a site: this bundle would leave a file behind at every import."""
    config = config_of("fedavg", tmp_path, rounds=1, **PATIENT)
    project = deployed(cluster, config)
    for site in SITES.split(","):
        cluster.site(project, site)
    evil, trace = cluster.project(config), tmp_path / "it ran in"
    trace.mkdir()
    app = evil / "fednorms_app.py"
    app.write_text(
        f"import os, pathlib, sys\npathlib.Path({str(trace)!r}, pathlib.Path(sys.argv[0]).name).touch()\n"
        + app.read_text()
    )
    cluster.flwr("run", str(evil))
    for site in SITES.split(","):
        log = cluster.folder / "state" / site / f"audit-{site}.jsonl"
        cluster.wait(lambda log=log: log.exists() and '"refused"' in log.read_text(), f"{site} has refused nothing")
        assert "is not the one of this site" in audit(cluster, site)[-1]["reason"]
    assert {path.name for path in trace.iterdir()} == {"flwr-serverapp"}  # the operator's own machine


@pytest.mark.slow
def test_a_key_revoked_in_a_running_round_and_a_new_one(cluster, tmp_path):
    config = config_of("scaffold", tmp_path, rounds=200, **PATIENT)
    project = deployed(cluster, config)
    for site in SITES.split(","):
        cluster.site(project, site)
    run, out = cluster.submit(config), Path(config["deploy.out"])
    cluster.wait_in_run(run, lambda: bool(rows(out)), "no first round")
    assert cluster.deploy("revoke", str(project), "--site", "faint").returncode == 0
    cluster.wait_in_run(run, lambda: "faint" in rows(out)[-1].get("lost", {}), "it still counts")
    first = next(row for row in rows(out) if "lost" in row)
    assert first["lost"]["faint"] in ("its key was revoked", "not connected")
    log = tmp_path / "node-faint.log"
    cluster.wait_in_run(run, lambda: "If the server refuses" in log.read_text(), "its node goes on")
    cluster.kill(cluster.needed["faint"])
    new = tmp_path / "faint.key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(new)], check=True)
    assert cluster.deploy("enroll", str(project), "--site", "faint", "--key", f"{new}.pub").returncode == 0
    cluster.site(project, "faint", key=new)
    cluster.wait_in_run(run, lambda: "faint" not in rows(out)[-1].get("lost", {}), "the new key does not count")


@pytest.mark.slow
def test_flowers_node_is_started_again_and_counts_again(tmp_path):
    with Cluster(tmp_path, patient=False) as cluster:
        config = config_of("scaffold", tmp_path, rounds=200, **PATIENT)
        project = deployed(cluster, config)
        for site in SITES.split(","):
            cluster.site(project, site)
        run, out = cluster.submit(config), Path(config["deploy.out"])
        cluster.wait_in_run(run, lambda: bool(rows(out)), "no first round")
        found = subprocess.run(
            ["pgrep", "-P", str(cluster.needed["faint"].pid), "-f", "flower-supernode"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        subprocess.run(["kill", f"-{signal.SIGKILL}", *found.stdout.split()], check=True)
        cluster.wait_in_run(run, lambda: "faint" in rows(out)[-1].get("lost", {}), "nobody misses it")
        cluster.wait_in_run(run, lambda: "lost" not in rows(out)[-1], "it does not come back")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the process group", "the command"])
def test_a_killed_link_continues_bit_for_bit_behind_its_door(killed, cluster, tmp_path):
    """The new door has never seen the nodes; the link's database has. Nothing of the killed link stays."""
    config = config_of("scaffold + fedbn", tmp_path, rounds=4, **PATIENT)
    project = deployed(cluster, config)
    for site in SITES.split(","):
        cluster.site(project, site)
    run, out = cluster.submit(config), Path(config["deploy.out"])
    cluster.wait_in_run(run, lambda: len(rows(out)) >= 2, "no second round")
    link = cluster.needed.pop("link")
    started = descendants(link.pid)
    assert len(started) >= 3  # Flower's link, its executor, and the app
    if killed == "the command":
        os.kill(link.pid, signal.SIGKILL)  # what it started gets no signal
        cluster.wait(lambda: not any(map(running, started)), "what the link started goes on")
    cluster.kill(link)
    cluster.wait(lambda: not locked(out), "the ServerApp does not end with its link")
    cluster.wait(lambda: not any(map(running, started)), "what the link started goes on")
    assert not (out / "summary.json").exists()
    cluster.door(project)
    assert_equals_the_loop(cluster.finish(config), config, tmp_path)
