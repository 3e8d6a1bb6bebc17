"""GReg's regularizer, and its bound on the difference of two losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LossBound(NamedTuple):
    """Per image: the regularizer, the absolute difference of the two losses, and the bound on it."""

    regularizer: Tensor
    gap: Tensor
    bound: Tensor


def loss_bound(by_batch: Tensor, by_server: Tensor, y: Tensor) -> LossBound:
    """Proposition 1 of GReg, per image, from logits with batch statistics (q_b) and with received ones (q_g).

    l_reg = (KL(q_b||q_g) + KL(q_g||q_b)) / 2 and |l(q_g, y) - l(q_b, y)| <= 2/tau sqrt(l_reg), tau the smaller of the
    two probabilities of the true class; l is cross-entropy.

    >>> found = loss_bound(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    >>> bool(found.gap <= found.bound), round(float(found.gap), 4)
    (True, 0.6201)
    """
    log_b, log_g = by_batch.double().log_softmax(1), by_server.double().log_softmax(1)
    regularizer = 0.5 * ((log_b.exp() - log_g.exp()) * (log_b - log_g)).sum(1)
    true_b, true_g = (log.gather(1, y[:, None])[:, 0] for log in (log_b, log_g))
    tau = torch.minimum(true_b, true_g).exp()
    return LossBound(regularizer, (true_g - true_b).abs(), 2 / tau * regularizer.clamp_min(0).sqrt())
