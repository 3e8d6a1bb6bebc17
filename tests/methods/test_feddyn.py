"""FedDyn: multipliers that make local optima agree with the global one, in the paper's and the authors' form."""

import pytest
import torch

from fednorms.core.errors import BadInput
from fednorms.methods.registry import method
from tests.reference.feddyn import feddyn_code, feddyn_paper
from tests.support.tiny import Scalar, close, ones, pairs, plan_of, play, rounds, tiny_data, tiny_net, tiny_task

COHORTS = ["abc", "ac", "b", "ab"]
NUMBERS = [["abc".index(k) for k in cohort] for cohort in COHORTS]


def plans(task, data):
    return [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(len(COHORTS))]


def vector(tree):
    return torch.cat([tree[n].reshape(-1) for n, _ in tiny_net().named_parameters()])


@pytest.mark.parametrize("clip", [None, 0.5])
def test_paper_form_equals_a_plain_torch_loop_under_partial_participation(clip):
    data = tiny_data()
    task = tiny_task("feddyn(alpha=0.2)", data, epochs=2, clip=clip)
    run = rounds(task, data, 4, cohorts=COHORTS)
    model, h, lambdas = feddyn_paper(tiny_net(), pairs(data), plans(task, data), NUMBERS, 0.1, 0.2, clip)
    close(run.model, model.state_dict(), atol=1e-7 if clip else 1e-10)
    torch.testing.assert_close(vector(run.server.parts["feddyn"]), h, atol=1e-7, rtol=0)
    for name, wanted in zip("abc", lambdas, strict=True):
        torch.testing.assert_close(vector(run.states[name].parts["feddyn"]), wanted, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.01, "clip": 0.5}, {"momentum": 0.5, "weight_decay": 0.1}], ids=str
)
def test_code_form_equals_the_authors_program_with_unequal_clients(settings):
    data = tiny_data(13, 4, 7)
    task = tiny_task("feddyn(alpha=0.2, form=code)", data, epochs=2, **settings)
    run = rounds(task, data, 4, cohorts=COHORTS)
    model, history = feddyn_code(tiny_net(), pairs(data), plans(task, data), NUMBERS, 0.1, 0.2, **settings)
    close(run.model, model.state_dict(), atol=1e-9)
    for name, wanted in zip("abc", history, strict=True):
        torch.testing.assert_close(vector(run.states[name].parts["feddyn"]), wanted, atol=1e-9, rtol=0)


def test_both_forms_agree_for_unequal_clients_without_clipping():
    data = tiny_data(13, 4, 7)
    paper, code = (
        play(f"feddyn(alpha=0.3, form={f})", data, n=4, cohorts=COHORTS, epochs=2) for f in ("paper", "code")
    )
    close(paper.model, code.model, atol=1e-10)


def test_both_forms_agree_for_equal_clients_without_clipping_and_clipping_tells_them_apart():
    data = tiny_data(8, 8, 8)
    paper, code = (
        play(f"feddyn(alpha=0.3, form={f})", data, n=4, cohorts=COHORTS, epochs=2) for f in ("paper", "code")
    )
    close(paper.model, code.model, atol=1e-10)
    close(code.server.parts["feddyn"] * -0.3, paper.server.parts["feddyn"], atol=1e-10)
    close(code.states["a"].parts["feddyn"] * -0.3, paper.states["a"].parts["feddyn"], atol=1e-10)
    clipped = [play(f"feddyn(alpha=0.3, form={f})", data, n=2, clip=0.1) for f in ("paper", "code")]
    assert not torch.allclose(clipped[0].model["head.weight"], clipped[1].model["head.weight"], atol=1e-6)


@pytest.mark.parametrize("weighting", [None, "size"])
@pytest.mark.parametrize("beside", ["", " + fedbn(upload=True)", " + hbn", " + partialfed"])
def test_h_is_the_mean_of_all_lambdas_whoever_took_part_and_however_models_are_weighted(weighting, beside):
    sizes = (13, 4, 7)
    run = play(f"feddyn(alpha=0.1){beside}", tiny_data(*sizes), n=4, cohorts=COHORTS, weighting=weighting)
    assert run.server.parts["feddyn"]
    relative = dict(zip("abc", (n * 3 / sum(sizes) for n in sizes), strict=True))
    for name, h in run.server.parts["feddyn"].items():
        mean = sum(run.states[k].parts["feddyn"][name] * relative[k] for k in "abc") / 3
        torch.testing.assert_close(h, mean, atol=1e-13, rtol=0)


