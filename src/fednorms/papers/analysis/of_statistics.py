"""Analyses of norms and of normalization statistics, of clients right after training and of the server."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from fednorms.core.errors import BadInput
from fednorms.core.tree import Tree
from fednorms.evaluation.statistics import statistics_layers, statistics_names
from fednorms.papers.analysis.channels import variance_across
from fednorms.papers.analysis.findings import Findings, Series, last_of
from fednorms.papers.analysis.norms import seen_and_unseen
from fednorms.papers.analysis.registry import Drawing, analysis
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.analysis.subject import Subject

_NORMS = Drawing(
    "curves",
    y="mean norm",
    panels={
        "rows of the classifier (W)": ("W seen", "W unseen", "W global"),
        "features (F)": ("F seen", "F unseen", "F global"),
        "W, clients minus global": ("W seen - global",),
        "F, clients minus global": ("F seen - global",),
    },
)


@analysis("norms", "FedFN Figures 2 to 4, appendix Figures 1 and 2", _NORMS)
def _norms(stored: StoredRun) -> Findings:
    """Norms of classifier rows (W) and raw features (F): clients after training, seen and unseen classes; global."""
    series: dict[str, Series] = {}
    for subject in stored.rounds():
        models = stored.of_client(subject.next_round.models)
        clients = [_client_norms(subject, name, model) for name, model in models.items()]
        now = {k: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for k, v in _columns(clients).items()}
        now["W global"] = float(subject.rows_of_classifier(subject.server_after).norm(dim=1).mean())
        now["F global"] = float(subject.outputs(subject.server_after).features.double().norm(dim=1).mean())
        for what in "WF":
            now[f"{what} seen - global"] = now[f"{what} seen"] - now[f"{what} global"]
        for name, value in now.items():
            series.setdefault(name, []).append((subject.round + 1, value))
    return Findings(last_of(series), series)


def _client_norms(subject: Subject, name: str, model: Tree) -> dict[str, float]:
    rows, outputs, seen = subject.rows_of_classifier(model), subject.outputs(model), subject.seen_by(name)
    w = seen_and_unseen(rows.norm(dim=1), torch.arange(len(rows)), seen)
    f = seen_and_unseen(outputs.features.norm(dim=1), outputs.labels, seen)
    return dict(zip(("W seen", "W unseen", "F seen", "F unseen"), (*w, *f), strict=True))


def _columns(rows: Iterable[dict[str, float]]) -> dict[str, np.ndarray]:
    table = list(rows)
    return {name: np.array([row[name] for row in table]) for name in table[0]}


@analysis("bn-variance", "GReg Figure 1", Drawing("curves", y="variance across clients"))
def _bn_variance(stored: StoredRun) -> Findings:
    """Variance across clients of the statistics of the first and the last normalization layer after local training."""
    series: dict[str, Series] = {}
    for subject in stored.rounds():
        layers = _layers(subject)
        if len(subject.run.next_cohort) < 2:
            continue  # no variance over one client
        models = list(subject.next_round.models.values())
        for place, layer in {"first layer": layers[0], "last layer": layers[-1]}.items():
            for what, name in zip(("mean", "variance"), _leaves(subject, layer), strict=True):
                value = variance_across([model[name] for model in models])
                series.setdefault(f"{what}, {place} ({layer})", []).append((subject.round + 1, value))
    if not series:
        raise BadInput(f"Run {stored.path} has no stored round after which two clients trained.")
    return Findings(last_of(series), series)


@analysis("bn-statistics", "FedWon Figures 1b and 12", Drawing("channels"))
def _bn_statistics(stored: StoredRun) -> Findings:
    """Statistics per channel of every normalization layer: two clients after the next local round, and the server."""
    subject = stored.before_end
    layers, clients = _layers(subject), subject.next_round.models
    models = {f"client {name}": clients[name] for name in stored.first_clients(clients, 2)}
    models["server"] = subject.tensors(subject.server_after)
    arrays = {
        f"{what}, {layer}": np.stack([model[name].double().cpu().numpy() for model in models.values()])
        for layer in layers
        for what, name in zip(("mean", "variance"), _leaves(subject, layer), strict=True)
    }
    return Findings(arrays=arrays, words={"models": list(models), "round": str(subject.round + 1)})


def _layers(subject: Subject) -> list[str]:
    layers = list(statistics_layers(subject.run.task.net))
    if not layers:
        raise BadInput(f'Model "{subject.run.task.net.name}" has no layer with stored statistics.')
    return layers


def _leaves(subject: Subject, layer: str) -> list[str]:
    return [n for n in statistics_names(subject.run.task.net) if n.rpartition(".")[0] == layer]
