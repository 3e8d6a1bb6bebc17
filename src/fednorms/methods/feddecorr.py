"""FedDecorr: keep the features of local models from collapsing into a few directions."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.views import Step


def correlation(features: Tensor) -> Tensor:
    """The correlation matrix of a batch's features, with unbiased variances: z^T z / N.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    >>> correlation(x)[0, 1].item() == correlation(x)[0, 0].item()
    True
    """
    centered = features - features.mean(0)
    z = centered / (features.var(0) + 1e-8).sqrt()
    return z.T @ z / len(z)


@part("feddecorr")
class FedDecorr(Part):
    """Add beta N mean of K_ij^2 over i != j to the local loss; K is the correlation matrix of a batch's features.

    Paper: Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning. Shi et al.
    ICLR 2023. https://arxiv.org/abs/2210.00226 (code: github.com/bytedance/FedDecorr)

    Features are what the classifier gets, N is the number of images of the batch; a batch of one adds nothing. The
    authors use beta=0.1. Acts on the local loss. No state, no extra communication. beta=0 is FedAvg bit for bit.
    Divergence: the default is the authors' program. variant="paper" is the text: beta / d^2 |K|_F^2 for d features,
    about N times weaker.

    >>> FedDecorr(beta=0.05)
    feddecorr(beta=0.05)
    """

    paper = "Shi et al. 2023"

    beta: float = option(0.1, at_least=0.0)
    variant: Literal["author", "paper"] = option("author", choices=("author", "paper"))

    @override
    def loss(self, s: Step) -> Tensor | float:
        f = s.features.flatten(1)
        n, d = f.shape
        if not self.beta or n == 1:
            return 0.0
        squares = correlation(f).square()
        if self.variant == "paper":
            return self.beta * squares.mean()
        return self.beta * n * (squares.sum() - squares.diagonal().sum()) / max(d * (d - 1), 1)