@pytest.mark.parametrize("text", ["feddyn(alpha=0.1)", "feddc(alpha=0.1)"])
def test_what_clients_keep_and_send_is_averaged_plainly(text):
    run = play(f"{text} + fedbn(upload=True)", tiny_data(6, 6, 6), n=3)
    for name in ("norm.weight", "norm.running_mean"):
        mean = sum(u.model[name] for u in run.uploads.values()) / 3
        torch.testing.assert_close(run.model[name], mean, atol=1e-13, rtol=0)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_the_first_round_of_all_clients_walks_twice_the_mean_update(form):
    run = play(f"feddyn(form={form})", n=1)
    start = dict(tiny_net().named_parameters())
    for name, w in start.items():
        mean = sum(u.model[name] - w.detach() for u in run.uploads.values()) / 3
        torch.testing.assert_close(run.model[name], w.detach() + 2 * mean, atol=1e-13, rtol=0)


def test_statistics_are_averaged_only():
    run = play("feddyn", n=2)
    mean = sum(u.model["norm.running_var"] for u in run.uploads.values()) / 3
    torch.testing.assert_close(run.model["norm.running_var"], mean, atol=1e-14, rtol=0)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_quadratics_reach_the_mean_optimum_and_lambda_is_the_local_gradient(form):
    a = torch.tensor([1.0, -2.0, 7.0], dtype=torch.float64)
    alpha = 0.5

    def quadratic(z, y):
        return 0.5 * (z.flatten() - a[y]).square().mean()

    # Curvature 1 + alpha: a step of 1 / (1 + alpha) finds the local minimizer exactly.
    data = ones(2, 2, 2)
    settings = {"model": Scalar(0.25), "loss": quadratic, "lr": 1 / (1 + alpha), "steps": 2, "batch_size": 2}
    task = tiny_task(f"feddyn(alpha={alpha}, form={form})", data, **settings)
    run = rounds(task, data, 1)
    for name, optimum in zip("abc", a, strict=True):
        theta = run.uploads[name].model["head.weight"]
        torch.testing.assert_close(theta.squeeze(), (optimum + alpha * 0.25) / (1 + alpha), atol=1e-12, rtol=0)
        mine = run.states[name].parts["feddyn"]["head.weight"] * (1.0 if form == "paper" else -alpha)
        torch.testing.assert_close(mine, theta - optimum, atol=1e-12, rtol=0)
    run = rounds(task, data, 60, run=run)
    assert float(run.model["head.weight"]) == pytest.approx(2.0, abs=1e-9)
    fedavg = play("fedavg", ones(2, 2, 6), n=60, **{**settings, "lr": 0.5, "batch_size": 6})
    assert abs(float(fedavg.model["head.weight"]) - 2.0) > 0.1  # by size, FedAvg goes elsewhere


@pytest.mark.parametrize("other", ["fedbn", "fedrep(head_epochs=1)", "fedbabu"])
def test_local_tensors_are_not_regularized(other):
    run = play(f"feddyn(alpha=5.0) + {other}", n=2)
    assert run.server.parts["feddyn"].keys() == run.states["a"].parts["feddyn"].keys()
    assert run.server.parts["feddyn"].keys() < dict(tiny_net().named_parameters()).keys()


def test_uploads_nothing_besides_the_model():
    assert not play("feddyn", n=1).uploads["a"].parts["feddyn"]


@pytest.mark.parametrize("alpha", ["0", "0.0", "-0.1"])
def test_alpha_zero_is_refused(alpha):
    with pytest.raises(BadInput, match=r"feddyn: alpha must be a number > 0\.0 \(default 0\.01\), got"):
        method(f"feddyn(alpha={alpha})")


def test_an_update_changed_before_it_is_sent_is_refused_by_name():
    with pytest.raises(BadInput, match=r"feddyn needs .* fednova changes"):
        method("feddyn + fednova")
