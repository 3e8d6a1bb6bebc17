"""A node speaks for the site of its key only: when it joins, at every reply, and until the key is revoked."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

from flwr.proto.node_pb2 import NodeInfo

from fednorms.core.errors import RunFailed
from fednorms.flower.keys import SiteKeys, Watched, new_key, read_keys, wire_form
from fednorms.flower.server import serve
from tests.support import hostile
from tests.support.flower_in_process import LocalGrid, config_of, nodes_for, run, same_result
from tests.support.tiny import same

PUBLIC = {name: new_key()[1] for name in ("clean", "faint", "stranger")}


class KeyedGrid(LocalGrid):
    """A Grid that knows the key of each node and when it was started, as Flower's does."""

    def __init__(self, *args, keys, **kwargs):
        super().__init__(*args, **kwargs)
        self.keys, self.starts = keys, dict.fromkeys(self.nodes, "first start")

    def get_nodes(self):
        return [
            NodeInfo(node_id=n, public_key=wire_form(PUBLIC[self.keys[n]]), last_activated_at=self.starts[n])
            for n in self.nodes
        ]


@pytest.fixture
def roster(tmp_path, monkeypatch):
    """The roster file of a link with two sites."""
    path = tmp_path / "roster.toml"
    SiteKeys({name: PUBLIC[name] for name in ("clean", "faint")}).write(path)
    for name, value in Watched(path).environment().items():
        monkeypatch.setenv(name, value)
    return path


def revoke(roster, site):
    read_keys(roster).without(site).write(roster)


def deployed(tmp_path, nodes=None, keys=None, fault=None, **changes):
    """A grid of two nodes, and what runs on it."""
    config = config_of("scaffold", tmp_path, **changes)
    grid = KeyedGrid(config, tmp_path, nodes or nodes_for(), fault, keys=keys or {100: "clean", 101: "faint"})
    return grid, lambda: serve(grid, config)


def lost(result):
    return [row.get("lost", {}) for row in result.history]


def without_faint(tmp_path):
    """The model of a run in which the site never answers to training."""

    def silent(site, message, reply):
        return None if (site, message.metadata.message_type) == ("faint", "train") else reply

    _, serve_it = deployed(tmp_path / "without", fault=silent)
    SiteKeys({name: PUBLIC[name] for name in ("clean", "faint")}).write(tmp_path / "roster.toml")
    return serve_it()._state.model


def test_a_run_with_keys_equals_one_without(roster, tmp_path, monkeypatch):
    _, serve_it = deployed(tmp_path)
    keyed = serve_it()
    monkeypatch.delenv("FEDNORMS_ROSTER")
    (tmp_path / "plain").mkdir()
    plain, _ = run("scaffold", tmp_path / "plain")
    same_result(keyed, plain)


def test_a_key_that_is_not_in_the_roster_trains_for_nobody(roster, tmp_path):
    """The attack of the issue: a newly registered key trained a whole run as a site that was absent."""
    grid, serve_it = deployed(tmp_path, keys={100: "clean", 101: "stranger"})
    result = serve_it()
    assert {site for site, _ in grid.log} == {"clean"}
    assert same(result._state.model, without_faint(tmp_path))
    assert lost(result)[0] == {"faint": "not connected", "node 101": "its key is not in the roster"}


def test_a_site_cannot_take_the_name_of_another(roster, tmp_path):
    nodes = nodes_for("clean,clean")
    grid, serve_it = deployed(tmp_path, nodes=nodes, keys={100: "faint", 101: "clean"})
    result = serve_it()
    assert ("clean", "train") in grid.log
    assert lost(result)[0] == {
        "faint": "not connected",
        "node 100": 'it calls itself "clean", but its key belongs to site "faint"',
    }


@pytest.mark.parametrize("silent", [True, False])
def test_a_key_revoked_in_a_round_does_not_count_in_that_round(silent, roster, tmp_path):
    def fault(site, message, reply):
        if site == "faint" and message.metadata.message_type == "train":
            revoke(roster, "faint")
            return None if silent else reply
        return reply

    grid, serve_it = deployed(tmp_path, fault=fault)
    result = serve_it()
    assert [row["faint"] for row in lost(result)] == ["its key was revoked", "not connected"]
    assert grid.log.count(("faint", "train")) == 1
    assert same(result._state.model, without_faint(tmp_path))


