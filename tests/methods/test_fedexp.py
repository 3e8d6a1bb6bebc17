"""FedExP: the server's step from the clients' disagreement."""

import pytest
import torch

from fednorms.core.states import context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.methods.fedexp import FedExP
from tests.reference.fedexp import fedexp, step_size
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def context(t=1):
    return context_of(tiny_task("fedexp", tiny_data(), rounds=9, schedule="exp", decay=0.5), t, None)


def eta(updates, eps=0.0, weights=None):
    """The step that the server takes for these updates, read off the result."""
    weights = weights or [1.0] * len(updates)
    total = sum(weights)
    delta = Tree(w=sum(w / total * d for w, d in zip(weights, updates, strict=True)))
    length = sum(w / total * d @ d for w, d in zip(weights, updates, strict=True))
    out, _ = FedExP(eps=eps).server(
        delta, Round(Tree(w=torch.zeros_like(delta["w"])), Tree(sqnorm=length), Tree(), 1, 1, context())
    )
    k = delta["w"].abs().argmax()
    return float(out["w"][k] / delta["w"][k])


@pytest.mark.parametrize("m", [1, 2, 3, 10])
def test_orthogonal_updates_of_equal_length(m):
    updates = list(2.5 * torch.eye(m, 12, dtype=torch.float64))
    assert eta(updates) == pytest.approx(max(1.0, m / 2), abs=1e-12)
    assert eta(updates, eps=1e12) == 1.0


def test_identical_updates_and_one_client_take_a_plain_step():
    d = torch.randn(9, dtype=torch.float64)
    assert eta([d, d, d]) == 1.0
    assert eta([d]) == 1.0


def test_never_below_one_and_equal_to_the_formula():
    for n in range(2, 7):
        updates = [torch.randn(5, dtype=torch.float64) for _ in range(n)]
        weights = [float(k + 1) for k in range(n)]
        got = eta(updates, 1e-3, weights)
        assert got >= 1.0
        assert got == pytest.approx(step_size(updates, weights, 1e-3), rel=1e-12)


def test_the_public_code_scales_eps_by_clients_and_rate():
    updates = list(2.5 * torch.eye(10, 12, dtype=torch.float64))
    delta = Tree(w=sum(updates) / 10)
    for t in (0, 3):
        length = Tree(sqnorm=delta["w"].new_tensor(2.5**2))
        r = Round(Tree(w=torch.zeros(12)), length, Tree(), 10, 20, context(t))
        paper, author = (FedExP(eps=0.1, variant=v).server(delta, r)[0]["w"][0] / 0.25 for v in ("paper", "author"))
        assert float(paper) == pytest.approx(step_size(updates, [1.0] * 10, 0.1), rel=1e-12)
        assert float(author) == pytest.approx(step_size(updates, [1.0] * 10, 0.1 * 10 * 0.5 ** (2 * t)), rel=1e-12)


def test_updates_that_cancel_leave_the_model_where_it_is():
    d = torch.ones(3, dtype=torch.float64)
    delta = Tree(w=torch.zeros(3, dtype=torch.float64))
    out, _ = FedExP(eps=0.0).server(delta, Round(Tree(w=d), Tree(sqnorm=d @ d), Tree(), 2, 2, context()))
    assert out["w"].tolist() == [0.0] * 3
    still, _ = FedExP(eps=0.0).server(delta, Round(Tree(w=d), Tree(sqnorm=0 * d.sum()), Tree(), 2, 2, context()))
    assert still["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("uniform", [False, True])
def test_equals_a_plain_torch_loop_over_three_rounds(uniform):
    data = tiny_data(12, 3, 5)
    settings = {"weighting": "uniform"} if uniform else {}
    task = tiny_task("fedexp(eps=0.0001)", data, **settings)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    server, previous, steps = fedexp(tiny_net(), pairs(data), plans, 0.1, 1e-4, uniform)
    assert max(steps) > 1.0  # not a vacuous test
    close(run.model, server.state_dict(), atol=1e-10)
    close(run.server.parts["fedexp"], {k: p.detach() for k, p in previous.named_parameters()})


def test_statistics_are_averaged_not_extrapolated():
    run = play("fedexp(eps=0)", n=1)
    sizes = {"a": 11, "b": 7, "c": 10}
    mean = sum(n * run.uploads[k].model["norm.running_var"] for k, n in sizes.items()) / 28
    torch.testing.assert_close(run.model["norm.running_var"], mean, atol=1e-14, rtol=0)


def test_one_client_is_fedavg():
    data = tiny_data(9)
    close(play("fedexp", data, n=3).model, play("fedavg", data, n=3).model, atol=1e-12)


def test_tests_use_the_mean_of_the_last_two_models():
    data = tiny_data()
    task = tiny_task("fedexp", data)
    first = rounds(task, data, 1)
    second = rounds(task, data, 1, run=first)
    tested = task.method.evaluation().server_model(second.model, second.server.parts["fedexp"])
    for name in ("conv.weight", "head.bias", "norm.weight"):
        torch.testing.assert_close(tested[name], (first.model[name] + second.model[name]) / 2, atol=1e-15, rtol=0)
    assert torch.equal(tested["norm.running_var"], second.model["norm.running_var"])
    assert tiny_task("fedexp(average_last_two=false)", data).method.evaluation().server_model is None


def test_before_the_first_round_the_tested_model_is_the_initial_one():
    task = tiny_task("fedexp", tiny_data())
    rule = task.method.evaluation().server_model
    assert same(rule(task.net.initial, Tree()), task.net.initial)


def test_after_the_first_round_the_tested_model_is_the_trained_one():
    data = tiny_data()
    task = tiny_task("fedexp", data)
    first = rounds(task, data, 1)
    assert not same(first.model, task.net.initial)
    assert same(task.method.evaluation().server_model(first.model, first.server.parts["fedexp"]), first.model)
