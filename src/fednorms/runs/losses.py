"""Base losses that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.data.facts import Facts

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the batch; with class weights, the weighted mean.

    >>> round(cross_entropy(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    0.6931
    """
    return nn.functional.cross_entropy(logits, y, weight=None if weight is None else weight.to(logits))


def focal(logits: Tensor, y: Tensor, weight: Tensor | None = None, gamma: float = 2.0) -> Tensor:
    """Weighted focal loss: mean of a_y (1 - p)^gamma (-log p), p the probability of the true class (Fed-ISIC2019).

    >>> round(focal(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([5.5813, 2.0472])).item(), 5)
    0.35475
    """
    log_p = logits.log_softmax(1).gather(1, y[:, None]).squeeze(1)
    a = 1.0 if weight is None else weight.to(logits)[y]
    return (a * (1 - log_p.exp()) ** gamma * -log_p).mean()


LOSSES = {"cross_entropy": cross_entropy, "focal": focal}


def base_loss(name: str, weights: list[float] | Literal["auto", "none", "balanced"], facts: Facts) -> Loss:
    """The loss that a recipe names, with its class weights; `Recipe.adopting` has already replaced "auto"."""
    if name not in LOSSES:
        raise BadInput(
            f'Unknown loss "{name}": {nearest(name, LOSSES)}. In Python, any function of (logits, y) can be passed.'
        )
    chosen = LOSSES[name]
    if weights == "none" or weights == "auto":
        return chosen
    if weights == "balanced":
        counts = torch.tensor(facts.class_counts)
        table = int(counts.sum()) / (facts.num_classes * counts.clamp(min=1).double())
    else:
        table = torch.tensor(weights, dtype=torch.float64)
        if len(table) != facts.num_classes or not bool((torch.isfinite(table) & (table > 0)).all()):
            raise BadInput(
                f"class_weights needs {facts.num_classes} numbers above 0, one per class of federation "
                f'"{facts.name}", got {list(weights)}. A batch of classes without weight would have no loss.'
            )
    return partial(chosen, weight=table)  # a lambda could not be sent to a worker process
