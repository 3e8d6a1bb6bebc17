"""Faults between machines, simulated in one process: rounds continue, nothing is lost or counted twice."""

import json
import logging
import shutil
import threading
from typing import ClassVar

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import httpx
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from fednorms.cli import main
from fednorms.core.errors import BadInput, Diverged, RunFailed
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.core.states import ClientState
from fednorms.core.tree import Tree
from fednorms.data import Federation, Preprocessing
from fednorms.data.facts import Facts, SiteFacts
from fednorms.flower import collect, messages
from fednorms.flower.agreement import Card, agreement, read_agreement
from fednorms.flower.generations import Generations
from fednorms.flower.server import serve, server_app
from fednorms.flower.settings import fingerprint, read
from fednorms.reports.report import report
from fednorms.runs.driver import resume
from fednorms.runs.recipe import Recipe
from fednorms.runs.session import Session, open_federation
from fednorms.runs.use.evaluate import evaluate_run
from fednorms.runs.use.export import export
from fednorms.runs.use.judge import judge
from tests.support.flower_in_process import LocalGrid, config_of, nodes_for, reference, run, same_result
from tests.support.pages import read_page
from tests.support.tiny import same

STATEFUL = "scaffold + fedbn"


def loop_with_cohorts(config, cohorts):
    """The reference loop, with the participants of each round given."""
    recipe, _ = read(config)
    found = open_federation(recipe)
    sites = [found.site(n) for n in config["deploy.sites"].split(",")]
    session = Session.open(recipe, Federation(found.name, sites, found.classes, found.preprocessing))
    state = session.engine.setup(initial_state(session.task))
    for cohort in cohorts:
        uploads = session.engine.train(broadcast(session.task, state), cohort).uploads
        state = server_update(session.task, state, uploads)
    return state


def in_round(message, kind, t):
    return message.metadata.message_type == kind and messages.about(message.content)["round"] == t


def test_a_reply_that_the_link_cannot_hand_over_costs_its_site_the_round(tmp_path):
    """A link that fails at one site's reply must not end the run; a link that is gone does."""
    answer = httpx.Response(500, request=httpx.Request("POST", "http://link"))
    failure = httpx.HTTPStatusError("500", request=answer.request, response=answer)

    class Failing(LocalGrid):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            if any(m.has_content() and m.content.array_records and m.metadata.src_node_id == 101 for m in found):
                raise failure
            return found

    config = config_of("fedavg", tmp_path, evaluate_every=5)
    ours = serve(Failing(config, tmp_path, nodes_for()), config)
    assert [set(row["lost"]) for row in ours.history] == [{"faint"}, {"faint"}]
    assert "cannot hand over (500)" in ours.history[0]["lost"]["faint"]
    failure = httpx.ConnectError("gone")
    with pytest.raises(httpx.ConnectError):
        serve(Failing(config, tmp_path, nodes_for()), config | {"deploy.out": str(tmp_path / "other")})


def test_a_lost_reply_is_taken_back_by_the_site(tmp_path):
    def fault(site, message, reply):
        return None if site == "faint" and in_round(message, "train", 1) else reply

    changes = {"rounds": 3, "deploy__deadline": 0.5, "evaluate_every": 3}
    ours, _ = run(STATEFUL, tmp_path, fault=fault, **changes)
    config = config_of(STATEFUL, tmp_path, **changes)
    theirs = loop_with_cohorts(config, [["clean", "faint"], ["clean"], ["clean", "faint"]])
    assert same(ours._state.model, theirs.model)
    assert same(ours._state.parts["scaffold"], theirs.parts["scaffold"])
    assert [row.get("lost", {}) for row in ours.history] == [{}, {"faint": "no reply within 0.5 s"}, {}]
    recipe, _ = read(config)
    kept = Generations(tmp_path / "state" / "101", fingerprint(recipe), "faint")
    assert kept.rounds() == [1, 3]  # the one it continued from, and the newest; round 2 was never accepted


