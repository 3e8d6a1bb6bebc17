"""FedPAC: features aligned with class means, classifiers mixed for each client.

Next to the authors' program (github.com/JianXu95/FedPAC), largest differences in float64: 2.8e-17 in a client's
statistics, 3.1e-8 in 100 rows of five mixing weights (its solver replaced by SciPy's SLSQP).
"""

import pytest
import torch

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.simplex import smallest_form
from fednorms.core.tree import branch
from tests.reference.fedpac import best_weights, fedpac
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_equals_a_plain_loop():
    data = tiny_data()
    task = tiny_task("fedpac(lam=0.7, head_lr=0.2)", data, epochs=2)
    run = rounds(task, data, 3)
    plans = [
        [(plan_of(task, s, k, t, 0, epochs=1), plan_of(task, s, k, t, 1)) for k, s in data.items()] for t in range(3)
    ]
    server, heads, means = fedpac(tiny_net(), pairs(data), plans, 0.1, 0.7, 0.2, 3)
    close(run.model, server.state_dict(), atol=1e-8)
    mixed = run.server.parts["mixheads"]
    for name, head in zip("abc", heads, strict=True):
        close(branch(branch(join_names(mixed), name), "head"), head, atol=1e-8)
    for c, mean in means.items():
        torch.testing.assert_close(run.server.parts["alignfeatures"]["mean"][c], mean, atol=1e-8, rtol=0)
    assert not torch.equal(mixed["a/head.weight"], mixed["b/head.weight"])


def join_names(tree):
    return type(tree)({k.replace("head.", "head/"): t for k, t in tree.items()})


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_the_quadratic_form_is_minimized(n):
    torch.manual_seed(n)
    for rank in range(1, n + 1):
        j = torch.rand(n, rank, dtype=torch.float64) - 0.2
        p = j @ j.T + torch.diag(0.1 * torch.rand(n, dtype=torch.float64))
        a, wanted = smallest_form(p), best_weights(p)
        torch.testing.assert_close(a, wanted, atol=1e-7, rtol=0)


def test_equal_clients_share_equally_and_nothing_known_means_equal_weights():
    torch.testing.assert_close(smallest_form(torch.ones(3, 3)), torch.full((3,), 1 / 3, dtype=torch.float64))
    assert smallest_form(torch.zeros(2, 2)).tolist() == [0.5, 0.5]


def test_clients_with_the_same_data_get_the_mean_classifier():
    one = tiny_data(9)["a"]
    run = play("mixheads", {"a": one, "b": one}, n=1)
    mean = sum(u.model["head.weight"] for u in run.uploads.values()) / 2
    for name in "ab":
        torch.testing.assert_close(run.server.parts["mixheads"][f"{name}/head.weight"], mean, atol=1e-9, rtol=0)


def test_an_absent_client_keeps_the_classifier_that_it_was_sent():
    data = tiny_data()
    task = tiny_task("mixheads", data)
    run = rounds(task, data, 1)
    kept = branch(run.server.parts["mixheads"], "c")
    run = rounds(task, data, 1, run=run, cohorts=["ab"])
    assert same(kept, branch(run.server.parts["mixheads"], "c"))


def test_the_first_round_is_not_aligned_and_lam_zero_never_is():
    one, other = (play(f"alignfeatures(lam={lam})", n=1) for lam in (0.0, 3.0))
    assert same(one.model, other.model)
    one, other = (play(f"alignfeatures(lam={lam})", n=2) for lam in (0.0, 3.0))
    assert not same(one.model, other.model)


def test_facts():
    facts = fn.describe("fedpac", "cnn-small")
    assert facts.addressed == ("mixheads",)
    assert not facts.averaged_only
    assert facts.stateless_clients


@pytest.mark.parametrize("other", ["fedper", "fedbabu", "standalone"])
def test_mixing_needs_a_classifier_that_is_sent(other):
    with pytest.raises(BadInput, match="mixheads"):
        tiny_task(f"mixheads + {other}", tiny_data())
