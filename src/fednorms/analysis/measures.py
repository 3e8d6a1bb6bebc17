"""The analyses of the papers' figures, by name: what each measures in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fednorms.analysis.channels import variance_across
from fednorms.analysis.divergence import divergences
from fednorms.analysis.embedding import balanced_rows, embedding
from fednorms.analysis.feature_maps import drawn_maps, map_cosines
from fednorms.analysis.findings import Findings, Series
from fednorms.analysis.four_factors import four_factors
from fednorms.analysis.kept import Kept
from fednorms.analysis.norms import seen_and_unseen
from fednorms.analysis.subject import Subject
from fednorms.errors import BadInput
from fednorms.evaluation.statistics import statistics_layers, statistics_names
from fednorms.tree import Tree

Picture = Literal["matrices", "curves", "channels", "points", "maps"]


@dataclass(frozen=True)
class Analysis:
    """Something that is measured in a run: of which figures it is, what it says, how it is drawn."""

    name: str
    figures: str
    says: str
    picture: Picture
    measure: Callable[[Kept], Findings]


ANALYSES: dict[str, Analysis] = {}
_Measure = Callable[[Kept], Findings]


def _analysis(name: str, figures: str, picture: Picture) -> Callable[[_Measure], _Measure]:
    def register(measure: _Measure) -> _Measure:
        says = (measure.__doc__ or "").partition("\n")[0]
        ANALYSES[name] = Analysis(name, figures, says, picture, measure)
        return measure

    return register


@_analysis("four-factors", "FedFN Figures 1 and 5", "matrices")
def _four_factors(kept: Kept) -> Findings:
    """Similarity of classifier rows, of classes, within classes, and of classes with their rows, on all test images."""
    last = kept.last
    seen = last.outputs(last.server)
    found = four_factors(seen.features, seen.labels, last.server[last.head].cpu())
    arrays = {"weights": found.weights, "between": found.between, "within": found.within, "alignment": found.alignment}
    return Findings(found.scalars, arrays=arrays)


@_analysis("norms", "FedFN Figures 2 and 3, appendix Figures 1 and 2", "curves")
def _norms(kept: Kept) -> Findings:
    """Norms of classifier rows (W) and raw features (F): of clients after training, classes they saw or not; global."""
    series: dict[str, Series] = {}
    for subject in kept.rounds():
        after, t = subject.next_round, subject.round + 1
        clients = [_client_norms(subject, name, model) for name, model in after.models.items()]
        now = {k: float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for k, v in _columns(clients).items()}
        server = subject.server_after
        now["W global"] = float(server[subject.head].double().norm(dim=1).mean())
        now["F global"] = float(subject.outputs(server).features.double().norm(dim=1).mean())
        for what in "WF":
            now[f"{what} seen - global"] = now[f"{what} seen"] - now[f"{what} global"]
        for name, value in now.items():
            series.setdefault(name, []).append((t, value))
    return Findings({f"{name}, last": s[-1][1] for name, s in series.items()}, series)


def _client_norms(subject: Subject, name: str, model: Tree) -> dict[str, float]:
    rows, outputs, seen = model[subject.head], subject.outputs(model), subject.seen_by(name)
    w = seen_and_unseen(rows.norm(dim=1), torch.arange(len(rows)), seen)
    f = seen_and_unseen(outputs.features.norm(dim=1), outputs.labels, seen)
    return dict(zip(("W seen", "W unseen", "F seen", "F unseen"), (*w, *f), strict=True))


def _columns(rows: Iterable[dict[str, float]]) -> dict[str, np.ndarray]:
    table = list(rows)
    return {name: np.array([row[name] for row in table]) for name in table[0]}


@_analysis("bn-variance", "GReg Figure 1", "curves")
def _bn_variance(kept: Kept) -> Findings:
    """Variance across clients of the statistics of the first and the last normalisation layer after local training."""
    series: dict[str, Series] = {}
    for subject in kept.rounds():
        layers, models = _layers(subject), list(subject.next_round.models.values())
        for layer in dict.fromkeys((layers[0], layers[-1])):
            for what, name in zip(("mean", "variance"), _leaves(subject, layer), strict=True):
                value = variance_across([model[name] for model in models])
                series.setdefault(f"{what}, {layer}", []).append((subject.round + 1, value))
    return Findings({f"{name}, last": s[-1][1] for name, s in series.items()}, series)


@_analysis("bn-statistics", "FedWon Figures 1b and 12", "channels")
def _bn_statistics(kept: Kept) -> Findings:
    """Statistics per channel of every normalisation layer: two clients after one more local round, and the server."""
    last = kept.last
    after = last.next_round
    two = sorted(after.models)[:2]
    models = {**{name: after.models[name] for name in two}, "server": last.server_after}
    arrays = {
        f"{what}, {layer}": np.stack([model[name].double().cpu().numpy() for model in models.values()])
        for layer in _layers(last)
        for what, name in zip(("mean", "variance"), _leaves(last, layer), strict=True)
    }
    return Findings(arrays=arrays, words={"models": ", ".join(models)})


def _layers(subject: Subject) -> list[str]:
    layers = list(statistics_layers(subject.run.task.net))
    if not layers:
        raise BadInput(f'Model "{subject.run.task.net.name}" has no layer with stored statistics to analyse.')
    return layers


def _leaves(subject: Subject, layer: str) -> list[str]:
    return [n for n in statistics_names(subject.run.task.net) if n.rpartition(".")[0] == layer]


@_analysis("test-gap", "GReg Figure 2", "curves")
def _test_gap(kept: Kept) -> Findings:
    """Loss on test images with the server's statistics minus that with the test batch's, mean over clients."""
    series: dict[str, Series] = {}
    for row in kept.metrics:
        scores = {name.removesuffix("/test"): s for name, s in row["scores"].items() if name.endswith("/test")}
        stored = {name.partition("/")[0]: s for name, s in scores.items() if name.endswith(("/global", "/own"))}
        for name, other in scores.items():
            model, _, statistics = name.partition("/")
            if statistics.startswith("batch") and model in stored:
                sites = stored[model]["sites"]
                gaps = [sites[site]["loss"] - other["sites"][site]["loss"] for site in other["sites"]]
                series.setdefault(statistics, []).append((int(row["round"]), fmean(gaps)))
    if not series:
        raise BadInput(
            f"Run {kept.path} was not tested with both kinds of statistics: run it with "
            'evaluate = ["global", "global/batch"].'
        )
    return Findings({f"{name}, last": s[-1][1] for name, s in series.items()}, series)


@_analysis("training-gap", "GReg Figure 3", "curves")
def _training_gap(kept: Kept) -> Findings:
    """Loss on training batches with the statistics received minus that with the batch's own, mean over a round."""

    def gap(subject: Subject, y: Tensor, by_batch: Tensor, by_server: Tensor) -> tuple[float, float]:
        loss = subject.run.task.loss
        return float(loss(by_server, y) - loss(by_batch, y)), float(len(y))

    series: Series = []
    for subject in kept.rounds():
        clients: dict[str, list[tuple[float, float]]] = {}
        for name, y, by_batch, by_server in subject.training():
            clients.setdefault(name, []).append(gap(subject, y, by_batch, by_server))
        means = [fmean([g for g, _ in of], weights=[n for _, n in of]) for of in clients.values()]
        series.append((subject.round + 1, fmean(means)))
    return Findings({"gap, last": series[-1][1]}, {"gap": series})


