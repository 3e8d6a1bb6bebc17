"""One of three sites sends crafted replies: the server never raises, and the honest sites finish their run."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import json
import math
from dataclasses import replace

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fednorms.core import border
from fednorms.core.errors import BadInput, Diverged, RunFailed
from fednorms.core.states import ServerState
from fednorms.core.tree import Tree
from fednorms.flower import schema
from fednorms.flower.agreement import Card, majority
from fednorms.flower.server import serve
from fednorms.methods.fedrdn import FedRDN
from tests.flower.test_faults import loop_with_cohorts
from tests.support import hostile
from tests.support.flower_in_process import LocalGrid, config_of, nodes_for
from tests.support.flower_in_process import run as run_in_process
from tests.support.hostile import HONEST, HOSTILE, INF, NAN, honest_run, run_against
from tests.support.replay import SITES, recorded
from tests.support.tiny import same

QUICK = {"rounds": 1, "training__steps": 2, "deploy__wait": 1.0, "evaluate_every": 1}

CARDS = {
    "train as text": hostile.card(train="5"),
    "train null": hostile.card(train=None),
    "train a list": hostile.card(train=[1]),
    "train NaN": hostile.card(train=NAN),
    "train infinite": hostile.card(train=INF),
    "train true": hostile.card(train=True),
    "train 10^400": hostile.card(train=10**400),
    "train 10^15": hostile.card(train=10**15),
    "train negative": hostile.card(train=-3),
    "test negative": hostile.card(test=-1),
    "counts of one class": hostile.card(counts=[3]),
    "counts of other images": hostile.card(counts=[10**6] * 10),
    "shape of two": hostile.card(shape=[8, 8]),
    "shape of texts": hostile.card(shape=["3", "8", "8"]),
    "shape of 10^6": hostile.card(shape=[3, 10**6, 10**6]),
    "shape of zeros": hostile.card(shape=[0, 8, 8]),
    "another shape": hostile.card(shape=[3, 9, 8]),
    "another dtype": hostile.card(dtype="float32"),
    "dtype of objects": hostile.card(dtype="object"),
    "other classes": hostile.card(classes=list("abcdefghij")),
    "classes twice": hostile.card(classes=["a"] * 10),
    "no classes": hostile.card(classes=[]),
    "std of zero": hostile.card(preprocessing={"mean": [0.5], "std": [0.0]}),
    "unknown protocol": hostile.card(protocol={"metric": "luck"}),
    "order as text": hostile.card(order="first"),
    "nested 10^5 deep": hostile.card_text("[" * 10**5 + "]" * 10**5),
    "nested objects": hostile.card_text('{"site":' * 10**5 + "1" + "}" * 10**5),
    "no JSON": hostile.card_text("clean"),
    "no card": hostile.about_nothing,
    "a card that is a number": hostile.words(card=5),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_that_cannot_be_used_costs_its_site_the_run(case):
    ours = run_against(CARDS[case], "hello")
    assert set(ours.history[0]["scores"]["global/global/test"]["sites"]) == set(HONEST)
    assert HOSTILE in ours.history[0]["lost"]
    assert any(name.startswith("node") for name in ours.history[0]["lost"])
    assert same(ours._state.model, honest_run()._state.model)


def test_what_honest_sites_recorded_is_what_the_loop_computes(tmp_path):
    config = config_of("fedavg", tmp_path, deploy__sites=SITES, **QUICK)
    ours = honest_run(rounds=1)
    assert same(ours._state.model, loop_with_cohorts(config, [list(HONEST)]).model)


UPLOADS = {
    "not a number": (hostile.tensor(lambda t: t * NAN), "not finite"),
    "infinite": (hostile.tensor(lambda t: t + INF), "not finite"),
    "another shape": (hostile.tensor(lambda t: t[:1]), "expected float32 of shape"),
    "10^7 numbers": (hostile.tensor(lambda t: torch.zeros(10**7)), "expected float32 of shape"),
    "doubles": (hostile.tensor(torch.Tensor.double), "expected float32 of shape"),
    "complex": (hostile.tensor(lambda t: t + 0j), "conv1.weight is of complex64, which no part sends"),
    "unsigned": (hostile.tensor(lambda t: torch.zeros(3, dtype=torch.uint64)), "is of uint64, which no part sends"),
    "a long name": (hostile.named("x" * 10**6), "sent xxxxxx"),
    "a name with escape codes": (hostile.named("\x1b[2J\n"), "sent ?[2J"),
    "missing": (hostile.tensor(lambda t: None), "as nothing"),
    "1e30": (hostile.tensor(lambda t: t + 1e30), "sent an update of length"),
    "negative variance": (hostile.tensor(lambda t: t - 5, "norm1.running_var"), "a variance, with negative"),
    "negative counter": (hostile.tensor(lambda t: t - 99, "norm1.num_batches_tracked"), "a counter, with negative"),
    "large counter": (hostile.tensor(lambda t: t + 2**60, "norm1.num_batches_tracked"), "a count of more than"),
    "dropped NaN": (hostile.metric(dropped=NAN), "dropped"),
    "dropped a list": (hostile.metric(dropped=[1.0]), "dropped"),
    "loss infinite": (hostile.metric(loss=INF), "loss"),
    "loss a list": (hostile.metric(loss=[1.0, 2.0]), "loss"),
    "kept as text": (hostile.words(kept="one"), "kept"),
    "kept of another round": (hostile.words(kept=77), "keeps the state after round 77"),
    "another name": (hostile.words(site="faint"), 'answered as "faint"'),
    "no name": (hostile.about_nothing, "answered as"),
    "no model": (hostile.without("model"), "no model or no metrics"),
    "no metrics": (hostile.without("metrics"), "no model or no metrics"),
    "an unknown part": (lambda reply: reply.__setitem__("part:evil", reply["model"]), "part:evil"),
    "says that it diverged": (hostile.words(error="Diverged", reason="so there"), None),
    "escape codes": (hostile.words(error="BadInput", reason="\x1b[2J" + "x" * 10**6), "?[2J"),
}


@pytest.mark.parametrize("case", UPLOADS)
def test_an_upload_that_cannot_be_used_is_left_out_named_and_counted(case):
    craft, said = UPLOADS[case]
    ours = run_against(craft, "train")
    row = ours.history[0]
    if said is None:
        assert row["diverged"] == {HOSTILE: "so there"}
    else:
        assert said in row["lost"][HOSTILE]
        assert len(row["lost"][HOSTILE]) < 3000
    assert same(ours._state.model, honest_run()._state.model)
    other = ("another name", "no name", "says that it diverged", "escape codes")  # counted as lost or diverged only
    assert row.get("refused", 0) == (0 if case in other else 1)


@pytest.mark.parametrize("kind", ["query.hello", "train", "evaluate"])
def test_bytes_that_flower_itself_cannot_read_cost_only_their_sender(kind, tmp_path):
    class Garbled(LocalGrid):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            if any(self.asked[m.metadata.reply_to_message_id] == (HOSTILE, kind) for m in found):
                raise ValueError("Mismatch in children object IDs")  # after the link has deleted all of them
            return found

        def push_messages(self, messages):
            ids = super().push_messages(messages)
            self.asked |= dict(zip(ids, self.log[-len(ids) :], strict=True))
            return ids

    config = config_of("fedavg", tmp_path, deploy__sites=SITES, **QUICK)
    grid = Garbled(config, tmp_path, nodes_for(SITES))
    grid.asked = {}
    ours = serve(grid, config)
    lost, notes = ours.history[0].get("lost", {}), " ".join(ours.notes)
    assert not set(HONEST) & set(lost)
    assert "sent a message that cannot be read (ValueError" in " ".join([*lost.values(), notes])
    assert set(ours.history[0]["scores"]["global/global/test"]["sites"]) >= set(HONEST)


SCORES = {
    "no samples": hostile.score(samples=0),
    "more samples than it has": hostile.score(samples=10**6),
    "accuracy a list": hostile.score(accuracy=[0.5]),
    "accuracy 1e9": hostile.score(accuracy=1e9),
    "accuracy NaN": hostile.score(accuracy=NAN),
    "accuracy negative": hostile.score(accuracy=-0.1),
    "balanced accuracy 2": hostile.score(balanced_accuracy=2.0),
    "loss infinite": hostile.score(loss=INF),
    "recall a number": hostile.score(recall=1.0),
    "recall of two classes": hostile.score(recall=[1.0, 1.0]),
    "recall above one": hostile.score(recall=[7.0] * 10),
}


@pytest.mark.parametrize("case", SCORES)
def test_a_score_that_cannot_be_used_does_not_enter_the_mean(case):
    ours = run_against(SCORES[case], "evaluate")
    for row in ours.history:
        scores = row["scores"]["global/global/test"]
        assert set(scores["sites"]) == set(HONEST)
        assert scores["mean"] == pytest.approx(sum(s["accuracy"] for s in scores["sites"].values()) / 2)
        assert row["refused"] == 2  # the test and the validation
    assert any("clean sent a score that cannot be used" in note for note in ours.notes)


def test_scores_after_training_are_checked_too():
    ours = run_against(hostile.score(accuracy=1e9), "train", evaluate='["after_local"]')
    assert all(set(row["scores"]["after_local/own/test"]["sites"]) == set(HONEST) for row in ours.history)


PARTS = {
    "fedplvm": hostile.tensor(lambda t: t[:, :3], "prototype", "part:fedplvm"),
    "fedplvm as vectors": hostile.tensor(lambda t: t.sum(), "prototype", "part:fedplvm"),
    "fedplvm without rows": hostile.tensor(lambda t: t[:0], "prototype", "part:fedplvm"),
    "fedplvm with too many rows": hostile.rows(2000, "part:fedplvm"),
    "fedproto": hostile.tensor(lambda t: -t, "count", "part:fedproto"),
    "hbn": hostile.tensor(lambda t: t - 9, "moments/var/norm1", "part:hbn"),
    "hbn counts": hostile.tensor(lambda t: t - 1e6, "count/images", "part:hbn"),
    "hbn for many images": hostile.tensor(lambda t: t * 100, "count/images", "part:hbn"),
    "fbn for many images": hostile.tensor(lambda t: t * 100, "n/norm1", "part:fbn"),
    "fedproto for many images": hostile.tensor(lambda t: t * 100, "count", "part:fedproto"),
    "scaffold": hostile.tensor(lambda t: t + 1e9, "conv1.weight", "part:scaffold"),
    "fednova": hostile.tensor(lambda t: -t, "a", "part:fednova"),
    "fedexp": hostile.tensor(lambda t: t - 1e3, "sqnorm", "part:fedexp"),
    "fednorm": hostile.tensor(lambda t: t[:1], "norm1.weight@clean", "part:fednorm"),
    "fbn": hostile.tensor(lambda t: -t - 1, "n/norm1", "part:fbn"),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_parts_upload_that_fits_no_other_is_left_out(case):
    method = case.split()[0]
    ours = run_against(PARTS[case], "train", method)
    assert [row["refused"] for row in ours.history] == [1, 1]
    assert all(row["lost"][HOSTILE].startswith("sent ") for row in ours.history)
    assert same(ours._state.model, honest_run(method)._state.model)
    assert all(same(tree, honest_run(method)._state.parts[name]) for name, tree in ours._state.parts.items())


@pytest.mark.parametrize(
    ("method", "craft"),
    [
        ("fedrdn", hostile.tensor(lambda t: -t, "std", "up")),
        ("fedrdn", hostile.tensor(lambda t: t[:1], "std", "up")),
        ("fedrdn", hostile.tensor(lambda t: t + 1e20, "mean", "up")),
        ("hbn", hostile.tensor(lambda t: t * NAN, "moments/mean/norm1", "up")),
        ("hbn", hostile.without("up")),
    ],
)
def test_a_measurement_that_cannot_be_used_is_left_out(method, craft):
    ours = run_against(craft, "measure", method)
    assert ours.history[0]["refused"] >= 1
    assert any(f"{HOSTILE} sent" in note for note in ours.notes)
    assert ours._state.model.finite()
    assert all(tree.finite() for tree in ours._state.parts.values())


# -- who decides what fits ------------------------------------------------------------------------------------------
def test_most_sites_decide_what_fits_and_the_reason_names_one_of_them():
    ours = run_against(hostile.card(dtype="float32"), "hello")
    said = ours.history[0]["lost"]["node 100"]
    assert said == 'site "clean" does not fit, pixels: float32, but "faint" has uint8'


def test_a_tie_is_decided_by_the_classes_of_the_deployment():
    true = Card.from_json(recorded("fedavg")["faint", "hello", None, None]["about"]["card"])
    other = replace(true, facts=replace(true.facts, classes=tuple("abcdefghij")))
    assert majority({"a": other, "b": true}, true.facts.classes) == [true]
    assert majority({"a": other, "b": true}) == [other, true]  # nobody knows
    assert majority({"a": other, "b": true, "c": true}, "abcdefghij") == [true]
    assert majority({}) == []
    large = Card(replace(true.facts, shape=(3, 99, 99)), true.sizes)
    assert majority({"a": large, "b": true}, true.facts.classes, true.facts.shape[1]) == [true]


def test_a_continued_run_keeps_to_its_own_data(tmp_path):
    config = config_of("fedavg", tmp_path, deploy__sites=SITES, **QUICK | {"rounds": 2})

    def stop(site, message, reply):
        if message.metadata.message_type == "train" and message.content["about"]["round"] == 1:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        serve(LocalGrid(config, tmp_path, nodes_for(SITES), stop), config)

    def now(site, message, reply):
        if message.metadata.message_type == "query.hello" and site != "foggy":
            hostile.card(dtype="float32")(reply.content)
        return reply

    ours = serve(LocalGrid(config, tmp_path, nodes_for(SITES), now), config)
    assert set(ours.history[1]["lost"]) == {"clean", "faint", "node 100", "node 101"}


# -- weights --------------------------------------------------------------------------------------------------------
def weights_seen(folder, **changes):
    seen = []

    class Watching(LocalGrid):
        def push_messages(self, sent):
            sent = list(sent)
            seen.extend(json.loads(m.content["about"]["agreement"]) for m in sent if "round" in m.content["about"])
            return super().push_messages(sent)

    def fault(site, message, reply):
        if site == HOSTILE and message.metadata.message_type == "query.hello":
            hostile.card(train=10**8)(reply.content)
        return reply

    config = config_of("fedavg", folder, deploy__sites=SITES, **QUICK, **changes)
    ours = serve(Watching(config, folder, nodes_for(SITES), fault), config)
    return ours, seen[0]["samples"]


def test_no_site_counts_for_more_than_the_largest_weight(tmp_path):
    _, samples = weights_seen(tmp_path / "a", deploy__max_weight=0.5)
    _, unlimited = weights_seen(tmp_path / "b", deploy__max_weight=1.0)
    honest = unlimited - 10**8
    assert samples == 2 * honest  # the hostile site has half of it
    ours, samples = weights_seen(tmp_path / "c")
    assert samples == pytest.approx(10 * honest, abs=1)
    assert any('"clean" counts for 90 % of all training images' in note for note in ours.notes)


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_wrong_largest_weight_is_refused(value):
    with pytest.raises(BadInput, match=r"deploy\.max_weight must be above 0 and at most 1"):
        run_against(hostile.about_nothing, "nothing", deploy__max_weight=value)


# -- the server's own state -----------------------------------------------------------------------------------------
def test_an_exploding_state_is_recognized():
    before = ServerState(3, Tree(w=torch.ones(4)), {"p": Tree(c=torch.ones(1))}, 0)
    fine = ServerState(4, Tree(w=torch.full((4,), 900.0)), before.parts, 0)
    assert border.exploded(before, fine) == ""
    far = ServerState(4, Tree(w=torch.full((4,), 1e30)), before.parts, 0)
    assert "would move by 2e+30" in border.exploded(before, far)
    lost = ServerState(4, before.model, {"p": Tree(c=torch.tensor([math.nan]))}, 0)
    assert border.exploded(before, lost) == "p/c would not be finite"


def test_a_round_that_would_break_the_model_is_not_stored(tmp_path, monkeypatch):
    """Both sites send plausible updates, but the server's step explodes: the last good round stays the last."""
    config = config_of("fedavg", tmp_path, **QUICK)
    monkeypatch.setattr(border, "EXPLODED", 1e-6)
    monkeypatch.setattr(border, "unusable", lambda *given: {})
    with pytest.raises(RunFailed, match=r"Round 1: 0 usable answers .* would break the model: the model would move by"):
        serve(LocalGrid(config, tmp_path, nodes_for()), config)
    assert not list((tmp_path / "run" / "checkpoints").glob("round-*/manifest.json"))
    monkeypatch.undo()
    ours = serve(LocalGrid(config, tmp_path, nodes_for()), config)
    assert same(ours._state.model, loop_with_cohorts(config, [["clean", "faint"]]).model)