class Crash(Exception):
    pass


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_server_that_dies_in_a_round_continues_bit_for_bit(kind, tmp_path):
    config = config_of(STATEFUL, tmp_path, rounds=3, evaluate_every=1)
    answered = []

    def fault(site, message, reply):
        answered.append(in_round(message, kind, 1 if kind == "train" else 2))
        if sum(answered) == 2:  # both sites have moved on, and the server dies with their replies
            raise Crash
        return reply

    with pytest.raises(Crash):
        serve(LocalGrid(config, tmp_path, nodes_for(), fault), config)
    grid = LocalGrid(config, tmp_path, {7: {"site": "faint"}, 8: {"site": "clean"}})  # new numbers, other disks:
    for old, new in ((100, 8), (101, 7)):
        shutil.copytree(tmp_path / "state" / str(old), tmp_path / "state" / str(new))
    ours = serve(grid, config)
    same_result(ours, reference(config, tmp_path))
    assert sum(kind == "train" for _, kind in grid.log) == 4  # rounds 1 and 2 only


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t.fill_(float("nan")), "which is not finite"),
        (lambda t: t.flatten(), "expected float32 of shape"),
        (lambda t: t.double(), "expected float32 of shape"),
        (None, "expected float32 of shape"),
    ],
)
def test_nonsense_is_left_out_and_named(spoil, reason, tmp_path):
    def fault(site, message, reply):
        if site == "faint" and in_round(message, "train", 0):
            model = messages.tree_of(reply.content.array_records["model"])
            tensor = model.pop("conv1.weight")
            if spoil:
                model["conv1.weight"] = spoil(tensor)
            reply.content["model"] = messages.array_record(model)
        return reply

    ours, _ = run("fedavg", tmp_path, fault=fault)
    config = config_of("fedavg", tmp_path)
    assert reason in ours.history[0]["lost"]["faint"]
    assert "lost" not in ours.history[1]
    assert same(ours._state.model, loop_with_cohorts(config, [["clean"], ["clean", "faint"]]).model)


def test_uploads_of_a_part_that_do_not_match_the_others_are_left_out(tmp_path):
    def fault(site, message, reply):
        if site == "foggy" and message.metadata.message_type == "train":
            up = messages.tree_of(reply.content.array_records["part:scaffold"])
            up.popitem()
            reply.content["part:scaffold"] = messages.array_record(up)
        return reply

    sites = "clean,faint,foggy"
    ours, _ = run("scaffold", tmp_path, nodes=nodes_for(sites), fault=fault, deploy__sites=sites, rounds=1)
    said = "sent head.bias as nothing, most sites send float32 of shape (10,)"
    assert ours.history[0]["lost"] == {"foggy": said}


def test_a_site_that_joins_late_takes_part_from_then_on(tmp_path):
    config = config_of("fedrdn + fedbn", tmp_path, rounds=3, deploy__wait=0.2, evaluate_every=3)
    late = LocalGrid(config, tmp_path, {100: {"site": "clean"}})

    def fault(site, message, reply):
        if in_round(message, "train", 0):
            late.nodes[101] = {"site": "faint"}
        return reply

    late.fault = lambda *given: reply if (reply := given[2]).metadata.message_type != "train" else fault(*given)
    ours = serve(late, config)
    assert [row.get("lost", {}) for row in ours.history] == [{"faint": "not connected"}, {}, {}]
    assert [site for site, kind in late.log if kind == "train"] == ["clean", "clean", "faint", "clean", "faint"]


def test_two_nodes_with_one_name_are_one_site(tmp_path):
    nodes = {**nodes_for(), 300: {"site": "clean"}}
    ours, grid = run("fedavg", tmp_path, nodes=nodes)
    assert ours.history[0]["lost"] == {"node 300": 'a second node is called "clean"; the first one counts'}
    assert ours.history[0]["clients"] == 2
    assert [site for site, kind in grid.log if kind == "train"] == ["clean", "faint"] * 2
    same_result_but_lost(ours, reference(config_of("fedavg", tmp_path), tmp_path))


def same_result_but_lost(ours, theirs):
    for row in ours.history:
        row.pop("lost", None)
    same_result(ours, theirs)


def test_an_unknown_site_is_refused(tmp_path):
    ours, grid = run("fedavg", tmp_path, nodes={**nodes_for(), 300: {"site": "foggy"}}, rounds=1)
    assert ours.history[0]["lost"] == {"node 300": 'site "foggy" is not one of clean, faint'}
    assert ("foggy", "train") not in grid.log


