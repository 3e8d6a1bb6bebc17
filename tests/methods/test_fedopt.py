"""Server optimizers: FedAvgM, FedAdagrad, FedYogi, FedAdam."""

import pytest
import torch

from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.methods.registry import method
from tests.reference.fedopt import adaptive, momentum
from tests.support.tiny import play, rounds, same, tiny_data, tiny_net, tiny_task

UPDATES = [0.5, -0.2, 0.001, 0.0, 3.0, -1.0, 0.004]
ADAPTIVE = ["fedadagrad", "fedyogi", "fedadam"]
ALL = ["fedavgm", *ADAPTIVE]


def places(text, updates=UPDATES):
    """Where the server takes a parameter that starts at 0, for these mean updates."""
    (part,) = method(text).parts
    w = Tree(w=torch.zeros(1, dtype=torch.float64))
    mine, client = part.init(w)
    assert not client
    seen = []
    for delta in updates:
        step, mine = part.server(
            Tree(w=torch.full((1,), delta, dtype=torch.float64)), Round(w, Tree(), mine, 1, 1, None)
        )
        w = w + step
        seen.append(float(w["w"]))
    return seen


@pytest.mark.parametrize(("lr", "beta1", "tau"), [(0.01, 0.9, 1e-3), (0.3, 0.0, 0.1), (1.0, 0.5, 1e-9)])
@pytest.mark.parametrize("kind", ADAPTIVE)
def test_adaptive_servers_equal_algorithm_2(kind, lr, beta1, tau):
    beta2 = 0.95
    options = f"lr={lr}, beta1={beta1}, tau={tau}" + ("" if kind == "fedadagrad" else f", beta2={beta2}")
    assert places(f"{kind}({options})") == pytest.approx(adaptive(kind, UPDATES, lr, beta1, beta2, tau), abs=1e-13)


@pytest.mark.parametrize(("lr", "beta"), [(1.0, 0.9), (0.5, 0.3), (1.0, 0.0)])
def test_momentum_equals_the_recursion(lr, beta):
    assert places(f"fedavgm(lr={lr}, beta={beta})") == pytest.approx(momentum(UPDATES, lr, beta), abs=1e-14)


def test_no_momentum_is_fedavg_bit_for_bit():
    assert same(play("fedavg", n=3).model, play("fedavgm(beta=0)", n=3).model)


def test_a_constant_update_is_amplified_by_one_over_one_minus_beta():
    walked = places("fedavgm(beta=0.5)", [1.0] * 60)
    assert walked[-1] - walked[-2] == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_the_first_step_of_a_large_update_has_a_length_that_does_not_depend_on_it(kind):
    one, two = (places(f"{kind}(beta1=0.0, tau=1e-12)", [size])[0] for size in (1.0, 1000.0))
    assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_a_huge_tau_is_fedavg_with_a_server_rate(kind):
    forgetful = "" if kind == "fedadagrad" else ", beta2=1.0"
    run = play(f"{kind}(beta1=0.0, tau=1e8, lr=2e8{forgetful})", n=1)  # v stays tau^2: the step is lr delta / (2 tau)
    plain = play("fedavg", n=1)
    for name, _ in tiny_net().named_parameters():
        torch.testing.assert_close(run.model[name], plain.model[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("text", ALL)
def test_statistics_are_averaged_and_clients_keep_and_send_nothing(text):
    run = play(text, n=3)
    sizes = {k: len(s) for k, s in tiny_data().items()}
    for name in ("norm.running_mean", "norm.running_var"):
        mean = sum(n * run.uploads[k].model[name] for k, n in sizes.items()) / sum(sizes.values())
        torch.testing.assert_close(run.model[name], mean, atol=1e-14, rtol=0)
    assert not any("running" in k for k in run.server.parts[text])
    assert not run.states["a"].parts[text]
    assert not run.uploads["a"].parts.get(text)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("other", ["fedbn", "fedbabu", "standalone"])
def test_only_what_is_sent_has_a_momentum(text, other):
    data = tiny_data()
    task = tiny_task(f"{text} + {other}", data)
    run = rounds(task, data, 2)
    assert {k.rsplit("/", 1)[-1] for k in run.server.parts[text]} == set(task.net.sent_params)
    assert run.model.finite()