def test_a_part_whose_server_step_fails_on_one_upload_leaves_that_site_out(monkeypatch):
    from fednorms.flower.engine import server_update

    def picky(task, state, uploads):
        if any(u.client == HOSTILE for u in uploads):
            raise IndexError("row 7")
        return server_update(task, state, uploads)

    monkeypatch.setattr("fednorms.flower.engine.server_update", picky)
    ours = run_against(lambda reply: None, "train")
    assert [row["lost"] for row in ours.history] == [{HOSTILE: "would break the model: row 7"}] * 2
    monkeypatch.undo()
    assert same(ours._state.model, honest_run()._state.model)


@pytest.mark.parametrize("answer", [IndexError("row 7"), Tree(mean=torch.tensor([NAN]))])
def test_a_pass_whose_server_step_fails_on_one_upload_leaves_that_site_out(answer, monkeypatch):
    def picky(self, up, r):
        if r.sampled == 3 or not up["mean"].min() > -5:
            if isinstance(answer, Exception):
                raise answer
            return answer
        return up

    recorded("fedrdn")
    monkeypatch.setattr(FedRDN, "_pool", picky)
    ours = run_against(hostile.tensor(lambda t: t - 10, "mean", "up"), "measure", "fedrdn")
    assert ours._state.parts["fedrdn"]["mean"].shape == (2, 3)  # of the honest sites
    assert any("fedrdn, before round 1: clean would break the model" in note for note in ours.notes)