@_analysis("smallest-probability", "GReg Figure 7", "curves")
def _smallest_probability(kept: Kept) -> Findings:
    """Smallest probability of the true class in a round of training, with the batch's and the server's statistics."""
    series: dict[str, Series] = {"batch statistics": [], "global statistics": []}
    for subject in kept.rounds():
        least = [1.0, 1.0]
        for _, y, *both in subject.training():
            for which, logits in enumerate(both):
                p = logits.double().softmax(1).gather(1, y[:, None])
                least[which] = min(least[which], float(p.min()))
        for name, value in zip(series, least, strict=True):
            series[name].append((subject.round + 1, value))
    return Findings({f"{name}, least": min(v for _, v in s) for name, s in series.items()}, series)


@_analysis("divergence", "GReg Figure 6", "matrices")
def _divergence(kept: Kept) -> Findings:
    """Symmetric KL divergence between clients' features of their test images under the server's model, per channel."""
    last = kept.last
    matrix = divergences([last.outputs(last.server, [site]).features for site in last.sites])
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    names = ", ".join(site.name for site in last.sites)
    return Findings({"mean over pairs": float(pairs.mean())}, arrays={"divergence": matrix}, words={"clients": names})


@_analysis("feature-maps", "FedWon Figures 5 and 13", "maps")
def _feature_maps(kept: Kept) -> Findings:
    """Cosine of the last convolution's maps between clients after training, and with the server; and some maps."""
    last = kept.last
    layers = [name for name, m in last.run.task.net.module.named_modules() if isinstance(m, nn.Conv2d)]
    if not layers:
        raise BadInput(f'Model "{last.run.task.net.name}" has no convolution.')
    deepest = layers[-1]
    after = last.next_round
    models = {"server": last.server_after, **after.models}
    cosines: dict[tuple[str, str], list[Tensor]] = {}
    for site in last.sites:  # one site's maps at a time: those of all may not fit
        maps = {name: last.outputs(model, [site], [deepest]).maps[deepest] for name, model in models.items()}
        for a, b in combinations(models, 2):
            cosines.setdefault((a, b), []).append(map_cosines(maps[a], maps[b]))
    pairs = {pair: float(torch.cat(found).mean()) for pair, found in cosines.items()}
    with_server = [v for (a, _), v in pairs.items() if a == "server"]
    between = [v for (a, _), v in pairs.items() if a != "server"]
    scalars = {"server and clients": fmean(with_server)} | ({"clients": fmean(between)} if between else {})
    return Findings(scalars, arrays=_some_maps(last, models, layers), words={"layer": deepest})


