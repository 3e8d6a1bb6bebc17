"""ATP: equal to a loop with a differentiable BatchNorm, blind to labels, and its identities."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core import noise
from fednorms.core.errors import BadInput
from fednorms.core.passes import LocalView, shuffled_rows
from fednorms.core.round import broadcast, own_state
from fednorms.core.states import Client, context_of
from fednorms.core.training import Training
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.evaluation.modes import Mode, model_for, predict_site
from fednorms.methods.registry import method
from tests.reference import atp as reference
from tests.support.after import federation, trained
from tests.support.tiny import close, play, rounds, same, tiny_data, tiny_net, tiny_task

HELD = tiny_data(10, 9, seed=3)


def started(text="atp(after=0)"):
    """A task whose model has statistics that fit no batch, and its first broadcast."""
    net = tiny_net()
    with torch.no_grad():
        net.norm.running_mean.normal_()
        net.norm.running_var.uniform_(0.1, 2)
    task = tiny_task(text, tiny_data(7, 6), model=net)
    return task, net


def learned(task, sent, name, val):
    """What a client uploads of its pass, and the batches that it saw."""
    (p,) = task.method.parts
    (job,) = p.passes()
    client = Client(name, tiny_data(7, 6)[name], val=val)
    context, mine = context_of(task, sent.round, client), own_state(task, sent, None)
    _, up = job.client(LocalView(task, p, client, sent.model, context, sent, mine))
    word = noise.seed_of("noise of a pass", task.seed, sent.round, name, "atp") & 0xFFFFFFFF
    data = val or client.data
    rows = noise.permutation(len(data), "order of a pass", word, 0).split(4)
    return up, [(data.x[r], data.y[r]) for r in rows]


def named(task, rates):
    """Rates by the names of the tensors, which the reference has in another order."""
    return {n: r.item() for n, r in zip([n for n in task.net.slots if "num_" not in n], rates, strict=True)}


@pytest.mark.parametrize("val", [HELD["a"], None], ids=["validation images", "training images"])
def test_learns_the_rates_of_the_loop(val):
    task, net = started("atp(after=0, eta=2.0)")
    sent = broadcast(task, play_state(task))
    up, batches = learned(task, sent, "a", val)
    expected = reference.learn(reference.opened(net), dict.fromkeys(named(task, up["rates"]), 0.0), batches, 2.0)
    found = named(task, up["rates"])
    assert max(abs(found[n] - expected[n]) for n in expected) < 1e-12
    assert found.keys() == expected.keys()
    assert max(map(abs, found.values())) > 1e-3


def play_state(task):
    return rounds(task, tiny_data(7, 6), 0).server


def test_the_server_takes_the_mean_and_the_next_round_starts_there():
    data = tiny_data(7, 6)
    task, net = started()
    run = rounds(task, data, 1)
    each = [u.parts["atp"]["rates"] for u in run.uploads.values()]
    torch.testing.assert_close(run.server.parts["atp"]["rates"], torch.stack(each).mean(0))
    up, batches = learned(task, broadcast(task, run.server), "a", None)
    start = named(task, run.server.parts["atp"]["rates"])
    expected = reference.learn(reference.opened(net), start, batches, 0.1)
    assert max(abs(named(task, up["rates"])[n] - expected[n]) for n in expected) < 1e-12


def answered(task, run, rates, split, mode="global/test-time"):
    """A site's probabilities under given rates."""
    state = replace(run, parts={"atp": Tree(rates=rates)})
    sent, client, kind = broadcast(task, state), Client("u", split), Mode.read(mode).resolved(task)
    model, mine = model_for(task, sent, client, kind)
    found = predict_site(task, sent, client, split, model, mine, kind)
    return torch.as_tensor(found.probabilities)


def some_rates(task):
    count = len([n for n in task.net.slots if "num_" not in n])
    return torch.linspace(-0.4, 0.9, count, dtype=torch.float64)


