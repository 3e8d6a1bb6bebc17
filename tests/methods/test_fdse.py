"""FDSE: erasers of skew, a consensus of updates, and aligned statistics.

Next to the authors' program (github.com/WwZzz/FDSE_CVPR25), largest differences in float64: 3.4e-16 in a network's
logits; 1.1e-9 in anything that four rounds of three clients leave, with activate=False and without the loss term (the
program's solver replaced by SciPy's SLSQP); and 1.2e-16 in a client's model after a round with the term, in the
program's first version, where its batch statistics are taken per channel.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.part import Route
from fednorms.core.round import server_update
from fednorms.core.tree import Tree, branch
from fednorms.layers import SkewEraser
from fednorms.methods.registry import method
from tests.reference import fdse as reference
from tests.support.tiny import client_model, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_task

NAMES = {
    **{f"{layer}.extract.": f"{layer}.first." for layer in ("conv", "fc")},
    **{f"{layer}.norm.": f"{layer}.bn." for layer in ("conv", "fc")},
    **{f"{layer}.expand.weight": f"{layer}.wide" for layer in ("conv", "fc")},
    **{f"{layer}.bias": f"{layer}.shift" for layer in ("conv", "fc")},
}


def theirs(tree):
    """Tensors by the names of the reference, without counters."""
    out = {}
    for name, t in tree.items():
        for mine, other in NAMES.items():
            if name.startswith(mine):
                name = other + name.removeprefix(mine)
                break
        if t.is_floating_point():
            out[name] = t
    return out


def network():
    torch.manual_seed(0)
    return reference.Net().double()


def split(initial):
    """The reference network from where ours starts."""
    net = network()
    for layer in ("conv", "fc"):
        setattr(net, layer, reference.Split(getattr(net, layer), initial[f"{layer}.expand.weight"]).double())
    return net


@pytest.mark.parametrize("cohorts", [["abc", "abc", "abc"], ["abc", "ab", "bc"]])
def test_equals_a_plain_torch_loop(cohorts):
    data = tiny_data(12, 8, 10)
    task = tiny_task("fdse(lam=2, tau=0.3, beta=0.7)", data, model=network())
    net = split(task.net.initial)
    plans = [[plan_of(task, s, k, t) if k in cohorts[t] else None for k, s in data.items()] for t in range(3)]
    server, mixed, local = reference.fdse(net, pairs(data), plans, 0.1, 2.0, 0.3, 0.7)
    run = rounds(task, data, 3, cohorts=cohorts)
    # 1e-6: the solver adds a tiny multiple of the identity, which nearly parallel updates feel
    wanted = {n: t for n, t in server.state_dict().items() if ".bn.running" not in n and t.is_floating_point()}
    close(Tree(theirs(run.model)).pick(wanted), wanted, atol=1e-6)
    for i, k in enumerate(data):
        here = theirs(client_model(task, data, run, k))
        close(Tree(here).pick(mixed[i]), mixed[i], atol=1e-6)
        own = {n: t for n, t in local[i].state_dict().items() if ".bn.running" in n}
        close(Tree(here).pick(own), own, atol=1e-6)
    assert not torch.equal(mixed[0]["conv.wide"], mixed[1]["conv.wide"])


# -- the layer --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize("relu", [True, False])
def test_the_layer_is_a_loop_over_channels(ratio, relu):
    torch.manual_seed(0)
    for old, x in ((nn.Conv2d(3, 7, 3), torch.rand(4, 3, 6, 6)), (nn.Linear(5, 7), torch.rand(4, 5))):
        old, x = old.double(), x.double()
        ours = SkewEraser.like(old, ratio=ratio, activate=relu)
        slow = reference.Split(old, ours.expand.weight, ratio, relu).double()
        for mode in (True, True, False):
            torch.testing.assert_close(ours.train(mode)(x), slow.train(mode)(x), atol=1e-12, rtol=0)


def test_equal_models_start_equal_and_other_seeds_elsewhere():
    first, again = (Net(network(), method("eraser")).initial for _ in range(2))
    assert same(first, again)
    assert torch.equal(first["conv.extract.weight"], network().conv.weight[:3].float())
    torch.manual_seed(1)
    other = Net(reference.Net().double(), method("eraser")).initial
    assert not torch.equal(first["conv.expand.weight"], other["conv.expand.weight"])
    bound = 1 / 3
    assert first["conv.expand.weight"].abs().max() <= bound


def test_only_layers_before_a_batchnorm_change():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8),
        nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3),
    )  # fmt: skip
    made = Net(net, method("eraser"))
    assert [change.name for change in made.changes["eraser"]] == ["0", "7", "11"]
    local = {n for n, r in made.routes.items() if r is Route.LOCAL}
    assert local == {
        f"{i}.norm.{s}" for i in (0, 7, 11) for s in ("running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize("text", ["eraser + fedfa(after='pool')", "fedfa(after='pool') + eraser"])
def test_features_are_augmented_after_all_channels_of_an_eraser(text):
    assert play(text).model["pool.1.mean"].shape == (4,)


# -- mixtures ---------------------------------------------------------------------------------------------------------
def test_a_high_temperature_mixes_evenly_and_a_low_one_hardly():
    data = tiny_data(12, 8, 10)
    name = "conv.expand.weight"
    for tau, near in ((1e9, False), (1e-7, True)):
        task = tiny_task(f"eraser(tau={tau})", data, model=network())
        run = rounds(task, data, 1)
        sent = {k: u.model[name] for k, u in run.uploads.items()}
        even = sum(sent.values()) / 3
        for k in data:
            close(Tree({name: branch(run.server.parts["eraser"], k)[name]}), {name: sent[k] if near else even})
        close(run.model.pick([name]), {name: even})  # for new sites


def test_who_is_away_keeps_its_mixture():
    data = tiny_data(12, 8, 10)
    task = tiny_task("eraser", data, model=network())
    run = rounds(task, data, 1)
    kept = branch(run.server.parts["eraser"], "c")
    run = rounds(task, data, 1, run=run, cohorts=["ab"])
    assert kept
    assert same(kept, branch(run.server.parts["eraser"], "c"))


# -- consensus --------------------------------------------------------------------------------------------------------
def spread(task, run, *updates):
    """The server's model after uploads that differ in one tensor only."""
    base = next(iter(run.uploads.values()))
    start = run.server.model
    made = []
    for name, d in zip("abc", updates, strict=False):
        model = Tree({**start, "head.bias": start["head.bias"] + torch.tensor(d).double()})
        made.append(replace(base, client=name, model=model))
    return server_update(task, run.server, made).model["head.bias"] - start["head.bias"]


