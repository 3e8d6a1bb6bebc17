"""Analyses of runs: each compared with numbers computed by hand from the run's models; the run is not changed."""

from __future__ import annotations

import copy
import hashlib
import math
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorms as fn
from fednorms.core.errors import BadInput
from fednorms.core.round import base_phases, begin, broadcast, draws, local_update, server_update, step
from fednorms.core.sampling import Participation
from fednorms.methods.registry import method, names
from fednorms.papers.analysis.analyze import analyze
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.measures import ANALYSES
from fednorms.papers.analysis.picture import figure, png
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.analysis.subject import activated
from fednorms.runs.store.directory import RunDirectory
from tests.support.kept import SMALL, kept

BY_ROUND = ["norms", "bn-variance", "training-gap", "smallest-probability", "loss-bound"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three rounds of FedAvg with two of five clients, tested in two modes; every round is kept."""
    folder = tmp_path_factory.mktemp("analyses")
    return kept(folder / "run", evaluate=["global", "global/batch"], participation="fixed:2")


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """Eleven rounds: round 10 is there."""
    return kept(tmp_path_factory.mktemp("analyses") / "longer", rounds=11)


def contents(path):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(path).rglob("*")) if p.is_file()}


def module_of(opened, tensors):
    module = copy.deepcopy(opened.task.net.module).eval()
    module.load_state_dict(tensors)
    return module


def seen_by(opened, tensors, site):
    """Features and logits of a site's test images, computed with only a torch module."""
    module, data = module_of(opened, tensors), opened.session.federation.site(site).test
    features = []
    module.get_submodule(opened.task.net.heads[0]).register_forward_pre_hook(lambda _, args: features.append(args[0]))
    with torch.no_grad():
        logits = module((data.x.float() / 255 - 0.5) / 0.5)
    return features[0], logits, data.y


def uploads_after(opened):
    sent = broadcast(opened.task, opened.state)
    return [local_update(opened.task, sent, opened.local.client(c))[0] for c in opened.next_cohort]


@pytest.mark.parametrize("name", [n for n in ANALYSES if n != "drift-embedding"])
def test_every_analysis_finds_something_draws_it_and_does_not_change_the_run(run, name):
    before = contents(run)
    found = analyze(run, name)
    assert contents(run) == before
    assert found.scalars or found.arrays
    assert all(math.isfinite(v) or name == "norms" for v in found.scalars.values())
    assert analyze(run, name).plain() == found.plain()
    drawn = {"FedAvg": [found, found], "again": [found]}
    assert png(ANALYSES[name], {"one": drawn, "two": drawn}, "A run").startswith(b"\x89PNG")


def test_four_factors_of_the_last_model(run):
    opened = fn.open_run(run)
    sites = [seen_by(opened, opened.state.model, s.name) for s in opened.session.federation.clients]
    f, y = torch.cat([s[0] for s in sites]), torch.cat([s[2] for s in sites])
    found = analyze(run, "four-factors")
    means = torch.stack([f[y == c].mean(0) for c in range(10)])
    expected = functional.cosine_similarity(means, opened.state.model["head.weight"])
    assert found.arrays["alignment"] == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)


def test_norms_are_those_of_clients_right_after_training_and_of_the_server_after_averaging(tmp_path):
    path = kept(tmp_path / "run", data={**SMALL["data"], "partition": "sharding(clients=5, shards=2)"})
    opened = fn.open_run(path, which=1)
    uploads = uploads_after(opened)
    seen, unseen = [], []
    for u in uploads:
        rows = u.model["head.weight"].norm(dim=1)
        mine = opened.local.data[u.client].y.unique()
        seen.append(rows[mine].mean())
        unseen.append(np.delete(rows.numpy(), mine.numpy()).mean())
    found = analyze(path, "norms").series
    assert [t for t, _ in found["W seen"]] == [1, 2, 3]
    assert found["W seen"][1][1] == pytest.approx(float(np.mean(seen)), rel=1e-5)
    assert found["W unseen"][1][1] == pytest.approx(float(np.mean(unseen)), rel=1e-5)
    server = server_update(opened.task, opened.state, uploads).model
    assert found["W global"][1][1] == pytest.approx(float(server["head.weight"].norm(dim=1).mean()), rel=1e-5)
    tested = [seen_by(opened, server, s.name)[0] for s in opened.session.federation.clients if s.test]
    assert found["F global"][1][1] == pytest.approx(float(torch.cat(tested).norm(dim=1).mean()), rel=1e-4)
    gap = found["F seen"][1][1] - found["F global"][1][1]
    assert found["F seen - global"][1][1] == pytest.approx(gap)


