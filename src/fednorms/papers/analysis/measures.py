"""The analyses of the papers' figures, by name: what each measures in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.options import nearest
from fednorms.core.tree import Tree
from fednorms.data import Site
from fednorms.evaluation.statistics import statistics_layers, statistics_names
from fednorms.papers.analysis.channels import variance_across
from fednorms.papers.analysis.divergence import divergences
from fednorms.papers.analysis.embedding import balanced_rows, embedding
from fednorms.papers.analysis.feature_maps import drawn_maps, map_cosines
from fednorms.papers.analysis.findings import Findings, Series
from fednorms.papers.analysis.four_factors import four_factors
from fednorms.papers.analysis.norms import seen_and_unseen
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.analysis.subject import Model, Outputs, Subject

Picture = Literal["matrices", "curves", "channels", "points", "maps"]


@dataclass(frozen=True)
class Analysis:
    """Something that can be measured in a run: the figures it belongs to, what it says, how it is drawn."""

    name: str
    figures: str
    says: str
    picture: Picture
    measure: Callable[[StoredRun], Findings]


ANALYSES: dict[str, Analysis] = {}
_Measure = Callable[[StoredRun], Findings]


def _analysis(name: str, figures: str, picture: Picture) -> Callable[[_Measure], _Measure]:
    def register(measure: _Measure) -> _Measure:
        says = (measure.__doc__ or "").partition("\n")[0]
        ANALYSES[name] = Analysis(name, figures, says, picture, measure)
        return measure

    return register


def analysis_named(name: str) -> Analysis:
    """An analysis by its name.

    >>> analysis_named("norm")
    Traceback (most recent call last):
    fednorms.BadInput: No analysis "norm": did you mean "norms"? ...
    """
    if name not in ANALYSES:
        raise BadInput(f'No analysis "{name}": {nearest(name, ANALYSES)}')
    return ANALYSES[name]


@_analysis("four-factors", "FedFN Figures 1 and 5", "matrices")
def _four_factors(stored: StoredRun) -> Findings:
    """Similarity of classifier rows, between and within classes, and of classes with their rows, on all test images."""
    last = stored.last
    seen = last.outputs(last.server)
    found = four_factors(seen.features, seen.labels, last.rows_of_classifier(last.server))
    arrays = {"weights": found.weights, "between": found.between, "within": found.within, "alignment": found.alignment}
    return Findings(found.scalars, arrays=arrays)


@_analysis("norms", "FedFN Figures 2 to 4, appendix Figures 1 and 2", "curves")
def _norms(stored: StoredRun) -> Findings:
    """Norms of classifier rows (W) and raw features (F): clients after training, seen and unseen classes; global."""
    series: dict[str, Series] = {}
    for subject in stored.rounds():
        clients = [_client_norms(subject, name, model) for name, model in subject.next_round.models.items()]
        now = {k: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for k, v in _columns(clients).items()}
        now["W global"] = float(subject.rows_of_classifier(subject.server_after).norm(dim=1).mean())
        now["F global"] = float(subject.outputs(subject.server_after).features.double().norm(dim=1).mean())
        for what in "WF":
            now[f"{what} seen - global"] = now[f"{what} seen"] - now[f"{what} global"]
        for name, value in now.items():
            series.setdefault(name, []).append((subject.round + 1, value))
    return Findings(_last(series), series)


def _client_norms(subject: Subject, name: str, model: Tree) -> dict[str, float]:
    rows, outputs, seen = subject.rows_of_classifier(model), subject.outputs(model), subject.seen_by(name)
    w = seen_and_unseen(rows.norm(dim=1), torch.arange(len(rows)), seen)
    f = seen_and_unseen(outputs.features.norm(dim=1), outputs.labels, seen)
    return dict(zip(("W seen", "W unseen", "F seen", "F unseen"), (*w, *f), strict=True))


def _columns(rows: Iterable[dict[str, float]]) -> dict[str, np.ndarray]:
    table = list(rows)
    return {name: np.array([row[name] for row in table]) for name in table[0]}


def _last(series: dict[str, Series]) -> dict[str, float]:
    return {f"{name}, last": s[-1][1] for name, s in series.items()}


@_analysis("bn-variance", "GReg Figure 1", "curves")
def _bn_variance(stored: StoredRun) -> Findings:
    """Variance across clients of the statistics of the first and the last normalization layer after local training."""
    series: dict[str, Series] = {}
    for subject in stored.rounds():
        layers = _layers(subject)
        if len(subject.run.next_cohort) < 2:
            continue  # no variance over one client
        models = list(subject.next_round.models.values())
        for layer in dict.fromkeys((layers[0], layers[-1])):
            for what, name in zip(("mean", "variance"), _leaves(subject, layer), strict=True):
                value = variance_across([model[name] for model in models])
                series.setdefault(f"{what}, {layer}", []).append((subject.round + 1, value))
    if not series:
        raise BadInput(f"Run {stored.path} has no stored round after which two clients trained.")
    return Findings(_last(series), series)


@_analysis("bn-statistics", "FedWon Figures 1b and 12", "channels")
def _bn_statistics(stored: StoredRun) -> Findings:
    """Statistics per channel of every normalization layer: two clients after one more local round, and the server."""
    last = stored.last
    layers, clients = _layers(last), last.next_round.models
    models = {f"client {name}": clients[name] for name in sorted(clients)[:2]}
    models["server"] = last.tensors(last.server_after)
    arrays = {
        f"{what}, {layer}": np.stack([model[name].double().cpu().numpy() for model in models.values()])
        for layer in layers
        for what, name in zip(("mean", "variance"), _leaves(last, layer), strict=True)
    }
    return Findings(arrays=arrays, words={"models": list(models)})


def _layers(subject: Subject) -> list[str]:
    layers = list(statistics_layers(subject.run.task.net))
    if not layers:
        raise BadInput(f'Model "{subject.run.task.net.name}" has no layer with stored statistics.')
    return layers


def _leaves(subject: Subject, layer: str) -> list[str]:
    return [n for n in statistics_names(subject.run.task.net) if n.rpartition(".")[0] == layer]


@_analysis("test-gap", "GReg Figure 2", "curves")
def _test_gap(stored: StoredRun) -> Findings:
    """Loss on test images with stored statistics minus loss with the test batch's, mean over clients; by round."""
    series: dict[str, Series] = {}
    for t, tested in stored.scores.items():
        for other in (s for s in tested.values() if s.split == "test" and s.statistics.startswith("batch")):
            usual = tested.get(f"{other.mode}/own/test", tested.get(f"{other.mode}/global/test"))
            if usual is not None:
                gaps = [usual.sites[name].loss - site.loss for name, site in other.sites.items()]
                series.setdefault(other.label, []).append((t, fmean(gaps)))
    if not series and not statistics_layers(stored.last.run.task.net):
        series = {"no layer with statistics": [(t, 0.0) for t, tested in stored.scores.items() if tested]}
    if not series:
        raise BadInput(
            f"Run {stored.path} was not tested with both kinds of statistics. Run it with "
            'evaluate = ["global", "global/batch"], or "personal" if clients keep their own layers.'
        )
    return Findings(_last(series), series)


