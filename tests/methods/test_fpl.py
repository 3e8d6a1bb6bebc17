"""FPL: clustered class means of the clients."""

import pytest
import torch

from fednorms.core.states import context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Step
from fednorms.data import Split
from fednorms.methods.fpl import FPL
from tests.methods.test_moon import features
from tests.reference.prototypes import fpl, fpl_loss
from tests.support.tiny import CLASSES, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


@pytest.mark.parametrize("lam", [1.0, 0.3])
def test_equals_a_plain_torch_loop_over_four_rounds_with_absences(lam):
    data, cohorts = tiny_data(11, 7, 10, 8, 9), ["abcde", "abde", "bc", "abcde"]
    data["c"] = Split(data["c"].x, data["c"].y % 2)  # a client without the last class
    task = tiny_task(f"fpl(lam={lam}, tau=0.2)", data)
    run = rounds(task, data, 4, cohorts=cohorts)
    plans = [[plan_of(task, s, k, t) if k in cohorts[t] else None for k, s in data.items()] for t in range(4)]
    model, prototypes = fpl(tiny_net(), features, pairs(data), plans, 0.1, lam, 0.2)
    close(run.model, model.state_dict(), atol=1e-9)
    mine = run.server.parts["fpl"]
    for c in range(CLASSES):
        found = mine["prototype"][c][mine["valid"][c] > 0]
        wanted = torch.stack(prototypes[c])
        assert found.shape == wanted.shape
        nearest = torch.cdist(wanted, found).argmin(1)
        assert sorted(nearest.tolist()) == list(range(len(found)))
        torch.testing.assert_close(found[nearest], wanted, atol=1e-9, rtol=0)


def step(f, y, prototype, valid):
    down, context = Tree(prototype=prototype, valid=valid), context_of(tiny_task("fpl", tiny_data()), 1, None)
    return Step(Tree(), Tree(), f, y, context, frozenset(), {"fpl": True}, None, None, f, f, "fpl", down)


def test_the_term_against_loops_with_unused_rows_and_an_unknown_class():
    """The authors' hierarchical_info_loss on such features differs by at most 5e-7 (it computes in float32)."""
    f = torch.randn(6, 5, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 3])
    g = torch.randn(4, 2, 5, dtype=torch.float64)
    valid = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]).double()
    g = g * valid.unsqueeze(2)
    table = {0: list(g[0]), 1: [g[1, 0]], 2: list(g[2])}
    got = FPL(lam=2.0, tau=0.3).loss(step(f, y, g, valid))
    torch.testing.assert_close(got, 2.0 * fpl_loss(f, y, table, 0.3), atol=1e-10, rtol=0)


def test_the_gradient_is_finite_for_a_zero_feature_and_a_batch_of_unknown_classes():
    f = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    g, valid = torch.ones(2, 1, 3).double(), torch.tensor([[1.0], [0.0]]).double()
    for y in ([0, 1], [1, 1]):
        term = FPL().loss(step(f, torch.tensor(y), g, valid))
        (slope,) = torch.autograd.grad(term, f)
        assert slope.isfinite().all()
    assert term.item() == 0.0


def test_the_first_round_and_lam_zero_are_fedavg_bit_for_bit():
    assert same(play("fpl", n=1).model, play("fedavg", n=1).model)
    assert same(play("fpl(lam=0)", n=3).model, play("fedavg", n=3).model)
    assert not same(play("fpl", n=2).model, play("fedavg", n=2).model)


def test_two_clients_have_one_prototype_per_class_their_plain_mean():
    data = tiny_data(12, 9)
    run = play("fpl", data, n=1)
    sent = [u.parts["fpl"] for u in run.uploads.values()]
    assert all(s["known"].all() for s in sent)
    torch.testing.assert_close(
        run.server.parts["fpl"]["prototype"][:, 0], (sent[0]["prototype"] + sent[1]["prototype"]) / 2
    )


def test_a_class_that_one_client_has_is_broadcast_as_that_clients_mean():
    """As in the authors' program; the privacy page warns of it."""
    data = tiny_data(12, 9)
    data["b"] = Split(data["b"].x, data["b"].y % 2)  # only "a" has the last class
    run = play("fpl", data, n=1)
    sent, known = run.uploads["a"].parts["fpl"]["prototype"], run.uploads["b"].parts["fpl"]["known"]
    assert known.tolist() == [1, 1, 0]
    assert torch.equal(run.server.parts["fpl"]["prototype"][2, 0], sent[2])