def test_consensus_in_closed_form():
    data = tiny_data(12, 8, 10)
    task = tiny_task("consensus", data)
    run = rounds(task, data, 1)
    cases = [
        ([[3.0, 0, 0]], [3.0, 0, 0]),
        ([[2.0, 0, 0], [0, 4.0, 0]], [1.5, 1.5, 0]),  # mean length 3 along (1/2, 1/2, 0)
        ([[1.0, 0, 0], [-5.0, 0, 0]], [0, 0, 0]),  # opposite directions cancel whatever their lengths
        ([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]], [0.5, 0.5, 0]),  # twice the same direction counts once
        ([[0.0, 0, 0], [0, 2.0, 0]], [0, 0, 0]),  # one that stays
    ]
    for updates, wanted in cases:
        got = spread(task, run, *updates)
        torch.testing.assert_close(got, torch.tensor(wanted).double(), atol=1e-6, rtol=0)


def test_no_client_is_overruled():
    data = tiny_data()
    task = tiny_task("consensus", data)
    before = rounds(task, data, 1)
    after = rounds(task, data, 1, run=before)
    for name in task.net.sent_params:
        moved = (after.model[name] - before.model[name]).flatten()
        for upload in after.uploads.values():
            own = (upload.model[name] - before.model[name]).flatten()
            assert moved @ own >= -1e-6 * moved.norm() * own.norm()
    stats = [u.model["norm.running_mean"] for u in after.uploads.values()]
    torch.testing.assert_close(after.model["norm.running_mean"], sum(stats) / 3)


def test_one_client_is_its_own_consensus():
    data = tiny_data(12)
    assert same(play("consensus", data, n=3).model, play("fedavg", data, n=3).model)


# -- aligned statistics -----------------------------------------------------------------------------------------------
def test_the_first_round_is_not_aligned_and_lam_zero_never_is():
    assert same(play("alignstats(lam=5)", n=1).model, play("fedavg", n=1).model)
    assert same(play("alignstats(lam=0)", n=3).model, play("fedavg", n=3).model)


def test_statistics_stay_nearer_to_the_received_ones():
    def far(lam):
        data = tiny_data(12, 8, 10)
        task = tiny_task(f"alignstats(lam={lam})", data)
        before = rounds(task, data, 1)
        after = rounds(task, data, 1, run=before)
        moved = [u.model["norm.running_mean"] - before.model["norm.running_mean"] for u in after.uploads.values()]
        return sum(float(d.square().sum()) for d in moved)

    assert far(20.0) < far(0.0)


# -- what users are told ----------------------------------------------------------------------------------------------
def test_facts():
    facts = fn.describe("fdse", "cnn-small")
    assert facts.addressed == ("eraser",)
    assert not facts.averaged_only
    assert facts.model_up < fn.describe("fedavg", "cnn-small").model_up


@pytest.mark.parametrize("text", ["gn(groups=2) + eraser", "fedwon + fdse", "silobn + fdse", "eraser + gn(groups=2)"])
def test_what_it_needs_is_said(text):
    with pytest.raises(BadInput, match=r"eraser|alignstats|fdse"):
        tiny_task(text, tiny_data())