@pytest.mark.parametrize("online", [False, True])
def test_answers_are_those_of_the_loop(online):
    task, net = started(f"atp(after=0, online={str(online).lower()})")
    split, rates = tiny_data(11, seed=8)["a"], some_rates(task)
    found = answered(task, play_state(task), rates, split)
    rows = shuffled_rows("u", 11).split(4)
    logits = reference.answers(reference.opened(net), named(task, rates), [split.x[r] for r in rows], online=online)
    for at, z in zip(rows, logits, strict=True):
        torch.testing.assert_close(found[at], z.softmax(1), atol=1e-10, rtol=0)


def test_no_label_of_a_test_image_is_read():
    task, _ = started("atp(after=0, online=true)")
    split, rates = tiny_data(11, seed=8)["a"], some_rates(task)
    other = Split(split.x, (split.y + 1) % 3)
    run = play_state(task)
    assert torch.equal(answered(task, run, rates, split), answered(task, run, rates, other))


@pytest.mark.parametrize("online", [False, True])
def test_only_online_does_a_batch_depend_on_those_before(online):
    task, _ = started(f"atp(after=0, online={str(online).lower()})")
    split, rates, run = tiny_data(11, seed=8)["a"], some_rates(task), play_state(task)
    first, second, last = shuffled_rows("u", 11).split(4)
    x = split.x.clone()
    x[first] += 1.0
    before, after = (answered(task, run, rates, s) for s in (split, Split(x, split.y)))
    assert torch.equal(before[second], after[second]) is not online
    x = split.x.clone()
    x[last] += 1.0
    after = answered(task, run, rates, Split(x, split.y))
    assert torch.equal(before[first], after[first])
    assert torch.equal(before[second], after[second])
    assert not torch.equal(before[last], after[last])


def test_a_test_changes_nothing():
    task, _ = started("atp(after=0)")
    run, split, rates = play_state(task), tiny_data(11, seed=8)["a"], some_rates(task)
    kept = run.model.clone()
    once = answered(task, run, rates, split)
    assert torch.equal(once, answered(task, run, rates, split))
    assert same(run.model, kept)


def test_with_rates_of_zero_nothing_adapts():
    task, _ = started("atp(after=0, eta=0)")
    run = rounds(task, tiny_data(7, 6), 2)
    rates, split = run.server.parts["atp"]["rates"], tiny_data(11, seed=8)["a"]
    assert not rates.any()
    expected = answered(task, run.server, rates, split, "global/global")
    for near in (rates, rates + 1e-14):  # with rates that are exactly zero, nothing is computed
        found = answered(task, run.server, near, split)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("other", ["scaffold(control='difference')", "feddc", "fedcm"])
def test_rounds_in_which_clients_rest_are_no_second_phase(other):
    chosen = method(f"{other.partition('(')[0]} + atp").settled(Training())
    assert str(chosen) == f"{other} + atp"
    run = play(str(chosen), tiny_data(7, 6), 3)  # the last two rounds rest
    assert all(t.isfinite().all() for t in run.model.values())
    assert same(run.model, play(str(chosen), tiny_data(7, 6), 2).model)


def test_the_model_rests_while_rates_are_learned():
    half, plain = (play(text, n=4) for text in ("atp(after=0.5)", "fedavg"))
    assert same(half.model, play("fedavg", n=2).model)
    assert not same(half.model, plain.model)
    assert half.server.parts["atp"]["rates"].any()
    whole = play("atp(after=1)", n=4)
    assert same(whole.model, plain.model)
    assert not whole.server.parts["atp"]["rates"].any()


def test_one_image_alone_has_no_variance_to_adapt_to():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    task = replace(tiny_task("atp(after=0)", tiny_data(7, 6), model=model), needs_two=True)
    run, split = play_state(task), tiny_data(9, seed=8)["a"]
    found, plain = (answered(task, run, some_rates(task), split, f"global/{how}") for how in ("test-time", "global"))
    first, second, last = shuffled_rows("u", 9).split(4)
    assert torch.equal(found[last], plain[last])
    assert not torch.allclose(found[first], plain[first])
    assert not torch.allclose(found[second], plain[second])