def test_variance_and_statistics_of_normalization_layers(run):
    opened = fn.open_run(run, which=2)
    means = torch.stack([u.model["norm1.running_mean"] for u in uploads_after(opened)])
    found = analyze(run, "bn-variance")
    first = found.series["mean, first layer (norm1)"]
    assert [t for t, _ in first] == [1, 2, 3]
    assert first[2][1] == pytest.approx(float(means.var(0, unbiased=False).mean()), rel=1e-5)
    statistics = analyze(run, "bn-statistics")
    uploads = {u.client: u.model for u in uploads_after(opened)}  # the last round, trained again
    assert statistics.words["round"] == "3"
    _, b, server = statistics.words["models"]
    assert server == "server"
    values = statistics.arrays["variance, norm1"]
    assert values[1] == pytest.approx(uploads[b.removeprefix("client ")]["norm1.running_var"].numpy(), rel=1e-5)
    assert values[2] == pytest.approx(values[:2].mean(0), rel=1e-2)  # two clients of about the same size


def test_the_gap_of_test_losses_is_that_of_the_metrics(run):
    rows = fn.open_run(run).directory.metrics()
    sites = {mode: rows[-1]["scores"][f"global/{mode}/test"]["sites"] for mode in ("global", "batch")}
    gaps = [sites["global"][s]["loss"] - sites["batch"][s]["loss"] for s in sites["batch"]]
    assert analyze(run, "test-gap").series["global/batch"][-1] == (3, pytest.approx(sum(gaps) / len(gaps)))


