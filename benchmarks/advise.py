"""How well does `fednorms advise` advise? Run every arm in full on generated federations, and count the points lost.

Every federation (kind of shift x strength x size x model) is trained with every arm at every learning rate. From these
records the tournament is played again, bit for bit, since a run that is continued is the run with more rounds. The
regret of an answer is the test accuracy of the best arm minus that of the answer, in points.

    python benchmarks/advise.py run --state FOLDER       # trains what is missing; can be interrupted at any time
    python benchmarks/advise.py results --state FOLDER   # writes docs/results/advise.json; then `make docs-pages`
    python benchmarks/advise.py priors                   # writes what `advise` knows before it trains

`--suite held-out` are other federations, `--suite real --data FOLDER` those of real images, on a GPU if there is one.
Several processes can share the work: `--part 1/4` to `--part 4/4`, each with every fourth federation.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from advise_federations import Case, generated, held_out, real
from torch import nn

import fednorms as fn
from fednorms.advice.arms import Question, propose
from fednorms.advice.measures import measure
from fednorms.advice.priors import expected_loss
from fednorms.advice.summaries import probe
from fednorms.advice.tournament import Played, Rungs, Trial, ladder, tournament
from fednorms.runs.identity import Custom

SEEDS, FINALISTS = 2, 3
RESULTS = Path(__file__).parent.parent / "docs" / "results"
SUITES = {"generated": "advise.json", "held-out": "advise-held-out.json", "real": "advise-real.json"}  # in RESULTS


def cases(suite: str, data: Path | None = None) -> list[Case]:
    """The federations of a suite."""
    if suite == "real":
        if data is None or not (found := real(data)):
            raise SystemExit("--suite real needs --data FOLDER with packs or folders: see `real` for their names.")
        return found
    return held_out() if suite == "held-out" else generated()


class Record:
    """What is known about one case: its measures and its runs, in one file that is replaced after every run."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.path = folder / f"{case.key.replace(', ', '_').replace(' ', '-')}.json"
        self.values: dict[str, Any] = {"data": case.data, "name": case.name, "model": case.model, "runs": []}
        if self.path.exists():
            self.values = json.loads(self.path.read_text())
        self.rounds = case.rounds

    def run(self, arm: str, lr: float, seed: int) -> dict[str, Any] | None:
        """A run that is known."""
        return next((r for r in self.values["runs"] if (r["arm"], r["lr"], r["seed"]) == (arm, lr, seed)), None)

    def save(self) -> None:
        """Replace the file."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.values))
        os.replace(new, self.path)


def recipe(case: Case) -> fn.Recipe:
    """What all runs of a federation share."""
    engine = "loop" if case.device == "cpu" else "auto"
    shared = {"rounds": case.rounds, "device": case.device, "engine": engine, "threads": 1, "evaluate": []}
    return fn.Recipe(**shared, training={"batch_size": case.batch, "lr": 0.05})


def train(folder: Path, planned: Sequence[Case], seeds: int) -> None:
    """Run everything that is missing: all rates with one seed first, then more seeds of each arm's best rate."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for case in planned:
            record = Record(folder, case)
            federation: fn.Federation | None = None
            if "measures" not in record.values:
                federation = case.make()
                begun = time.perf_counter()
                network = case.network()
                made = Custom.of(federation, network, None)
                named = recipe(case).model_copy(update={"model": model_name(network)})
                found = {m.name: m.value for m in measure(probe(named, without_test(federation), made))}
                record.values |= {"measures": found, "probe_seconds": time.perf_counter() - begun}
                sites, classes = len(federation.clients), federation.num_classes
                question = Question(network, classes, federation.shape, sites, case.rounds, case.batch)
                one = replace(question, wanted="one-model")
                record.values["arms"] = {a.name: list(a.rates) for a in propose(question, found).arms}
                record.values["one_model"] = [a.name for a in propose(one, found).arms]
                record.save()
            for arm, rates in record.values["arms"].items():
                for lr in rates if seed == 0 else wanted_rates(record, arm):
                    if record.run(arm, lr, seed):
                        continue
                    federation = federation or case.make()
                    record.values["runs"].append(one_run(federation, case, arm, lr, seed))
                    record.save()
            print(f"{time.strftime('%H:%M:%S')} seed {seed}: {case.key}", flush=True)


def model_name(network: str | nn.Module) -> str:
    """How a recipe names a network."""
    from fednorms.runs.identity import own_model

    return network if isinstance(network, str) else own_model(network)


