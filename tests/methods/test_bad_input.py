"""What a method cannot work on is refused at once: the message names the part, the model or layer, and a way out."""

import pytest
import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.methods.registry import method
from fednorms.models import build
from tests.support.tiny import tiny_data, tiny_net, tiny_task


@pytest.mark.parametrize("text", ["gn(groups=3)", "gn", "agn(groups=3)", "fednn(groups=3)"])
def test_groups_that_do_not_divide_a_width_name_the_layer(text):
    with pytest.raises(BadInput, match=r'Layer "norm": 4 channels do not divide into \d+ groups.*groups=1'):
        tiny_task(text, tiny_data())


NEED_NORMS = "gn ln frn rbn sn inorm pn fbn hbn agn mixbn fedbn silobn fixbn fedtan fednorm adabn greg"


@pytest.mark.parametrize("text", NEED_NORMS.split())
def test_a_network_without_norms_is_refused_by_every_part_that_needs_them(text):
    model = tiny_net()
    model.norm = nn.Identity()
    with pytest.raises(BadInput, match=rf'{text} has nothing to act on: model "TinyNet".*Remove {text}'):
        tiny_task(text, tiny_data(), model=model)


@pytest.mark.parametrize("text", ["ws", "wn", "wsconv"])
def test_a_network_without_convolutions_is_refused(text):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Linear(4, 3))
    with pytest.raises(BadInput, match=f"{text} has nothing to act on"):
        tiny_task(text, tiny_data(), model=model)


@pytest.mark.parametrize("text", ["fedbabu", "fedrep", "fedfn", "spherefed"])
def test_a_network_without_a_linear_classifier_is_refused(text):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(BadInput, match="cannot find the linear layer"):
        Net(model, method(text))


def test_a_head_that_is_not_there_is_refused_with_the_names_that_are():
    with pytest.raises(BadInput, match=r'no module "fc".*head='):
        Net(tiny_net(), method("fedrep"), head="fc")


@pytest.mark.parametrize("size", [20, 100])
def test_levit_at_the_wrong_size(size):
    pytest.importorskip("timm")
    model = build("timm:levit_128s", classes=3, size=64)
    net = Net(model, method("fedavg"), name="timm:levit_128s")
    with pytest.raises(BadInput, match=rf'"timm:levit_128s" cannot take images of 3x{size}x{size}'):
        net.probe((3, size, size), 3)


@pytest.mark.parametrize("text", ["frn", "inorm"])
def test_levit_normalizes_vectors_which_frn_and_in_refuse(text):
    pytest.importorskip("timm")
    with torch.device("meta"):
        model = build("timm:levit_128s", classes=3, size=64)
    with pytest.raises(BadInput, match="BatchNorm1d, which normalizes vectors"):
        swap_only(model, text)


def swap_only(model, text):
    part = method(text).parts[0]
    part.surgery(model, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fbn(rho=1.5)", r"fbn: rho must be a number >= 0.0 and <= 1.0 \(default 0.1\), got 1.5"),
        ("pn(noise=-1)", r"pn: noise must be a number >= 0.0 \(default 0.0\), got -1.0"),
        ("sn(biased=2)", r"sn: biased must be a bool \(default False\), got 2"),
        ("wsconv(start=kaiming)", r"wsconv: start must be one of 'keep', 'xavier' \(default 'keep'\), got 'kaiming'"),
        ("fedtan(mu=1)", r'fedtan has no option "mu": it has no options'),
    ],
)
def test_options_outside_their_range(text, message):
    with pytest.raises(BadInput, match=message):
        method(text)
