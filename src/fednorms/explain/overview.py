"""An overview of all methods: the idea from the docstring, costs and limits as `describe` measures them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fednorms.core.citations import papers
from fednorms.core.errors import BadInput
from fednorms.core.part import REGISTRY, SUMS
from fednorms.explain.describe import Description, describe
from fednorms.methods.registry import names

MODEL = "cnn-small"


@dataclass(frozen=True)
class CatalogEntry:
    """What a method's docstring says about it."""

    name: str
    idea: str
    paper: str
    options: str
    link: str  # to the paper; "" for baselines


_FEDAVG = """Train on every client, average the models weighted by data size.

Paper: Communication-Efficient Learning of Deep Networks from Decentralized Data. McMahan et al. AISTATS 2017.
https://arxiv.org/abs/1602.05629
"""


def entries() -> list[CatalogEntry]:
    """Every name that `method` understands, with the first sentence of its docstring.

    >>> next(e for e in entries() if e.name == "fedbn").paper
    'Li et al. 2021'
    """
    return [_entry(name) for name in names()]


def _entry(name: str) -> CatalogEntry:
    made: Any = SUMS.get(name) or REGISTRY.get(name)  # None: fedavg, which has no parts
    doc = _FEDAVG if made is None else inspect.getdoc(made) or ""
    found = papers(doc)
    short = getattr(made, "paper", "") or (found[0].short if found else "")
    link = found[0].link if found else ""
    return CatalogEntry(name, _first_sentence(doc), short, _defaults(made) if made else "", link)


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[^ .][.])\s+(?=[A-Z])", paragraph)[0]


def _defaults(made: Any) -> str:  # noqa: ANN401
    options = [p for p in inspect.signature(made).parameters.values() if p.name != "self"]
    return ", ".join(f"{p.name}={p.default or repr(p.default)}" for p in options)


# A column's title, what it means, and its value from a method's description and FedAvg's.
Value = Callable[[Description, Description], str]
COLUMNS: dict[str, tuple[str, Value]] = {
    "acts on": ("what it changes", lambda d, avg: ", ".join(d.acts_on) or "nothing"),
    "client": (
        "what a client keeps between rounds, in models",
        lambda d, avg: _ratio(d.client_state, avg.bytes_up),
    ),
    "server": (
        "what the server keeps besides the model, in models",
        lambda d, avg: _ratio(d.server_state, avg.bytes_up),
    ),
    "down": ("bytes a client receives in a round, FedAvg = 1", lambda d, avg: _ratio(d.bytes_down, avg.bytes_down)),
    "up": ("bytes a client sends in a round, FedAvg = 1", lambda d, avg: _ratio(d.bytes_up, avg.bytes_up)),
    "passes": (
        "forward passes per local step, and other passes over the client's data",
        lambda d, avg: f"{d.forward_passes:g}" + (f" + {d.extra_passes:g}/round" if d.extra_passes else ""),
    ),
    "stateless": (
        "suits clients that take part once: they keep nothing",
        lambda d, avg: "yes" if d.stateless_clients else "no",
    ),
    "batch of 1": (
        "yes: each image is trained on independently; mixed: the images of a batch influence each other, and one "
        "image is too few where batch normalization has one value per channel",
        lambda d, avg: "mixed" if d.mixes_batch else "yes",
    ),
    "pretrained": (
        "whether published weights are used as they are: all, all but running statistics, or not all",
        lambda d, avg: _pretrained(d),
    ),
    "secure": (
        "secure aggregation: the server needs only sums of what clients send",
        lambda d, avg: "yes" if d.averaged_only else "no",
    ),
    "unseen": (
        "sites that never trained: yes, with the server's model; stats: after measuring their own statistics; no: "
        "clients keep tensors that predictions need",
        lambda d, avg: {"own statistics": "stats"}.get(d.unseen, d.unseen),
    ),
}


def facts(method: str, avg: Description) -> dict[str, str]:
    """The columns of one method; empty if it does not fit the model (`avg` is FedAvg's description).

    >>> facts("scaffold", describe("fedavg", MODEL))["up"]
    '1.99'
    """
    try:
        found = describe(method, MODEL)
    except BadInput:  # a custom part that acts on other models
        return dict.fromkeys(COLUMNS, "")
    return {title: value(found, avg) for title, (_, value) in COLUMNS.items()}


def overview() -> list[tuple[CatalogEntry, dict[str, str]]]:
    """All methods with their columns; takes a few seconds."""
    avg = describe("fedavg", MODEL)
    return [(entry, facts(entry.name, avg)) for entry in entries()]


def _ratio(some: int, whole: int) -> str:
    """A ratio in three digits; 0 and 1 mean exactly that.

    >>> _ratio(0, 5), _ratio(5, 5), _ratio(501, 500), _ratio(1, 99999)
    ('0', '1', '1.00+', '<0.01')
    """
    if some in (0, whole):
        return str(int(some > 0))
    share = some / whole
    if f"{share:.2f}" == "1.00":
        return "1.00+" if share > 1 else "1.00-"
    return f"{share:.2f}" if share >= 0.005 else "<0.01"


def _pretrained(d: Description) -> str:
    if not d.lost_weights:
        return "all" if not d.lost_statistics else "but stats"
    return f"but {len(d.lost_weights)} of {d.weights}"
