"""FRN + TLU: where the threshold takes the place of a ReLU, and where it does not."""

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.layers import FilterResponseNorm, filter_response, thresholded
from fednorms.models import build
from tests.support.tiny import play, rounds, tiny_data, tiny_net, tiny_task


class Residual(nn.Module):
    """One ReLU module for all: after a norm, after an addition in place, and after a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(x))
        out += x
        return self.head(self.relu(self.fc(self.relu(out).mean((2, 3)))))


def residual():
    torch.manual_seed(2)
    return Residual().double()


def test_the_residual_network_by_hand():
    x = tiny_data()["a"].x
    net = tiny_task("frn", tiny_data(), model=residual()).net
    assert [c.name for c in net.changes["frn"]] == ["norm1", "norm2", "relu"]
    assert "norm2.tau" not in net.initial
    tensors = net.initial.clone()
    tensors["norm1.tau"].copy_(torch.tensor([-0.5, 0.1, 0.3, -1.0]))
    got, _ = net.forward(tensors, x, train=True, batch_statistics=True)
    m = residual()
    h = torch.maximum(filter_response(m.conv1(x)), tensors["norm1.tau"][:, None, None])
    assert h.min() < 0  # a ReLU after the threshold would hide this
    out = torch.relu(filter_response(m.conv2(h)) + h)
    wanted = m.head(torch.relu(m.fc(out.mean((2, 3)))))
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_a_functional_relu_stays_and_there_is_no_threshold():
    net = tiny_task("frn", tiny_data()).net
    assert "norm.tau" not in net.initial
    x = tiny_data()["a"].x
    m = tiny_net()
    wanted = m.head(m.pool(torch.relu(filter_response(m.conv(x)))).flatten(1))
    got, _ = net.forward(net.initial, x, train=False, batch_statistics=False)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def test_at_the_start_it_is_the_network_with_its_own_relus():
    x = tiny_data()["a"].x
    net = tiny_task("frn", tiny_data(), model=residual()).net
    m = residual()
    m.norm1, m.norm2 = (FilterResponseNorm(4, tlu=False).double() for _ in range(2))
    got, _ = net.forward(net.initial, x, train=True, batch_statistics=True)
    torch.testing.assert_close(got, m(x), atol=1e-12, rtol=0)


# By reading the networks' source: norms directly followed by a ReLU module (DenseNet's last is a function).
FOLLOWED = {
    "torchvision:resnet18": (20, 9),
    "torchvision:resnet50": (53, 33),
    "torchvision:vgg11_bn": (8, 8),
    "torchvision:densenet121": (121, 120),
    "torchvision:mobilenet_v2": (52, 0),  # ReLU6
    "timm:resnet18": (20, 9),
    "lenet": (2, 2),
    "digits-cnn": (3, 3),
    "cnn-small": (3, 3),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_zoo(name):
    for library in ("torchvision", "timm"):
        if name.startswith(library):
            pytest.importorskip(library)
    model = build(name, classes=3, seed=0)
    changes = thresholded(model)
    norms = [m for m in model.modules() if isinstance(m, FilterResponseNorm)]
    assert (len(norms), sum(m.tau is not None for m in norms)) == FOLLOWED[name]
    assert sum("with threshold" in c.after for c in changes) == FOLLOWED[name][1]


def test_samples_are_independent_and_batches_of_one_train():
    data = tiny_data()
    net = tiny_task("frn", data, model=residual()).net
    x = data["a"].x
    whole, _ = net.forward(net.initial, x, train=True, batch_statistics=True)
    alone, _ = net.forward(net.initial, x[:1], train=True, batch_statistics=True)
    torch.testing.assert_close(whole[:1], alone, atol=1e-13, rtol=0)
    assert net.buffers == []
    assert play("frn", n=1, batch_size=1).model.finite()


def test_thresholds_train_and_are_averaged():
    data = tiny_data()
    run = rounds(tiny_task("frn", data, model=residual()), data, 2)
    assert run.model["norm1.tau"].abs().min() > 0


def test_the_learned_eps_is_a_parameter():
    assert "norm.eps" in tiny_task("frn(learn_eps=true)", tiny_data()).net.trained


def test_a_network_without_batch_norm_is_refused():
    model = tiny_net()
    model.norm = nn.Identity()
    with pytest.raises(BadInput, match=r'frn has nothing to act on: model "TinyNet"'):
        tiny_task("frn", tiny_data(), model=model)