def _some_maps(last: Subject, models: dict[str, Tree], layers: list[str], size: int = 32) -> dict[str, np.ndarray]:
    """The first test image of the first site, and its maps in every layer: server and two clients; 0 to 255."""
    some = {name: models[name] for name in list(models)[:3]}
    site = last.sites[0]
    assert site.test is not None
    image = last.run.task.preprocessing.unit(site.test.batch([0])[0], dtype=torch.float32)
    small = torch.nn.functional.interpolate(image, size=(size, size), mode="bilinear", antialias=True)
    arrays = {"image": _grey(small[0].permute(1, 2, 0))}
    for name, model in some.items():
        maps = last.outputs(model, [site], layers).maps
        for layer in layers:
            arrays[f"{name}, {layer}"] = _grey(drawn_maps(maps[layer][:1], (size, size))[0])
    return arrays


def _grey(x: Tensor) -> np.ndarray:
    return (255 * x.clamp(0, 1)).round().int().cpu().numpy()


@_analysis("embedding", "FedNN Figure 7", "points")
def _embedding(kept: Kept) -> Findings:
    """t-SNE of the server's features of 2,000 test images, as many of every domain."""
    return _points(kept.last, {"server": kept.last.server})


@_analysis("drift-embedding", "FedNN Figure 6", "points")
def _drift_embedding(kept: Kept) -> Findings:
    """t-SNE of the features of a client right after training in round 10 and of the server after it, together."""
    before = kept.at(9)
    after = before.next_round
    who = min(after.models)
    found = _points(before, {"server": before.server_after, who: after.models[who]})
    return Findings(found.scalars, found.series, found.arrays, found.words | {"client": who})


def _points(subject: Subject, models: dict[str, Tree], images: int = 2000) -> Findings:
    outputs = {name: subject.outputs(model) for name, model in models.items()}
    one = next(iter(outputs.values()))
    rows = balanced_rows(one.sites, images)
    points = embedding([o.features[rows] for o in outputs.values()])
    arrays = {f"points of {name}": p.round(2) for name, p in zip(outputs, points, strict=True)}
    arrays |= {"site": one.sites[rows].numpy(), "class": one.labels[rows].numpy()}
    names = ", ".join(site.name for site in subject.sites)
    return Findings(arrays=arrays, words={"models": ", ".join(models), "sites": names})
