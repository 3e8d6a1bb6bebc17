"""FedTAN: a first step that equals the step of one network on everybody's batches."""

import copy

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.round import broadcast, initial_state, server_update
from fednorms.data import Federation, Preprocessing, Site
from fednorms.engines.graphs import Graphs
from fednorms.engines.joint import Lockstep
from fednorms.engines.loop import Loop
from fednorms.explain.describe import describe
from fednorms.runs.store.clients import ClientStore
from tests.reference.fedtan import first_step_gradients
from tests.support.after import recipe
from tests.support.tiny import close, plan_of, play, same, tiny_data, tiny_net, tiny_task

EQUAL = (4, 4, 4)


def engine_of(task, data, kind=Loop):
    federation = Federation("tiny", [Site(n, n, train=s) for n, s in data.items()], ["0", "1", "2"], Preprocessing())
    return kind(task, federation, federation, ClientStore(2**30))


def together(text, data, n=1, cohorts=None, **settings):
    """`n` rounds on the loop engine, which takes first steps jointly."""
    task = tiny_task(text, data, **settings)
    engine = engine_of(task, data)
    state = engine.setup(initial_state(task))
    for t in range(n):
        cohort = cohorts[t] if cohorts else list(data)
        state = server_update(task, state, engine.train(broadcast(task, state), cohort).uploads)
    return state.model


def centralised_gradient(model, data):
    x, y = torch.cat([s.x for s in data.values()]), torch.cat([s.y for s in data.values()])
    nn.functional.cross_entropy(model(x), y).backward()
    return {n: p.grad for n, p in model.named_parameters()}


