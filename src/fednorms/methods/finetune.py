"""FineTune: adapt a copy of the final model to each client before testing it."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from fednorms.core.part import Eval, Part, Phase, option, part


@part("finetune")
class FineTune(Part):
    """Test each client after `epochs` epochs on its own training data: FedAvg-FT, FedFN-FT, any method + finetune.

    The rate is `factor` times the recipe's learning rate (FedFN's grid: 1, 0.1, 0.01; its choice 0.1), without weight
    decay unless `weight_decay` says so, whatever federated training has. Acts on the evaluation mode "adapted" only;
    federated training is untouched, bit for bit. epochs=0 tests the model as it is.
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
