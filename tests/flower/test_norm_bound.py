"""`deploy.norm_bound`: across machines, an update far longer than the median site's is shortened and noted."""

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import torch

from fednorms.core.errors import BadInput
from fednorms.core.tree import Tree
from fednorms.flower import messages
from tests.support import hostile
from tests.support.flower_in_process import run
from tests.support.hostile import HOSTILE, run_against
from tests.support.tiny import same

FAR = hostile.tensor(lambda t: t + 30)  # plausible for the border, but a thousand times as long as training


def length(ours, start):
    weights = {k: t for k, t in ours._state.model.items() if k.startswith("conv1")}
    return float((Tree(weights) - start).sqnorm().sqrt())


def nothing(reply):
    pass


def test_a_far_too_long_update_is_shortened_and_noted():
    honest, bounded, free = (
        run_against(craft, "train", rounds=1, deploy__norm_bound=most)
        for craft, most in ((nothing, 50.0), (FAR, 50.0), (FAR, 0.0))
    )
    start = honest._state.model
    assert length(free, start) > 100  # a third of 30 in each of 432 numbers
    assert length(bounded, start) < 50
    assert [note for note in bounded.notes if "deploy.norm_bound" in note] == [
        f'Round 1: the update of "{HOSTILE}" was more than 50 times as long as that of the median site, and was '
        "shortened to that (deploy.norm_bound)."
    ]
    assert not [note for note in (*free.notes, *honest.notes) if "norm_bound" in note]
    assert not bounded.history[0].get("lost")


def test_the_bound_is_that_of_the_part():
    """The same as a relative bound of the method in its first round."""
    ours = run_against(FAR, "train", rounds=1, deploy__norm_bound=5.0)
    part = run_against(FAR, "train", method="normbound(relative=5)", rounds=1, deploy__norm_bound=0.0)
    assert same(ours._state.model, part._state.model)


def test_a_bound_that_is_not_reached_changes_no_bit():
    with_bound, without = (run_against(nothing, "train", rounds=1, deploy__norm_bound=most) for most in (50.0, 0.0))
    assert same(with_bound._state.model, without._state.model)


def test_statistics_have_a_bound_of_their_own():
    far = hostile.tensor(lambda t: t + 1000.0, "norm1.running_mean")
    bounded, free = (run_against(far, "train", rounds=1, deploy__norm_bound=most) for most in (50.0, 0.0))
    moved = [ours._state.model["norm1.running_mean"].abs().max() for ours in (bounded, free)]
    assert moved[0] < moved[1] / 2
    weights = [Tree({k: t for k, t in ours._state.model.items() if "conv" in k}) for ours in (bounded, free)]
    assert same(*weights)


@pytest.mark.parametrize("value", [-1.0, 0.5, float("nan")])
def test_a_wrong_bound_is_refused(value):
    with pytest.raises(BadInput, match=r"deploy\.norm_bound must be 0 \(no limit\) or at least 1"):
        run_against(nothing, "nothing", rounds=1, deploy__norm_bound=value)


def test_noise_for_the_plain_mean_is_not_disturbed():
    """The border holds every update to dpcentral's clip; a bound that depends on other sites would cost privacy."""
    tight, without = (
        run_against(nothing, "train", method="dpcentral(draws='seeded')", rounds=1, deploy__norm_bound=most)
        for most in (1.0, 0.0)
    )
    assert same(tight._state.model, without._state.model)
    assert torch.isfinite(tight._state.model["conv1.weight"]).all()


def test_of_two_sites_the_one_that_hardly_moves_does_not_stop_the_other(tmp_path):
    """The median of two lengths is the shorter one: a bound by it would shorten the honest update to almost nothing."""

    def silent(site, message, reply):
        if site == HOSTILE and message.metadata.message_type == "train":
            tree = messages.tree_of(message.content.array_records["model"])
            sent = messages.tree_of(reply.content.array_records["model"])
            near = {k: tree[k] + 1e-4 * (t - tree[k]) if t.is_floating_point() else t for k, t in sent.items()}
            reply.content["model"] = messages.array_record(Tree(near))
        return reply

    models = [
        run("fedavg", tmp_path / str(most), fault=silent, rounds=1, training__steps=2, deploy__norm_bound=most)[0]
        for most in (50.0, 0.0)
    ]
    assert same(models[0]._state.model, models[1]._state.model)
    assert not [note for note in models[0].notes if "norm_bound" in note]
