"""FedPer: the head stays, the body is sent."""

import torch
from torch import nn

from fednorms.evaluation.modes import headline
from tests.support.tiny import client_model, ones, play, rounds, tiny_data, tiny_net, tiny_task

C, D = torch.tensor([1.0, 2.0, 6.0]).double(), torch.tensor([3.0, -5.0, 7.0]).double()


class Two(nn.Module):
    """Outputs (theta, phi) on the constant image 1: the body's one weight and the head's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.body.weight, 0.5)
        nn.init.constant_(self.head.weight, -0.25)

    def forward(self, x):
        x = x.flatten(1)
        return torch.cat([self.body(x), self.head(x)], 1)


def linear(logits, y):
    """L_k = c_k theta + d_k phi; the label of a sample is its client's number."""
    return (C[y] * logits[:, 0] + D[y] * logits[:, 1]).mean()


def test_a_linear_loss_has_its_closed_form():
    data, lr = ones(2, 2, 2), 0.1
    task = tiny_task("fedper", data, model=Two(), loss=linear, steps=1, lr=lr)
    one = rounds(task, data, 1)
    theta = 0.5 - lr * C.mean()
    torch.testing.assert_close(one.model["body.weight"].squeeze(), theta, atol=1e-12, rtol=0)
    for k, name in enumerate("abc"):
        held = client_model(task, data, one, name)
        torch.testing.assert_close(held["head.weight"].squeeze(), -0.25 - lr * D[k], atol=1e-12, rtol=0)
        assert torch.equal(held["body.weight"], one.model["body.weight"])  # a second round starts from (theta_1, phi_k)
    two = rounds(task, data, 1, run=one)
    torch.testing.assert_close(two.model["body.weight"].squeeze(), theta - lr * C.mean(), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        two.states["b"].local["head.weight"].squeeze(), -0.25 - 2 * lr * D[1], atol=1e-12, rtol=0
    )


def test_no_head_is_sent_and_norms_are():
    run = play("fedper")
    assert set(run.uploads["a"].model) == {n for n in tiny_net().state_dict() if not n.startswith("head.")}
    assert set(run.states["a"].local) == {"head.weight", "head.bias"}
    assert torch.equal(run.model["head.weight"], tiny_net().head.weight)


def test_the_head_trains_with_the_body_and_is_kept():
    data = tiny_data()
    run = play("fedper", data, n=2, cohorts=["ab", "b"])
    first = play("fedper", data, n=1, cohorts=["ab"])
    assert not torch.equal(first.states["a"].local["head.weight"], tiny_net().head.weight)
    assert torch.equal(run.states["a"].local["head.weight"], first.states["a"].local["head.weight"])
    assert str(headline(tiny_task("fedper", data))).startswith("personal")
