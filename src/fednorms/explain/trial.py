"""A trial run: a method on a model and two tiny clients, by which `describe` and `what_leaves` measure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from fednorms.core.errors import refuse_class
from fednorms.core.method import Method
from fednorms.core.round import initial_state
from fednorms.core.states import Client, ServerState, Task
from fednorms.core.training import Training
from fednorms.data import Federation, Site, Split
from fednorms.data.facts import Facts
from fednorms.engines.base import EngineSettings
from fednorms.engines.loop import Loop
from fednorms.models import build, models
from fednorms.runs.assemble import assemble
from fednorms.runs.recipe import Recipe
from fednorms.runs.store.clients import ClientStore

NAMES = ["a", "b"]
BATCH = 4
IMAGES = 2 * BATCH  # of each client
AVERAGED = ("weighted", "uniform", "sum")  # reductions for which the server needs only sums over sites


@dataclass(frozen=True)
class Trial:
    """A task on two clients with random images; `module` is the model before the method's surgery."""

    module: nn.Module
    task: Task
    engine: Loop
    state: ServerState  # after the setup passes

    @classmethod
    def of(
        cls,
        method: Method,
        model: str | nn.Module,
        classes: int = 10,
        shape: tuple[int, int, int] | None = None,
        head: str | list[str] | None = None,
    ) -> Trial:
        """Assemble the task and run the setup passes; by default images have the size that the model is made for."""
        refuse_class("model", model)
        if shape is None:
            known = models().get(model) if isinstance(model, str) else None
            side = known.size if known and known.size else (32 if known else 224)
            shape = (3, side, side)
        name = model if isinstance(model, str) else type(model).__name__
        module = build(name, classes=classes, channels=shape[0], size=shape[1], seed=0) if name is model else model
        assert isinstance(module, nn.Module)
        generator = torch.Generator().manual_seed(0)
        sites = [_site(n, torch.rand(IMAGES, *shape, generator=generator), classes) for n in NAMES]
        federation = Federation("tiny", sites, [str(c) for c in range(classes)])
        recipe = Recipe(
            method=str(method),
            model=name,
            rounds=4,
            training=Training(batch_size=BATCH, lr=1e-3),
            head=[head] if isinstance(head, str) else head or [],
            device="cpu",
        )
        task = assemble(recipe, Facts.of(federation), module)
        if method.using_proxy:
            task = replace(task, proxy=sites[0].train)
        engine = Loop(task, federation, federation, ClientStore(2**40), EngineSettings(torch.get_num_threads()))
        return cls(module, task, engine, engine.setup(initial_state(task)))

    def client(self) -> Client:
        """The first client with its current state."""
        return self.engine.local.client(NAMES[0])


def _site(name: str, x: torch.Tensor, classes: int) -> Site:
    return Site(name, name, train=Split(x, torch.arange(len(x)) % classes), attributes={"modality": name})
