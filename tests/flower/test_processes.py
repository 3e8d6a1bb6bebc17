"""SuperLink, SuperNodes and apps as real processes on the loopback interface, started with Flower's own programs."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from fednorms.core.errors import RunFailed
from fednorms.explain.deployable import obstacle
from fednorms.flower.settings import read
from fednorms.methods.registry import load_all, method, names
from fednorms.runs.session import open_federation
from fednorms.runs.store.directory import RunDirectory
from fednorms.runs.use.open import open_run
from tests.support.flower_in_process import SITES, config_of, reference, repeatable_form, without_times
from tests.support.flower_processes import Cluster
from tests.support.tiny import same
from tests.support.waiting import HANG

load_all()
PATIENT = {"deploy__wait": HANG, "deploy__deadline": HANG}  # for runs that do not test late sites


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as made:
        yield made


def rows(out: Path) -> list[dict]:
    """The rows of a run so far; a line without its end is still being written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def locked(out: Path) -> bool:
    """Whether a process is writing the run."""
    try:
        with RunDirectory(out).lock():
            return False
    except RunFailed:
        return True


def assert_equals_the_loop(out: Path, config: dict, folder: Path) -> None:
    ours, theirs = open_run(out), reference(config, folder)
    assert list(ours.state.model) == list(theirs._state.model)
    assert same(ours.state.model, theirs._state.model)
    assert [{k: v for k, v in r.items() if k != "lost"} for r in without_times(rows(out))] == without_times(
        theirs.history
    )


def equals_the_loop(cluster: Cluster, text: str, **changes) -> None:
    folder = cluster.folder / re.sub(r"\W+", "-", text)
    folder.mkdir()
    config = config_of(text, folder, **PATIENT, **changes)
    assert_equals_the_loop(cluster.finish(config), config, folder)


def start(cluster: Cluster, sites: str = SITES, **config) -> None:
    cluster.link()
    for site in sites.split(","):
        cluster.node(site, **{"attribute.modality": site}, **config)


def test_waiting_ends_when_a_process_ends_or_nothing_happens(cluster):
    hung = "while true; do echo retrying in 0.1 s; sleep 0.1; done"
    cluster.needed["link"] = cluster._start("link", "sh", "-c", hung)
    with pytest.raises(AssertionError, match=r"no run: no news in any log for 0.5 s"):
        cluster.wait(lambda: False, "no run", hang=0.5)
    cluster.needed["clean"] = cluster._start("node-clean", "sh", "-c", "echo because")
    with pytest.raises(AssertionError, match=r"no run: clean ended\n(.|\n)*because"):
        cluster.wait(lambda: False, "no run")


@pytest.mark.slow  # test_deployment.py has the same through the door
def test_real_processes_equal_the_loop(cluster):
    """One run of two rounds with state, tensors that stay at a site, and an upload of a part."""
    start(cluster)
    equals_the_loop(cluster, "scaffold + fedbn")


@pytest.mark.slow
@pytest.mark.timeout(24 * 3600)  # many runs one after the other; Cluster finds out if one hangs
def test_every_deployable_method_equals_the_loop_in_real_processes(cluster):
    start(cluster)
    for text in names():
        if not obstacle(method(text)):
            equals_the_loop(cluster, repeatable_form(text))


@pytest.mark.slow
def test_a_node_killed_mid_round_is_missed_and_comes_back(tmp_path):
    with Cluster(tmp_path, patient=False) as cluster:  # the node has to be taken for dead before a new one counts
        start(cluster)
        config = config_of("scaffold", tmp_path, rounds=100, **PATIENT)
        run, out = cluster.submit(config), Path(config["deploy.out"])

        def missed() -> list[int]:
            return [row["round"] for row in rows(out) if "faint" in row.get("lost", {})]

        log = tmp_path / "node-faint.log"
        working = "Receiving: train message"
        cluster.wait_in_run(run, lambda: log.read_text(errors="replace").count(working) >= 2, "no second round")
        assert not missed()
        cluster.kill(cluster.needed["faint"])
        cluster.node("faint", **{"attribute.modality": "faint"})  # a new number, the same name and disk
        cluster.wait_in_run(run, lambda: bool(missed()), "nobody misses it")
        cluster.wait_in_run(run, lambda: rows(out)[-1]["round"] not in missed(), "it does not come back")
    assert missed()[0] >= 2
    assert missed() == list(range(missed()[0], missed()[-1] + 1))


@pytest.mark.slow
def test_a_node_that_joins_late_takes_part(cluster, tmp_path):
    cluster.link()
    cluster.node("clean")
    # The server waits this long for the missing node; the other one must have joined by then.
    config = config_of("scaffold", tmp_path, rounds=100, **(PATIENT | {"deploy__wait": 180.0}))
    run, out = cluster.submit(config), Path(config["deploy.out"])
    cluster.wait_in_run(run, lambda: bool(rows(out)), "no first round")
    cluster.node("faint")
    cluster.wait_in_run(run, lambda: "lost" not in rows(out)[-1], "it is not taken in")
    *before, _ = rows(out)
    assert [row["lost"] for row in before] == [{"faint": "not connected"}] * len(before)
    assert before


@pytest.mark.slow
def test_a_node_slower_than_the_deadline_is_left_out(cluster, tmp_path):
    start(cluster)
    config = config_of("scaffold", tmp_path, rounds=100, **(PATIENT | {"deploy__deadline": 180.0}))
    run, out = cluster.submit(config), Path(config["deploy.out"])
    cluster.wait_in_run(run, lambda: bool(rows(out)), "no first round")
    os.killpg(cluster.needed["faint"].pid, signal.SIGSTOP)  # alive, but it does nothing
    cluster.wait_in_run(run, lambda: "lost" in rows(out)[-1], "nobody misses it")
    assert rows(out)[-1]["lost"] == {"faint": "no reply within 180 s"}


@pytest.mark.slow
def test_a_killed_server_continues_bit_for_bit(cluster, tmp_path):
    database = ["--database", str(tmp_path / "link.db")]  # without it a new link knows none of the nodes, and they end
    link = cluster.link(*database)
    for site in SITES.split(","):
        cluster.node(site)
    config = config_of("scaffold + fedbn", tmp_path, rounds=4, **PATIENT)
    out = Path(config["deploy.out"])
    run = cluster.submit(config)
    cluster.wait_in_run(run, lambda: len(rows(out)) >= 2, "no second round")
    cluster.kill(link)  # the nodes stay and connect again
    cluster.wait(lambda: not locked(out), "the ServerApp does not end with its SuperLink")
    assert not (out / "summary.json").exists()
    cluster.link(*database)
    assert_equals_the_loop(cluster.finish(config), config, tmp_path)


@pytest.mark.slow
def test_the_same_project_in_flowers_simulation(cluster, tmp_path):
    """Virtual nodes are the sites of the recipe's federation, in its order."""
    pytest.importorskip("ray", reason="Flower's simulation is an extra of its own: pip install 'flwr[simulation]'")
    cluster.env["XDG_STATE_HOME"] = str(tmp_path / "state")
    cluster.link("--simulation")
    config = config_of("scaffold + fedbn + fedrdn", tmp_path, **PATIENT) | {"deploy.sites": "", "deploy.minimum": 5}
    out = cluster.finish(
        config, "--federation-config", "num-supernodes=5 client-resources-num-cpus=1 init-args-num-cpus=2"
    )
    everyone = ",".join(s.name for s in open_federation(read(config)[0]).clients)
    assert_equals_the_loop(out, config | {"deploy.sites": everyone}, tmp_path)
