"""A site's policy: a file at the site that says what a run may ask of it. A run that asks for more is refused.

The path is `policy` in the node's config, or the environment variable FEDNORMS_POLICY. Without a file, everything is
allowed except class counts.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.method import Method
from fednorms.core.options import nearest
from fednorms.core.part import REGISTRY, Part
from fednorms.explain.leaves import what_leaves
from fednorms.flower.schema import problem
from fednorms.flower.settings import Deployment, Scalar
from fednorms.methods.registry import method as read_method
from fednorms.models.custom import module_of
from fednorms.runs.recipe import Recipe


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Bound(_Strict):
    """What values of an option are allowed."""

    at_least: float | None = None
    at_most: float | None = None
    one_of: list[str | bool | int | float] | None = None

    def objection(self, value: object) -> str:
        """What is expected instead of a value; empty if the value is allowed."""
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        if self.at_least is not None and (number is None or not number >= self.at_least):
            return f"at least {self.at_least:g}"
        if self.at_most is not None and (number is None or not number <= self.at_most):
            return f"at most {self.at_most:g}"
        if self.one_of is not None and value not in self.one_of:
            return f"one of {', '.join(map(repr, self.one_of))}"
        return ""


class Policy(_Strict):
    """What a run may ask of this site.

    >>> policy = Policy(require=["dplocal"], options={"dplocal": {"noise": {"at_least": 1.0}}})
    >>> policy.objections(Recipe(method="dplocal(noise=0.1)"), Deployment())
    ['dplocal(noise=0.1): this site allows only noise at least 1']
    """

    parts: list[str] | None = None
    """Parts or methods that may be used; without it, all."""
    require: list[str] = []
    """Parts that the method must have, such as "dplocal"."""
    options: dict[str, dict[str, Bound]] = {}
    """Bounds of options, by part: [options.dplocal] noise = {at_least = 1.0}."""
    minimum_sites: Annotated[int, Field(ge=1)] = 1
    """Sites that must answer for a round to count (the run's deploy.minimum)."""
    class_counts: bool = False
    """Whether images per class may leave: for balanced class weights, as recall per class, and for methods that send
    them."""
    statistics: bool = True
    """Whether statistics of the images may leave, such as running statistics of BatchNorm or prototypes."""
    scores: bool = True
    """Whether test scores may leave: accuracy, balanced accuracy, loss and number of test images."""
    messages_per_round: Annotated[int, Field(ge=1)] | None = None
    """Messages that the site answers per round of a run."""
    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Budget of all noised answers of the site together, in all runs. Needs a method with dplocal."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta at which epsilon is computed."""

    @classmethod
    def of(cls, node: Mapping[str, Scalar]) -> Policy:
        """The policy that a node's config names, or the default."""
        path = str(node.get("policy", "")) or os.environ.get("FEDNORMS_POLICY", "")
        return cls.read(Path(path).expanduser()) if path else cls()

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy; a mistake in it is an error: no run starts with weaker limits than intended."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"Cannot read the policy {path}: {reason}.") from None
        except tomllib.TOMLDecodeError as error:
            raise BadInput(f"The policy {path} is not valid TOML: {error}.") from None
        return cls.make(values, f"The policy {path}")

    @classmethod
    def make(cls, values: Mapping[str, Any], where: str) -> Policy:
        """A policy from plain values; names of parts and options are checked, too."""
        if unknown := [key for key in values if key not in cls.model_fields]:
            raise BadInput(f'{where}: unknown key "{unknown[0]}": {nearest(unknown[0], cls.model_fields)}.')
        try:
            policy = cls.model_validate(dict(values))
        except ValidationError as error:
            raise BadInput(f"{where}: {problem(error)}.") from None
        try:
            for name in (*(policy.parts or ()), *policy.require):
                read_method(name)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
        for name, bounds in policy.options.items():
            if name not in REGISTRY:
                raise BadInput(f'{where}: unknown part "{name}" in options: {nearest(name, REGISTRY)}.')
            known = [f.name for f in fields(REGISTRY[name])]  # type: ignore[arg-type]
            if wrong := [option for option in bounds if option not in known]:
                raise BadInput(f'{where}: {name} has no option "{wrong[0]}": {nearest(wrong[0], known)}.')
        return policy

    def check(
        self, recipe: Recipe, deployment: Deployment, clients: int | None = None, model: nn.Module | None = None
    ) -> None:
        """Refuse a run that asks for more than the policy allows."""
        if found := self.objections(recipe, deployment, clients, model):
            raise BadInput(f"This site's policy refuses the run: {'; '.join(found)}.")

    def objections(
        self, recipe: Recipe, deployment: Deployment, clients: int | None = None, model: nn.Module | None = None
    ) -> list[str]:
        """All that a run asks for and the policy does not allow; `clients` is how many sites the server says it has."""
        method = read_method(recipe.method)
        found = [*self._of_parts(method), *self._of_privacy(method)]
        there = deployment.minimum if clients is None else min(deployment.minimum, clients)
        if there < self.minimum_sites:
            found.append(
                f"a round counts with {there} site{'s' * (there != 1)}, this site allows only {self.minimum_sites} or "
                "more (deploy.minimum)"
            )
        code = module_of(recipe.model)
        if code:
            found.append(
                f'model "{recipe.model}" names code to import, and a site imports nothing that a run names: hand the '
                "model to client_app(model=...)"
            )
        if not self.class_counts:
            if recipe.class_weights == "balanced":
                found.append('class_weights = "balanced" asks for images per class; class_counts is false here')
            found += [
                f"{p.name} sends images per class; class_counts is false here"
                for p in method.parts
                if p.tells_class_counts
            ]
        if not self.statistics and not code:
            senders = _statistics(str(method), recipe.model) if model is None else _measured(method, model)
            found += [f"{who} sends statistics of the images; statistics is false here" for who in senders]
        return found

    def _of_parts(self, method: Method) -> list[str]:
        found = []
        if self.parts is not None:
            allowed = {p.name for name in self.parts for p in read_method(name).parts}
            found += [f"{p.name} is not one of its parts" for p in method.parts if p.name not in allowed]
        there = {p.name for p in method.parts}
        needed = dict.fromkeys(p.name for name in self.require for p in read_method(name).parts)
        found += [f"{name} is required" for name in needed if name not in there]
        for p in method.parts:
            for option, bound in self.options.get(p.name, {}).items():
                if expected := bound.objection(getattr(p, option)):
                    found.append(f"{p}: this site allows only {option} {expected}")
        return found

    def _of_privacy(self, method: Method) -> list[str]:
        """Where a policy relies on a site's own noise, the noise must be there and unpredictable."""
        relies = self.epsilon is not None or any(
            _protects_at_site(p) for n in self.require for p in read_method(n).parts
        )
        if not relies:
            return []
        part = next((p for p in method.parts if _protects_at_site(p)), None)
        if part is None:
            return ["epsilon is limited, which needs dplocal"] if self.epsilon is not None else []
        if getattr(part, "draws", "") == "seeded":
            return [f"{part}: noise of the seed can be computed by everybody"]
        return []


def _protects_at_site(p: Part) -> bool:
    privacy = p.privacy()
    return privacy is not None and privacy.mechanism is not None and privacy.mechanism.where == "client"


@lru_cache(maxsize=8)
def _statistics(method: str, model: str) -> tuple[str, ...]:
    return _measured(read_method(method), model)


def _measured(method: Method, model: str | nn.Module) -> tuple[str, ...]:
    """Who sends statistics of the images: parts, or the model; measured in a trial run."""
    return tuple(dict.fromkeys(x.sender for x in what_leaves(method, model).leaving if x.statistics))
