"""FedFN's classifier."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednorms.core.errors import BadInput
from fednorms.layers import UnitNormLinear, unit_norm


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_features_have_norm_one_and_zero_stays_zero(features):
    torch.testing.assert_close(unit_norm(features).norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(unit_norm(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_logits_do_not_depend_on_the_norm_of_the_features(features):
    head = UnitNormLinear(4, 3).double()
    torch.testing.assert_close(head(17.0 * features), head(features))
    torch.testing.assert_close(
        head(features), F.linear(features / features.norm(dim=1)[:, None], head.weight, head.bias)
    )


def test_gradients_are_those_of_the_paper(features):
    head = UnitNormLinear(4, 3, bias=False).double()
    y = torch.tensor([0, 1, 2, 1, 0])
    logits = head(features)
    F.cross_entropy(logits, y, reduction="sum").backward()
    # The gradient is orthogonal to the feature itself, sample by sample.
    assert (features.grad * features).sum(1).abs().max() < 1e-12
    error = logits.softmax(1) - F.one_hot(y, 3)
    torch.testing.assert_close(head.weight.grad, error.T @ unit_norm(features))


def test_a_zero_feature_behind_relu_gives_finite_gradients():
    x = torch.tensor([[-1.0, -2.0], [1.0, -2.0]], requires_grad=True)
    UnitNormLinear(2, 2)(x.relu()).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_like_keeps_parameters_and_can_drop_the_bias():
    linear = nn.Linear(4, 3).double().eval()
    new = UnitNormLinear.like(linear)
    assert new.weight is linear.weight
    assert new.bias is linear.bias
    assert not new.training
    assert set(new.state_dict()) == {"weight", "bias"}
    assert set(UnitNormLinear.like(linear, bias=False).state_dict()) == {"weight"}
    assert set(UnitNormLinear.like(nn.Linear(4, 3, bias=False)).state_dict()) == {"weight"}
    with pytest.raises(BadInput, match='"fc" is a UnitNormLinear with its own forward'):
        UnitNormLinear.like(new, name="fc")
