"""FedProto: prototypes instead of weights."""

import pytest
import torch

from fednorms.core.round import broadcast
from fednorms.core.states import Client, context_of
from fednorms.core.tree import Tree
from fednorms.core.views import Round
from fednorms.evaluation.modes import Mode, headline, model_for, score_site
from fednorms.methods.fedproto import FedProto, to_prototypes
from tests.methods.test_moon import features
from tests.reference.prototypes import fedproto
from tests.support.tiny import CLASSES, close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task


@pytest.mark.parametrize("weights", ["count", "uniform"])
def test_equals_a_plain_torch_loop_over_three_rounds(weights):
    data = tiny_data()
    task = tiny_task(f"fedproto(weights={weights}, lam=0.7)", data)
    run = rounds(task, data, 3)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(3)]
    models, prototypes = fedproto(tiny_net(), features, pairs(data), plans, 0.1, 0.7, plain=weights == "uniform")
    for name, model in zip("abc", models, strict=True):
        close(run.states[name].local, {n: model.state_dict()[n] for n in run.states[name].local})
    mine = run.server.parts["fedproto"]
    for c in range(CLASSES):
        assert bool(mine["known"][c]) == (c in prototypes)
        if c in prototypes:
            torch.testing.assert_close(mine["prototype"][c], prototypes[c], atol=1e-10, rtol=0)


def pooled(part, *uploads, mine=None):
    up = Tree(sum=sum(u[0] for u in uploads), count=sum(u[1] for u in uploads))
    task = tiny_task("fedproto", tiny_data())
    return part.passes()[0].server(up, Round(Tree(), up, mine or Tree(), 2, 2, context_of(task, 0, None)))


def test_the_weighted_and_the_plain_mean_of_two_prototypes():
    a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 4.0]])
    weighted = pooled(FedProto(), (1 * a, torch.tensor([1.0])), (3 * b, torch.tensor([3.0])))
    assert weighted["prototype"].tolist() == [[1.5, 3.0]]
    plain = pooled(FedProto(weights="uniform"), (a, torch.tensor([1.0])), (b, torch.tensor([1.0])))
    assert plain["prototype"].tolist() == [[1.0, 2.0]]


def test_a_class_that_no_client_sent_keeps_its_prototype():
    old = Tree(prototype=torch.tensor([[9.0], [5.0]]), known=torch.tensor([1.0, 1.0]))
    new = pooled(FedProto(), (torch.tensor([[4.0], [0.0]]), torch.tensor([2.0, 0.0])), mine=old)
    assert new["prototype"].tolist() == [[2.0], [5.0]]
    assert new["known"].tolist() == [1.0, 1.0]


def test_the_term_and_samples_without_prototype():
    f, p = torch.tensor([[1.0, 4.0], [8.0, 8.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    known = torch.tensor([1.0, 0.0])
    assert to_prototypes(f[:1], torch.tensor([0]), p, known) == 2.0
    assert to_prototypes(f, torch.tensor([0, 1]), p, known) == 1.0


def test_no_weights_are_sent_and_lam_zero_is_standalone():
    run, alone = play("fedproto(lam=0)", n=3), play("standalone", n=3)
    assert not run.uploads["a"].model
    assert run.uploads["a"].parts["fedproto"].keys() == {"sum", "count"}
    for name in alone.states:
        assert same(run.states[name].local, alone.states[name].local)


def test_prediction_is_the_nearest_prototype_among_the_clients_own_classes():
    rule = FedProto().evaluation().predict
    p = torch.tensor([[0.0, 0.0], [10.0, 0.0], [1.0, 0.0]])
    down = Tree(prototype=p, known=torch.ones(3))
    f = torch.tensor([[0.9, 0.0], [8.0, 0.0], [0.1, 0.0]])
    logits = torch.zeros(3, 3)
    assert rule(logits, f, down, Tree()).argmax(1).tolist() == [2, 1, 0]
    own = Tree(own=torch.tensor([1.0, 1.0, 0.0]))
    answer = rule(logits, f, down, own)
    assert answer.argmax(1).tolist() == [0, 1, 0]
    assert answer.isfinite().all()
    assert torch.equal(rule(logits, f, Tree(), own), logits)  # before the first round: the classifier
    assert FedProto(predict="head").evaluation().predict is None


def test_a_test_uses_prototypes_and_its_loss_is_finite():
    data = tiny_data()
    task = tiny_task("fedproto", data)
    run = rounds(task, data, 3)
    assert headline(task) == Mode("personal", "own")
    sent = broadcast(task, run.server)
    client = Client("a", data["a"], run.states["a"])
    tensors, mine = model_for(task, sent, client, headline(task))
    score = score_site(task, sent, client, data["a"], CLASSES, tensors, mine, headline(task))
    model = tiny_net()
    model.load_state_dict(tensors)
    model.eval()
    down = run.server.parts["fedproto"]
    nearest = torch.cdist(features(model, data["a"].x), down["prototype"]).argmin(1)
    own = [int(c) in set(data["a"].y.tolist()) for c in range(CLASSES)]
    assert all(own)
    assert score.accuracy == float((nearest == data["a"].y).double().mean())
    assert score.loss < float("inf")
