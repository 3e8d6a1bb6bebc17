"""Analyses of features: their angles, divergences, maps and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.data import Site
from fednorms.papers.analysis.divergence import divergences
from fednorms.papers.analysis.embedding import balanced_rows, embedding
from fednorms.papers.analysis.feature_maps import drawn_maps, map_cosines
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.four_factors import four_factors
from fednorms.papers.analysis.registry import Drawing, analysis
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.analysis.subject import Model, Outputs, Subject


@analysis("four-factors", "FedFN Figures 1 and 5", Drawing("matrices", y="cosine"))
def _four_factors(stored: StoredRun) -> Findings:
    """Similarity of classifier rows, between and within classes, and of classes with their rows, on all test images."""
    subject = stored.chosen
    seen = subject.outputs(subject.server)
    found = four_factors(seen.features, seen.labels, subject.rows_of_classifier(subject.server))
    arrays = {"weights": found.weights, "between": found.between, "within": found.within, "alignment": found.alignment}
    return Findings(found.scalars, arrays=arrays, words={"ticks": subject.classes})


@analysis("divergence", "GReg Figure 6", Drawing("matrices", y="symmetric KL divergence"))
def _divergence(stored: StoredRun) -> Findings:
    """Symmetric KL divergence between clients' features of their test images under the server's model, per channel.

    Channels that are (nearly) constant at one of the clients are left out and counted.
    """
    subject = stored.chosen
    found = divergences([subject.outputs(subject.server, [site]).features for site in subject.sites], stored.dead)
    if found.dead == found.channels:
        raise BadInput(
            f"No feature varies at every client by {stored.dead:g} of its mean variance. Choose a smaller dead."
        )
    pairs = found.matrix[np.triu_indices(len(found.matrix), 1)]
    names = [site.name for site in subject.sites]
    scalars = {"mean over pairs": float(pairs.mean()), "channels left out": found.dead, "channels": found.channels}
    return Findings(scalars, arrays={"divergence": found.matrix}, words={"clients": names, "ticks": names})


@analysis("feature-maps", "FedWon Figures 5 and 13", Drawing("maps"))
def _feature_maps(stored: StoredRun) -> Findings:
    """Cosine of the last convolution's maps between clients after training, and with the server; and some maps.

    The drawn maps are those of one image: of the server and two clients at the first site, and of the server at one
    site of every other domain.
    """
    subject = stored.before_end
    by_domain: dict[str, Site] = {}
    for site in subject.sites:
        by_domain.setdefault(site.domain, site)
    first, *others = by_domain.values()
    layers = list(subject.first_maps(subject.server, first))
    if not layers:
        raise BadInput(f'Model "{subject.run.task.net.name}" has no convolution.')
    trained = subject.next_round.models
    if len(trained) < 2:
        raise BadInput(f"Round {subject.round + 1} has only one client, so its model is the server's.")
    clients = {f"client {name}": trained[name] for name in stored.first_clients(trained, len(trained))}
    models: dict[str, Model] = {"server": subject.server_after, **clients}
    cosines: dict[tuple[str, str], list[Tensor]] = {}
    for at in subject.sites:  # one site at a time, to limit memory
        maps = {name: subject.outputs(model, [at], layers[-1:]).maps[layers[-1]] for name, model in models.items()}
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
        arrays[f"image, {name} at {site.name}"] = _image(subject, site)
        for layer, maps_of_one in subject.first_maps(models[name], site).items():
            arrays[f"{layer}, {name} at {site.name}"] = _gray(drawn_maps(maps_of_one, (_PIXELS, _PIXELS))[0])
    drawn = [f"{name} at {site.name}" for name, site in lines]
    words: dict[str, str | list[str]] = {"layer": layers[-1], "lines": drawn, "layers": layers}
    return Findings(scalars, arrays=arrays, words=words | {"round": str(subject.round + 1)})


_PIXELS = 32  # size of drawn maps
_DOMAINS = 5  # more domains of which maps are drawn


def _image(subject: Subject, site: Site) -> np.ndarray:
    """A site's first test image."""
    assert site.test is not None
    image = subject.run.task.preprocessing.unit(site.test.batch([0])[0], dtype=torch.float32)
    small = torch.nn.functional.interpolate(image, size=(_PIXELS, _PIXELS), mode="bilinear", antialias=True)
    return _gray(small[0].permute(1, 2, 0))


def _gray(x: Tensor) -> np.ndarray:
    return (255 * x.clamp(0, 1)).round().int().cpu().numpy()


@analysis("embedding", "FedNN Figure 7", Drawing("points"))
def _embedding(stored: StoredRun) -> Findings:
    """t-SNE of the server's features of 2,000 test images, equally many of every site."""
    subject = stored.chosen
    return _points(subject, {"server": subject.outputs(subject.server)})


@analysis("drift-embedding", "FedNN Figure 6", Drawing("points"))
def _drift_embedding(stored: StoredRun) -> Findings:
    """t-SNE of the features of a client right after training in round 10 and of the server after it, together.

    If only one client trained in round 10, its model is the server's; then the next round with several clients is used.
    "Shift of features" is the mean over images of |client's - server's| / |server's|.
    """
    first = 10 if stored.round is None else stored.round
    for t in range(first, stored.last.run.recipe.rounds + 1):
        before = stored.at(t - 1)
        if len(before.run.next_cohort) > 1:
            break
    else:
        raise BadInput(f"Run {stored.path} has no round from {first} on in which several clients trained.")
    models = before.next_round.models
    [client] = stored.first_clients(models, 1)
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
    names = [site.name for site in subject.sites]
    return Findings(arrays=arrays, words={"models": list(outputs), "sites": names, "classes": subject.classes})