def test_a_site_whose_data_do_not_fit_is_told_why():
    def card(**changes):
        values = {"classes": ("cat", "dog"), "shape": (3, 8, 8), "dtype": "uint8", "preprocessing": Preprocessing()}
        site = SiteFacts("north", "north", images={"train": [1, 2]})
        facts = Facts("north", **(values | changes), sites=(site,), clients=("north",), samples=3)
        return Card(facts, {"train": 3, "val": 0, "test": 0})

    assert card().differs(card()) == ""
    assert card(classes=("cat",)).differs(card()) == """classes: ['cat'], but "north" has ['cat', 'dog']"""
    assert "3x9x8" in card(shape=(3, 9, 8)).differs(card())
    assert Card.from_json(card().to_json()) == card()
    assert read_agreement(agreement(card().facts)).class_counts == [1, 2]


def test_a_site_that_lost_its_disk_is_left_out_and_says_so(tmp_path):
    def fault(site, message, reply):
        if site == "faint" and in_round(message, "train", 0):
            shutil.rmtree(tmp_path / "state" / "101")
        return reply

    ours, _ = run(STATEFUL, tmp_path, fault=fault)
    assert 'The state of site "faint" after round 1 cannot be read' in ours.history[1]["lost"]["faint"]


def test_too_few_sites_stop_the_run_which_then_continues(tmp_path):
    config = config_of("scaffold", tmp_path, deploy__minimum=2, deploy__deadline=0.3)
    calls = []

    def fault(site, message, reply):
        calls.append(site == "faint" and in_round(message, "train", 1))
        return None if calls[-1] else reply

    with pytest.raises(RunFailed, match=r"Round 2: 1 usable .* deploy.minimum is 2 \(faint: no reply within 0.3 s\)"):
        serve(LocalGrid(config, tmp_path, nodes_for(), fault), config)
    ours = serve(LocalGrid(config, tmp_path, nodes_for()), config)
    same_result(ours, reference(config, tmp_path))


def test_a_site_that_never_joins_is_named(tmp_path):
    with pytest.raises(RunFailed, match=r"within 0\.2 s: expected 2, found 1; missing: faint"):
        run("fedavg", tmp_path, nodes={100: {"site": "clean"}}, deploy__minimum=2, deploy__wait=0.2)


def test_divergence_is_sent_as_a_message(tmp_path):
    wild = {"training__lr": 1e30, "rounds": 1}
    with pytest.raises(Diverged, match='Client "clean" diverged in round 1'):
        run("gn", tmp_path, **wild)
    with pytest.raises(RunFailed, match="0 usable answers"):
        run("gn", tmp_path, on_divergence="skip", deploy__out=str(tmp_path / "other"), **wild)


def test_metrics_on_disk_say_what_happened(tmp_path):
    run("fedavg", tmp_path, nodes={**nodes_for(), 300: {"site": "foggy"}}, rounds=1)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["lost"] == {"node 300": 'site "foggy" is not one of clean, faint'}
    assert torch.tensor(row["bytes_up"]) > 0


@pytest.mark.parametrize("what", ["bytes", "nothing", "round"])
def test_bytes_of_an_unknown_sender_never_stop_a_run(what, tmp_path):
    def fault(site, message, reply):
        if site == "faint" and message.metadata.message_type == "train":
            if what == "bytes":
                reply.content["model"]["conv1.weight"].data = b"not an array"
            elif what == "nothing":
                del reply.content["model"]
            else:
                reply.content["about"]["kept"] = 99
        return reply

    ours, _ = run("scaffold", tmp_path, fault=fault, rounds=1)
    said = ours.history[0]["lost"]["faint"]
    assert said.startswith(
        "says that it keeps the state after round 99" if what == "round" else "sent a message that cannot be"
    )


