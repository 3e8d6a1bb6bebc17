"""The algebra of trees."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorms.core.tree import Tree, branch, join, mean

NAMES = st.lists(st.sampled_from(["a", "b", "c", "d.weight"]), unique=True, max_size=4)
NUMBERS = st.integers(-8, 8)  # small integers in float64: sums and products are exact


@st.composite
def trees(draw, names=NAMES):
    chosen = draw(names) if not isinstance(names, list) else names
    return Tree({k: torch.tensor(draw(st.lists(NUMBERS, min_size=2, max_size=2)), dtype=torch.float64) for k in chosen})


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


FULL = trees(["a", "b", "c"])


@given(FULL, FULL, FULL)
def test_addition_is_a_commutative_group_on_equal_keys(a, b, c):
    assert equal(a + b, b + a)
    assert equal((a + b) + c, a + (b + c))
    assert equal(a + a.zeros(), a)
    assert equal(a - a, a.zeros())
    assert equal(a - b, a + -b)


@given(FULL, FULL, NUMBERS, NUMBERS)
def test_scalars_distribute(a, b, s, t):
    assert equal(s * (a + b), s * a + s * b)
    assert equal((s + t) * a, s * a + t * a)
    assert equal(a * s, s * a)
    if s:
        assert equal(a * s / s, a)


@given(trees(), trees())
def test_the_left_operand_decides_the_keys_and_missing_entries_stay(a, b):
    for out, sign in ((a + b, 1), (a - b, -1)):
        assert list(out) == list(a)
        for k in a:
            assert torch.equal(out[k], a[k] + sign * b[k] if k in b else a[k])


@given(trees(), trees(), NUMBERS)
def test_the_inner_product_over_common_keys(a, b, s):
    assert float(a.dot(b)) == sum(float(a[k] @ b[k]) for k in a if k in b)
    assert a.dot(b) == b.dot(a)
    assert a.sqnorm() >= 0
    assert float((s * a).dot(b)) == s * float(a.dot(b))


@given(trees(), trees())
def test_nothing_is_changed_in_place(a, b):
    before = [{k: v.clone() for k, v in t.items()} for t in (a, b)]
    a + b, a - b, -a, a * 2.0, a / 2.0, a.dot(b), a.zeros(), a.map(torch.exp), mean([a, a], [1, 2])
    assert equal(a, Tree(before[0]))
    assert equal(b, Tree(before[1]))


@given(trees(), trees())
def test_join_and_branch_are_inverse(a, b):
    both = join(h=a, c=b)
    assert len(both) == len(a) + len(b)
    assert equal(branch(both, "h"), a)
    assert equal(branch(both, "c"), b)
    nested = join(x=both)
    assert equal(branch(branch(nested, "x"), "c"), b)


@given(st.lists(FULL, min_size=1, max_size=4), st.data())
def test_the_mean_is_convex_and_ignores_the_scale_of_weights(many, data):
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(many), max_size=len(many)))
    got, scaled = mean(many, weights), mean(many, [7 * w for w in weights])
    for k in got:
        wanted = sum(w * t[k] for w, t in zip(weights, many, strict=True)) / sum(weights)
        torch.testing.assert_close(got[k], wanted, atol=1e-12, rtol=0)
        torch.testing.assert_close(got[k], scaled[k], atol=1e-12, rtol=0)
        stacked = torch.stack([t[k] for t in many])
        assert bool((got[k] >= stacked.min(0).values - 1e-9).all())
        assert bool((got[k] <= stacked.max(0).values + 1e-9).all())


def test_the_mean_of_one_is_that_one_bit_for_bit():
    a = Tree(w=torch.rand(5))
    assert equal(mean([a], [0.1]), a)


def test_equal_float32_trees_average_to_themselves_bit_for_bit():
    a = Tree(w=torch.randn(1000))
    assert equal(mean([a, a, a], [3, 5, 7]), a)


def test_counters_are_the_first_trees_and_keep_their_type():
    got = mean([Tree(n=torch.tensor(3)), Tree(n=torch.tensor(8))], [1, 1])["n"]
    assert got.dtype == torch.int64
    assert got == 3


def test_the_mean_is_taken_in_float64_and_returned_in_the_trees_type():
    big = [Tree(w=torch.tensor([x])) for x in (1e8, 1.0, -1e8)]
    got = mean(big, [1, 1, 1])["w"]
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(1 / 3, rel=1e-6)  # float32 sums would lose the 1


def test_clone_shares_nothing_and_detach_shares_everything():
    a = Tree(w=torch.ones(2, requires_grad=True))
    b, c = a.clone(), a.detach()
    assert b["w"].data_ptr() != a["w"].data_ptr()
    assert c["w"].data_ptr() == a["w"].data_ptr()
    assert not b["w"].requires_grad
    assert not c["w"].requires_grad


def test_dtypes_and_devices():
    a = Tree(w=torch.ones(2), n=torch.tensor(1))
    assert [t.dtype for t in a.to(torch.float64).values()] == [torch.float64, torch.int64]
    assert a.nbytes() == 16
    assert a.to("cpu").keys() == a.keys()


def test_finite_looks_at_floating_entries():
    assert Tree(n=torch.tensor(1), w=torch.ones(1)).finite()
    assert not Tree(w=torch.tensor([float("inf")])).finite()
    assert Tree().finite()


def test_arithmetic_of_empty_trees():
    empty = Tree()
    assert empty + empty == empty * 2.0 == empty / 2.0 == -empty == {}
    assert float(empty.sqnorm()) == 0.0


def test_pick_keeps_the_asked_order():
    a = Tree(x=torch.ones(1), y=torch.zeros(1), z=torch.ones(1))
    assert list(a.pick(["z", "nowhere", "x"])) == ["z", "x"]


def test_a_tree_survives_pickling():
    a = Tree(w=torch.rand(3), n=torch.tensor(2))
    b = pickle.loads(pickle.dumps(a))
    assert type(b) is Tree
    assert equal(a, b)


def test_gradients_flow_through_the_algebra():
    w = Tree(w=torch.tensor([1.0, 2.0], requires_grad=True))
    (g,) = torch.autograd.grad((w - Tree(w=torch.ones(2))).sqnorm(), [w["w"]])
    assert g.tolist() == [0.0, 2.0]


def test_the_squared_norm_counts_integers_and_works_under_function_transforms():
    tree = Tree(w=torch.tensor([1.0, 2.0]), n=torch.tensor(3))
    assert float(tree.sqnorm()) == float(tree.dot(tree)) == 14.0
    w = torch.randn(3)
    torch.testing.assert_close(torch.func.grad(lambda w: Tree(w=w).sqnorm())(w), 2 * w)


def test_the_squared_norm_has_first_and_second_derivatives():
    tensors = torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in tensors]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda a, b: Tree(a=a, b=b).sqnorm(), leaves)