@_analysis("training-gap", "GReg Figure 3", "curves")
def _training_gap(stored: StoredRun) -> Findings:
    """Loss on training batches with the received statistics minus loss with the batch's own, mean over a round."""
    series: Series = []
    for subject in stored.rounds():
        loss = subject.run.task.loss
        clients: dict[str, list[tuple[float, int]]] = {}
        for name, y, by_batch, by_server in subject.training():
            gap = float(loss(by_server, y) - loss(by_batch, y))
            clients.setdefault(name, []).append((gap, len(y)))
        means = [fmean([g for g, _ in of], weights=[n for _, n in of]) for of in clients.values()]
        series.append((subject.round + 1, fmean(means)))
    return Findings(_last({"gap": series}), {"gap": series})


@_analysis("smallest-probability", "GReg Figure 7", "curves")
def _smallest_probability(stored: StoredRun) -> Findings:
    """Smallest probability of the true class in a round of training, with the batch's and the server's statistics."""
    series: dict[str, Series] = {"batch statistics": [], "global statistics": []}
    for subject in stored.rounds():
        least = [1.0, 1.0]
        for _, y, *both in subject.training():
            for which, logits in enumerate(both):
                p = logits.double().softmax(1).gather(1, y[:, None])
                least[which] = min(least[which], float(p.min()))
        for name, value in zip(series, least, strict=True):
            series[name].append((subject.round + 1, value))
    return Findings({f"{name}, least": min(v for _, v in s) for name, s in series.items()}, series)


@_analysis("divergence", "GReg Figure 6", "matrices")
def _divergence(stored: StoredRun) -> Findings:
    """Symmetric KL divergence between clients' features of their test images under the server's model, per channel."""
    last = stored.last
    matrix = divergences([last.outputs(last.server, [site]).features for site in last.sites])
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    names = [site.name for site in last.sites]
    return Findings({"mean over pairs": float(pairs.mean())}, arrays={"divergence": matrix}, words={"clients": names})


