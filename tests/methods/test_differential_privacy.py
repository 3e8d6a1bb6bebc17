"""dpcentral and dplocal: the influence of one client, the size of the noise, and what they refuse."""

import importlib.util
import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fednorms import Recipe, resume, run
from fednorms.core.errors import BadInput
from fednorms.core.noise import secret_normals
from fednorms.core.part import REGISTRY
from fednorms.core.passes import passes
from fednorms.core.round import broadcast, initial_state, local_update, server_update
from fednorms.core.states import Client, Upload, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.engines.loop import Loop
from fednorms.methods.differential_privacy import CentralDP, LocalDP
from fednorms.methods.registry import load_all, method, names
from fednorms.runs.store.clients import ClientStore
from tests.support.pairs import federation, fitting
from tests.support.tiny import play, rounds, same, tiny_data, tiny_net, tiny_task

load_all()
SMALL = Recipe(data={"size": 8}, training={"steps": 1})
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def length(tree):
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tree.values()))


def task_of(text, data=None, **settings):
    return tiny_task(text, data or tiny_data(), **settings)


def release(part, update, task, sampled=None):
    """The server's update for a mean update."""
    context = context_of(task, 0, None)
    return part.privacy().release(update, Round(Tree(), Tree(), Tree(), sampled or task.clients, task.clients, context))


# -- the influence of one client --------------------------------------------------------------------------------------
@given(st.lists(st.lists(FLOATS, max_size=6), min_size=1, max_size=4), st.floats(1e-6, 1e6), st.booleans())
def test_no_update_is_longer_than_the_clip(rows, clip, double):
    dtype = torch.float64 if double else torch.float32
    update = Tree({str(i): torch.tensor(row, dtype=dtype) for i, row in enumerate(rows)})
    sent = CentralDP(clip=clip).privacy().protect(update, None)
    assert length(sent) <= clip
    if length(update) <= clip:
        assert same(sent, update)
    else:
        assert length(sent) >= clip * (1 - 1e-4)
        assert all((t * update[k] >= 0).all() for k, t in sent.items())  # shorter, not turned


@pytest.mark.parametrize(
    "text",
    [
        "dpcentral(clip=0.01)",
        "dpcentral(clip=0.01) + fedprox",
        "silobn + dpcentral(clip=0.01)",
        "fedbn(upload=True) + dpcentral(clip=0.01)",
        "partialfed + dpcentral(clip=0.01)",
        "partialfed(strategy=adaptive) + dpcentral(clip=0.01)",
    ],
)
@pytest.mark.parametrize("before", [0, 3])
def test_what_a_client_sends_is_within_the_clip_of_what_it_got(text, before):
    data = tiny_data()
    task = task_of(text, data, lr=0.5, epochs=3)
    run = rounds(task, data, before)  # clients may have local tensors by now
    sent = broadcast(task, run.server)
    upload, _ = local_update(task, sent, Client("a", data["a"], run.states.get("a")))
    floats = {k: t for k, t in upload.model.items() if t.is_floating_point()}
    assert 0.0099 < length({k: t - sent.model[k] for k, t in floats.items()}) <= 0.01 + 1e-12
    counters = [k for k in upload.model if k not in floats]
    assert all(torch.equal(upload.model[k], sent.model[k]) for k in counters)  # they would count its images


def test_one_client_moves_the_sum_by_the_clip_at_most_whatever_it_does():
    data = tiny_data(8, 8, 8)
    task = task_of("dpcentral(clip=0.05, noise=0)", data, lr=10.0)
    state = initial_state(task)
    sent = broadcast(task, state)
    uploads = {n: local_update(task, sent, Client(n, split))[0] for n, split in data.items()}
    every = server_update(task, state, list(uploads.values())).model
    for name in data:
        others = server_update(task, state, [u for n, u in uploads.items() if n != name]).model
        moved = {k: t - others[k] for k, t in every.items() if t.is_floating_point()}
        assert length(moved) <= 0.05 / 3 + 1e-12