def test_a_network_without_batchnorm_adapts_its_parameters():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    data = tiny_data(7, 6)
    task = tiny_task("atp(after=0)", data, model=model)
    rates = rounds(task, data, 1).server.parts["atp"]["rates"]
    assert rates.shape == (2,)
    assert rates.any()


# -- runs -------------------------------------------------------------------------------------------------------------
def test_validation_images_are_learned_from_and_training_images_are_not():
    def rates(change):
        sites = federation()
        changed = [replace(s, **{change: flipped(getattr(s, change))}) if s.train else s for s in sites.sites]
        _, state = trained("atp(after=0)", 1, replace(sites, sites=changed) if change else sites)
        return state.parts["atp"]["rates"]

    def flipped(split):
        return Split(255 - split.x, split.y)

    _, state = trained("atp(after=0)", 1)
    assert torch.equal(rates("train"), state.parts["atp"]["rates"])
    assert not torch.equal(rates("val"), state.parts["atp"]["rates"])


def test_it_is_judged_after_adapting_and_can_be_tested_without():
    session, state = trained("atp(after=0, eta=5.0)", 2)
    assert session.headline == Mode("global", "test-time")
    assert Mode("unseen").resolved(session.task).statistics == "test-time"
    plain, other = trained("fedavg", 0)
    without = session.engine.evaluate(state, Mode.read("global/global"), "abc")
    assert without.sites == plain.engine.evaluate(other, Mode("global"), "abc").sites
    adapted = session.engine.evaluate(state, Mode("global"), "abc")
    assert adapted.label == "global/test-time"
    assert adapted.sites != without.sites
    smaller = session.engine.evaluate(state, Mode.read("global/test-time:3"), "abc")
    assert smaller.sites != adapted.sites


@pytest.mark.parametrize("mode", ["global/test-time", "unseen/test-time:8"])
def test_other_methods_do_not_adapt(mode):
    with pytest.raises(BadInput, match=r"no part of it adapts.*atp"):
        Mode.read(mode).resolved(tiny_task("fedavg", tiny_data()))


@pytest.mark.parametrize("mode", ["adapted/test-time", "averaged/test-time"])
def test_other_models_do_not_adapt(mode):
    with pytest.raises(BadInput, match=r"(only global, personal and unseen models|has a global model)"):
        Mode.read(mode).resolved(tiny_task("atp + finetune", tiny_data()))


def test_two_ways_to_test_are_refused():
    with pytest.raises(BadInput, match="adabn and atp each decide with which statistics to test"):
        tiny_task("adabn + atp", tiny_data())


def test_personal_models_adapt_too():
    session, state = trained("fedbn + atp(after=0, eta=5.0)", 2)
    assert session.headline == Mode("personal", "test-time")
    one, other = (session.engine.evaluate(state, Mode.read(m), "abc") for m in ("personal", "personal/own"))
    assert one.sites != other.sites


def test_gradients_of_stored_statistics_are_those_of_batchnorm_written_out():
    task, net = started()
    x, y = tiny_data(6)["a"].x, tiny_data(6)["a"].y
    found = Tree(task.net.initial).map(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    logits, recorded = task.net.tested(found, x)
    plain, _ = task.net.forward(task.net.initial, x, train=False, batch_statistics=False)
    assert torch.equal(logits, plain)
    nn.functional.cross_entropy(logits, y).backward()
    other = reference.opened(net)
    nn.functional.cross_entropy(other(x), y).backward()
    close({n: found[n].grad for n, _ in other.named_parameters()}, {n: p.grad for n, p in other.named_parameters()})
    assert recorded.keys() == {"norm.running_mean", "norm.running_var"}
    close(recorded, {f"norm.{n}": t for n, t in other.norm.seen.items()})