def test_the_gap_of_test_losses_needs_no_model(run, tmp_path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert analyze(tmp_path / "run", "test-gap").series == analyze(run, "test-gap").series


def test_the_repeated_training_sees_what_training_saw(run):
    subject = StoredRun(run).at(2)
    opened = subject.run
    steps = list(subject.training())
    losses = {u.client: float(u.metrics["loss"]) for u in uploads_after(opened)}
    for client in opened.next_cohort:
        mine = [float(functional.cross_entropy(by_batch, y)) for name, y, by_batch, _ in steps if name == client]
        assert sum(mine) / len(mine) == pytest.approx(losses[client], rel=1e-5)  # before each step, as the run's loss
        total = sum(len(y) for name, y, *_ in steps if name == client)
        assert total == len(opened.local.data[client])
    # At the first step the model is the server's: its own statistics are the test-time ones.
    name, y, _, by_server = steps[0]
    x = next(iter(opened.local.data[name].batches(1)))[0]
    assert by_server.shape == (len(y), 10)
    assert x.shape[1:] == opened.session.federation.shape
    gap = analyze(run, "training-gap").series["gap"][-1]
    means = []
    for client in opened.next_cohort:
        terms = [
            (functional.cross_entropy(s, y, reduction="sum") - functional.cross_entropy(b, y, reduction="sum"), len(y))
            for who, y, b, s in steps
            if who == client
        ]
        means.append(float(sum(t for t, _ in terms)) / sum(n for _, n in terms))
    assert gap == (3, pytest.approx(sum(means) / len(means), rel=1e-4))
    least = min(float(b.softmax(1).gather(1, y[:, None]).min()) for _, y, b, _ in steps)
    assert analyze(run, "smallest-probability").series["batch statistics"][-1] == (3, pytest.approx(least, rel=1e-4))


def test_a_model_without_batch_normalization_has_no_gap(tmp_path):
    path = kept(tmp_path / "run", "gn")
    assert analyze(path, "training-gap").scalars["gap, last"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(BadInput, match="no layer with stored statistics"):
        analyze(path, "bn-variance")


def test_divergence_between_clients_test_images(run):
    opened = fn.open_run(run)
    names = [s.name for s in opened.session.federation.clients]
    found = analyze(run, "divergence")
    assert found.words["clients"] == names
    a, b = (seen_by(opened, opened.state.model, n)[0].double() for n in names[:2])
    every = [seen_by(opened, opened.state.model, n)[0].double().var(0, unbiased=False) for n in names]
    varies = [
        c for c in range(a.shape[1]) if min(v[c] for v in every) >= 1e-3 * sum(v[c] for v in every) / len(every) > 0
    ]
    normals = [torch.distributions.Normal(x.mean(0), x.std(0, unbiased=False)) for x in (a[:, varies], b[:, varies])]
    kl = torch.distributions.kl_divergence
    both = kl(*normals) + kl(*reversed(normals))
    assert found.arrays["divergence"][0, 1] == pytest.approx(float(both.mean()), rel=1e-3)
    assert found.scalars["channels left out"] == a.shape[1] - len(varies)
    strict = analyze(run, "divergence", dead=0.01).scalars
    assert strict["channels left out"] > found.scalars["channels left out"]
    assert strict["mean over pairs"] < found.scalars["mean over pairs"]
    with pytest.raises(BadInput, match="No feature varies at every client"):
        analyze(run, "divergence", dead=1.0)


class Shared(nn.Module):
    """One activation for all layers, a pooling in between, and a convolution that nothing follows."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3)
        self.act, self.pool, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(3, 2)

    def forward(self, x):
        x = self.second(self.act(self.norm(self.first(x))))
        return self.head(self.act(self.pool(x).flatten(1)))


def test_maps_are_taken_after_the_activation_and_before_pooling():
    model, x = Shared().eval(), torch.rand(4, 1, 6, 6)
    with torch.no_grad(), activated(model, ["first", "second"]) as seen:
        model(x)
    expected = model.norm(model.first(x)).relu()
    assert torch.equal(seen["first"], expected)
    assert torch.equal(seen["second"], model.second(expected))
    assert not any(m._forward_hooks for m in model.modules())


def test_identical_models_have_identical_maps(run):
    found = analyze(run, "feature-maps")
    assert all(0 < v < 1 for v in found.scalars.values())
    still = StoredRun(run).before_end
    assert still.round == 2
    a, *others = still.sites  # each from its own domain
    server, one, two, *rest = found.words["lines"]
    clients = sorted(still.next_round.models)[:2]
    assert [server, one, two] == [f"{name} at {a.name}" for name in ("server", *(f"client {c}" for c in clients))]
    assert rest == [f"server at {site.name}" for site in others[:5]]
    last_layer = found.words["layer"]
    for line in found.words["lines"]:
        assert found.arrays[f"image, {line}"].shape == (32, 32, 3)
        assert found.arrays[f"{last_layer}, {line}"].shape == (32, 32)
    assert (found.arrays[f"{last_layer}, {server}"] != found.arrays[f"{last_layer}, {rest[0]}"]).any()
    same = {name: still.tensors(still.server) for name in still.next_round.models}
    still.__dict__["next_round"] = replace(still.next_round, models=same, tested=still.server)
    kept_run = StoredRun(run)
    kept_run.__dict__["before_end"] = still
    alike = ANALYSES["feature-maps"].measure(kept_run).scalars
    assert alike == {"server and clients": pytest.approx(1), "clients": pytest.approx(1)}


@pytest.mark.parametrize("text", ["fedavg", "nonorm", "fedwon", "gn"])
def test_maps_are_taken_after_the_activation_whatever_comes_before_it(tmp_path, text):
    last = StoredRun(kept(tmp_path / "run", text, rounds=1)).last
    maps = last.first_maps(last.server, last.sites[0])
    assert list(maps) == [n for n, m in last.run.task.net.module.named_modules() if isinstance(m, nn.Conv2d)]
    assert all(m.min() >= 0 and m.max() > 0 for m in maps.values())
    every = last.outputs(last.server, last.sites[:1], list(maps)).maps
    assert all(torch.allclose(every[n][:1], maps[n], atol=1e-5) for n in maps)


def test_maps_of_a_network_that_shares_its_activation(tmp_path):
    path = kept(tmp_path / "run", rounds=1, model="lenet", data={"size": 32, "val": 0.1, "test": 0.8})
    assert 0 < analyze(path, "feature-maps").scalars["clients"] < 1


def test_an_embedding_has_the_same_number_of_images_from_every_site(run):
    found = analyze(run, "embedding")
    sites, counts = np.unique(found.arrays["site"], return_counts=True)
    assert len(sites) == 5
    assert counts.max() <= 400
    assert found.arrays["points of server"].shape == (counts.sum(), 2)


def test_drift_is_that_of_round_ten(longer):
    found = analyze(longer, "drift-embedding")
    server, client = found.words["models"]
    before = fn.open_run(longer, which=9)
    assert client.removeprefix("client ").removesuffix(" in round 10") == min(before.next_cohort)
    assert found.scalars["shift of features"] > 0
    assert found.arrays[f"points of {server}"].shape == found.arrays[f"points of {client}"].shape
    assert png(ANALYSES["drift-embedding"], {"": {"FedAvg": [found]}}, "Drift").startswith(b"\x89PNG")


def test_a_round_with_one_client_has_no_drift_and_the_next_with_several_is_used(longer, tmp_path):
    clients, often = fn.open_run(longer).session.engine.clients, Participation.read("bernoulli:0.3")
    cohorts = {seed: [len(often.cohort(clients, seed, t)) for t in (9, 10, 11)] for seed in range(99)}
    seed = next(s for s, (tenth, next_one, third) in cohorts.items() if tenth == 1 == next_one and third > 1)
    path = kept(tmp_path / "run", rounds=12, participation="bernoulli:0.3", seed=seed)
    assert analyze(path, "drift-embedding").words["models"][1].endswith(" in round 12")


def test_a_run_with_one_client_per_round_shows_no_drift(tmp_path):
    path = kept(tmp_path / "run", rounds=10, participation="fixed:1")
    with pytest.raises(BadInput, match="several clients trained"):
        analyze(path, "drift-embedding")


INSTALLING = ["hbn", "fbn", "adabn", "fednn", "fedrdn", "fixbn"]  # methods that do not test the plain model
OTHERS = sorted(
    (n for n in names() if n not in INSTALLING and n not in ("local", "fednorm")),
    key=lambda n: hashlib.sha256(n.encode()).digest(),
)


@pytest.mark.parametrize("text", [*INSTALLING, *OTHERS[:14]])
def test_the_servers_model_is_the_one_that_the_run_tested(tmp_path, text):
    """Losses of every site, from the analysis's logits, against the run's own metrics."""
    settings = {"evaluate": ["global"]} if text in INSTALLING else {}
    if method(text).using_proxy:
        settings["data"] = {**SMALL["data"], "proxy": 0.2}
    path = kept(tmp_path / "run", text, rounds=2, **settings)
    subject = StoredRun(path).last
    scores = RunDirectory(path).metrics()[-1]["scores"]
    tested = next((s for name, s in scores.items() if name.startswith("global/") and name.endswith("/test")), None)
    if tested is None:
        assert text not in INSTALLING
        pytest.skip(f"{text} tests no global model")
    seen = subject.outputs(subject.server)
    for number, site in enumerate(subject.sites):
        mine = seen.sites == number
        loss = functional.cross_entropy(seen.logits[mine].double(), seen.labels[mine])
        if not any(p.evaluation().predict for p in subject.run.task.method.having("evaluation")):
            assert float(loss) == pytest.approx(tested["sites"][site.name]["loss"], rel=1e-4), site.name


def test_layers_that_clients_keep_are_their_mean_after_the_round(tmp_path):
    subject = StoredRun(kept(tmp_path / "run", "fedbn")).at(2)
    after = StoredRun(tmp_path / "run").at(3)
    mean = sum(s.local["norm1.running_mean"] for s in after.run.clients.values()) / len(after.run.clients)
    assert torch.allclose(subject.tensors(subject.server_after)["norm1.running_mean"], mean, atol=1e-6)
    assert torch.allclose(after.tensors(after.server)["norm1.running_mean"], mean, atol=1e-6)


def test_pooled_data_are_compared_with_running_statistics_of_the_moment(tmp_path):
    path = kept(tmp_path / "run", "centralised")
    subject = StoredRun(path).at(1)
    task, engine = subject.run.task, subject.run.session.engine
    [name] = engine.clients
    carry, _ = begin(task, broadcast(task, subject.run.state), subject.run.local.client(name))
    expected = []
    for batches, phase in draws(task, carry, base_phases(task, carry.context)):
        x, _ = batches[0]
        module = module_of(subject.run, carry.model())
        with torch.no_grad():
            expected.append(module((x.float() / 255 - 0.5) / 0.5))
        step(task, carry, batches, phase)
    found = [by_server for *_, by_server in subject.training()]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))


def test_custom_models_and_losses_must_be_passed(tmp_path):
    def odd(logits, y):
        return functional.cross_entropy(2 * logits, y)

    recipe = fn.Recipe.make(SMALL | {"method": "fedavg", "rounds": 2, "keep_checkpoints": "all"})
    fn.run(recipe=recipe, loss=odd, out=tmp_path / "loss")
    with pytest.raises(BadInput, match="the same as loss="):
        analyze(tmp_path / "loss", "norms")
    with pytest.raises(BadInput, match="the same as loss="):
        analyze(tmp_path / "loss", "training-gap")
    assert analyze(tmp_path / "loss", "norms", loss=odd).series
    model = Own()
    fn.run(recipe=recipe.model_copy(update={"model": "custom:own"}), model=copy.deepcopy(model), out=tmp_path / "model")
    with pytest.raises(BadInput, match="pass the same model"):
        analyze(tmp_path / "model", "divergence")
    assert analyze(tmp_path / "model", "divergence", model=model).scalars["mean over pairs"] > 0


class Own(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("fednova", "norms", "fednova changes updates before they are sent"),
        ("fedtan", "training-gap", "fedtan trains clients together"),
        ("centralised", "feature-maps", "only one client"),
        ("centralised", "bn-variance", "two clients trained"),
    ],
)
def test_what_a_method_does_not_have_is_reported(tmp_path, text, name, said):
    path = kept(tmp_path / "run", text, rounds=2)
    with pytest.raises(BadInput, match=said):
        analyze(path, name)


def test_gaps_of_several_models_stay_apart_and_without_statistics_there_is_none(tmp_path):
    modes = ["global", "personal", "global/batch", "personal/batch"]
    found = analyze(kept(tmp_path / "ditto", "ditto", rounds=2, evaluate=modes), "test-gap").series
    assert {name: [t for t, _ in s] for name, s in found.items()} == {"global/batch": [1, 2], "personal/batch": [1, 2]}
    assert analyze(kept(tmp_path / "gn", "gn", rounds=1), "test-gap").scalars == {"no layer with statistics, last": 0.0}


@pytest.mark.parametrize("text", ["fedbn", "silobn", "scaffold", "hbn", "fedfn", "fedwon"])
def test_analyses_of_methods_with_states_and_local_tensors(tmp_path, text):
    path = kept(tmp_path / "run", text, rounds=2)
    chosen = ["four-factors", "divergence", "norms", "feature-maps"]
    assert all(np.isfinite(list(analyze(path, n).scalars.values())).any() for n in chosen)


def test_what_cannot_be_analysed_is_reported(tmp_path):
    fn.run(recipe=fn.Recipe.make(SMALL | {"method": "fedavg", "rounds": 1}), out=tmp_path / "run")
    for name in [*BY_ROUND, "feature-maps", "bn-statistics"]:
        with pytest.raises(BadInput, match="only its last round"):
            analyze(tmp_path / "run", name)
    with pytest.raises(BadInput, match=r'No analysis "t-sne"'):
        analyze(tmp_path / "run", "t-sne")


def test_the_gap_of_test_losses_is_computed_from_kept_rounds_if_it_was_not_recorded(run, tmp_path):
    recorded = analyze(run, "test-gap").series["global/batch"]
    path = kept(tmp_path / "run", participation="fixed:2")  # the same run, tested only as usual
    assert analyze(path, "test-gap").series["global/batch"] == [(t, pytest.approx(gap)) for t, gap in recorded]


def test_the_rate_of_a_schedule_that_ends_at_zero_does_not_hide_the_last_round(tmp_path):
    path = kept(tmp_path / "run", training={"schedule": "cosine", "lr": 0.1})
    assert analyze(path, "feature-maps").scalars["clients"] < 1 - 1e-6


def test_a_round_and_a_client_can_be_chosen(run):
    cohort = fn.open_run(run, which=1).next_cohort
    found = analyze(run, "norms", round=2, client=cohort[1])
    assert [t for t, _ in found.series["W seen"]] == [2]
    upload = next(u for u in uploads_after(fn.open_run(run, which=1)) if u.client == cohort[1])
    expected = upload.model["head.weight"].norm(dim=1)[fn.open_run(run).local.data[cohort[1]].y.unique()].mean()
    assert found.series["W seen"][0][1] == pytest.approx(float(expected), rel=1e-5)
    assert analyze(run, "bn-statistics", client=cohort[1], round=2).words["models"][0] == f"client {cohort[1]}"
    absent = next(c for c in fn.open_run(run).session.engine.clients if c not in cohort)
    for name in ("norms", "training-gap"):
        with pytest.raises(BadInput, match=f'Client "{absent}" did not train'):
            analyze(run, name, round=2, client=absent)


def test_the_bound_of_the_loss_gap_holds_and_is_that_of_the_formula(run):
    found = analyze(run, "loss-bound")
    assert 0 < found.scalars["largest share of the bound"] <= 1
    steps = list(StoredRun(run).at(2).training())
    regularizer, gaps, bounds = [], [], []
    for _, y, by_batch, by_server in steps:
        for label, b, g in zip(y.tolist(), by_batch.double().softmax(1), by_server.double().softmax(1), strict=True):
            kl = sum(float(p * (p / q).log()) for p, q in zip(b, g, strict=True))
            lk = sum(float(q * (q / p).log()) for p, q in zip(b, g, strict=True))
            regularizer.append((kl + lk) / 2)
            gaps.append(abs(math.log(g[label]) - math.log(b[label])))
            bounds.append(2 / min(float(b[label]), float(g[label])) * math.sqrt(regularizer[-1]))
    for name, values in (("regularizer", regularizer), ("gap", gaps), ("bound", bounds)):
        assert found.series[name][-1] == (3, pytest.approx(sum(values) / len(values), rel=1e-4))


def test_weight_normalization_hides_shift_and_scale_of_filters(run):
    found = analyze(run, "filter-drift").scalars
    assert all(change < 1e-2 for name, change in found.items() if name.startswith("weight-normalized"))
    assert all(change > 0.5 for name, change in found.items() if name.startswith("plain"))


def test_findings_are_drawn_alone_and_with_those_of_other_runs(run, longer):
    one, two = analyze(run, "norms"), analyze(longer, "norms")
    assert one.label == "fedavg"
    figure = one.plot(replace(two, label="longer"))
    drawn = {text.get_text() for part in figure.subfigs for legend in part.legends for text in legend.get_texts()}
    assert drawn == {f"{row}, {name}" for row in ("fedavg", "longer") for name in ("seen", "global")}
    axis = figure.subfigs[0].axes[0]
    assert axis.get_ylabel() == "mean norm"
    assert axis.lines[0].get_marker() != "None"
    with pytest.raises(BadInput, match="cannot share a picture"):
        one.plot(analyze(run, "divergence"))


def test_gaps_of_global_and_personal_models_share_a_panel():
    pytest.importorskip("matplotlib")
    gaps = {"fedavg": "global/batch", "fedbn": "personal/batch"}
    found = {row: [Findings(series={name: [(1, 0.1), (2, 0.2)]})] for row, name in gaps.items()}
    (axis,) = figure(ANALYSES["test-gap"], {"": found}, "Figure").axes
    assert {line.get_label() for line in axis.lines} >= {f"{row}, {name}" for row, name in gaps.items()}


def test_settings_of_a_figure_share_their_scales(run, longer):
    one, two = analyze(run, "bn-variance"), analyze(longer, "bn-variance")
    settings = {"a": {"fedbn": [one], "fedavg": [one]}, "b": {"fedavg": [two]}}
    drawn = figure(ANALYSES["bn-variance"], settings, "Figure")
    first, second = (part.axes for part in drawn.subfigs)
    assert all(a.get_ylim() == b.get_ylim() for a, b in zip(first, second, strict=True))
    assert first[0].lines[1].get_color() == second[0].lines[0].get_color()  # both are fedavg


def test_pictures_of_many_layers_and_runs_stay_readable():
    pytest.importorskip("matplotlib")
    layers = [f"layer{i}" for i in range(20)]
    both = [f"{what}, {layer}" for layer in layers for what in ("mean", "variance")]
    found = Findings(arrays={name: np.arange(3.0)[None] for name in both}, words={"models": ["server"]})
    drawn = figure(ANALYSES["bn-statistics"], {"": {"fedavg": [found]}}, "Figure")
    titles = [axis.get_title() for axis in drawn.subfigs[0].axes]
    assert len(titles) == 12
    assert titles[0] == "fedavg: mean, layer0"
    assert titles[-1] == "fedavg: variance, layer19"

    maps = {f"{name}, server": np.ones((4, 4)) for name in ("image", *layers)}
    words = {"layers": layers, "lines": ["server"]}
    one = Findings({"clients": 0.5}, arrays=maps, words=words)
    drawn = figure(ANALYSES["feature-maps"], {"": {"fedavg": [one]}}, "Figure")
    assert drawn.get_figwidth() < 25

    matrix = Findings(arrays={"divergence": np.eye(2)})
    drawn = figure(ANALYSES["divergence"], {"": {str(i): [matrix] for i in range(5)}}, "Figure")
    panels = [axis for axis in drawn.subfigs[0].axes if axis.get_label() != "<colorbar>" and axis.axison]
    assert [axis.get_title() for axis in panels] == [f"{i}: divergence" for i in range(5)]
    assert {axis.get_subplotspec().colspan.start for axis in panels} == {0, 1, 2, 3}


@pytest.mark.parametrize(("name", "unit"), [("four-factors", "cosine"), ("divergence", "symmetric KL divergence")])
def test_matrices_and_bars_say_what_their_numbers_are(run, name, unit):
    axes = analyze(run, name).plot().subfigs[0].axes
    scales = [axis for axis in axes if axis.get_label() == "<colorbar>"]
    bars = [axis for axis in axes if axis.patches]
    assert scales
    assert {axis.get_ylabel() for axis in (*scales, *bars)} == {unit}
    assert all(bar.get_height() < axis.get_ylim()[1] for axis in bars for bar in axis.patches)


def test_titles_of_many_matrices_do_not_overlap(run):
    figure = analyze(run, "filter-drift").plot()
    figure.canvas.draw()
    panels = [axis for axis in figure.subfigs[0].axes if axis.get_title()]
    assert len(panels) == 8
    boxes = [axis.title.get_window_extent() for axis in panels]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
