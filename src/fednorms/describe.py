"""describe: what a method does to a model, measured on a tiny federation rather than written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fednorms.core import broadcast, initial_state, local_update, server_update
from fednorms.data import Federation, Preprocessing, Site, Split
from fednorms.engines.loop import Loop
from fednorms.engines.store import ClientStore
from fednorms.method import Method
from fednorms.method import method as read_method
from fednorms.models import build, models
from fednorms.net import Net
from fednorms.part import Part, Route
from fednorms.states import Client, Task
from fednorms.training import Training
from fednorms.tree import Tree

AVERAGED = ("weighted", "uniform", "sum")


@dataclass(frozen=True)
class PartFacts:
    """What one part adds, per client and round: bytes beside the model, state, and extra exchanges."""

    name: str
    layers_changed: int
    bytes_down: int
    bytes_up: int
    client_state: int
    server_state: int
    setup_trips: int
    test_trips: int
    averaged_only: bool


@dataclass(frozen=True)
class Description:
    """What a method does to a model. Bytes are per client and round.

    >>> d = describe("scaffold + fedbn", "cnn-small")
    >>> d.routes["norm1.running_mean"].name, d.forward_passes, d.stateless_clients
    ('LOCAL', 1.0, False)
    """

    method: str
    model: str
    weighting: str
    routes: dict[str, Route]
    sizes: dict[str, int]
    parts: list[PartFacts]
    changes: dict[str, list[str]]
    model_up: int
    model_down: int
    model_kept: int
    forward_passes: float
    batch_of_one: bool

    @property
    def bytes_up(self) -> int:
        """Bytes a client sends in a round."""
        return self.model_up + sum(p.bytes_up for p in self.parts)

    @property
    def bytes_down(self) -> int:
        """Bytes a client receives in a round."""
        return self.model_down + sum(p.bytes_down for p in self.parts)

    @property
    def client_state(self) -> int:
        """Bytes a client keeps between rounds."""
        return self.model_kept + sum(p.client_state for p in self.parts)

    @property
    def stateless_clients(self) -> bool:
        """Whether clients keep nothing, so that a method suits clients that come once."""
        return self.client_state == 0

    @property
    def averaged_only(self) -> bool:
        """Whether the server only ever needs sums of uploads, as secure aggregation gives."""
        return all(p.averaged_only for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "method": self.method,
            "model": self.model,
            "weighting": self.weighting,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "client_state": self.client_state,
            "forward_passes_per_step": self.forward_passes,
            "batch_of_one": self.batch_of_one,
            "stateless_clients": self.stateless_clients,
            "averaged_only": self.averaged_only,
            "parts": [vars(p) for p in self.parts],
            "routes": {n: r.name for n, r in self.routes.items()},
            "changes": self.changes,
        }

    def __repr__(self) -> str:
        lines = [f'Method "{self.method}" on model "{self.model}" (models weighted by {self.weighting})', ""]
        count = Counter(self.routes.values())
        for route in sorted(count):
            names = [n for n, r in self.routes.items() if r is route]
            size = sum(self.sizes[n] for n in names)
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            lines.append(f"  {route.name:<7}{count[route]:>4} tensors {_human(size):>10}   {some}")
        lines += ["", "  part           layers changed   down        up          kept by client  kept by server"]
        lines.append(
            f"  {'model':<32}{_human(self.model_down):<12}{_human(self.model_up):<12}{_human(self.model_kept)}"
        )
        lines += [
            f"  {p.name:<15}{p.layers_changed or '':<17}{_human(p.bytes_down):<12}{_human(p.bytes_up):<12}"
            f"{_human(p.client_state):<16}{_human(p.server_state)}"
            for p in self.parts
        ]
        trips = [f"{p.name}: {p.setup_trips} before the first round" for p in self.parts if p.setup_trips]
        trips += [f"{p.name}: {p.test_trips} per evaluation" for p in self.parts if p.test_trips]
        lines += [
            "",
            f"  forward passes per local step   {self.forward_passes:g}",
            f"  extra round trips               {'; '.join(trips) or 'none'}",
            f"  clients keep state              {_human(self.client_state) if self.client_state else 'no'}",
            f"  trains with batches of one      {'yes' if self.batch_of_one else 'no'}",
            f"  uploads are only averaged       {'yes' if self.averaged_only else 'no'}"
            f" (secure aggregation {'possible' if self.averaged_only else 'impossible'})",
        ]
        return "\n".join(lines)


def describe(
    method: str | Method | Part,
    model: str | nn.Module = "cnn-small",
    *,
    classes: int = 10,
    shape: tuple[int, int, int] | None = None,
    head: str | list[str] | None = None,
) -> Description:
    """Describe a method on a model: routes, bytes, state, passes; computed by training two tiny clients for two rounds.

    >>> describe("greg", "cnn-small").forward_passes
    2.0
    """
    chosen = read_method(method)
    if shape is None:
        known = models().get(model) if isinstance(model, str) else None
        side = known.size if known and known.size else (32 if known else 224)
        shape = (3, side, side)
    module = (
        build(model, classes=classes, channels=shape[0], size=shape[1], seed=0) if isinstance(model, str) else model
    )
    net = Net(module, chosen, head=head, name=model if isinstance(model, str) else type(model).__name__)
    needs_two = net.probe(shape, classes)
    generator = torch.Generator().manual_seed(0)
    size = 4
    sites = [
        Site(n, n, train=Split(torch.rand(2 * size, *shape, generator=generator), torch.arange(2 * size) % classes))
        for n in ("a", "b")
    ]
    federation = Federation("tiny", sites, [str(c) for c in range(classes)], Preprocessing())
    task = Task(
        net, Training(batch_size=size, lr=1e-3), rounds=4, seed=0, clients=2, samples=4 * size, needs_two=needs_two
    )
    engine = Loop(task, federation, federation, ClientStore(2**40, None), threads=torch.get_num_threads())
    state = engine.setup(initial_state(task))
    state = server_update(task, state, engine.train(broadcast(task, state), ["a", "b"]).uploads)
    sent = broadcast(task, state)
    with _counting(net) as count:
        upload, kept = local_update(
            task, sent, Client("a", sites[0].train or sites[0].splits["train"], engine.store.get("a"))
        )
    steps = max(float(upload.metrics["steps"]), 1.0)
    after = server_update(task, state, [upload, replace(upload, client="b")])
    sizes = {n: Tree({n: t}).nbytes() for n, t in net.initial.items()}
    down = [n for n, r in net.routes.items() if r is Route.SHARED]
    return Description(
        method=str(chosen),
        model=net.name,
        weighting=chosen.weighting(),
        routes=net.routes,
        sizes=sizes,
        parts=[
            PartFacts(
                name=p.name,
                layers_changed=len(net.changes.get(p.name, [])),
                bytes_down=sent.parts[p.name].nbytes(),
                bytes_up=upload.parts.get(p.name, Tree()).nbytes(),
                client_state=kept.parts[p.name].nbytes(),
                server_state=after.parts[p.name].nbytes(),
                setup_trips=sum(job.when == "setup" for job in p.passes()),
                test_trips=sum(job.when == "evaluate" for job in p.passes()),
                averaged_only=all(job.reduce in AVERAGED for job in p.passes()) and p.reduction in AVERAGED,
            )
            for p in chosen.parts
        ],
        changes={k: [str(c) for c in v] for k, v in net.changes.items()},
        model_up=upload.model.nbytes(),
        model_down=sum(sizes[n] for n in down),
        model_kept=kept.local.nbytes(),
        forward_passes=count[0] / steps,
        batch_of_one=not needs_two,
    )


class _counting:
    """Counts forward passes of a net while it is open."""

    def __init__(self, net: Net) -> None:
        self.net, self.count = net, [0]

    def __enter__(self) -> list[int]:
        self.hook = self.net.module.register_forward_pre_hook(self._see)
        return self.count

    def _see(self, *_: object) -> None:
        self.count[0] += 1

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def _human(n: int) -> str:
    size = float(n)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