def test_a_roster_that_cannot_be_read_lets_nobody_count(roster, tmp_path):
    def fault(site, message, reply):
        if message.metadata.message_type == "train":
            roster.write_text("[keys")
        return reply

    _, serve_it = deployed(tmp_path, fault=fault)
    with pytest.raises(RunFailed, match="0 usable answers"):
        serve_it()


def test_a_node_started_again_in_a_round_is_missed_greeted_and_taken_back(roster, tmp_path):
    grids = []

    def fault(site, message, reply):
        grid = grids[0]
        if site == "faint" and message.metadata.message_type == "train" and grid.starts[101] == "first start":
            grid.starts[101] = "second start"  # it forgets what it was asked
            return None
        return reply

    grid, serve_it = deployed(tmp_path, fault=fault)
    grids.append(grid)
    assert lost(serve_it()) == [{"faint": "its node was started again, or away for a minute"}, {}]
    assert grid.log.count(("faint", "query.hello")) == 2


def test_a_new_key_replaces_the_former_one_between_rounds(roster, tmp_path):
    """Rotation: the site's node comes back with its new key, under another number."""
    grids = []

    def fault(site, message, reply):
        grid = grids[0]
        if message.metadata.message_type == "train" and site == "faint" and 102 not in grid.nodes:
            read_keys(roster).enrolled("faint", PUBLIC["stranger"]).write(roster)
            grid.nodes[102], grid.keys[102], grid.starts[102] = grid.nodes[101], "stranger", "its start"
        return reply

    grid, serve_it = deployed(tmp_path, fault=fault)
    grids.append(grid)
    first, second = lost(serve_it())
    assert first["faint"] == "its key was revoked"
    assert "faint" not in second


# -- how many images a site may have ---------------------------------------------------------------------------------
def claiming(images):
    """Every site but the honest one says that it has this many training images."""

    def fault(site, message, reply):
        if site != "foggy" and message.metadata.message_type == "query.hello":
            hostile.card(train=images)(reply.content)
        return reply

    return fault


THREE = {"nodes": nodes_for("clean,faint,foggy"), "deploy__sites": "clean,faint,foggy", "deploy__wait": 1.0}


def test_two_sites_that_lie_together_do_not_get_all_the_weight(tmp_path):
    """10^9 images, the most that a card can say, would make the third site's model vanish in the mean."""
    lied, _ = run("fedavg", tmp_path / "lied", fault=claiming(10**9), rounds=1, **THREE)
    assert "claims 1,000,000,000 training images, but deploy.max_images allows 1,000,000" in str(lost(lied))
    true, _ = run("fedavg", tmp_path / "true", rounds=1, nodes=nodes_for("foggy"), deploy__sites="foggy")
    assert same(lied._state.model, true._state.model)
    with pytest.raises(RunFailed, match=r"claims 10,000 training images, but deploy.max_images allows 5,000"):
        run("fedavg", tmp_path / "bound", fault=claiming(10**4), deploy__max_images=5000, deploy__minimum=2, **THREE)


def test_a_run_notes_whose_number_of_images_nothing_bounds(roster, tmp_path):
    def noted(folder, weighting="size"):
        result = deployed(tmp_path / folder, rounds=1, weighting=weighting)[1]()
        return [note for note in result.notes if "number of images" in note]

    (note,) = noted("none")
    assert "for clean, faint: where sites are weighted by their images" in note
    assert noted("equal weights", "uniform") == []
    read_keys(roster).limited("faint", 10**5).write(roster)
    (note,) = noted("one")
    assert "for clean: " in note
    read_keys(roster).limited("clean", 10**5).write(roster)
    assert noted("both") == []


def test_the_roster_bounds_the_images_of_a_site(roster, tmp_path):
    honest = deployed(tmp_path / "a", rounds=1)[1]()
    read_keys(roster).limited("faint", 10**5).limited("clean", 10**5).write(roster)
    assert same(
        deployed(tmp_path / "b", rounds=1)[1]()._state.model, honest._state.model
    )  # not reached: no bit changes
    read_keys(roster).limited("faint", 3).write(roster)
    said = str(lost(deployed(tmp_path / "c", rounds=1, deploy__wait=1.0)[1]()))
    assert 'site "faint" claims' in said
    assert "but the roster allows 3" in said