def test_a_part_that_fails_whatever_sites_send_raises_its_own_error(monkeypatch):
    def broken(self, up, r):
        raise IndexError("row 7")

    recorded("fedrdn")
    monkeypatch.setattr(FedRDN, "_pool", broken)
    with pytest.raises(IndexError, match="row 7"):
        run_against(lambda reply: None, "measure", "fedrdn")


def test_the_round_before_can_be_continued(tmp_path):
    """Most sites diverge: the error names the setting that goes one round back, and it works, states included."""
    config = config_of("scaffold + fedbn", tmp_path, **QUICK | {"rounds": 3})

    grid = LocalGrid(config, tmp_path, nodes_for())
    healthy = grid.app

    def ill(message, context):
        if message.metadata.message_type == "train" and message.content["about"]["round"] == 2:
            words = {"error": "Diverged", "reason": "The loss is not finite."}
            return Message(RecordDict({"about": ConfigRecord(words)}), reply_to=message)
        return healthy(message, context)

    grid.app = ill
    with pytest.raises(Diverged, match=r"continue from the round before: .*deploy\.restart=1"):
        serve(grid, config)
    with pytest.raises(BadInput, match=r"no checkpoint of that round\. Kept rounds: 1 and 2"):
        serve(LocalGrid(config, tmp_path, nodes_for()), config | {"deploy.restart": 7})
    ours = serve(LocalGrid(config, tmp_path, nodes_for()), config | {"deploy.restart": 1})
    assert [row["round"] for row in ours.history] == [1, 2, 3]
    assert same(ours._state.model, loop_with_cohorts(config, [["clean", "faint"]] * 3).model)


