"""FedPLVM: clustered prototypes and the alpha-sparse loss; FINCH."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.clustering import cluster_means, finch
from fednorms.core.tree import Tree
from fednorms.core.views import Step
from fednorms.methods.fedplvm import FedPLVM, sparse_contrast
from tests.methods.test_moon import features
from tests.reference.prototypes import fedplvm, plvm_loss
from tests.reference.prototypes import finch as slow_finch
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def directions(*degrees):
    a = torch.deg2rad(torch.tensor(degrees).double())
    return torch.stack([a.cos(), a.sin()], 1)


def as_lists(labels):
    return sorted([i for i, v in enumerate(labels.tolist()) if v == c] for c in set(labels.tolist()))


# -- FINCH ----------------------------------------------------------------------------------------------------------
def test_finch_on_known_angles():
    assert finch(directions(0, 1, 90, 91)).tolist() == [0, 0, 1, 1]
    # Three pairs; a second step would join the two near ones and leave one cluster beside it, then stop.
    assert as_lists(finch(directions(0, 1, 20, 21, 120, 121))) in ([[0, 1], [2, 3], [4, 5]], [[0, 1, 2, 3], [4, 5]])


def test_finch_on_few_points():
    assert finch(directions(5)).tolist() == [0]
    assert finch(directions(5, 80)).tolist() == [0, 0]  # the first partition already has one cluster
    assert finch(torch.zeros(0, 3)).tolist() == []


@given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 1000))
def test_finch_against_all_three_kinds_of_links(n, d, seed):
    x = torch.randn(n, d + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert as_lists(finch(x)) == slow_finch(list(x))


def test_finch_does_not_depend_on_lengths_and_finds_far_groups():
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(4).double()
    x = torch.cat([c + 0.01 * torch.randn(12, 4, generator=generator, dtype=torch.float64) for c in centres])
    labels = finch(x)
    assert 1 < len(set(labels.tolist())) < 48
    for group in range(4):  # no cluster mixes groups unless whole groups were joined
        assert len(x[labels == labels[12 * group]]) >= 2


def test_cluster_means():
    x = torch.tensor([[0.0, 0.0], [2.0, 4.0], [5.0, 5.0]])
    assert cluster_means(x, torch.tensor([0, 0, 1])).tolist() == [[1.0, 2.0], [5.0, 5.0]]


# -- the loss -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("alpha", "value"), [(0.5, 0.47408), (1.0, 0.42006)])
def test_the_contrast_at_two_known_points(alpha, value):
    s = torch.tensor([[0.81, 0.16]]).double()
    yes, no = torch.tensor([[True, True]]), torch.tensor([[True, False]])
    assert abs(sparse_contrast(s, no, yes, alpha, 1.0).item() - value) < 5e-6


def step(f, y, prototypes, labels):
    down = Tree({"prototype": prototypes, "class": labels})
    return Step(Tree(), Tree(), f, y, None, frozenset(), {"fedplvm": True}, None, None, f, f, "fedplvm", down)


def test_the_term_against_loops_with_negative_cosines_padding_and_an_unknown_class():
    f = torch.randn(6, 5, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 3])  # class 3 has no prototype
    g = torch.randn(8, 5, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 1, 2, -1, -1])
    got = FedPLVM(lam=2.0, alpha=0.25, tau=0.07).loss(step(f, y, g, labels))
    table = {c: [g[i] for i in range(8) if labels[i] == c] for c in range(3)}
    torch.testing.assert_close(got, 2.0 * plvm_loss(f, y, table, 0.25, 0.07), atol=1e-9, rtol=0)


def test_the_gradient_is_finite_where_a_cosine_is_negative_or_a_feature_is_zero():
    f = torch.tensor([[-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    term = FedPLVM().loss(step(f, torch.tensor([0, 3]), torch.eye(2).double(), torch.tensor([0, 1])))
    (g,) = torch.autograd.grad(term, f)
    assert g.isfinite().all()


# -- rounds ---------------------------------------------------------------------------------------------------------
def test_equals_a_plain_torch_loop_over_three_rounds():
    data = tiny_data()
    task = tiny_task("fedplvm(lam=0.5, tau=0.5)", data)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    close(run.model, fedplvm(tiny_net(), features, pairs(data), plans, 0.1, 0.5, 0.25, 0.5).state_dict(), atol=1e-8)


def test_the_first_round_and_lam_zero_are_fedavg_bit_for_bit():
    assert same(play("fedplvm", n=1).model, play("fedavg", n=1).model)
    assert same(play("fedplvm(lam=0)", n=3).model, play("fedavg", n=3).model)
    assert not same(play("fedplvm", n=2).model, play("fedavg", n=2).model)


def test_shapes_are_padded_to_powers_of_two():
    run = play("fedplvm", n=2)
    label = run.server.parts["fedplvm"]["class"]
    assert len(label) & (len(label) - 1) == 0
    used = int((label >= 0).sum())
    assert len(label) < 2 * used
    assert not run.server.parts["fedplvm"]["prototype"][label < 0].any()


def test_uploads_may_differ_in_length_and_only_the_received_count():
    data = tiny_data(11, 2, 10)
    run = play("fedplvm", data, n=2, cohorts=["abc", "b"])
    label = run.server.parts["fedplvm"]["class"]
    assert set(label[label >= 0].tolist()) == set(data["b"].y.tolist())
