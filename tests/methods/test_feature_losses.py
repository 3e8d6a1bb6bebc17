"""FedDecorr and FedNTD: terms over features and logits."""

import pytest
import torch

from fednorms.methods.feddecorr import correlation
from fednorms.methods.fedntd import others
from tests.reference.feature_losses import decorrelation, fedavg_with, not_true
from tests.support.tiny import close, pairs, plan_of, play, rounds, same, tiny_data, tiny_net, tiny_task

TERMS = {
    "feddecorr(beta=0.5)": lambda logits, f, known, y: 0.5 * decorrelation(f, "author"),
    "feddecorr(beta=5, variant=paper)": lambda logits, f, known, y: 5 * decorrelation(f, "paper"),
    "fedntd(beta=2, tau=3)": lambda logits, f, known, y: 2 * not_true(logits, known, y, 3.0),
}


@pytest.mark.parametrize("text", TERMS)
def test_equals_a_plain_torch_loop(text):
    data = tiny_data(8, 6)
    task = tiny_task(text, data)
    plans = [[plan_of(task, s, k, t) for k, s in data.items()] for t in range(2)]
    wanted = fedavg_with(tiny_net(), pairs(data), plans, 0.1, TERMS[text]).state_dict()
    close(rounds(task, data, 2).model, wanted, atol=1e-8)


@pytest.mark.parametrize("text", ["feddecorr(beta=0)", "feddecorr(beta=0, variant=paper)", "fedntd(beta=0)"])
def test_without_its_weight_it_is_fedavg_bit_for_bit(text):
    assert same(play("fedavg").model, play(text).model)


def test_distillation_starts_from_zero():
    """The received model and the client's agree before the first step, if normalization is that of a test."""
    plain, pulled = (play(text, n=1, steps=1) for text in ("fixbn(switch=0)", "fixbn(switch=0) + fedntd(beta=9)"))
    close(plain.model, pulled.model, atol=1e-12)


def test_batches_of_one_train():
    assert play("feddecorr + gn(groups=2)", tiny_data(3, 2), batch_size=1).model.finite()


def test_correlation_is_torchs():
    f = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(correlation(f) * 9 / 8, torch.corrcoef(f.T), atol=1e-6, rtol=0)


def test_the_true_class_does_not_matter():
    logits, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 3])
    louder = logits.clone()
    louder[torch.arange(6), y] += 7
    assert torch.equal(others(logits, y), others(louder, y))
    assert not torch.equal(others(logits, y), others(logits + torch.eye(4)[(y + 1) % 4], y))
