"""What a search runs on: the recipe as it was asked for, and the same without test images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorms.advice.arms import Question, Wanted
from fednorms.advice.validation import for_validation
from fednorms.core.errors import BadInput, Diverged
from fednorms.core.sampling import Participation
from fednorms.data import Federation
from fednorms.runs.driver import execute
from fednorms.runs.identity import Custom, recipe_keys
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Data, Recipe
from fednorms.runs.session import open_federation


@dataclass(frozen=True)
class Setting:
    """A recipe with its data. `recipe` and `data` are as asked for; `trials` and `held` have no test images."""

    recipe: Recipe
    trials: Recipe
    data: Federation
    held: Federation
    custom: Custom
    notes: list[str]

    @classmethod
    def of(
        cls,
        federation: str | Path | Federation | None,
        model: str | nn.Module | None,
        loss: str | Loss | None,
        recipe: Recipe | None,
        changes: Mapping[str, Any],
        training: Mapping[str, Any],
    ) -> Setting:
        """Open the data, and set validation images apart; of `changes` and `training`, None keeps the recipe's."""
        base = recipe or Recipe()
        given = {k: v for k, v in changes.items() if v is not None}
        local = {k: v for k, v in training.items() if v is not None}
        made = Recipe.make(
            base.model_dump()
            | given
            | {"training": vars(base.training) | local, "fingerprint": ""}
            | recipe_keys(federation, model, loss, base.data.model_dump())
        )
        custom = Custom.of(federation, model, loss)
        data = custom.federation if custom.federation is not None else open_federation(made)
        held, notes = for_validation(data, made.seed)
        named = {"federation": f"custom:{data.name}", "data": Data(augment=made.data.augment), "patience": None}
        return cls(made, made.model_copy(update=named), data, held, replace(custom, federation=held), notes)

    def question(self, wanted: Wanted = "any") -> Question:
        """What is asked for, as `propose` needs it."""
        recipe, sites = self.recipe, len(self.data.clients)
        return Question(
            model=self.custom.model if self.custom.model is not None else recipe.model,
            classes=self.data.num_classes,
            shape=self.data.shape,
            sites=sites,
            rounds=recipe.rounds,
            batch_size=recipe.training.batch_size,
            expected=Participation.read(recipe.participation).expected(sites),
            unseen=len(self.data.unseen),
            wanted=wanted,
            pretrained=recipe.pretrained,
            optimizer=recipe.training.optimizer,
            head=recipe.head,
        )

    def seconds_per_round(self) -> float:
        """Time a round of FedAvg with its validation: the mean of two, after one that warms up."""
        given = {"rounds": 3, "evaluate": [], "evaluate_every": 1, "validate_every": None}
        for method in ("fedavg", "gn"):  # batch normalization may not fit, or diverge
            timed = self.trials.model_copy(update={**given, "method": method})
            try:
                done = execute(timed, federation=self.held, model=self.custom.model, loss=self.custom.loss)
            except (BadInput, Diverged):
                continue
            return sum(row["seconds"] for row in done.history[1:]) / 2
        raise BadInput(
            "Neither FedAvg nor FedAvg with group normalization can train here, so no time could be measured. Give the "
            "budget in rounds, or try another learning rate."
        )