class Deep(nn.Module):
    """Two residual blocks, shared activations, and a batch normalization of vectors."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)
        self.fc, self.norm3 = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.norm0(self.stem(x)))
        x = x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return self.head(torch.relu(self.norm3(self.fc(x.mean((2, 3))))))


def deep():
    torch.manual_seed(1)
    return Deep().double()


@pytest.mark.parametrize("make", [tiny_net, deep])
def test_one_step_is_that_of_one_network_on_all_batches(make):
    data = tiny_data(*EQUAL)
    got = together("fedtan", data, model=make(), lr=1.0)
    naive = play("fedavg", data, n=1, model=make(), lr=1.0).model
    gradient = centralised_gradient(make(), data)
    start = make().state_dict()
    apart = []
    for name, g in gradient.items():
        torch.testing.assert_close(start[name] - got[name], g, atol=1e-10, rtol=0)
        apart.append((start[name] - naive[name] - g).abs().max())
    assert max(apart) > 1e-3


def test_each_clients_gradient_is_that_of_the_protocol():
    data = tiny_data(*EQUAL)
    task = tiny_task("fedtan", data, lr=1.0)
    state = initial_state(task)
    uploads = engine_of(task, data).train(broadcast(task, state), list(data)).uploads
    batches = [(s.x[plan_of(task, s, n, 0)[0]], s.y[plan_of(task, s, n, 0)[0]]) for n, s in data.items()]
    gradients, mean, var = first_step_gradients(tiny_net(), batches)
    for upload, gradient in zip(uploads, gradients, strict=True):
        for name, g in gradient.items():
            torch.testing.assert_close(state.model[name] - upload.model[name], g, atol=1e-12, rtol=0)
        torch.testing.assert_close(upload.model["norm.running_mean"], 0.1 * mean, atol=1e-12, rtol=0)
        wanted = 0.9 + 0.1 * var * 256 / 255  # M = 4 images of 8x8
        torch.testing.assert_close(upload.model["norm.running_var"], wanted, atol=1e-12, rtol=0)
        assert upload.model["norm.num_batches_tracked"] == 1


def test_later_steps_are_ordinary_local_ones():
    data = tiny_data(8, 8)
    task = tiny_task("fedtan", data, lr=0.1)
    got = together("fedtan", data, lr=0.1)
    plans = {n: plan_of(task, s, n, 0) for n, s in data.items()}
    first = [(s.x[plans[n][0]], s.y[plans[n][0]]) for n, s in data.items()]
    gradients, mean, var = first_step_gradients(tiny_net(), first)
    models = []
    for (name, split), gradient in zip(data.items(), gradients, strict=True):
        local = tiny_net()
        with torch.no_grad():
            for key, p in local.named_parameters():
                p -= 0.1 * gradient[key]
            local.norm.running_mean.copy_(0.1 * mean)
            local.norm.running_var.copy_(0.9 + 0.1 * var * 256 / 255)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        rows = plans[name][1]
        nn.functional.cross_entropy(local(split.x[rows]), split.y[rows]).backward()
        optimizer.step()
        models.append(local.state_dict())
    for name in ("conv.weight", "norm.weight", "norm.running_mean", "norm.running_var", "head.bias"):
        wanted = (models[0][name] + models[1][name]) / 2
        torch.testing.assert_close(got[name], wanted, atol=1e-12, rtol=0)


def test_one_participant_is_fedavg():
    data = tiny_data(9)
    close(together("fedtan", data, n=2), together("fedavg", data, n=2), atol=1e-12)


def test_partial_participation_repeats_bit_for_bit():
    data = tiny_data()
    cohorts = [["a", "c"], ["b"], ["a", "b", "c"]]
    one, two = (together("fedtan", data, n=3, cohorts=cohorts, momentum=0.9, clip=1.0) for _ in range(2))
    assert same(one, two)


def test_the_weights_of_the_average_weight_the_statistics():
    data = tiny_data(2, 4, 6)
    got = together("fedtan", data, lr=1.0, batch_size=6, weighting="size")
    gradient = centralised_gradient(tiny_net(), data)
    for name, g in gradient.items():
        torch.testing.assert_close(tiny_net().state_dict()[name] - got[name], g, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "other", ["scaffold", "fedprox(mu=0.1)", "greg", "perfedavg", "fedbn", "fixbn(switch=0)", "wn", "ditto"]
)
def test_it_combines(other):
    data = tiny_data(7, 6)
    weighting = {"weighting": "uniform"}
    assert together(f"fedtan + {other}", data, n=2, **weighting).finite()


def test_frozen_statistics_leave_nothing_to_share():
    data = tiny_data()
    close(
        together("fedtan + fixbn(switch=0)", data, n=2),
        together("fixbn(switch=0)", data, n=2, weighting="uniform"),
        atol=1e-14,
    )


def test_a_client_too_small_for_a_batch_sits_out():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    data = tiny_data(1, 4, 4)
    task = tiny_task("fedtan", data, model=model)
    object.__setattr__(task, "needs_two", True)
    done = engine_of(task, data).train(broadcast(task, initial_state(task)), list(data))
    assert [u.metrics["steps"] for u in done.uploads] == [0, 1, 1]


def test_other_engines_refuse_and_name_the_one_that_can():
    data = tiny_data(4, 4)
    with pytest.raises(BadInput, match=r'"graphs" cannot run fedtan.*joint.*engine="loop"'):
        engine_of(tiny_task("fedtan", data), data, Graphs)


def test_auto_takes_the_loop(monkeypatch):
    monkeypatch.setattr("fednorms.engines.devices.pick_device", lambda name: "cuda")
    assert recipe("fedtan + fedprox").resolved().engine == "loop"
    assert recipe("fedprox").resolved().engine == "graphs"


def test_a_model_without_batch_norm_is_refused():
    with pytest.raises(BadInput, match="fedtan has nothing to act on"):
        tiny_task("gn(groups=2) + fedtan", tiny_data())


def test_an_error_in_one_thread_ends_all():
    lockstep = Lockstep([1.0, 1.0, 1.0])

    def job(index):
        lockstep.average(index, torch.zeros(1))
        if index == 1:
            raise ValueError("here")
        lockstep.average(index, torch.zeros(1))

    with pytest.raises(ValueError, match="here"):
        lockstep.run([lambda k=k: job(k) for k in range(3)])


def test_threads_that_do_not_meet_are_an_error_and_not_a_deadlock():
    for early in range(3):
        lockstep = Lockstep([1.0, 1.0, 1.0])

        def job(index, lockstep=lockstep, early=early):
            lockstep.average(index, torch.zeros(1))
            if index != early:
                lockstep.average(index, torch.zeros(1))

        with pytest.raises(RuntimeError, match="same layers"):
            lockstep.run([lambda k=k: job(k) for k in range(3)])


def test_describe_counts_three_exchanges_a_layer():
    found = describe("fedtan", copy.deepcopy(tiny_net(dtype=torch.float32)), classes=3, shape=(3, 8, 8))
    assert found.parts[0].round_trips == 3
    assert "fedtan: 3 in every round" in repr(found)
