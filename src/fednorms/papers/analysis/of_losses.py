"""Analyses of losses and probabilities with batch statistics and with stored statistics."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from fednorms.core.errors import BadInput
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import Scores
from fednorms.evaluation.statistics import statistics_layers
from fednorms.papers.analysis.findings import Findings, Series, last_of
from fednorms.papers.analysis.loss_bound import loss_bound
from fednorms.papers.analysis.registry import Drawing, analysis
from fednorms.papers.analysis.stored_run import StoredRun
from fednorms.papers.analysis.subject import Subject

_ONE_GAP = {"gap": ("global/batch", "personal/batch", "no layer with statistics")}  # as each method is judged


@analysis("test-gap", "GReg Figure 2", Drawing("curves", y="difference of losses", zero=True, panels=_ONE_GAP))
def _test_gap(stored: StoredRun) -> Findings:
    """Loss on test images with stored statistics minus loss with the test batch's, mean over clients; by round.

    A run that was tested with both kinds of statistics has it in its metrics; otherwise its kept rounds are tested.
    """
    series = _gaps(stored.scores)
    if not series and not statistics_layers(stored.last.run.task.net):
        series = {"no layer with statistics": [(t, 0.0) for t, tested in stored.scores.items() if tested]}
    if not series:
        series = _gaps({subject.round: _tested(subject) for subject in stored.trained()})
    return Findings(last_of(series), series)


def _gaps(rounds: Mapping[int, Mapping[str, Scores]]) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for t, tested in rounds.items():
        for other in (s for s in tested.values() if s.split == "test" and s.statistics.startswith("batch")):
            usual = tested.get(f"{other.mode}/own/test", tested.get(f"{other.mode}/global/test"))
            if usual is not None:
                gaps = [usual.sites[name].loss - site.loss for name, site in other.sites.items()]
                series.setdefault(other.label, []).append((t, fmean(gaps)))
    return series


def _tested(subject: Subject) -> dict[str, Scores]:
    """The scores of a kept round with stored and with batch statistics."""
    task, run = subject.run.task, subject.run
    model = "personal" if task.personal else "global"
    found: dict[str, Scores] = {}
    for text in (model, f"{model}/batch"):
        mode = Mode.read(text).resolved(task)
        scores = run.session.engine.evaluate(run.state, mode, run.cohort, "test")
        if scores is None:
            raise BadInput(f'Federation "{run.session.federation.name}" has no client with test images.')
        found[f"{mode}/test"] = scores
    return found


@analysis("training-gap", "GReg Figure 3", Drawing("curves", y="difference of losses", zero=True))
def _training_gap(stored: StoredRun) -> Findings:
    """Loss on training batches with the received statistics minus loss with the batch's own, mean over a round."""
    series: Series = []
    for subject in stored.rounds():
        loss = subject.run.task.loss
        clients: dict[str, list[tuple[float, int]]] = {}
        for name, y, by_batch, by_server in subject.training(stored.client):
            gap = float(loss(by_server, y) - loss(by_batch, y))
            clients.setdefault(name, []).append((gap, len(y)))
        means = [fmean([g for g, _ in of], weights=[n for _, n in of]) for of in clients.values()]
        series.append((subject.round + 1, fmean(means)))
    return Findings(last_of({"gap": series}), {"gap": series})


_BOUND = Drawing("curves", y="mean over images", log=True, panels={"loss gap": ("gap", "bound"), "": ("regularizer",)})


@analysis("loss-bound", "GReg Proposition 1", _BOUND)
def _loss_bound(stored: StoredRun) -> Findings:
    """GReg's regularizer, the absolute loss gap and its bound 2/tau sqrt(l_reg), mean over a round's images."""
    series: dict[str, Series] = {"regularizer": [], "gap": [], "bound": []}
    largest = 0.0
    for subject in stored.rounds():
        sums, images = dict.fromkeys(series, 0.0), 0
        for _, y, by_batch, by_server in subject.training(stored.client):
            found = loss_bound(by_batch, by_server, y)
            for name, values in zip(series, found, strict=True):
                sums[name] += float(values.sum())
            largest = max(largest, float((found.gap / found.bound.clamp_min(1e-300)).max()))
            images += len(y)
        for name, total in sums.items():
            series[name].append((subject.round + 1, total / images))
    return Findings(last_of(series) | {"largest share of the bound": largest}, series)


_SMALLEST = Drawing(
    "curves",
    y="probability of the true class",
    log=True,
    panels={"smallest in a round": ("batch statistics", "global statistics")},
)


@analysis("smallest-probability", "GReg Figure 7", _SMALLEST)
def _smallest_probability(stored: StoredRun) -> Findings:
    """Smallest probability of the true class in a round of training, with the batch's and the server's statistics."""
    series: dict[str, Series] = {"batch statistics": [], "global statistics": []}
    for subject in stored.rounds():
        least = [1.0, 1.0]
        for _, y, *both in subject.training(stored.client):
            for which, logits in enumerate(both):
                p = logits.double().softmax(1).gather(1, y[:, None])
                least[which] = min(least[which], float(p.min()))
        for name, value in zip(series, least, strict=True):
            series[name].append((subject.round + 1, value))
    return Findings({f"{name}, least": min(v for _, v in s) for name, s in series.items()}, series)
