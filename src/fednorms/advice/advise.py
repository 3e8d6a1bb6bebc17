"""advise: which method to take for a federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorms.advice.advice import Advice, Finalist
from fednorms.advice.arms import Arm, Proposal, Wanted, propose
from fednorms.advice.budget import SEEDS, Budget, Schedule, schedule
from fednorms.advice.certainty import Said, answers, difference
from fednorms.advice.measures import Measure, measure
from fednorms.advice.plan import kept_folder, recorded
from fednorms.advice.priors import expected_loss, records
from fednorms.advice.remarks import remarks
from fednorms.advice.setting import Setting
from fednorms.advice.summaries import SiteSummary, probe
from fednorms.advice.tournament import Rungs, Trial, tournament
from fednorms.advice.training import Trainer, counting
from fednorms.core.counted import counted
from fednorms.core.errors import BadInput, Diverged
from fednorms.data import Federation
from fednorms.runs.driver import execute
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import flag, option
from fednorms.runs.progress import CellWatch, Reporter, is_wanted
from fednorms.runs.recipe import Recipe
from fednorms.runs.result import Result

MINUTES = 10.0
_SHOWN = 3  # methods of a rung that are compared with intervals


def advise(
    federation: str | Path | Federation | None = None,
    model: str | nn.Module | None = None,
    rounds: int | None = None,
    *,
    minutes: float | None = None,
    budget: int | None = None,
    one_model: bool = False,
    personal: bool = False,
    methods: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    batch_size: int | None = None,
    participation: str | None = None,
    loss: str | Loss | None = None,
    device: str | None = None,
    seed: int | None = None,
    seeds: int = SEEDS,
    epsilon: float | None = None,
    retrain: bool = False,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    progress: bool | None = None,
) -> Advice:
    """Find out which method to take for a federation, in so many minutes.

    Four steps: measure how the sites differ, from what may leave them; propose methods that can work here; train them
    briefly at several learning rates, and the best ones longer and with several seeds; answer. Only validation images
    decide; test images are never read. `rounds` is the length of the real run (default: the recipe's).

    The budget is a number of rounds (`budget`), or `minutes` (default 10), which a timed probe turns into rounds. With
    the same number of rounds the answer repeats exactly. `one_model=True` asks for one model for all sites,
    `personal=True` for models that are only used at the sites that train; by default both kinds compete. Sites without
    training data must be served as well, so methods that cannot do that are left out.

    `methods` replaces the candidates, `rates` their learning rates. `epsilon` adds noise to the class counts that sites
    send. With `out`, everything is stored there, the same call continues after an interruption, and the answer is
    written as advice.md and advice.json. `retrain=True` trains the recommendation in full, with its test, in OUT/final.

    >>> advice = advise("digits-shift", rounds=4, budget=40, methods=["fedavg", "fedbn"], seeds=1)
    >>> advice.method in ("fedavg", "fedbn"), advice.finished
    (True, True)
    """
    _check(minutes, budget, one_model, personal, seeds, epsilon, jobs, methods, rates, retrain, out)
    changes = {"rounds": rounds, "participation": participation, "device": device, "seed": seed}
    setting = Setting.of(federation, model, loss, recipe, changes, {"batch_size": batch_size})
    if len(setting.data.clients) < 2:
        raise BadInput(
            f'Federation "{setting.data.name}" has only one site that trains. Choosing a federated method needs at '
            f"least two: give folders SITE/CLASS/IMAGE, or divide it ({option('partition')})."
        )
    wanted: Wanted = "one-model" if one_model else "personal" if personal else "any"
    asked: dict[str, Any] = {
        "recipe": setting.recipe.to_dict(),
        "data": setting.held.fingerprint(),
        "wanted": wanted,
        "minutes": minutes,
        "budget": budget,
        "methods": list(methods) if methods else None,
        "rates": list(rates) if rates else None,
        "seeds": seeds,
        "epsilon": epsilon,
    }
    if methods:
        _proposed(setting, wanted, {}, methods, rates)  # a method that cannot work is told before anything is measured
    with kept_folder(out) as folder:
        with Reporter("advise", 1, silent=not is_wanted(progress)) as reporter:
            reporter.say("Measuring how the sites differ ...")
            found = recorded(folder, asked, lambda: _found(setting, minutes, budget, epsilon, jobs))
        measures, given = [Measure(**m) for m in found["measures"]], Budget(**found["budget"])
        values = {m.name: m.value for m in measures}
        field = _proposed(setting, wanted, values, methods, rates)
        numbers = tuple(range(setting.recipe.seed, setting.recipe.seed + seeds))
        chosen = schedule(field.arms, given.rounds, setting.recipe.rounds, numbers)
        advice = _played(
            setting, measures, field, chosen, given, seeds, folder, out is not None, jobs, wanted, progress
        )
        if retrain:
            advice.retrained = _retrained(setting, advice, folder / "final")
        if out is not None:
            advice.write(folder)
        return advice


def _proposed(
    setting: Setting,
    wanted: Wanted,
    measures: Mapping[str, float | None],
    methods: Sequence[str] | None,
    rates: Sequence[float] | None,
) -> Proposal:
    """The methods that compete, ordered by what the measures let expect; an error if there is none."""
    field = propose(setting.question(wanted), measures, expected_loss(measures, records()), methods, rates)
    if not field.arms:
        raise BadInput("No method fits: " + " ".join(f"{name}: {why}" for name, why in field.excluded.items()))
    return field


def _check(
    minutes: float | None,
    budget: int | None,
    one_model: bool,
    personal: bool,
    seeds: int,
    epsilon: float | None,
    jobs: int,
    methods: Sequence[str] | None,
    rates: Sequence[float] | None,
    retrain: bool,
    out: str | Path | None,
) -> None:
    problems = []
    if minutes is not None and budget is not None:
        problems.append(f"give the budget in minutes ({option('minutes')}) or in rounds ({option('budget')}), not both")
    if one_model and personal:
        problems.append(f"{flag('one_model')} and {flag('personal')} exclude each other")
    for name, value, least in (("minutes", minutes, 0), ("budget", budget, 0), ("epsilon", epsilon, 1e-9)):
        if value is not None and value < least:
            problems.append(f"{option(name)} must be {'positive' if name == 'epsilon' else '0 or more'}, got {value:g}")
    for name, number in (("seeds", seeds), ("jobs", jobs)):
        if number < 1:
            problems.append(f"{option(name)} must be an integer >= 1, got {number}")
    if methods is not None and len(set(methods)) != len(methods):
        problems.append("a method is given twice")
    if rates is not None and (not rates or min(rates) <= 0):
        problems.append(f"{option('rates')} must be positive numbers")
    if retrain and out is None:
        problems.append(f"{flag('retrain')} needs a folder ({option('out')})")
    if problems:
        raise BadInput("advise: " + "; ".join(problems) + ".")


def _found(
    setting: Setting, minutes: float | None, budget: int | None, epsilon: float | None, jobs: int
) -> dict[str, Any]:
    """The measures, and the budget in rounds."""
    measures = measure(_summaries(setting, epsilon))
    if budget is not None:
        given = Budget(budget, jobs=jobs)
    else:
        given = Budget.of_minutes(MINUTES if minutes is None else minutes, setting.seconds_per_round(), jobs)
    return {"measures": [m.to_dict() for m in measures], "budget": given.to_dict()}


def _summaries(setting: Setting, epsilon: float | None) -> list[SiteSummary]:
    recipe = setting.trials
    try:
        return probe(recipe, setting.held, setting.custom, epsilon)
    except Diverged:  # one round with a small rate shows the sites' statistics as well
        small = recipe.model_copy(update={"training": replace(recipe.training, lr=recipe.training.lr / 100)})
        return probe(small, setting.held, setting.custom, epsilon)


def _trials(arms: Iterable[Arm]) -> list[Trial]:
    return [Trial(arm.name, arm.method, {"lr": rate}) for arm in arms for rate in arm.rates]


def _played(
    setting: Setting,
    measures: list[Measure],
    field: Proposal,
    chosen: Schedule,
    given: Budget,
    seeds: int,
    folder: Path,
    keep: bool,
    jobs: int,
    wanted: Wanted,
    progress: bool | None,
) -> Advice:
    """Play the tournament, and say after every rung what is known."""
    advice = Advice(
        recipe=setting.recipe,
        question=setting.question(wanted).facts(),
        measures=measures,
        arms=chosen.arms,
        excluded={**field.excluded, **chosen.left_out},
        rungs=[],
        finalists=[],
        budget=given,
        planned=len(chosen.rungs),
        notes=[*setting.notes, *_cut_by_budget(field.arms, chosen, given.rounds, setting.recipe, seeds)],
        path=folder if keep else None,
    )
    if not chosen.rungs:
        advice.notes.append(
            f"A budget of {given.rounds:g} rounds is too small for any tournament. Give more ({option('minutes')} or "
            f"{option('budget')})."
        )
        return advice
    every = max(1, chosen.rungs[0].rounds // 4)
    trainer = Trainer(setting.trials, setting.held, setting.custom, folder, every, jobs)
    total = trainer.most_rounds(chosen.rungs, sum(len(arm.rates) for arm in chosen.arms))
    with Reporter("advise", total, silent=not is_wanted(progress)) as reporter:
        trainer.watch = counting(CellWatch(reporter))

        def after(done: Rungs) -> None:
            advice.rungs.append(done)
            if not trainer.fresh and not advice.finished:
                return  # all of it ran before, and its runs may have continued since
            advice.finalists = _finalists(setting, trainer, done) or advice.finalists
            reporter.say(_rung_line(advice, done))
            if keep:
                advice.write(folder)

        tournament(_trials(chosen.arms), chosen.rungs, trainer.play, after)
    advice.notes += _notes(advice, trainer)
    return advice


def _cut_by_budget(arms: Sequence[Arm], chosen: Schedule, budget: float, recipe: Recipe, seeds: int) -> list[str]:
    """A note on the rates, seeds and rounds that did not fit the budget; methods left out are listed elsewhere."""
    if not chosen.rungs:
        return []
    last = chosen.rungs[-1]
    wanted = {
        "learning rate": (max(len(a.rates) for a in chosen.arms), max(len(a.rates) for a in arms)),
        "seed": (len(last.seeds), seeds),
        "round": (last.rounds, recipe.rounds),
    }
    less = [f"{some} of {counted(all_, name)}" for name, (some, all_) in wanted.items() if some < all_]
    return [f"The budget of {budget:g} rounds had room for {', '.join(less)}."] if less else []


def _finalists(setting: Setting, trainer: Trainer, done: Rungs) -> list[Finalist]:
    """The best trial of each method in a rung, best first; the first three are compared image by image."""
    best: dict[str, Trial] = {}
    for trial, _ in done.ranking:
        best.setdefault(trial.arm, trial)
    balanced = setting.trials.adopting(setting.held.protocol).metric == "balanced_accuracy"
    seen: list[list[Said]] = []
    found: list[Finalist] = []
    for trial in list(best.values())[:_SHOWN]:
        scores = [p.score for p in done.played if p.trial.name == trial.name and p.score is not None]
        paths = [trainer.path(trial, seed, done.rung.rounds) for seed in done.rung.seeds]
        seen.append([answers(path, setting.held, setting.custom) for path in paths])
        behind = difference(seen[0], seen[-1], balanced=balanced) if found else None
        found.append(Finalist(trial, scores, done.rung.rounds, behind))
    return found


def _rung_line(advice: Advice, done: Rungs) -> str:
    if not advice.finalists:
        return f"Rung {len(advice.rungs)} of {advice.planned}: every run failed."
    first, rounds = advice.finalists[0], counted(done.rung.rounds, "round")
    where = f"Rung {len(advice.rungs)} of {advice.planned} ({rounds})"
    return f"{where}: best {first.trial.name}, {100 * first.mean:.1f} %"


def _notes(advice: Advice, trainer: Trainer) -> list[str]:
    notes = []
    if advice.question["unseen_sites"]:
        notes.append("Scores are those of sites that train: sites without training data have no validation images.")
    if not advice.finalists:
        errors = {p.error for rung in advice.rungs for p in rung.played}
        notes.append("Every run failed: " + " ".join(sorted(errors)[:2]))
    if advice.finalists:
        trial = advice.finalists[0].trial
        grid = {"lr": advice.arm.rates}
        notes += remarks(trial, grid, advice.curves().get(trial.name, []))
    if trainer.restarted:
        names = ", ".join(sorted(trainer.restarted))
        notes.append(f"{names}: what it does depends on the number of rounds, so every rung started anew.")
    if diverged := sorted({p.trial.name for rung in advice.rungs for p in rung.played if p.error}):
        notes.append(f"No result: {'; '.join(diverged[:5])}. advice.json has the reasons.")
    return notes


def _retrained(setting: Setting, advice: Advice, path: Path) -> Result:
    custom = setting.custom
    return execute(advice.real_recipe(), out=path, federation=setting.data, model=custom.model, loss=custom.loss)
