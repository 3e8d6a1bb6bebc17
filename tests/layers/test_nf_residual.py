"""Residual blocks scaled as in NF-ResNets, against the formula written out with plain convolutions."""

import math

import pytest
import torch
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.methods.registry import method
from fednorms.models import build
from tests.reference.layers_reference import scaled_weight
from tests.support.tiny import play, tiny_net

ALPHA = 0.2


def network(name, size, text="fedwon(nf_residual=true)"):
    model = build(name, classes=4, channels=3, size=size, seed=0)
    net = Net(model, method(text), name=name, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    tensors = net.initial.clone()
    for key, value in tensors.items():  # as after some training: every gain has moved
        if key.endswith("gain"):
            value.add_(torch.rand(value.shape, generator=generator, dtype=value.dtype))
    return net, tensors


def convolve(tensors, name, x, stride, padding):
    gains = tensors[f"{name}.gain"].flatten().tolist()
    weight = torch.from_numpy(scaled_weight(tensors[f"{name}.weight"].numpy(), gains, "listing"))
    return F.conv2d(x, weight, None, stride, padding)


def block(tensors, name, h, beta, stride, across=None):
    """One block with two convolutions: the input is scaled, not the filters."""
    inner = F.relu(convolve(tensors, f"{name}.conv1", beta * h, stride, 1))
    inner = convolve(tensors, f"{name}.conv2", inner, 1, 1)
    shortcut = h if across is None else convolve(tensors, f"{name}.{across}", beta * h, stride, 0)
    return F.relu(shortcut + ALPHA * tensors[f"{name}.conv2.branch_gain"] * inner)


def test_a_resnet_by_the_formula():
    net, tensors = network("torchvision:resnet18", 32)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    h = F.max_pool2d(F.relu(convolve(tensors, "conv1", x, 2, 3)), 3, 2, 1)
    variance = 1.0
    for stage in range(1, 5):
        for number in range(2):
            first = stage > 1 and number == 0
            h = block(
                tensors,
                f"layer{stage}.{number}",
                h,
                1 / math.sqrt(variance),
                2 if first else 1,
                "downsample.0" if first else None,
            )
            variance = (1.0 if first else variance) + ALPHA**2
    wanted = F.linear(h.mean((2, 3)), tensors["fc.weight"], tensors["fc.bias"])
    got, _ = net.forward(tensors, x, train=True, batch_statistics=True)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)
    plain, _ = network("torchvision:resnet18", 32, "fedwon")
    without, _ = plain.forward(plain.initial, x, train=True, batch_statistics=True)
    assert not torch.allclose(got, without)


def test_a_shortcut_without_convolution_does_not_restart_the_variance():
    """ResNet-20 of option A pads its shortcuts: the variance grows through all nine blocks."""
    net, tensors = network("resnet20", 16)
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    h = F.relu(convolve(tensors, "conv", x, 1, 1))
    for number in range(9):
        wider = number in (3, 6)
        name, beta = f"blocks.{number}", 1 / math.sqrt(1 + number * ALPHA**2)
        inner = F.relu(convolve(tensors, f"{name}.conv1", beta * h, 2 if wider else 1, 1))
        inner = convolve(tensors, f"{name}.conv2", inner, 1, 1)
        if wider:
            more = h.shape[1] // 2
            h = F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, more, more))
        h = F.relu(h + ALPHA * tensors[f"{name}.conv2.branch_gain"] * inner)
    wanted = F.linear(h.mean((2, 3)), tensors["head.weight"], tensors["head.bias"])
    got, _ = net.forward(tensors, x, train=True, batch_statistics=True)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "name", ["timm:resnet10t", "torchvision:resnet50", "torchvision:mobilenet_v2", "resnet18-cifar"]
)
def test_at_the_start_every_branch_is_silent(name):
    """g = 0: whatever is inside a branch, the network computes its shortcuts; the gains get a gradient."""
    net = Net(build(name, classes=4, channels=3, size=32, seed=0), method("fedwon(nf_residual=true)"), name=name)
    ends = [k for k in net.initial if k.endswith("branch_gain")]
    assert len(ends) == {"timm:resnet10t": 4, "torchvision:resnet50": 16, "torchvision:mobilenet_v2": 10}.get(name, 8)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    other = net.initial.clone()
    for end in ends:
        other[end.replace("branch_gain", "weight")].uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    one, _ = net.forward(net.initial, x, train=False, batch_statistics=False)
    two, _ = net.forward(other, x, train=False, batch_statistics=False)
    assert torch.equal(one, two)
    leaves = {k: net.initial[k].clone().requires_grad_() for k in ends}
    logits, _ = net.forward(type(net.initial)({**net.initial, **leaves}), x, train=False, batch_statistics=False)
    grads = torch.autograd.grad(logits.square().sum(), list(leaves.values()))
    assert all(float(g.abs()) > 0 for g in grads)


def test_refusals():
    for text, problem in [
        ("wsconv(nf_residual=true)", "still ends in BatchNorm2d"),
        ("gn(groups=2) + wsconv(nf_residual=true)", "still ends in"),
    ]:
        with pytest.raises(BadInput, match=problem):
            Net(build("resnet20", classes=4, size=16), method(text), name="resnet20")
    with pytest.raises(BadInput, match="no residual blocks are known in this LeNet"):
        Net(build("lenet", classes=4, size=32), method("fedwon(nf_residual=true)"), name="lenet")
    for name, problem in [
        ("timm:hrnet_w18_small", "parallel blocks"),
        ("timm:seresnet18", "gate after its last convolution"),
        ("torchvision:efficientnet_v2_s", "ends in SiLU"),
    ]:
        with pytest.raises(BadInput, match=problem):
            Net(build(name, classes=4, size=32), method("fedwon(nf_residual=true)"), name=name)
    odd = build("resnet20", classes=4, size=16)
    odd.blocks[1].conv2 = torch.nn.ConvTranspose2d(16, 16, 3, padding=1)
    with pytest.raises(BadInput, match=r'"blocks.1".*no standardized convolution'):
        Net(odd, method("fedwon(nf_residual=true)"), name="odd")
    with pytest.raises(BadInput, match="no residual blocks"):
        play("fedwon(nf_residual=true)", model=tiny_net())
