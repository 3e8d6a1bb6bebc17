"""dplocal across machines: one noised answer per round, the same bytes for the same request, counted at the site."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import json
import math

import torch
from flwr.app import Context, Message

from fednorms.core.accounting import Guarantee, epsilon_of_answers
from fednorms.core.errors import RunFailed
from fednorms.core.sampling import Participation
from fednorms.core.tree import Tree
from fednorms.core.views import Mechanism
from fednorms.flower import messages
from fednorms.flower.generations import file_name
from fednorms.flower.ledger import Ledger
from fednorms.flower.server import serve
from tests.support.flower_in_process import LocalGrid, config_of, nodes_for, run, travelled

METHOD = "dplocal(noise=2.0) + fedbn"
QUICK = {"training__steps": 2, "evaluate_every": 3, "deploy__wait": 1.0}


class Recording(LocalGrid):
    """Keeps the messages that a site got, to send them again."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.got: list[tuple[int, Message, Context]] = []
        answer = self.app

        def app(message, context):
            if message.metadata.message_type == "train":
                self.got.append((message.content["about"]["round"], message, context))
            return answer(message, context)

        self.app, self.answer = app, answer


def trained(folder, rounds=2, method=METHOD, policy=""):
    """A run of two sites, and the train messages of the first one."""
    config = config_of(method, folder, rounds=rounds, **QUICK)
    grid = Recording(config, folder, {100: {"site": "clean", "policy": policy}, 101: {"site": "faint"}})
    serve(grid, config)
    return grid, [(message, context) for _, message, context in grid.got if context.node_config["site"] == "clean"]


def ledger(folder, site="clean", node=100):
    return Ledger(folder / "state" / str(node), file_name(site))


def model(reply):
    return messages.tree_of(reply.content.array_records["model"])


def test_a_repeated_message_gets_the_same_bytes_and_counts_once(tmp_path):
    grid, asked = trained(tmp_path)
    before = ledger(tmp_path).path.read_bytes()
    first, again = (grid.answer(travelled(asked[1][0]), asked[1][1]) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(model(first).values(), model(again).values(), strict=True))
    assert first.content["about"]["kept"] == again.content["about"]["kept"] == 2
    assert dict(first.content["metrics"]) == {}
    assert ledger(tmp_path).path.read_bytes() == before
    assert [a.round for a in ledger(tmp_path).answers] == [0, 1]


def test_a_stored_answer_that_was_changed_is_not_sent(tmp_path):
    """Noise is drawn once: an answer with other bytes would be a second one."""
    grid, asked = trained(tmp_path)
    (stored,) = (tmp_path / "state" / "100").rglob("answer-000001.safetensors")
    data = bytearray(stored.read_bytes())
    data[-5] ^= 1  # a bit of a tensor
    stored.write_bytes(data)
    reply = grid.answer(travelled(asked[1][0]), asked[1][1])
    assert 'The answer of site "clean" for round 2 cannot be read' in reply.content["about"]["reason"]
    assert not reply.content.array_records


def test_another_request_for_the_same_round_is_refused(tmp_path):
    grid, asked = trained(tmp_path)
    message, context = asked[1]
    tree = messages.tree_of(message.content.array_records["model"])
    tree["conv1.weight"] = tree["conv1.weight"] + 1e-6
    message.content["model"] = messages.array_record(tree)
    reply = grid.answer(message, context)
    assert "has answered round 2 of this run, for another model" in reply.content["about"]["reason"]
    assert not reply.content.array_records


def test_a_round_whose_answer_is_no_longer_stored_is_refused(tmp_path):
    grid, asked = trained(tmp_path, rounds=3)
    reply = grid.answer(*asked[0])
    assert "has answered round 1 of this run" in reply.content["about"]["reason"]
    kept = {p.name for p in (tmp_path / "state" / "100").rglob("answer-*")}
    assert kept == {"answer-000001.safetensors", "answer-000002.safetensors"}


def test_rounds_beyond_the_last_are_refused(tmp_path):
    grid, asked = trained(tmp_path)
    message, context = asked[1]
    message.content["about"]["round"] = 2
    assert "Round 3 is not one of the 2 rounds" in grid.answer(message, context).content["about"]["reason"]