def without_test(federation: fn.Federation) -> fn.Federation:
    """The federation without test images: nothing that advises may see them."""
    return replace(federation, sites=[replace(s, test=None) for s in federation.clients])


def best_rate(record: Record, arm: str) -> float | None:
    """The rate of an arm with the best validation after the last round of seed 0; None if all diverged."""
    runs = [r for r in record.values["runs"] if r["arm"] == arm and r["seed"] == 0 and r["val"]]
    return max(runs, key=lambda r: r["val"][-1])["lr"] if runs else None


def wanted_rates(record: Record, arm: str) -> list[float]:
    """The rates of an arm that need more seeds: its best one, and those that reach the last rung of a tournament."""
    rates = {best_rate(record, arm)}
    for arms in questions(record).values():
        rates |= {t.values["lr"] for t, _ in replayed(record, arms, (0,))[-1].ranking[:FINALISTS] if t.arm == arm}
    return sorted(rate for rate in rates if rate is not None)


def questions(record: Record) -> dict[str, list[str]]:
    """The arms that compete if any model will do, and if one model for all sites is asked for."""
    arms = list(record.values["arms"])
    return {"any": arms, "one model": [arm for arm in arms if arm in record.values["one_model"]]}


def replayed(record: Record, arms: Sequence[str], seeds: Sequence[int]) -> list[Rungs]:
    """Play the tournament of `advise` from the recorded curves."""

    def play(jobs: Sequence[tuple[Trial, int]], rounds: int) -> list[Played]:
        played = []
        for trial, seed in jobs:
            run = record.run(trial.arm, trial.values["lr"], seed)
            if run is None:
                raise LookupError(f"{record.path.stem}: {trial.name}, seed {seed} has not run yet")
            played.append(Played(trial, seed, rounds, run["val"][rounds - 1] if run["val"] else None))
        return played

    trials = [Trial(arm, arm, {"lr": rate}) for arm in arms for rate in record.values["arms"][arm]]
    rates = max(len(record.values["arms"][arm]) for arm in arms)
    return tournament(trials, ladder(record.rounds, len(arms), rates, seeds, FINALISTS), play)


def one_run(federation: fn.Federation, case: Case, arm: str, lr: float, seed: int) -> dict[str, Any]:
    """Train an arm in full: validation after every round, test after the last one; nothing if it diverged."""
    begun = time.perf_counter()
    known = {"arm": arm, "lr": lr, "seed": seed}
    try:
        result = fn.run(arm, federation, case.network(), recipe=recipe(case), lr=lr, seed=seed, progress=False)
    except fn.Diverged as error:
        return known | {"val": [], "test": None, "error": str(error), "seconds": time.perf_counter() - begun}
    session, state = result._session, result._state
    assert session is not None
    assert state is not None
    tested = session.engine.evaluate(state, session.headline, session.cohort(case.rounds - 1), "test")
    assert tested is not None
    val = [a for _, a in result.curve(split="val")]
    return known | {"val": val, "test": tested.mean, "seconds": time.perf_counter() - begun}


def tested(record: Record, arm: str, lr: float | None) -> float:
    """Mean test accuracy of an arm at a rate over its seeds, in percent; 0 if it diverged."""
    found = [r["test"] for r in record.values["runs"] if (r["arm"], r["lr"]) == (arm, lr)]
    return 100 * fmean(t or 0.0 for t in found) if found else 0.0


def lost(record: Record, arms: Sequence[str]) -> dict[str, float]:
    """Points that each arm, at its best rate, loses to the best arm on test images."""
    scores = {arm: tested(record, arm, best_rate(record, arm)) for arm in arms}
    return {arm: max(scores.values()) - score for arm, score in scores.items()}


def complete(folder: Path, planned: Sequence[Case]) -> list[Record]:
    """The federations on which every arm has run at every rate."""
    found = [Record(folder, case) for case in planned]
    return [
        r
        for r in found
        if "arms" in r.values and all(r.run(arm, lr, 0) for arm, rates in r.values["arms"].items() for lr in rates)
    ]