# -- texts ----------------------------------------------------------------------------------------------------------
def test_bounds_of_texts():
    with pytest.raises(schema.BadMessage, match="characters, more than"):
        Card.from_json(" " * (schema.LONGEST_TEXT + 1))
    assert schema.printable("a\x07b\n" + "c" * 600).startswith("a?b cc")
    assert len(schema.printable("c" * 10**6)) < 510


# -- two sites: no majority ------------------------------------------------------------------------------------------
TWO = {"nodes": nodes_for("clean,faint"), "deploy__sites": "clean,faint"}


def _two(method, tmp_path, craft, kind, **changes):
    """A run of two sites, of which the one whose name comes first is hostile."""

    def fault(site, message, reply):
        if site == HOSTILE and message.metadata.message_type.removeprefix("query.") == kind:
            craft(reply.content)
        return reply

    return run_in_process(method, tmp_path, fault=fault, **TWO, **QUICK | changes)[0]


def test_of_two_sites_the_servers_own_rehearsal_decides_whose_upload_fits(tmp_path):
    """Before, the first name decided, and the honest site was left out."""
    ours = _two("scaffold", tmp_path, hostile.rows(1, "part:scaffold"), "train")
    assert list(ours.history[0]["lost"]) == [HOSTILE]
    assert ", expected float" in ours.history[0]["lost"][HOSTILE]


