"""FedACG: clients start where the server's momentum points."""

from fednorms.evaluation import modes
from tests.reference.fedacg import fedacg
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


def test_the_tested_model_equals_a_plain_torch_loop():
    data = tiny_data()
    task = tiny_task("fedacg(lam=0.8, beta=0.5)", data, epochs=2)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    tested = modes.tested_state(task, rounds(task, data, 3).server).model
    close(tested, fedacg(tiny_net(), pairs(data), plans, 0.1, 0.8, 0.5).state_dict())


def test_without_momentum_it_is_fedprox_and_without_both_fedavg_bit_for_bit():
    assert same(play("fedprox(mu=0.5)").model, play("fedacg(lam=0, beta=0.5)").model)
    assert same(play("fedavg").model, play("fedacg(lam=0, beta=0)").model)


def test_the_first_test_is_fedavgs():
    data = tiny_data()
    task = tiny_task("fedacg(beta=0)", data)
    close(modes.tested_state(task, rounds(task, data, 1).server).model, play("fedavg", data, n=1).model, atol=1e-14)


def test_fednova_learns_the_pull():
    task = tiny_task("fedacg(beta=0.25) + fednova", tiny_data())
    assert task.method.parts[1].mu == 0.25
