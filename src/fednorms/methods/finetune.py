"""FineTune: adapt a copy of the final model to each client before testing it."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from fednorms.core.part import Eval, Part, Phase, option, part


@part("finetune")
class FineTune(Part):
    """Test each client after `epochs` epochs on its own training data: FedAvg-FT, FedFN-FT, any method + finetune.

    Paper: FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning. Kim et al.
    NeurIPS workshop FL@FM 2023. https://arxiv.org/abs/2311.13267
    Paper: FedBABU: Towards Enhanced Representation for Federated Image Classification. Oh, Kim and Yun. ICLR 2022.
    https://arxiv.org/abs/2106.06042

    The rate is `factor` times the recipe's learning rate (FedFN's grid is 1, 0.1, 0.01; it chooses 0.1). There is no
    weight decay unless `weight_decay` sets one, whatever federated training uses. Acts only on the evaluation mode
    "adapted"; federated training is unchanged, bit for bit. epochs=0 tests the model as it is.
    Divergence: published scripts start from the round with the best test accuracy; here it is the last round.

    >>> FineTune(train="head")
    finetune(train='head')
    """

    paper = "Kim et al. 2023 (FedFN); Oh et al. 2022"

    epochs: int = option(5, at_least=0)
    factor: float = option(0.1, at_least=0.0)
    train: Literal["all", "head", "body"] = option("all", choices=("all", "head", "body"))
    weight_decay: float = option(0.0, at_least=0.0)

    @override
    def evaluation(self) -> Eval:
        phase = Phase(epochs=self.epochs, train=self.train, factor=self.factor, weight_decay=self.weight_decay)
        return Eval(phases=(phase,) if self.epochs else ())
