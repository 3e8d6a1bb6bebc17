"""SCAFFOLD by its identities: sign, storage and scale of the control variates."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.round import broadcast, initial_state, local_update
from fednorms.core.states import Client, ClientState
from fednorms.core.tree import Tree
from fednorms.methods.registry import method
from fednorms.runs.recipe import Recipe
from tests.reference.scaffold import scaffold, scaffold_feddc
from tests.support.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task

COHORTS = ["abc", "ac", "b", "ab"]


def c_of(run):
    return run.server.parts["scaffold"]


def c_i(run, name):
    return run.states[name].parts["scaffold"]


def gradient(model, x, y):
    model.train()
    nn.functional.cross_entropy(model(x), y).backward()
    return Tree({n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("control", ["gradient", "difference"])
def test_equals_algorithm_1_line_by_line_under_partial_participation(control):
    data = tiny_data()
    task = tiny_task(f"scaffold(control={control})", data)
    run = rounds(task, data, 4, cohorts=COHORTS)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(4)]
    model, c, c_clients = scaffold(
        tiny_net(), pairs(data), plans, [["abc".index(k) for k in cohort] for cohort in COHORTS], 0.1
    )
    close(run.model, model.state_dict())
    close(c_of(run), c)
    for name, wanted in zip("abc", c_clients, strict=True):
        close(c_i(run, name), wanted)


@pytest.mark.parametrize("text", ["scaffold", "scaffold(control=difference)", "scaffold(option=I)"])
def test_c_is_the_mean_of_all_c_i(text):
    run = play(text, n=4, cohorts=COHORTS)
    for name, c in c_of(run).items():
        mean = sum(c_i(run, k)[name] for k in "abc") / 3
        torch.testing.assert_close(c, mean, atol=1e-12, rtol=0)


def test_a_client_that_never_took_part_counts_with_zero():
    run = play("scaffold", n=2, cohorts=["a", "b"])
    assert set(run.states) == {"a", "b"}
    for name, c in c_of(run).items():
        torch.testing.assert_close(c, (c_i(run, "a")[name] + c_i(run, "b")[name]) / 3, atol=1e-12, rtol=0)


@pytest.mark.parametrize("control", ["gradient", "difference"])
def test_one_local_step_makes_c_i_the_gradient(control):
    data = tiny_data(5)
    run = play(f"scaffold(control={control})", data, n=1, batch_size=5)
    close(c_i(run, "a"), gradient(tiny_net(), data["a"].x, data["a"].y), atol=1e-12)


def test_both_controls_agree_under_plain_sgd_and_weight_decay_tells_them_apart():
    plain = [play(f"scaffold(control={c})", n=3, epochs=2) for c in ("gradient", "difference")]
    close(c_of(plain[0]), c_of(plain[1]))
    close(plain[0].model, plain[1].model)
    decayed = [play(f"scaffold(control={c})", n=1, weight_decay=0.1, batch_size=99) for c in ("gradient", "difference")]
    start = tiny_net().head.weight.detach()
    gap = c_of(decayed[1])["head.weight"] - c_of(decayed[0])["head.weight"]
    torch.testing.assert_close(gap, 0.1 * start, atol=1e-12, rtol=0)  # the difference contains wd w


def test_a_single_client_is_fedavg():
    data = tiny_data(9)
    close(play("scaffold", data, n=3).model, play("fedavg", data, n=3).model, atol=1e-12)


def test_round_zero_is_fedavg_with_uniform_weights():
    close(play("scaffold", n=1).model, play("fedavg", n=1, weighting="uniform").model, atol=1e-15)


def test_identical_clients_get_no_correction():
    split = tiny_data(4)["a"]
    data = {"a": split, "b": split, "c": split}  # full batches: the order permutes a sum only
    run = play("scaffold", data, n=3, epochs=3)
    close(c_i(run, "a"), c_of(run), atol=1e-12)
    close(run.model, play("fedavg", data, n=3, epochs=3).model, atol=1e-11)


@pytest.mark.parametrize("text", ["scaffold", "scaffold(control=difference)"])
def test_one_full_batch_makes_option_one_and_two_coincide(text):
    one, two = (play(t, n=2, batch_size=50) for t in ("scaffold(option=I)", text))
    close(c_of(one), c_of(two), atol=1e-12)
    close(one.model, two.model, atol=1e-12)


@pytest.mark.parametrize("other", ["fedbn", "fedper", "fixbn(switch=0.0)"])
def test_option_one_starts_from_the_clients_own_tensors_and_normalizes_as_training_does(other):
    one, two = (play(f"{other} + {t}", n=2, batch_size=50) for t in ("scaffold(option=I)", "scaffold"))
    close(c_of(one), c_of(two), atol=1e-12)
    close(one.model, two.model, atol=1e-12)


@pytest.mark.parametrize("other", ["fedprox(mu=0.5)", "greg", "fedfr", "moon", "feddyn(alpha=0.1)"])
def test_option_one_is_the_gradient_of_all_terms_of_the_loss(other):
    one, two = (play(f"{other} + {t}", n=3, batch_size=50) for t in ("scaffold(option=I)", "scaffold"))
    close(c_of(one), c_of(two), atol=1e-11)
    close(one.model, two.model, atol=1e-11)


def test_option_one_is_the_gradient_at_the_broadcast_model_over_all_data():
    data = tiny_data(8, 6)
    run = play("nonorm + scaffold(option=I)", data, n=1, epochs=2)
    model = tiny_net()
    model.norm = nn.Identity()  # without batch statistics the mean over batches is the full gradient
    close(c_i(run, "b"), gradient(model, data["b"].x, data["b"].y), atol=1e-12)


def test_exact_variates_move_every_client_by_the_mean_gradient():
    data = tiny_data()
    task = tiny_task("scaffold", data, batch_size=50)
    grads = {k: gradient(tiny_net(), s.x, s.y) for k, s in data.items()}
    mean = Tree({n: sum(g[n] for g in grads.values()) / 3 for n in grads["a"]})
    state = replace(initial_state(task), parts={"scaffold": mean})
    for name, split in data.items():
        mine = ClientState(0, Tree(), {"scaffold": grads[name]})
        upload, _ = local_update(task, broadcast(task, state), Client(name, split, mine))
        close(upload.model.pick(mean) - task.net.initial, mean * -0.1, atol=1e-12)


@pytest.mark.parametrize(("k", "rho"), [(10, 0.9), (4, 0.5), (1, 0.9)])
def test_momentum_divides_by_k_prime(k, rho):
    # A constant gradient of 1: the true mean gradient is 1, and the difference form must say so.
    def linear(z, y):
        return z.mean()

    run = play(
        "scaffold(control=difference)",
        ones(2),
        n=1,
        model=Scalar(),
        loss=linear,
        steps=k,
        momentum=rho,
        batch_size=2,
    )
    assert float(c_i(run, "a")["head.weight"]) == pytest.approx(1.0, abs=1e-12)
    prime = float(1.0 - run.model["head.weight"]) / 0.1
    velocity = [sum(rho**j for j in range(i + 1)) for i in range(k)]
    assert prime == pytest.approx(sum(velocity), abs=1e-12)
    if (k, rho) == (10, 0.9):
        assert prime == pytest.approx(41.38, abs=0.005)  # the sum above as one number


def test_the_rate_in_force_is_used_not_the_first_one():
    decayed = [play(f"scaffold(control={c})", n=3, schedule="exp", decay=0.5) for c in ("gradient", "difference")]
    close(c_of(decayed[0]), c_of(decayed[1]))


def test_statistics_are_averaged_and_never_corrected():
    run = play("scaffold", n=3)
    assert not [k for k in c_of(run) if "running" in k or "tracked" in k]
    mean = sum(run.uploads[k].model["norm.running_var"] for k in "abc") / 3
    torch.testing.assert_close(run.model["norm.running_var"], mean, atol=1e-14, rtol=0)


@pytest.mark.parametrize(("other", "left_out"), [("fedbabu", "head."), ("fedbn", "norm."), ("fedrep", "head.")])
def test_variates_cover_exactly_what_is_sent(other, left_out):
    run = play(f"scaffold + {other}", n=2)
    assert c_of(run).keys() == c_i(run, "a").keys() == run.uploads["a"].parts["scaffold"].keys()
    assert c_of(run)
    assert not [k for k in c_of(run) if k.startswith(left_out)]


def test_the_mean_gradient_keeps_its_meaning_under_clipping():
    # It is raw: what happens to a gradient after it was taken does not matter.
    one = play("scaffold(control=gradient)", n=1, steps=1, clip=1e-3)
    two = play("scaffold(control=gradient)", n=1, steps=1)
    close(c_of(one), c_of(two), atol=1e-15)


@pytest.mark.parametrize("settings", [{"clip": 0.05}, {"weight_decay": 0.1}, {"clip": 0.1, "momentum": 0.9}])
def test_the_default_is_option_two_of_the_paper_with_every_setting_of_sgd(settings):
    data = tiny_data()
    run = play("scaffold", data, n=1, epochs=2, **settings)
    start, rho = tiny_net().state_dict(), settings.get("momentum", 0.0)
    for name, split in data.items():
        k = 2 * -(-len(split) // 4)
        weights = sum((1 - rho ** (k - j)) / (1 - rho) for j in range(k))
        for tensor, c in c_i(run, name).items():  # c_i and c are zero before: c_i+ = (w_t - w) / (K lr)
            wanted = (start[tensor] - run.uploads[name].model[tensor]) / (weights * 0.1)
            torch.testing.assert_close(c, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("text", "settings", "became"),
    [
        ("scaffold", {}, "difference"),
        ("scaffold", {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}, "difference"),
        ("scaffold", {"optimizer": "adamw"}, "gradient"),
        ("scaffold", {"optimizer": "adam"}, "gradient"),
        ("scaffold", {"optimizer": "custom:SGD@12"}, "gradient"),
        ("scaffold", {"momentum": 0.9, "keep_momentum": True}, "gradient"),
        ("scaffold + perfedavg(beta=0.01)", {}, "gradient"),  # which has its own rate
        ("scaffold + fedrep", {"momentum": 0.9}, "difference"),  # whose head is not sent
        ("scaffold + alignfeatures", {}, "gradient"),  # whose head is sent, and trains in its own phase
    ],
)
def test_auto_becomes_what_fits_the_recipe_and_is_written_out(text, settings, became):
    recipe = Recipe(method=text, training=settings).resolved()
    assert f"control='{became}'" in recipe.method
    assert Recipe.from_toml(recipe.to_toml()).resolved() == recipe


@pytest.mark.parametrize("divides", ["scaffold(control=difference)", "scaffold(variant=fedntd)", "feddc", "fedcm"])
@pytest.mark.parametrize("plans", ["alignfeatures", "perfedavg(beta=0.01)"])
def test_an_update_of_several_phases_or_rates_is_not_divided(divides, plans):
    named, planner = divides.split("(")[0], plans.split("(")[0]
    with pytest.raises(BadInput, match=f"{named} divides an update .* but {planner} trains in several phases or at"):
        Recipe(method=f"{divides} + {plans}").resolved()
    for fine in (f"{divides} + fedrep", "scaffold(option=I) + alignfeatures", f"fednova + {plans}"):
        assert Recipe(method=fine).resolved()


@pytest.mark.parametrize("text", ["scaffold(option=I)", "scaffold(variant=feddc)", "scaffold(control=gradient)"])
def test_only_auto_is_replaced(text):
    assert Recipe(method=text).resolved().method == str(method(text))


def test_a_recipe_of_version_0_1_keeps_the_mean_gradient():
    assert Recipe(method="scaffold", version="0.1.0").resolved().method == "scaffold(control='gradient')"
    assert Recipe(method="scaffold(option=I) + fedbn", version="0.1.0").method == "scaffold(option='I') + fedbn"
    assert Recipe(method="fednova + fedprox(mu=0.1)", version="0.1.0").resolved().method.startswith("fednova(mu=0.0)")
    assert Recipe(method="fednova", version="0.1.0").method == "fednova"


def test_option_one_sees_the_methods_own_loss():
    data = tiny_data(6, 5)
    one, two = (play(t, data, n=2, batch_size=50) for t in ("spherefed + scaffold(option=I)", "spherefed + scaffold"))
    close(c_of(one), c_of(two), atol=1e-12)


# -- the versions in other authors' repositories --------------------------------------------------------------------
@pytest.mark.parametrize("clip", [None, 0.5])
def test_feddcs_version_equals_a_plain_torch_loop(clip):
    data = tiny_data(13, 4, 7)
    text = "scaffold(variant=feddc)"
    task = tiny_task(text, data, epochs=2, schedule="exp", decay=0.5, clip=clip)
    run = rounds(task, data, 4, cohorts=COHORTS)
    fixed = replace(task, training=replace(task.training, steps=2 * 2))  # two epochs of ceil(8 / 4) batches for all
    plans = [[plan_of(fixed, s, k, t) for k, s in data.items()] for t in range(4)]
    numbers = [["abc".index(k) for k in cohort] for cohort in COHORTS]
    model, c, c_clients = scaffold_feddc(tiny_net(), pairs(data), plans, numbers, 0.1, 0.5, clip)
    close(run.model, model.state_dict(), atol=1e-6 if clip else 1e-10)
    close(c_of(run), c, atol=1e-6 if clip else 1e-10)
    for name, wanted in zip("abc", c_clients, strict=True):
        close(c_i(run, name), wanted, atol=1e-6 if clip else 1e-10)


def test_feddcs_version_lets_every_client_take_the_same_number_of_steps():
    run = play("scaffold(variant=feddc)", tiny_data(13, 4, 7), n=1, epochs=3)
    assert [u.metrics["steps"] for u in run.uploads.values()] == [6, 6, 6]
    assert [u.metrics["steps"] for u in play("scaffold", tiny_data(13, 4, 7), n=1).uploads.values()] == [4, 1, 2]


def test_feddcs_version_is_the_default_for_equal_clients_at_a_constant_rate():
    data = tiny_data(8, 8, 8)
    ours, theirs = (play(t, data, n=4, cohorts=COHORTS) for t in ("scaffold", "scaffold(variant=feddc)"))
    close(ours.model, theirs.model, atol=1e-11)
    close(c_of(ours), c_of(theirs), atol=1e-11)


def test_feddcs_version_divides_by_the_undecayed_rate():
    # A constant gradient of 1 in round 1, at half the rate: c_i says 1/2 where the default says 1.
    def linear(z, y):
        return z.mean()

    settings = {"model": Scalar(), "loss": linear, "schedule": "exp", "decay": 0.5, "batch_size": 2, "steps": 3}
    for text, wanted in (("scaffold(variant=feddc)", 0.5), ("scaffold(control=difference)", 1.0)):
        run = play(text, ones(2), n=2, **settings)
        assert float(c_i(run, "a")["head.weight"]) == pytest.approx(wanted, abs=1e-12)


def test_fedntds_version_uses_k_prime_and_weights_models_by_size():
    data = tiny_data(13, 4, 7)
    settings = {"n": 3, "momentum": 0.9, "cohorts": COHORTS[:3], "schedule": "exp", "decay": 0.5}
    theirs = play("scaffold(variant=fedntd)", data, **settings)
    ours = play("scaffold(control=difference)", data, weighting="size", **settings)
    close(theirs.model, ours.model, atol=0)
    close(c_of(theirs), c_of(ours), atol=0)
    assert tiny_task("scaffold(variant=fedntd)", data).method.weighting() == "size"
    assert tiny_task("scaffold(variant=feddc)", data).method.weighting() == "uniform"
