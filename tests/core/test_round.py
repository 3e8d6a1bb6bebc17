"""The laws of a round: routes, reductions, order of hooks, divergence, keyed randomness."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput, Diverged
from fednorms.core.method import Method
from fednorms.core.net import Net
from fednorms.core.part import HOOKS, Part, Route, option, part
from fednorms.core.reductions import reduce_uploads
from fednorms.core.round import broadcast, initial_state, local_update, server_update
from fednorms.core.states import Client, context_of
from fednorms.core.surgery import Change
from fednorms.core.tree import Tree
from fednorms.data import Split
from fednorms.methods.registry import method
from tests.support.tiny import close, play, rounds, same, tiny_data, tiny_net, tiny_task


def own(name, **hooks):
    return part(name)(type(name, (Part,), hooks))()


# -- routes -----------------------------------------------------------------------------------------------------
def routed(name, **leaves):
    return own(name, route=lambda self, slot: leaves.get(slot.leaf, Route.SHARED))


@pytest.mark.usefixtures("parts_as_before")
def test_the_most_private_route_wins_in_any_order():
    a, b = routed("a", weight=Route.SENT), routed("b", weight=Route.LOCAL, bias=Route.SENT)
    for order in ((a, b), (b, a)):
        net = tiny_task(Method(order), tiny_data()).net
        assert net.routes["conv.weight"] is Route.LOCAL
        assert net.routes["conv.bias"] is Route.SENT
        assert net.routes["norm.running_mean"] is Route.SHARED


@pytest.mark.usefixtures("parts_as_before")
def test_two_owners_are_refused_by_name():
    both = Method((routed("first", running_mean=Route.OWNED), routed("second", running_mean=Route.OWNED)))
    with pytest.raises(BadInput, match=re.escape("first and second both own norm.running_mean")):
        tiny_task(both, tiny_data())


@pytest.mark.parametrize("text", ["fedbabu(epochs=0) + fedrep", "spherefed + fedrep", "fedbabu + standalone"])
def test_frozen_against_local_is_refused_by_name(text):
    with pytest.raises(BadInput, match=r'on model "TinyNet": \w+ freezes head.weight but \w+ keeps it local'):
        tiny_task(text, tiny_data())


@pytest.mark.usefixtures("parts_as_before")
def test_nothing_left_to_share_is_refused_by_name():
    everything = own("hermit", route=lambda self, slot: Route.LOCAL)
    with pytest.raises(BadInput, match="hermit together leave nothing to share"):
        tiny_task(Method((everything,)), tiny_data())


@pytest.mark.usefixtures("parts_as_before")
def test_a_part_that_acts_on_nothing_is_an_error_that_names_the_model():
    with pytest.raises(BadInput, match=r'lazy has nothing to act on: model "TinyNet".*Remove lazy'):
        tiny_task(Method((routed("lazy", nowhere=Route.LOCAL),)), tiny_data())


@pytest.mark.parametrize(
    "text", ["nonorm + gn(groups=2)", "hbn + mixbn", "agn + fedbn", "gn(groups=2) + ln", "hbn + fedbn"]
)
def test_two_surgeries_on_one_layer_are_an_error_that_names_both(text):
    first, second = [p.name for p in method(text).parts]
    with pytest.raises(
        BadInput, match=rf"{second} has nothing to act on.*\(after.*{first}.*changed it\).*Remove {second}"
    ):
        tiny_task(text, tiny_data())


def test_every_tensor_has_exactly_one_route_and_one_group():
    for text in ("fedavg", "fedbn", "hbn", "fedbabu", "mixbn", "standalone"):
        net = tiny_task(text, tiny_data()).net
        assert net.routes.keys() == net.slots.keys() == net.initial.keys() == net.module.state_dict().keys()
        assert set(net.exchanged) & set(net.own) == {n for n, r in net.routes.items() if r is Route.SENT}
        assert not set(net.exchanged) & net.private


# -- order and laws of hooks --------------------------------------------------------------------------------------
@pytest.mark.usefixtures("parts_as_before")
def test_gradient_hooks_run_in_order():
    double = own("double", grad=lambda self, g, s: g * 2.0)
    ones_ = own("ones", grad=lambda self, g, s: g.map(torch.ones_like))
    data = tiny_data(4)
    start = tiny_net().conv.weight.detach()
    for parts, factor in (((double, ones_), 1.0), ((ones_, double), 2.0)):
        run = play(Method(parts), data, n=1, lr=0.1)
        torch.testing.assert_close(run.model["conv.weight"], start - 0.1 * factor, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("parts_as_before")
def test_server_hooks_run_in_order_and_see_parameters_only():
    seen = {}

    def watch(self, delta, r):
        seen[self.name] = set(delta)
        return delta * 2.0, r.mine

    def clip(self, delta, r):
        return delta.map(lambda t: t.clamp(-1e-3, 1e-3)), r.mine

    double, clipper = own("double", server=watch), own("clipper", server=clip)
    data = tiny_data(4)
    start = tiny_net().conv.weight.detach()
    for parts, most in (((double, clipper), 1e-3), ((clipper, double), 2e-3)):
        run = play(Method(parts), data, n=1)
        assert (run.model["conv.weight"] - start).abs().max() == pytest.approx(most, abs=1e-12)
    assert seen["double"] == {n for n, _ in tiny_net().named_parameters()}


@pytest.mark.usefixtures("parts_as_before")
def test_statistics_have_their_own_chain():
    still = own("still", stats=lambda self, delta, r: delta.zeros())
    run = play(Method((still,)), n=2)
    assert run.model["norm.running_mean"].tolist() == [0.0] * 4
    assert not torch.equal(run.model["conv.weight"], tiny_net().conv.weight)


@pytest.mark.usefixtures("parts_as_before")
def test_loss_terms_commute():
    one, other = (play(t, n=2).model for t in ("fedprox(mu=0.5) + fedfr(mu=0.1)", "fedfr(mu=0.1) + fedprox(mu=0.5)"))
    close(one, other, atol=1e-12)


@pytest.mark.usefixtures("parts_as_before")
def test_what_a_part_sends_changes_the_upload_only():
    half = own("half", send=lambda self, delta, e: delta * 0.5)
    data = tiny_data(4)
    plain, halved = play("fedavg", data, n=1), play(Method((half,)), data, n=1)
    start = tiny_net().state_dict()
    for name, _ in tiny_net().named_parameters():
        torch.testing.assert_close(
            halved.model[name] - start[name], (plain.model[name] - start[name]) / 2, atol=1e-12, rtol=0
        )
    assert torch.equal(halved.model["norm.running_var"], plain.model["norm.running_var"])


@pytest.mark.usefixtures("parts_as_before")
def test_an_upload_of_a_private_tensor_is_stopped():
    leak = own("leak", finish=lambda self, e: (e.mine, Tree({"norm.weight": torch.ones(4)})))
    with pytest.raises(BadInput, match=re.escape("leak: finish would upload norm.weight, which is LOCAL")):
        play(method("fedbn") + leak, n=1)


@pytest.mark.usefixtures("parts_as_before")
def test_a_part_sees_only_its_own_state():
    seen = {}

    def look(self, e):
        seen[self.name] = (sorted(e.mine), sorted(e.down))
        return e.mine, Tree()

    def start(self, w):
        return Tree({f"server {self.name}": torch.zeros(1)}), Tree({f"client {self.name}": torch.zeros(1)})

    parts = [own(n, init=start, finish=look, down=lambda self, mine: mine) for n in ("one", "two")]
    play(Method(tuple(parts)), n=1)
    assert seen == {n: ([f"client {n}"], [f"server {n}"]) for n in ("one", "two")}


@pytest.mark.usefixtures("parts_as_before")
def test_every_hook_is_reached():
    # A documented hook that is never called would be a bug. `arrange` is called earlier, when the task is made.
    called = set()

    def spy(hook):
        base = getattr(Part, hook)

        def record(self, *args):
            called.add(hook)
            if hook == "surgery":
                return [Change("none", "none", "none")]
            if hook == "route":
                return Route.SENT
            return base(self, *args)

        return record

    play(Method((own("spy", **{hook: spy(hook) for hook in HOOKS}),)), n=2)
    assert called == set(HOOKS) - {"arrange"}


# -- reductions ---------------------------------------------------------------------------------------------------
def test_reductions():
    rows = [Tree(m=torch.tensor([1.0, 2.0])), Tree(m=torch.tensor([4.0, 0.0]))]
    got = {how: reduce_uploads(rows, [1.0, 3.0], how) for how in ("weighted", "uniform", "sum", "stack", "list")}
    assert got["weighted"]["m"].tolist() == [3.25, 0.5]
    assert got["uniform"]["m"].tolist() == [2.5, 1.0]
    assert got["sum"]["m"].tolist() == [5.0, 2.0]
    assert got["stack"]["m"].tolist() == [[1.0, 2.0], [4.0, 0.0]]
    assert sorted(got["list"]) == ["0/m", "1/m"]
    assert reduce_uploads([], [], "sum") == {}
    assert reduce_uploads([Tree(), Tree()], [1.0, 1.0], "stack") == {}


@pytest.mark.usefixtures("parts_as_before")
def test_weighted_uploads_use_the_weights_of_the_models():
    @part("mass")
    class Mass(Part):
        scale: float = option(1.0)

        def finish(self, e):
            return e.mine, Tree(n=torch.tensor(float(e.context.samples)))

        def server(self, delta, r):
            return delta, r.up

    data = tiny_data(3, 9)
    for weighting, wanted in (("size", (9 + 81) / 12), ("uniform", 6.0)):
        run = play(Method((Mass(),)), data, n=1, weighting=weighting)
        assert float(run.server.parts["mass"]["n"]) == pytest.approx(wanted)


def test_a_clients_relative_size_and_the_context():
    data = tiny_data(3, 9)
    task = tiny_task("fedavg", data, schedule="exp", decay=0.5)
    c = context_of(task, 2, Client("b", data["b"], attributes={"scanner": "x"}))
    assert (c.relative, c.samples, c.clients, c.round, c.rounds) == (1.5, 9, 2, 2, 4)
    assert (c.lr, c.lr_0) == (0.025, 0.1)
    assert c.attributes == {"scanner": "x"}


# -- divergence ---------------------------------------------------------------------------------------------------
def test_divergence_names_client_round_step_and_fix():
    data = tiny_data(8)
    with pytest.raises(Diverged, match=r'Client "a" diverged in round 1, step 2.*Lower the learning rate'):
        play("nonorm", data, n=1, lr=1e200)


@pytest.mark.usefixtures("parts_as_before")
def test_divergence_names_the_part_and_the_hook():
    bad = own("bad", grad=lambda self, g, s: g * float("nan"))
    with pytest.raises(Diverged, match=r"step 1: bad \(grad\) is not finite"):
        play(Method((bad,)), n=1)
    worse = own("worse", loss=lambda self, s: s.logits.sum() * float("inf"))
    with pytest.raises(Diverged, match=r"step 1: worse \(loss\) is not finite"):
        play(Method((worse,)), n=1)


@pytest.mark.usefixtures("parts_as_before")
def test_a_loss_that_is_not_finite_counts_even_if_its_gradient_is():
    def infinite(self, s):  # no gradient comes from the constant
        return s.logits.sum() * 0.0 + s.logits.new_tensor(float("inf"))

    with pytest.raises(Diverged, match=r'Client "a" diverged in round 1, step 1: far \(loss\) is not finite'):
        play(Method((own("far", loss=infinite),)), tiny_data(8), n=1)

    def base(logits, y):
        return torch.nn.functional.cross_entropy(logits, y) + torch.tensor(float("nan"))

    with pytest.raises(Diverged, match=r"step 1: the model \(loss\) is not finite"):
        play("fedavg", tiny_data(8), n=1, loss=base)


def test_images_that_are_not_finite_are_named():
    data = tiny_data(4)
    data = {"a": Split(data["a"].x * float("nan"), data["a"].y)}
    with pytest.raises(Diverged, match=r"its data \(images\) is not finite. Fix the data"):
        play("fedavg", data, n=1)


# -- randomness ---------------------------------------------------------------------------------------------------
def dropped():
    model = tiny_net()
    model.pool = nn.Sequential(model.pool, nn.Dropout(0.5))
    return model


def test_torchs_generator_plays_no_part():
    torch.manual_seed(1)
    one = play("fedavg", model=dropped())
    torch.manual_seed(2)
    torch.rand(5)
    state = torch.get_rng_state()
    model = dropped()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert same(one.model, play("fedavg", model=model).model)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(state, before)


def test_seed_round_and_client_change_the_order_and_the_noise():
    base = play("fedavg", tiny_data(8), n=1, model=dropped(), seed=0)
    assert not same(base.model, play("fedavg", tiny_data(8), n=1, model=dropped(), seed=1).model)
    data = tiny_data(8)
    task = tiny_task("fedavg", data, batch_size=8, lr=0.1, model=dropped())
    state = initial_state(task)
    a, _ = local_update(task, broadcast(task, state), Client("a", data["a"]))
    b, _ = local_update(task, broadcast(task, state), Client("b", data["a"]))
    later, _ = local_update(task, broadcast(task, replace(state, round=1)), Client("a", data["a"]))
    for other in (b, later):
        assert not torch.allclose(a.model["head.weight"], other.model["head.weight"], atol=1e-9)


def test_an_extra_part_does_not_shift_the_noise_of_others():
    plain, more = (play(t, model=dropped()) for t in ("fedavg", "finetune + fedprox(mu=0)"))
    assert same(plain.model, more.model)


def test_both_passes_of_greg_see_the_same_dropout():
    # With statistics equal in both passes (frozen by fixbn) the penalty is zero only if the masks agree too.
    data = tiny_data(8)
    with_, without = (
        play(t, data, n=3, model=dropped()) for t in ("fixbn(switch=0) + greg(alpha=3.0, rho=1)", "fixbn(switch=0)")
    )
    for name in with_.model:
        torch.testing.assert_close(with_.model[name], without.model[name], atol=1e-9, rtol=0)


# -- the server ---------------------------------------------------------------------------------------------------
def test_uploads_in_any_order_give_the_same_bits():
    data = tiny_data()
    task = tiny_task("scaffold", data)
    state = initial_state(task)
    ups = [local_update(task, broadcast(task, state), Client(k, s))[0] for k, s in data.items()]
    one, other = (server_update(task, state, u) for u in (ups, ups[::-1]))
    assert same(one.model, other.model)
    assert same(one.parts["scaffold"], other.parts["scaffold"])
    assert one.round == 1


def test_tied_weights_have_one_slot_and_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.b(torch.relu(self.a(x.mean((2, 3)).repeat(1, 2)[:, :4]))))

    torch.manual_seed(0)
    model = Tied().double()
    data = tiny_data(6)
    run = play("fedavg", data, n=1, model=model, batch_size=6)
    assert "b.weight" not in run.model
    nn.functional.cross_entropy(model(data["a"].x), data["a"].y).backward()
    torch.testing.assert_close(
        run.model["a.weight"], model.a.weight.detach() - 0.1 * model.a.weight.grad, atol=1e-12, rtol=0
    )


def test_an_unused_parameter_does_not_change():
    model = tiny_net()
    model.spare = nn.Linear(2, 2).double()
    data = tiny_data(6)
    task = tiny_task("scaffold", data, model=model, weight_decay=0.1, momentum=0.9)
    run = rounds(task, data, 2)
    torch.testing.assert_close(run.model["spare.weight"], model.spare.weight.detach(), atol=1e-12, rtol=0)


def test_cumulative_statistics_are_refused_because_counters_are_not_averaged():
    model = tiny_net()
    model.norm.momentum = None
    with pytest.raises(BadInput, match=r'"norm".*momentum=None.*0\.1'):
        Net(model, method("fedavg"), name="mine")


def test_parts_whose_maths_needs_plain_updates_refuse_those_that_change_them():
    for text in ("fedexp + fednova", "fednova + fedexp", "feddyn + fednova"):
        with pytest.raises(BadInput, match="plain updates"):
            method(text)


def test_greg_needs_statistics_that_come_back_from_the_server():
    with pytest.raises(BadInput, match="greg has nothing to act on"):
        Net(tiny_net(), method("fedbn(upload=true) + greg"), name="mine")


@pytest.mark.usefixtures("parts_as_before")
@pytest.mark.parametrize("hook", ["protect", "release", "mechanism", "trips"])
def test_a_hook_of_version_0_1_that_is_gone_says_what_to_write(hook):
    with pytest.raises(BadInput, match=rf'Part "old": the hook {hook} was removed'):
        own("old", **{hook: lambda self, *given: None})


@pytest.mark.usefixtures("parts_as_before")
@pytest.mark.parametrize("declared", [True, False])
def test_a_step_changes_its_parts_state_only_if_the_part_says_so(declared):
    def oracle(self, gradf, s):
        s.mine["n"].add_(1)
        return gradf

    hooks = {"init": lambda self, w: (Tree(), Tree(n=torch.zeros(()))), "oracle": oracle, "writes_state": declared}
    if declared:
        assert float(play(Method((own("counting", **hooks),)), n=2).states["a"].parts["counting"]["n"]) > 0
    else:
        with pytest.raises(BadInput, match="writes_state"):
            play(Method((own("counting", **hooks),)), n=2)