def test_statistics_and_parameters_are_clipped_as_one_vector():
    data = tiny_data()
    both, alone = (task_of(text, data, lr=1.0) for text in ("dpcentral(clip=0.02, noise=0)", "fedavg"))
    sent = broadcast(both, initial_state(both))
    plain = local_update(alone, sent, Client("a", data["a"]))[0].model
    clipped = local_update(both, sent, Client("a", data["a"]))[0].model
    moved = {k: t - sent.model[k] for k, t in plain.items() if t.is_floating_point()}
    share = 0.02 / length(moved)
    for k, t in moved.items():
        torch.testing.assert_close(clipped[k] - sent.model[k], share * t, rtol=1e-5, atol=1e-12)
    assert any("running" in k for k in moved)


# -- the noise --------------------------------------------------------------------------------------------------------
def moments(x):
    x = x.double().flatten()
    z = (x - x.mean()) / x.std()
    return float(x.mean()), float(x.std()), float((z**4).mean())


@pytest.mark.parametrize("draws", ["seeded", "system"])
def test_the_servers_noise_has_the_promised_size(draws):
    part = CentralDP(clip=0.5, noise=3.0, draws=draws)
    task = task_of("dpcentral", tiny_data(8, 8, 8, 8))
    got = release(part, Tree(a=torch.zeros(200, 200), b=torch.zeros(40000, dtype=torch.float64)), task)
    for tensor in got.values():
        mean, std, fourth = moments(tensor)
        expected = 3.0 * 0.5 / 4
        assert abs(mean) < 5 * expected / 200
        assert abs(std / expected - 1) < 0.02
        assert abs(fourth - 3) < 0.2  # of a normal distribution
    assert not torch.equal(got["a"].flatten(), got["b"].float())


def test_a_clients_noise_has_the_promised_size_and_differs_from_others():
    data = tiny_data()
    task = task_of("dplocal", data)
    zero, drawn = Tree(w=torch.zeros(40000, dtype=torch.float64)), []
    for name in "ab":
        context = context_of(task, 0, Client(name, data[name]))
        end = type("End", (), {"context": context})()
        drawn.append(LocalDP(clip=0.5, noise=2.0).privacy().protect(zero, end)["w"])
    for tensor in drawn:
        mean, std, _ = moments(tensor)
        assert abs(mean) < 0.025
        assert abs(std - 1) < 0.02
    assert abs(float((drawn[0] * drawn[1]).mean())) < 0.025


def test_noise_of_the_seed_repeats_and_noise_of_the_system_does_not():
    zero, task = Tree(w=torch.zeros(100)), task_of("dpcentral")
    there = replace(task, deployed=True)
    for draws, where, equal in [
        ("auto", task, True),
        ("auto", there, False),
        ("seeded", there, True),
        ("system", task, False),
    ]:
        one, two = (release(CentralDP(draws=draws), zero, where)["w"] for _ in range(2))
        assert torch.equal(one, two) is equal
    mean, std, fourth = moments(secret_normals(torch.zeros(300, 200)))
    assert abs(mean) < 0.02
    assert abs(std - 1) < 0.02
    assert abs(fourth - 3) < 0.2


def test_rounds_and_tensors_have_different_noise():
    task, zero = task_of("dpcentral"), Tree(a=torch.zeros(50), b=torch.zeros(50))
    seen = []
    for t in range(3):
        r = Round(Tree(), Tree(), Tree(), 3, 3, context_of(task, t, None))
        seen += list(CentralDP().privacy().release(zero, r).values())
    assert len({tuple(t.tolist()) for t in seen}) == 6


def test_noise_is_added_before_any_server_step():
    """Momentum of a mean without noise would carry it into later rounds."""
    data = tiny_data(8, 8)
    text = "dpcentral(clip=0.1, noise=0.5)"
    one = play(f"{text} + fedavgm(beta=0.9)", data, n=3)
    two = play(f"fedavgm(beta=0.9) + {text}", data, n=3)
    assert same(one.model, two.model)
    task = task_of(f"{text} + fedavgm(beta=0.9)", data)
    plain = task_of(text, data)
    state, here = initial_state(task), initial_state(plain)
    names_ = task.net.sent_params
    velocity = Tree()
    for _ in range(3):
        sent = broadcast(task, state)
        uploads = [local_update(task, sent, Client(n, split))[0] for n, split in data.items()]
        alone = server_update(plain, replace(here, round=state.round, model=state.model), uploads)
        noisy = alone.model.pick(names_) - state.model.pick(names_)
        velocity = velocity * 0.9 + noisy if velocity else noisy
        expected = state.model.pick(names_) + velocity
        state = server_update(task, state, uploads)
        for k in names_:
            torch.testing.assert_close(state.model[k], expected[k], atol=1e-12, rtol=0)


