"""Weight-normalized (FedNN) and scaled weight-standardized (FedWon) convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.layers import WNConv2d, WSConv2d, scaled_weight, weight_norm
from tests.reference import layers_reference as reference

GEOMETRIES = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": (3, 1), "dilation": 2, "padding": "same"},
    {"kernel_size": 3, "groups": 2, "padding": 1, "padding_mode": "circular"},
]


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(5, 3, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 0.2 + 0.1


@pytest.mark.parametrize("variant", ["paper", "author"])
def test_weight_norm_is_the_papers_formula(weight, variant):
    np.testing.assert_allclose(
        weight_norm(weight, variant, 1e-5).numpy(),
        reference.weight_norm(weight.numpy(), variant, 1e-5),
        rtol=1e-9,
    )


def test_weight_norm_filters_have_mean_zero_and_variance_one(weight):
    flat = weight_norm(weight, "paper", eps=0.0).flatten(1)
    assert flat.mean(1).abs().max() < 1e-12
    torch.testing.assert_close(flat.var(1, correction=0), torch.ones(5, dtype=torch.float64))
    single = weight_norm(weight.float(), "paper", eps=0.0).flatten(1)
    assert single.mean(1).abs().max() < 1e-6


def test_author_weight_norm_has_the_sample_variance_of_its_code(weight):
    s = weight.flatten(1).std(1, correction=1)
    got = weight_norm(weight, "author", 1e-5).flatten(1).var(1, correction=1)
    torch.testing.assert_close(got, (s / (s + 1e-5)) ** 2)


@settings(max_examples=20, deadline=None)
@given(a=st.floats(0.1, 10), b=st.floats(-5, 5))
def test_weight_norm_does_not_see_scale_and_offset(a, b):
    w = torch.randn(4, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(weight_norm(a * w + b, "paper", 0.0), weight_norm(w, "paper", 0.0))
    torch.testing.assert_close(scaled_weight(a * w + b), scaled_weight(w))
    # FedNN, Figure 3: the mean of a filter and its affine image has the same direction.
    torch.testing.assert_close(weight_norm((w + 3 * w + 2) / 2, "paper", 0.0), weight_norm(w, "paper", 0.0))


@pytest.mark.parametrize("form", ["listing", "formula"])
def test_scaled_weight_is_the_papers_formula(weight, form):
    gain = torch.rand(5, 1, 1, 1, dtype=torch.float64) + 0.5
    got = scaled_weight(weight, gain, form)
    np.testing.assert_allclose(
        got.numpy(), reference.scaled_weight(weight.numpy(), gain.numpy().ravel(), form), rtol=1e-9
    )
    n = weight[0].numel()
    norm = gain.flatten() ** 2 * ((n - 1) / n if form == "listing" else 1)
    torch.testing.assert_close(got.flatten(1).square().sum(1), norm)
    assert got.flatten(1).mean(1).abs().max() < 1e-12


def test_scaled_weight_of_a_constant_filter_is_zero_and_finite():
    w = torch.full((2, 3, 3, 3), 0.3, requires_grad=True)
    out = scaled_weight(w)
    out.sum().backward()
    assert out.abs().max() < 1e-4
    assert torch.isfinite(w.grad).all()


@pytest.mark.parametrize("cls", [WNConv2d, WSConv2d])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_like_keeps_geometry_and_the_same_parameters(cls, geometry):
    conv = nn.Conv2d(4, 6, **geometry).double().eval()
    conv.weight.requires_grad_(False)
    rng = torch.get_rng_state()
    new = cls.like(conv)
    assert torch.equal(torch.get_rng_state(), rng), "surgery must not draw numbers"
    assert new.weight is conv.weight
    assert new.bias is conv.bias
    assert not new.training
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    standardised = nn.Conv2d(4, 6, **geometry).double()
    with torch.no_grad():
        standardised.weight.copy_(weight_norm(conv.weight) if cls is WNConv2d else scaled_weight(conv.weight))
        if conv.bias is not None:
            standardised.bias.copy_(conv.bias)
    torch.testing.assert_close(new(x), standardised(x))
    assert new(x).dtype == torch.float64


def test_state_dict_keys():
    assert set(WNConv2d.like(nn.Conv2d(2, 2, 3)).state_dict()) == {"weight", "bias"}
    assert set(WSConv2d.like(nn.Conv2d(2, 2, 3)).state_dict()) == {"weight", "bias", "gain"}
    assert set(WSConv2d.like(nn.Conv2d(2, 2, 3, bias=False)).state_dict()) == {"weight", "gain"}
    assert set(WSConv2d.like(nn.Conv2d(2, 2, 3), form="formula").state_dict()) == {"weight", "bias"}
    added = WSConv2d.like(nn.Conv2d(2, 2, 3, bias=False), add_bias=True)
    assert torch.equal(added.bias, torch.zeros(2))


@pytest.mark.parametrize("cls", [WNConv2d, WSConv2d])
def test_gradients_flow_through_mean_and_deviation(cls):
    conv = cls.like(nn.Conv2d(2, 3, 2).double())
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    names = [name for name, _ in conv.named_parameters()]

    def forward(*values):
        return torch.func.functional_call(conv, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, tuple(p.detach().clone().requires_grad_() for p in conv.parameters()))


def test_wsconv_output_of_an_image_does_not_depend_on_its_batch_or_mode():
    conv = WSConv2d(3, 4, 3)
    x = torch.randn(5, 3, 6, 6)
    torch.testing.assert_close(conv(x)[2:3], conv(x[2:3]))
    assert torch.equal(conv(x), conv.eval()(x))


def test_new_wsconv_starts_xavier_normal_with_unit_gain():
    torch.manual_seed(0)
    conv = WSConv2d(16, 32, 3)
    assert torch.equal(conv.gain, torch.ones(32, 1, 1, 1))
    expected = (2 / (16 * 9 + 32 * 9)) ** 0.5
    assert abs(conv.weight.std().item() / expected - 1) < 0.05


@pytest.mark.parametrize("cls", [WNConv2d, WSConv2d])
def test_a_convolution_with_its_own_forward_is_refused(cls):
    class Odd(nn.Conv2d):
        def forward(self, x):
            return super().forward(2 * x)

    with pytest.raises(BadInput, match=r'"stem".* Odd with its own forward'):
        cls.like(Odd(1, 1, 3), name="stem")
    with pytest.raises(BadInput, match="own forward"):
        cls.like(WSConv2d(2, 2, 3))
    with pytest.raises(BadInput, match="fan-in"):
        cls.like(nn.Conv2d(2, 2, 1, groups=2))


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
def test_timm_same_padding_is_kept(size, stride, dilation):
    timm_layers = pytest.importorskip("timm.layers")
    conv = timm_layers.Conv2dSame(2, 3, 3, stride=stride, dilation=dilation)
    new = WNConv2d.like(conv)
    x = torch.randn(1, 2, size, size)
    expected = torch.func.functional_call(conv, {"weight": weight_norm(conv.weight)}, (x,))
    torch.testing.assert_close(new(x), expected)