@_analysis("feature-maps", "FedWon Figures 5 and 13", "maps")
def _feature_maps(stored: StoredRun) -> Findings:
    """Cosine of the last convolution's maps between clients after training, and with the server; and some maps.

    The drawn maps are those of one image: of the server and two clients at the first site, and of the server at one
    site of every other domain.
    """
    last = stored.last
    by_domain: dict[str, Site] = {}
    for site in last.sites:
        by_domain.setdefault(site.domain, site)
    first, *others = by_domain.values()
    layers = list(last.first_maps(last.server, first))
    if not layers:
        raise BadInput(f'Model "{last.run.task.net.name}" has no convolution.')
    clients = {f"client {name}": model for name, model in last.next_round.models.items()}
    if len(clients) < 2:
        raise BadInput(f"Round {last.round + 1} has only one client, so its model is the server's.")
    models: dict[str, Model] = {"server": last.server_after, **clients}
    cosines: dict[tuple[str, str], list[Tensor]] = {}
    for at in last.sites:  # one site at a time, to limit memory
        maps = {name: last.outputs(model, [at], layers[-1:]).maps[layers[-1]] for name, model in models.items()}
        for a, b in combinations(models, 2):
            cosines.setdefault((a, b), []).append(map_cosines(maps[a], maps[b]))
    pairs = {pair: float(torch.cat(found).mean()) for pair, found in cosines.items()}
    scalars = {
        "server and clients": fmean(v for (a, _), v in pairs.items() if a == "server"),
        "clients": fmean(v for (a, _), v in pairs.items() if a != "server"),
    }
    lines = [(name, first) for name in list(models)[:3]] + [("server", site) for site in others[:_DOMAINS]]
    arrays = {}
    for name, site in lines:
        arrays[f"image, {name} at {site.name}"] = _image(last, site)
        for layer, maps_of_one in last.first_maps(models[name], site).items():
            arrays[f"{layer}, {name} at {site.name}"] = _grey(drawn_maps(maps_of_one, (_PIXELS, _PIXELS))[0])
    drawn = [f"{name} at {site.name}" for name, site in lines]
    return Findings(scalars, arrays=arrays, words={"layer": layers[-1], "lines": drawn, "layers": layers})


_PIXELS = 32  # size of drawn maps
_DOMAINS = 5  # more domains of which maps are drawn


def _image(subject: Subject, site: Site) -> np.ndarray:
    """A site's first test image."""
    assert site.test is not None
    image = subject.run.task.preprocessing.unit(site.test.batch([0])[0], dtype=torch.float32)
    small = torch.nn.functional.interpolate(image, size=(_PIXELS, _PIXELS), mode="bilinear", antialias=True)
    return _grey(small[0].permute(1, 2, 0))


def _grey(x: Tensor) -> np.ndarray:
    return (255 * x.clamp(0, 1)).round().int().cpu().numpy()


@_analysis("embedding", "FedNN Figure 7", "points")
def _embedding(stored: StoredRun) -> Findings:
    """t-SNE of the server's features of 2,000 test images, equally many of every site."""
    return _points(stored.last, {"server": stored.last.outputs(stored.last.server)})


@_analysis("drift-embedding", "FedNN Figure 6", "points")
def _drift_embedding(stored: StoredRun) -> Findings:
    """t-SNE of the features of a client right after training in round 10 and of the server after it, together.

    If only one client trained in round 10, its model is the server's; then the next round with several clients is used.
    "Shift of features" is the mean over images of |client's - server's| / |server's|.
    """
    for t in range(10, stored.last.run.recipe.rounds + 1):
        before = stored.at(t - 1)
        if len(before.run.next_cohort) > 1:
            break
    else:
        raise BadInput(f"Run {stored.path} has no round from 10 on in which several clients trained.")
    models = before.next_round.models
    client = min(models)
    server, moved = before.outputs(before.server_after), before.outputs(models[client])
    shift = (moved.features - server.features).norm(dim=1) / server.features.norm(dim=1).clamp_min(1e-12)
    found = _points(before, {"server": server, f"client {client} in round {t}": moved})
    return replace(found, scalars={"shift of features": float(shift.mean())})


def _points(subject: Subject, outputs: Mapping[str, Outputs], images: int = 2000) -> Findings:
    one = next(iter(outputs.values()))
    rows = balanced_rows(one.sites, images)
    points = embedding([o.features[rows] for o in outputs.values()])
    arrays = {f"points of {name}": p.round(1) for name, p in zip(outputs, points, strict=True)}
    arrays |= {"site": one.sites[rows].numpy(), "class": one.labels[rows].numpy()}
    return Findings(arrays=arrays, words={"models": list(outputs), "sites": [site.name for site in subject.sites]})