@pytest.mark.parametrize("text", ["fedavg", "fedbn", "scaffold + fedrdn", "ditto"])
def test_models_are_collected_at_the_server_and_at_the_sites(text, tmp_path):
    run(text, tmp_path)
    there = tmp_path / "run"
    reference(config_of(text, tmp_path), tmp_path)
    if text == "fedbn":
        with pytest.raises(BadInput, match="Export a site's model there"):
            export(there, tmp_path / "all")
        for ask in (evaluate_run, judge):
            with pytest.raises(BadInput, match=r"across machines, so its images are at the sites.*--data FOLDER"):
                ask(there)
        with pytest.raises(BadInput, match="Export a site's model there"):
            judge(there, open_federation(read(config_of(text, tmp_path))[0]))
        with pytest.raises(BadInput, match="flwr run PROJECT here"):
            resume(there)
        with pytest.raises(BadInput, match=r"No state of site .faint.*state="):
            collect.export_at_site(there, "faint", tmp_path / "none", tmp_path / "nowhere")
        page = read_page(report(there))
        assert "flwr run PROJECT here" in page.text
        assert "fednorms run" not in page.text
        assert "fednorms evaluate" not in page.text
    elif text != "scaffold + fedrdn":
        export(there, tmp_path / "all")
    command = ["deploy", "export", str(there), "--site", "faint", "--out", str(tmp_path / "ours")]
    assert main([*command, "--state", str(tmp_path / "state" / "101")]) == 0
    card = (tmp_path / "ours" / "MODEL_CARD.md").read_text()
    assert "| faint | yes | 0 |" not in card
    assert "Trained across machines, 2 sites" in card
    export(tmp_path / "loop", tmp_path / "theirs", site="faint")
    a, b = (load_file(tmp_path / which / "model.safetensors") for which in ("ours", "theirs"))
    assert same(a, b)


@pytest.mark.parametrize("text", ["scaffold", "scaffold(control='gradient') + fedbn", "fedprox(mu=0.1) + fednova"])
def test_an_export_finds_the_state_under_the_recipe_that_the_site_was_given(text, tmp_path):
    given = Recipe(method=text, weights="start.pt")
    Generations(tmp_path, fingerprint(given), "north").save(ClientState(1, Tree(w=torch.ones(1)), {}), accepted=0)
    assert collect._generations(tmp_path, given.settled(), "north").rounds() == [1]


def test_a_cut_off_federation_json_is_one_message_and_can_be_written_again(tmp_path, caplog, capsys):
    config = config_of("fedavg", tmp_path)
    whole = serve(LocalGrid(config, tmp_path, nodes_for()), config)
    file = tmp_path / "run" / "federation.json"
    content = file.read_bytes()
    file.write_bytes(content[:40])
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    try:
        server_app()(LocalGrid(config, tmp_path, nodes_for()), context)
    except RunFailed as error:
        logging.getLogger("flwr").error("%s raised an exception", "ServerApp", exc_info=error)  # as Flower does
    last = caplog.records[-1]
    assert last.getMessage().startswith(f"fednorms: Cannot read {file} (")
    assert "`flwr run`" in last.getMessage()
    assert last.exc_info is None
    command = ["deploy", "export", str(tmp_path / "run"), "--site", "faint", "--out", str(tmp_path / "ours")]
    assert main(command) != 0
    said = capsys.readouterr().err
    assert "`flwr run`" in said
    assert "Traceback" not in said
    file.unlink()
    again = serve(LocalGrid(config, tmp_path, nodes_for()), config)
    assert file.read_bytes() == content
    same_result(again, whole)


def test_a_reply_that_is_uploaded_forever_costs_only_its_site(tmp_path, monkeypatch):
    """Flower waits for the rest of a reply in `pull_messages`: the round must end at its deadline all the same."""
    monkeypatch.setattr("fednorms.flower.roster.PATIENCE", 0.2)
    over = threading.Event()

    class Slow(LocalGrid):
        threads: ClassVar[list] = []

        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            if any(m.metadata.src_node_id == 100 and m.metadata.message_type == "train" for m in found):
                self.threads.append(threading.current_thread())
                over.wait()
            return found

    config = config_of("fedavg", tmp_path, rounds=3, training__steps=2, deploy__wait=1.0, deploy__deadline=1.0)
    try:
        result = serve(Slow(config, tmp_path, nodes_for()), config)
    finally:
        over.set()
    said = [row["lost"]["clean"] for row in result.history]
    assert said == ["no reply within 1 s", *["its last reply is still being uploaded"] * 2]
    assert len(Slow.threads) == 1  # it is not asked again in the meantime