def test_variances_stay_possible_under_any_noise():
    for text in ("dpcentral(noise=50)", "dplocal(noise=50)"):
        variances = []
        for seed in range(4):
            found = play(text, tiny_data(8, 8), n=1, seed=seed)
            assert found.model.finite()
            variances += [found.model, *(u.model for u in found.uploads.values())]
        seen = torch.cat([tree["norm.running_var"] for tree in variances])
        assert (seen >= 0).all()
        assert (seen == 0).any()  # the noise was strong enough to need it


# -- who counts -------------------------------------------------------------------------------------------------------
def test_the_sum_is_divided_by_the_expected_number_of_clients():
    data = tiny_data(8, 8)
    task = task_of("dpcentral(clip=0.1, noise=0)", data)
    state = initial_state(task)
    sent = broadcast(task, state)
    uploads = [local_update(task, sent, Client(n, split))[0] for n, split in data.items()]
    one = server_update(task, state, uploads[:1]).model  # the other one did not answer
    for k, t in uploads[0].model.items():
        if t.is_floating_point():
            torch.testing.assert_close(one[k] - state.model[k], (t - state.model[k]) / 2, atol=1e-12, rtol=0)


def test_all_clients_weigh_the_same():
    data = tiny_data(16, 4)
    text = "dpcentral(clip=inf, noise=0)"
    assert same(play(text, data).model, play("fedavg", data, weighting="uniform").model)
    assert not same(play(text, data).model, play("fedavg", data, weighting="size").model)
    with pytest.raises(BadInput, match="dpcentral needs equal weights"):
        play(text, data, weighting="size")


def test_a_round_without_clients_is_a_round_of_noise():
    task = task_of("dpcentral(clip=0.1, noise=1.0) + silobn", tiny_data(8, 8))
    state = initial_state(task)
    moved = server_update(task, state, []).model
    names_ = task.net.sent_params
    change = torch.cat([(moved[k] - state.model[k]).flatten() for k in names_])
    assert abs(float(change.std()) / 0.05 - 1) < 0.25
    assert same(
        {k: t for k, t in moved.items() if k not in names_}, {k: state.model[k] for k in moved if k not in names_}
    )


def test_a_draw_that_chooses_no_client_is_not_repeated():
    found = run("dpcentral(noise=0.01) + gn", rounds=6, recipe=SMALL, participation="bernoulli:0.1", seed=1)
    assert 0 in [row["clients"] for row in found.history]
    assert all(
        row["clients"] for row in run("gn", rounds=6, recipe=SMALL, participation="bernoulli:0.1", seed=1).history
    )


# -- neutral, engines, resuming ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("other", ["", " + fedprox", " + fedbn", " + fedavgm", " + fedbabu"])
def test_no_noise_and_no_clip_change_nothing(other):
    data = tiny_data(8, 8)
    for name, weighting in (("dpcentral", "uniform"), ("dplocal", None)):
        with_it = play(f"{name}(clip=inf, noise=0){other}", data, weighting=weighting)
        assert same(with_it.model, play(f"fedavg{other}", data, weighting=weighting).model)


def test_workers_give_the_loops_bits():
    text = "dplocal(clip=0.1, noise=0.1) + fedbn"
    one, two = (
        run(text, rounds=1, recipe=SMALL.model_copy(update={"engine": engine, "workers": 2}))
        for engine in ("loop", "workers")
    )
    assert same(one.model("clean").state_dict(), two.model("clean").state_dict())


@pytest.mark.parametrize("text", ["dpcentral(clip=0.1, noise=0.5) + gn", "dplocal(clip=0.1, noise=0.5)"])
def test_an_interrupted_run_ends_as_one_that_was_not(text, tmp_path):
    recipe = SMALL.model_copy(update={"participation": "bernoulli:0.5"})
    whole = run(text, rounds=4, recipe=recipe, out=tmp_path / "whole")

    def stop(event):
        if event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(text, rounds=4, recipe=recipe, out=tmp_path / "cut", callback=stop)
    again = resume(tmp_path / "cut")
    assert same(whole.model().state_dict(), again.model().state_dict())
    assert [row["epsilon"] for row in whole.history] == [row["epsilon"] for row in again.history]
    assert whole.privacy == again.privacy == again.to_dict()["privacy"]
    assert whole.privacy["epsilon"] == whole.history[-1]["epsilon"] > 0


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dp", ["dpcentral", "dplocal"])
@pytest.mark.parametrize(
    "other",
    ["scaffold", "fedrdn", "fedexp", "fednova", "hbn", "fedproto", "fedplvm", "fedfa", "fednorm", "fedtan", "fbn"],
)
def test_parts_that_send_more_are_refused_by_name(dp, other):
    for text in (f"{dp} + {other}", f"{other} + {dp}"):
        with pytest.raises(BadInput, match=rf"{other} (sends its own tensors, which {dp}|needs the clients' plain)"):
            method(text)