def test_of_two_sites_the_rehearsal_decides_whose_measurement_fits(tmp_path):
    ours = _two("fedrdn", tmp_path, hostile.rows(7, "up"), "measure")
    assert any(f"{HOSTILE} sent" in note and "expected" in note for note in ours.notes)
    assert not any("faint sent" in note for note in ours.notes)


def test_without_a_rehearsal_no_name_decides():
    trees = {"a": Tree(m=torch.ones(3)), "b": Tree(m=torch.ones(2))}
    images = {"a": 5, "b": 5}
    assert set(border.odd_ones(trees, "sum", images)) == {"a", "b"}
    assert set(border.odd_ones(trees, "sum", images, trial=lambda: trees["b"])) == {"a"}
    assert set(border.odd_ones({**trees, "c": trees["a"]}, "sum", {**images, "c": 5}, trial=lambda: trees["b"])) == {
        "b"
    }


def test_of_two_sites_that_do_not_fit_the_project_decides_or_nobody(tmp_path):
    other, true = hostile.card(classes=list("abcdefghij")), ",".join(map(str, range(10)))
    ours = _two("fedavg", tmp_path / "named", other, "hello", deploy__classes=true)
    assert HOSTILE in ours.history[0]["lost"]
    with pytest.raises(RunFailed, match=r'"clean" and "faint" do not fit together, classes: .* No majority'):
        _two("fedavg", tmp_path / "unnamed", other, "hello")
