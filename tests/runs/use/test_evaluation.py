"""Which model is tested, with which statistics: identities between modes, and independent forward passes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.round import base_phases, begin, broadcast, draws, step
from fednorms.core.states import Client
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.evaluation.modes import Mode, model_for, unseen_broadcast
from fednorms.evaluation.statistics import statistics_names
from fednorms.methods.registry import method
from tests.support.after import federation, order_of, trained
from tests.support.tiny import close, same

STATELESS = ["fedavg", "fednn", "fedwon", "greg", "hbn", "fedfn", "scaffold"]


def evaluate(session, state, mode, split="test"):
    return session.engine.evaluate(state, Mode.read(mode), session.engine.clients, split)


def tensors(session, state, mode, site):
    mode = Mode.read(mode).resolved(session.task)
    sent = session.engine.test_broadcast(state, session.engine.clients)
    data = session.federation.site(site).train
    return model_for(session.task, sent, Client(site, data, session.engine.store.get(site)), mode)[0]


def plain(session, tree, x):
    """Logits of a plain torch module, on images that this test normalizes itself."""
    module = copy.deepcopy(session.task.net.module)
    module.load_state_dict(tree)
    return module.eval()((x.float() / 255 - 0.5) / 0.5)


@pytest.mark.parametrize("text", STATELESS)
def test_personal_is_global_where_clients_keep_nothing(text):
    session, state = trained(text)
    one, other = (evaluate(session, state, m) for m in ("global", "personal"))
    assert one.statistics == other.statistics == "global"
    assert one.sites == other.sites


def test_fedbn_tests_each_client_with_its_own_bn_bit_for_bit():
    session, state = trained("fedbn")
    for site in session.federation.clients:
        own = session.engine.store[site.name].local
        assert own.keys() == {n for n in state.model if n.startswith("norm")}
        with torch.no_grad():
            logits = plain(session, {**state.model, **own}, site.test.x)
        score = evaluate(session, state, "personal").sites[site.name]
        right = logits.argmax(1) == site.test.y
        assert score.accuracy == right.double().mean()
        expected = nn.functional.cross_entropy(logits.double(), site.test.y)
        assert score.loss == pytest.approx(float(expected), rel=1e-12)
        assert same(tensors(session, state, "personal", site.name), {**state.model, **own})


def test_unseen_sites_of_fedbn_use_the_mean_of_the_clients_bn():
    session, state = trained("fedbn")
    states = [session.engine.store[n] for n in "abc"]
    sent = unseen_broadcast(session.task, broadcast(session.task, state), states)
    for name, tensor in sent.model.items():
        if name not in states[0].local:
            assert tensor is state.model[name]
        elif tensor.is_floating_point():
            expected = torch.stack([s.local[name].double() for s in states]).mean(0)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    unseen = session.federation.site("u").test
    with torch.no_grad():
        right = plain(session, sent.model, unseen.x).argmax(1) == unseen.y
    assert evaluate(session, state, "unseen").sites["u"].accuracy == right.double().mean()


def test_fedbn_that_uploads_tests_unseen_sites_with_the_server_model():
    session, state = trained("fedbn(upload=True)")
    sent = unseen_broadcast(session.task, broadcast(session.task, state), session.engine.store.values())
    assert sent.model is state.model
    mean = torch.stack([session.engine.store[n].local["norm1.running_mean"] for n in "abc"]).mean(0)
    torch.testing.assert_close(state.model["norm1.running_mean"], mean)
    ours, servers = (tensors(session, state, f"personal/{s}", "a") for s in ("own", "global"))
    names = statistics_names(session.task.net)
    assert same(Tree(servers).pick(names), state.model.pick(names))
    assert same({k: v for k, v in ours.items() if k not in names}, {k: v for k, v in servers.items() if k not in names})


def test_fine_tuning_at_rate_zero_scores_like_the_model_it_starts_from():
    # With tracked statistics, fine-tuning updates them at any rate: then only a model without them stays the same.
    for text in ("nonorm", "gn", "nonorm + scaffold", "nonorm + fedbabu(epochs=1, lr=0)"):
        both = text if "fedbabu" in text else f"{text} + finetune(factor=0, epochs=1)"
        session, state = trained(both)
        one, other = (evaluate(session, state, m) for m in ("global", "adapted"))
        assert one.sites == other.sites
        assert (one.std, one.mean, one.pooled) == (other.std, other.mean, other.pooled)


def test_fine_tuning_moves_what_training_froze():
    session, state = trained("fedbabu(epochs=1, lr=0.1)")
    assert torch.equal(state.model["head.weight"], session.task.net.initial["head.weight"])
    after = tensors(session, state, "adapted", "a")
    params = [n for n, s in session.task.net.slots.items() if s.trainable]
    assert all(not torch.equal(after[n], state.model[n]) for n in params)


def test_fine_tuning_leaves_the_control_variates_of_scaffold_out():
    one, state = trained("scaffold + finetune(epochs=1)")
    other, _ = trained("fedavg + finetune(epochs=1)", 0)
    other.engine.use(one.engine.store)
    plain_state = replace(state, parts={k: v for k, v in state.parts.items() if k == "finetune"})
    assert same(tensors(one, state, "adapted", "a"), tensors(other, plain_state, "adapted", "a"))


@pytest.mark.parametrize("text", ["fedavg", "fedbn", "silobn"])
def test_re_estimated_statistics_are_torchs_cumulative_averages(text):
    session, state = trained(text)  # site a has three batches of four
    x, module = session.federation.site("a").train.x, copy.deepcopy(session.task.net.module)
    module.load_state_dict(tensors(session, state, "personal", "a"))
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():
        for batch in ((x[order_of("a", 12)].float() / 255 - 0.5) / 0.5).split(4):
            module.train()(batch)
    found = tensors(session, state, "personal/re-estimated", "a")
    for name in statistics_names(session.task.net):
        torch.testing.assert_close(found[name], module.state_dict()[name], rtol=1e-6, atol=1e-7)
    rest = [n for n in found if n not in statistics_names(session.task.net)]
    assert same(Tree(found).pick(rest), tensors(session, state, "personal", "a").pick(rest))


def test_unequal_batches_are_weighted_by_their_images():
    session, state = trained("fedavg", sites=federation(sizes=(4, 6, 4)))  # site b: batches of four and two
    x = session.federation.site("b").train.x
    with torch.no_grad():
        conv = session.task.net.plain(state.model).conv1((x.float() / 255 - 0.5) / 0.5)
    parts = conv.split(4)
    axes = (0, 2, 3)
    expected = sum(len(p) * p.var(axes) for p in parts) / 6
    found = tensors(session, state, "global/re-estimated", "b")
    torch.testing.assert_close(found["norm1.running_var"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["norm1.running_mean"], conv.mean(axes), rtol=1e-5, atol=1e-6)


def test_re_estimation_ignores_mixtures_and_noise():
    # HBN's and MixBN's layers would mix in what the server sent, FedNN's would draw numbers: none of it is measured.
    for text, leaf in (("hbn", "mean"), ("mixbn", "running_mean"), ("fednn", "running_mean")):
        session, state = trained(text)
        first, again = (tensors(session, state, "global/re-estimated", "a") for _ in range(2))
        assert same(first, again)
        assert not torch.equal(first[f"norm2.{leaf}"], tensors(session, state, "global", "a")[f"norm2.{leaf}"])
    session, state = trained("hbn")
    reference, _ = trained("fedavg", 0)
    tree = tensors(session, state, "global", "a")
    plain_names = {"mean": "running_mean", "var": "running_var"}
    renamed = {
        f"{n.rpartition('.')[0]}.{plain_names.get(n.rpartition('.')[2], n.rpartition('.')[2])}": t
        for n, t in tree.items()
        if not n.endswith("phi")
    }
    same_start = replace(state, model=Tree({**reference.task.net.initial, **renamed}), parts={})
    expected = tensors(reference, same_start, "global/re-estimated", "a")
    found = tensors(session, state, "global/re-estimated", "a")
    close(
        {n: found[f"{n}.mean"] for n in ("norm1", "norm2", "norm3")},
        {n: expected[f"{n}.running_mean"] for n in ("norm1", "norm2", "norm3")},
        atol=1e-4,
    )


@pytest.mark.parametrize("text", ["fedavg", "fedbn", "silobn", "fednn", "hbn", "fedrdn", "fedbn + finetune(epochs=1)"])
def test_no_evaluation_changes_the_server_or_a_client(text):
    session, state = trained(text)
    store, net = session.engine.store, session.task.net
    model, parts = state.model.clone(), {k: v.clone() for k, v in state.parts.items()}
    local = {n: store[n].local.clone() for n in store}
    held = Tree({**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}).clone()
    modes = ["personal", "personal/batch", "personal/re-estimated", "unseen", "unseen/batch", "unseen/re-estimated"]
    if "finetune" in text:
        modes += ["adapted", "adapted/batch", "adapted/re-estimated"]
    first = {m: evaluate(session, state, m) for m in modes}
    assert same(state.model, model)
    assert all(same(state.parts[k], v) for k, v in parts.items())
    assert all(same(store[n].local, v) for n, v in local.items())
    assert same(Tree({**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}), held)
    assert all(evaluate(session, state, m).sites == s.sites for m, s in first.items())


def test_batch_statistics_draw_no_gumbel_noise():
    session, state = trained("fednn")
    layer = session.task.net.module.norm1
    evaluate(session, state, "global/batch")
    assert not layer.sampling
    session.engine.train(broadcast(session.task, state), ["a"])
    assert layer.sampling


def test_pooled_counts_samples_and_mean_counts_sites():
    session, state = trained("fedavg")
    scores = evaluate(session, state, "global")
    sizes = {"a": 9, "b": 12, "c": 15}
    assert {n: s.samples for n, s in scores.sites.items()} == sizes
    right = {n: s.accuracy * s.samples for n, s in scores.sites.items()}
    assert scores.pooled == pytest.approx(sum(right.values()) / 36)
    assert scores.mean == pytest.approx(sum(right[n] / sizes[n] for n in "abc") / 3)


def test_fedrdn_measures_an_unseen_site_on_its_own_images():
    session, state = trained("fedrdn")
    unseen = session.federation.site("u").test
    x = unseen.x.float() / 255
    mean, std = x.mean((2, 3)).mean(0), x.flatten(2).std(2).mean(0)
    module = copy.deepcopy(session.task.net.module)
    module.load_state_dict(state.model)
    with torch.no_grad():
        logits = module.eval()((x - mean.view(-1, 1, 1)) / std.view(-1, 1, 1))
    score = evaluate(session, state, "unseen").sites["u"]
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(logits.double(), unseen.y)), rel=1e-5)


def test_hbn_measures_under_the_statistics_that_the_server_holds():
    session, state = trained("hbn")
    held = {k: v for k, v in state.parts["hbn"].items() if k.startswith("norm")}
    session.task.net.module.norm2.register_forward_pre_hook(lambda m, _: seen.append(m.mean.clone()))
    seen: list[torch.Tensor] = []
    session.engine.test_broadcast(state, ["a"])
    assert seen
    assert all(torch.equal(mean, held["norm2.mean"]) for mean in seen)


def test_measurements_for_a_test_are_those_it_broadcasts():
    session, state = trained("hbn")
    kept = session.engine.with_measurements(state, session.engine.clients)
    sent = session.engine.test_broadcast(state, session.engine.clients)
    assert same(kept.parts["hbn@test"], sent.parts["hbn"])
    assert not same(kept.parts["hbn@test"], state.parts["hbn"])


def test_temperature_of_fednn_is_the_last_rounds_one_at_the_end():
    session, state = trained("fednn(tau=3.0)")
    assert state.round == session.recipe.rounds == 2
    tau = tensors(session, state, "global", "a")["norm1.tau"]
    assert float(tau) == pytest.approx(3.0 * (2 - 1 + 1e-3) / 2)


def test_after_local_is_the_clients_model_before_averaging():
    session, state = trained("silobn")
    sent = broadcast(session.task, state)
    done = session.engine.train(sent, ["a", "b"], score=True)
    for upload in done.uploads:
        site = session.federation.site(upload.client)
        own = {**state.model, **upload.model, **session.engine.store[upload.client].local}
        with torch.no_grad():
            right = plain(session, own, site.test.x).argmax(1) == site.test.y
        assert done.after_local[upload.client].accuracy == right.double().mean()
    with pytest.raises(BadInput, match="while a run trains"):
        evaluate(session, state, "after_local")


@pytest.mark.parametrize("text", ["fedavg", "fedbn", "silobn", "fedwon", "fednn(tau=3.0)", "fednorm", "fedper", "hbn"])
def test_after_local_is_the_model_that_was_trained(text):
    given = federation()
    sites = [replace(s, attributes={"modality": "CT"}) for s in given.sites]
    data = Federation(given.name, sites, given.classes, given.preprocessing)
    session, state = trained(text, n=1, rounds=4, sites=data)
    engine, task = session.engine, session.task
    sent = broadcast(task, state)
    client = engine.local.client("a")
    carry, _ = begin(task, sent, client)
    with engine.local.seeded("train", sent.round, "a"):
        for batches, phase in draws(task, carry, base_phases(task, carry.context)):
            step(task, carry, batches, phase)
    (upload,) = engine.train(sent, ["a"]).uploads
    _, after, _ = engine.local.model_after(sent, engine.local.client("a"), upload)
    got, wanted = ({k: v for k, v in tree.items() if v.is_floating_point()} for tree in (after, carry.model().detach()))
    close(dict(sorted(got.items())), dict(sorted(wanted.items())), atol=1e-7)


def test_sites_that_never_trained_measure_their_own_statistics_under_silobn():
    session, state = trained("silobn")
    assert Mode("unseen").resolved(session.task).statistics == "re-estimated"
    one, other = (evaluate(session, state, m) for m in ("unseen", "unseen/re-estimated"))
    assert one.sites == other.sites
    assert one.sites != evaluate(session, state, "unseen/global").sites


def test_pooled_clients_of_fedbn_share_the_one_bn_that_was_trained():
    session, state = trained("centralised + fedbn")
    own = session.engine.store["centralised"].local
    site = session.federation.site("b")
    with torch.no_grad():
        right = plain(session, {**state.model, **own}, site.test.x).argmax(1) == site.test.y
    assert evaluate(session, state, "personal").sites["b"].accuracy == right.double().mean()


@pytest.mark.parametrize(
    ("text", "mode", "hint"),
    [
        ("fedbn", "global", "no global model"),
        ("silobn", "global", "the server has none"),
        ("silobn", "personal/global", "the server has none"),
        ("fedavg", "personal/own", "clients keep no statistics"),
        ("fedbn", "unseen/own", "no site that trained"),
        ("fedwon", "global/re-estimated", "no layer with stored statistics"),
        ("gn", "global/batch", "no layer with stored statistics"),
        ("fedavg", "adapted", r"finetune"),
        ("fedavg", "after_local/batch", "tested with its own statistics"),
        ("fedavg", "global/mean", "Unknown evaluation mode"),
    ],
)
def test_modes_that_mean_nothing_are_explained(text, mode, hint):
    session, _ = trained(text, 0)
    with pytest.raises(BadInput, match=hint):
        Mode.read(mode).resolved(session.task)


class Caching(nn.Module):
    """Like timm's LeViT: keeps a function of its weights in eval mode, in a dictionary that `train` replaces."""

    def __init__(self):
        super().__init__()
        self.bias, self.head, self.kept = nn.Parameter(torch.zeros(2)), nn.Linear(2, 2), {}

    def train(self, mode=True):
        super().train(mode)
        if self.kept:
            self.kept = {}
        return self

    def forward(self, x):
        if self.training:
            return self.head(x) + self.bias
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias.detach().clone()
        return self.head(x) + self.kept["bias"]


def test_what_a_module_caches_never_reaches_the_next_client():
    net, x = Net(Caching(), method("fedavg")), torch.ones(1, 2)
    one, other = net.initial, Tree({**net.initial, "bias": torch.ones(2)})
    with torch.no_grad():
        for train in (False, True, False):
            net.forward(one, x, train=train, batch_statistics=train)
        a, b = (net.forward(t, x, train=False, batch_statistics=False)[0] for t in (one, other))
        torch.testing.assert_close(b, a + 1)
        torch.testing.assert_close(net.plain(other)(x), b)


def test_a_plain_module_keeps_the_users_hooks_and_only_those():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    seen = []
    model[1].register_forward_pre_hook(lambda *_: seen.append(1))
    net = Net(model, method("fedavg"))
    module = net.plain(net.initial)
    module(torch.zeros(1, 4))
    assert seen == [1]
    assert len(module[1]._forward_pre_hooks) == 1
    assert not module.training