@pytest.mark.parametrize("other", ["feddyn", "feddc"])
def test_parts_that_need_plain_updates_are_refused(other):
    with pytest.raises(BadInput, match=f"{other} needs the clients' plain updates, which dpcentral changes"):
        method(f"{other} + dpcentral")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dpcentral + dplocal", "dpcentral and dplocal each protect what is sent"),
        ("dpcentral(clip=inf)", "dpcentral needs a finite clip"),
        ("dplocal(clip=inf, noise=0.1)", "dplocal needs a finite clip"),
        ("dpcentral(clip=0)", "clip must be"),
        ("dpcentral(noise=-1)", "noise must be"),
        ("dpcentral(delta=0)", "delta must be"),
    ],
)
def test_settings_without_meaning_are_refused(text, said):
    with pytest.raises(BadInput, match=said):
        method(text)


def test_delta_must_be_below_one_in_the_number_of_clients():
    with pytest.raises(BadInput, match="delta must be well below 1/5"):
        run("dpcentral(delta=0.2) + gn", rounds=1, recipe=SMALL)


def test_without_the_accountant_a_run_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "fednorms.core.accounting.find_spec", lambda name: None if name == "dp_accounting" else find(name)
    )
    with pytest.raises(BadInput, match=r"pip install 'fednorms\[dp\]'"):
        run("dpcentral + gn", rounds=1, recipe=SMALL)
    assert run("dpcentral(noise=0) + gn", rounds=1, recipe=SMALL).privacy is None


def test_an_undeclared_upload_is_caught_before_it_leaves():
    class Talker(REGISTRY["scaffold"]):
        uploads = False

    data = tiny_data()
    task = task_of("scaffold", data)
    parts = (Talker(), CentralDP())
    object.__setattr__(task.net, "method", replace(method("fedavg"), parts=parts))
    sent = broadcast(task, initial_state(task))
    with pytest.raises(
        BadInput, match=r"scaffold: finish or a pass sends .*dpcentral does not protect.*uploads = True"
    ):
        local_update(task, sent, Client("a", data["a"]))


@pytest.mark.parametrize(
    "name", [n for n in names() if n in REGISTRY and REGISTRY[n].__module__.startswith("fednorms.")]
)
def test_a_part_that_sends_its_own_tensors_declares_it(name):
    text = fitting(name)
    fed = federation()
    for p in method(text).parts:
        fed = p.arrange(fed)
    data = {s.name: s.train for s in fed.clients}
    task = tiny_task(text, data, model=tiny_net())
    engine = Loop(task, fed, fed, ClientStore(2**30))
    sent = broadcast(task, engine.setup(initial_state(task)))
    measured = [p.name for when in ("setup", "evaluate") for p, _ in passes(task, when)]
    uploads: list[Upload] = engine.train(sent, engine.clients).uploads
    spoke = {part for u in uploads for part, tree in u.parts.items() if tree} | set(measured)
    assert all(p.uploads for p in task.method.parts if p.name in spoke)


def test_after_local_is_not_offered():
    with pytest.raises(BadInput, match="dplocal changes updates"):
        run("dplocal(noise=0.1)", rounds=1, recipe=SMALL, evaluate=["after_local"])


def test_two_rounds_of_a_run_hold_their_epsilon():
    data = tiny_data()
    assert rounds(task_of("dpcentral", data), data, 1).model.finite()
    found = run("dpcentral(noise=1.0) + gn", rounds=2, recipe=SMALL)
    first, second = (row["epsilon"] for row in found.history)
    assert 0 < first < second == found.privacy["epsilon"]
    assert f"epsilon {second:.3g}" in repr(found)