def prior_records(federations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `advise` knows of federations with results."""
    names = ("data", "name", "model", "measures")
    return [{key: f[key] for key in names} | {"lost": f["any"]["always"]} for f in federations]


def stored(suite: str) -> list[dict[str, Any]]:
    """The stored results of a suite's federations."""
    found: list[dict[str, Any]] = json.loads((RESULTS / SUITES[suite]).read_text())["federations"]
    return found


def judged(record: Record, known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The regret of every answer to both questions; the priors do not know this data set."""
    values = record.values
    expected = expected_loss(values["measures"], [k for k in known if k["data"] != values["data"]])
    out: dict[str, Any] = {key: values[key] for key in ("data", "name", "model", "measures")}
    for question, unordered in questions(record).items():
        arms = sorted(unordered, key=lambda arm: expected.get(arm, 0.0))  # as `propose` orders them
        points = lost(record, arms)
        best = max(tested(record, arm, best_rate(record, arm)) for arm in arms)
        try:
            rungs, seeds = replayed(record, arms, range(SEEDS)), SEEDS
        except LookupError:
            rungs, seeds = replayed(record, arms, (0,)), 1
        answer = rungs[-1].ranking[0][0]
        out[question] = {
            "best": best,
            "winner": min(points, key=lambda arm: points[arm]),
            "answer": answer.name,
            "seeds": seeds,
            "rounds": trained_rounds(rungs),
            "all_rounds": record.rounds * seeds * sum(len(values["arms"][arm]) for arm in arms),
            "advice": best - tested(record, answer.arm, answer.values["lr"]),
            "measures": points[arms[0]],
            "always": points,
        }
    return out


def trained_rounds(rungs: Sequence[Rungs]) -> int:
    """Rounds that a tournament trains."""
    reached: dict[tuple[str, int], int] = {}
    for rung in rungs:
        for p in rung.played:
            reached[p.trial.name, p.seed] = p.rounds
    return sum(reached.values())


def correlations(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Spearman's rank correlation of each measure with the points by which each arm is better than FedAvg."""
    from scipy.stats import spearmanr

    out: dict[str, dict[str, float]] = {}
    for name in records[0].values["measures"]:
        for arm in records[0].values["arms"]:
            both = [
                (r.values["measures"][name], points["fedavg"] - points[arm])
                for r in records
                for points in [lost(r, list(r.values["arms"]))]
                if arm in points and r.values["measures"][name] is not None
            ]
            if arm != "fedavg" and len({a for a, _ in both}) > 2:
                out.setdefault(name, {})[arm] = round(float(spearmanr(*zip(*both, strict=True)).statistic), 2)
    return out


def write_results(folder: Path, suite: str, planned: Sequence[Case], out: Path | None) -> None:
    """Write the results of a suite, from which docs/make_advise_page.py makes the page.

    Priors are the generated federations of other data sets, for all suites.
    """
    records = complete(folder, planned)
    known = prior_records(stored("generated"))
    if suite == "generated":
        names = ("data", "measures")
        known = [{k: r.values[k] for k in names} | {"lost": lost(r, list(r.values["arms"]))} for r in records]
    results = {
        "planned": len(planned),
        "rounds": planned[0].rounds,
        "batch_size": planned[0].batch,
        "federations": [judged(r, known) for r in records],
        "correlations": correlations(records),
        "hours": sum(run["seconds"] for r in records for run in r.values["runs"]) / 3600,
    }
    path = out or RESULTS / SUITES[suite]
    path.write_text(json.dumps(rounded(results), indent=1) + "\n")
    print(f"{path}: {len(records)} of {len(planned)} federations")


def rounded(value: Any) -> Any:
    """Numbers with four digits after the point."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def write_priors() -> None:
    """Write what `advise` knows before it trains: the results of all suites."""
    records = [record for suite in SUITES for record in prior_records(stored(suite))]
    lines = ",\n".join(json.dumps(rounded(record)) for record in records)
    path = RESULTS.parent.parent / "src" / "fednorms" / "advice" / "priors.json"
    path.write_text(f'{{"records": [\n{lines}\n]}}\n')
    print(f"{path}: {len(records)} federations")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "results", "priors"))
    parser.add_argument("--state", type=Path, help="folder of the records; the priors need none")
    parser.add_argument("--suite", choices=SUITES, default="generated", help="which federations")
    parser.add_argument("--data", type=Path, help="folder of real images, for --suite real")
    parser.add_argument("--part", default="1/1", help="which share of the federations to train, as in 2/4")
    parser.add_argument("--out", type=Path, help="file of the results (default: docs/results/advise-SUITE.json)")
    parser.add_argument("--most", type=int, default=1000, help="only the first so many federations")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of every method's best rate")
    given = parser.parse_args()
    if given.what == "priors":
        write_priors()
        raise SystemExit
    if given.state is None:
        parser.error(f"{given.what} needs --state FOLDER")
    every = cases(given.suite, given.data)
    if given.what == "run":
        part, parts = map(int, given.part.split("/"))
        train(given.state, every[: given.most][part - 1 :: parts], given.seeds)
    else:
        write_results(given.state, given.suite, every, given.out)