def test_a_server_that_is_restarted_gets_the_lost_answers_again(tmp_path):
    """The reply of a round got lost with its server: the answer was given, so it is not drawn anew."""
    config = config_of(METHOD, tmp_path, rounds=2, **QUICK)
    sent = []

    def die(site, message, reply):
        if message.metadata.message_type == "train" and message.content["about"]["round"] == 1:
            sent.append(model(reply))
            if site == "faint":
                raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        serve(LocalGrid(config, tmp_path, nodes_for(), die), config)
    again = []

    def listen(site, message, reply):
        if message.metadata.message_type == "train":
            again.append(model(reply))
        return reply

    serve(LocalGrid(config, tmp_path, nodes_for(), listen), config)
    assert len(sent) == len(again) == 2
    assert all(
        torch.equal(a, b) for x, y in zip(sent, again, strict=True) for a, b in zip(x.values(), y.values(), strict=True)
    )


def test_epsilon_at_the_site_is_that_of_the_run(tmp_path):
    trained(tmp_path, rounds=3)
    guarantee = Guarantee("dplocal", Mechanism(1.0, 2.0, 1e-5, "client"), Participation(), ("a", "b"))
    assert ledger(tmp_path).epsilon(1e-5) == pytest.approx(guarantee.epsilon(3))
    said = f"3 noised answers of this site in all runs, epsilon {guarantee.epsilon(3):.3g} at delta 1e-05"
    assert ledger(tmp_path).spent(1e-5) == said


def test_a_site_stops_at_its_budget_over_all_runs(tmp_path):
    two, three = (epsilon_of_answers([2.0] * n, 1e-5) for n in (2, 3))
    policy = tmp_path / "site.toml"
    policy.write_text(f"epsilon = {(two + three) / 2}\n")
    nodes = {100: {"site": "clean"}, 101: {"site": "faint", "policy": str(policy)}}
    ours, _ = run(METHOD, tmp_path, nodes=nodes, rounds=3, **QUICK)
    assert ["faint" in row.get("lost", {}) for row in ours.history] == [False, False, True]
    assert f"epsilon would be {three:.3g} at delta 1e-05" in ours.history[2]["lost"]["faint"]
    other, _ = run(METHOD, tmp_path, nodes=nodes, rounds=3, seed=1, deploy__out=str(tmp_path / "two"), **QUICK)
    assert all("faint" in row["lost"] for row in other.history)  # another run does not start from zero


def test_a_method_without_noise_writes_no_ledger(tmp_path):
    run("fedbn", tmp_path, rounds=1, **QUICK)
    assert not list((tmp_path / "state").rglob("ledger*"))


def test_a_damaged_ledger_stops_the_site(tmp_path):
    grid, asked = trained(tmp_path, rounds=1)
    ledger(tmp_path).path.write_text(json.dumps({"answers": [{"round": -1}]}))
    assert "cannot be read" in grid.answer(*asked[0]).content["about"]["reason"]
    with pytest.raises(RunFailed, match="Restore it from a copy"):
        ledger(tmp_path).epsilon(1e-5)


def test_answers_with_different_noise_compose():
    one = epsilon_of_answers([1.0], 1e-5)
    assert epsilon_of_answers([math.sqrt(2), math.sqrt(2)], 1e-5) == pytest.approx(one)
    assert epsilon_of_answers([1.0, 5.0], 1e-5) > one
    assert epsilon_of_answers([], 1e-5) == 0.0


def test_the_hash_of_a_request_covers_everything_that_is_sent():
    from fednorms.core.states import Broadcast
    from fednorms.flower.ledger import request_of

    def sent(t=1, w=1.0, c=1.0, name="w"):
        return Broadcast(t, Tree({name: torch.tensor([w])}), {"p": Tree(c=torch.tensor(c))})

    assert request_of(sent()) == request_of(sent())
    assert len({request_of(s) for s in (sent(), sent(t=2), sent(w=2.0), sent(c=2.0), sent(name="v"))}) == 5
