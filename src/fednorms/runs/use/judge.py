"""Judge a run's models: all metrics with intervals, on its own data or on any labelled images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from fednorms.core.errors import BadInput, RunFailed
from fednorms.core.states import Client
from fednorms.data import Federation, Site
from fednorms.data.folders.broken import Broken, left_out_note
from fednorms.engines.base import SplitName
from fednorms.engines.devices import repeatable
from fednorms.evaluation.judge import judge_predictions
from fednorms.evaluation.judgement import Judgement
from fednorms.evaluation.modes import Mode, averages, model_for, predict_site, unseen_broadcast
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import Scores, SiteScore
from fednorms.evaluation.threshold import Threshold, choose_threshold
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import flag, option
from fednorms.runs.progress import Reporter, is_wanted, per_cent
from fednorms.runs.store import predictions as store
from fednorms.runs.use.choose import check_kept, known_site
from fednorms.runs.use.evaluate import nothing_to_test, recorded_scores, refuse_lost_loss
from fednorms.runs.use.labelled import folder_of, labelled_sites
from fednorms.runs.use.open import OpenRun, Which, open_run


@dataclass(frozen=True)
class JudgedRun:
    """Scores and judgements of a run's models, by mode and split ("personal/own/test").

    Models right after local training are gone; they have only the scores that the run recorded.
    """

    scores: dict[str, Scores]
    judgements: dict[str, Judgement]
    metric: str = "accuracy"  # what the run is judged by


@dataclass(frozen=True)
class Operating:
    """How the threshold of a binary model is chosen on validation images: by a sensitivity, or by Youden's J.

    `positive` is the class to be found, by default the last of the two.
    """

    sensitivity: float | None = None
    positive: str | None = None

    @property
    def asked(self) -> bool:
        """Whether the user asked for a threshold."""
        return self.sensitivity is not None or self.positive is not None


def judge(
    path: str | Path,
    data: str | Path | Federation | None = None,
    modes: Sequence[str] | None = None,
    which: Which = "last",
    split: Literal["test", "val", "train"] = "test",
    *,
    site: str | None = None,
    group: str | None = None,
    skip_broken: bool = False,
    sensitivity: float | None = None,
    positive: str | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str = "auto",
    progress: bool | None = None,
) -> dict[str, Judgement]:
    """Judge a run's models in the given modes; the keys are "mode/statistics/split".

    Args:
        path: the run's directory.
        data: labelled images: a folder of class/image or site/class/image, a federation, its name or a pack. By default
            the run's own data.
        modes: models and statistics, such as "personal", "global/batch" or "averaged" (the mean of personal models). By
            default the recipe's; for other data the global or averaged model, and personal ones of sites that trained.
        which: the last round, the one with the best validation accuracy, or a kept round.
        split: the images to test on.
        site: test the personal model of this client on all of `data`.
        group: a regular expression that finds the patient in a file name of `data`; intervals then draw patients. By
            default that of the run.
        skip_broken: leave out files of `data` that cannot be read, and note them.
        sensitivity: for two classes, choose the threshold that reaches it on validation images. By default, the
            threshold has the highest Youden's J there.
        positive: the class that a threshold is for, by default the last one.
        model: the run's custom model.
        loss: the run's custom loss, for "adapted".
        device: cpu, cuda or auto (the run's own, or the CPU if that is not here).
        progress: show a progress bar (default: on a terminal and in a notebook).

    >>> import tempfile
    >>> from fednorms.runs.driver import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("fedbn", rounds=1, out=folder + "/run")
    ...     found = judge(folder + "/run", modes=["personal", "averaged"])
    >>> list(found), round(found["personal/own/test"].mean.value - result.accuracy, 6)
    (['personal/own/test', 'averaged/global/test'], 0.0)
    """
    operating = Operating(sensitivity, positive)
    return judge_run(
        path, data, modes, which, split, site, group, skip_broken, operating, model, loss, device, progress
    ).judgements


def judge_run(
    path: str | Path,
    data: str | Path | Federation | None = None,
    modes: Sequence[str] | None = None,
    which: Which = "last",
    split: SplitName = "test",
    site: str | None = None,
    group: str | None = None,
    skip_broken: bool = False,
    operating: Operating = Operating(),  # noqa: B008  it is frozen
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str = "auto",
    progress: bool | None = None,
) -> JudgedRun:
    """Like `judge`, with the scores that `evaluate_run` gives."""
    if split not in ("test", "val", "train"):
        raise BadInput(f'Unknown split "{split}". Expected "test", "val" or "train".')
    opened = open_run(path, which, None, model, loss, device)
    for note in opened.notes:
        warnings.warn(note, stacklevel=3)
    _check_operating(opened, operating, split)
    if data is None and (site is not None or group is not None or skip_broken):
        given = option("site" if site is not None else "group") if not skip_broken else flag("skip_broken")
        raise BadInput(f"{given} is for other data. Name them with {option('data')}.")
    there: _Own | _Other = _Own(opened) if data is None else _Other.of(opened, data, split, site, group, skip_broken)
    asked = list(dict.fromkeys(there.modes(modes)))
    found = JudgedRun({}, {}, opened.recipe.metric)
    empty: list[Mode] = []
    with Reporter("evaluate", len(asked), silent=not is_wanted(progress), unit="mode") as reporter:
        for number, mode in enumerate(asked, 1):
            name = f"{mode}/{split}"
            if mode.model == "after_local":
                scores: Scores | None = there.recorded(mode, split)
            else:
                scores = _judge_mode(there, mode, split, operating, found)
            if scores is None:
                empty.append(mode)
            else:
                found.scores[name] = scores
            reporter.advance(number, f"{mode}: " + ("nothing to test" if scores is None else per_cent(scores.mean)))
    if not found.scores or (empty and modes):
        raise BadInput(there.nothing(empty, split))
    return found


def _judge_mode(
    there: _Own | _Other, mode: Mode, split: SplitName, operating: Operating, found: JudgedRun
) -> Scores | None:
    opened = there.opened
    said = there.predictions(mode, split)
    if not said:
        return None
    threshold, notes = _threshold(opened, mode, split, operating, there.owner(mode))
    found.judgements[f"{mode}/{split}"] = judge_predictions(
        said,
        opened.facts.classes,
        mode=mode.model,
        statistics=mode.statistics,
        split=split,
        metric="balanced_accuracy" if opened.recipe.metric == "balanced_accuracy" else "accuracy",
        threshold=threshold,
        notes=[*there.notes(mode), *notes],
    )
    scores = {name: SiteScore.of(p) for name, p in said.items()}
    return Scores(mode.model, mode.statistics, split, scores, there.domains)


# -- thresholds -----------------------------------------------------------------------------------------------------
def _check_operating(opened: OpenRun, operating: Operating, split: str) -> None:
    classes = opened.facts.classes
    if not operating.asked:
        return
    given = option("sensitivity" if operating.sensitivity is not None else "positive")
    if len(classes) != 2:
        raise BadInput(f"{given} is for two classes, but this run has {len(classes)}.")
    if operating.positive is not None and operating.positive not in classes:
        raise BadInput(f'{option("positive")} "{operating.positive}" is not a class: expected {" or ".join(classes)}.')
    if operating.sensitivity is not None and not 0 < operating.sensitivity <= 1:
        raise BadInput(f"{given} must be above 0 and at most 1, got {operating.sensitivity:g}.")
    if split == "val":
        raise BadInput(f"{given} chooses a threshold on validation images, so it cannot be reported on them.")


def _threshold(
    opened: OpenRun, mode: Mode, split: str, operating: Operating, owner: str | None
) -> tuple[Threshold | None, list[str]]:
    """The threshold of a binary model, chosen on the run's validation images; notes say why there is none.

    If all tested models are that of one site, the `owner`, only its validation images count.
    """
    classes = opened.facts.classes
    if len(classes) != 2 or split == "val":
        return None, []
    try:
        said = opened.session.engine.predict(opened.state, mode, opened.cohort, "val")
        said = {name: p for name, p in said.items() if owner in (None, name)}
        if not said:
            raise BadInput(f'Site "{owner}" has no validation images.' if owner else "No site has validation images.")
        y, p = (np.concatenate([getattr(x, k) for x in said.values()]) for k in ("labels", "probabilities"))
        positive = classes.index(operating.positive) if operating.positive is not None else 1
        return choose_threshold(y, p, positive, operating.sensitivity), []
    except BadInput as error:
        if operating.asked:
            raise BadInput(f"No threshold can be chosen: {error} Leave out {option('sensitivity')}.") from error
        return None, [f"No threshold was chosen on validation images. {error}"]


# -- where the images are -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Own:
    """The run's own data."""

    opened: OpenRun

    def modes(self, asked: Sequence[str] | None) -> list[Mode]:
        return [Mode.read(text).resolved(self.opened.task) for text in asked] if asked else self.opened.session.modes

    @property
    def domains(self) -> Mapping[str, str]:
        return self.opened.facts.domain_of

    def notes(self, mode: Mode) -> list[str]:
        return []

    def owner(self, mode: Mode) -> str | None:
        return None

    def recorded(self, mode: Mode, split: str) -> Scores | None:
        return recorded_scores(self.opened, mode, split)

    def nothing(self, empty: list[Mode], split: str) -> str:
        return nothing_to_test(self.opened.session.federation, empty, split)

    def predictions(self, mode: Mode, split: SplitName) -> dict[str, Predictions]:
        """What a mode predicts; test predictions that the run did not keep are stored with it."""
        opened = self.opened
        refuse_lost_loss(opened, mode)
        said = opened.session.engine.predict(opened.state, mode, opened.cohort, split)
        size = store.size_of(sum(map(len, said.values())), opened.facts.num_classes)
        keep = opened.recipe.keep_predictions
        if said and split == "test" and keep is not False and (keep or size <= store.LIMIT):
            with suppress(RunFailed):  # a run that cannot be written to can be judged all the same
                if store.read(opened.directory, opened.state.round, str(mode)) is None:
                    store.write(opened.directory, opened.state.round, str(mode), split, said)
        return said


@dataclass(frozen=True)
class _Other:
    """Other labelled images, and whose personal model is tested on them."""

    opened: OpenRun
    sites: list[Site]
    source: str
    model_of: Mapping[str, str] = field(default_factory=dict)  # the client of each site, if it has one
    said: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        opened: OpenRun,
        data: str | Path | Federation,
        split: str,
        site: str | None,
        group: str | None,
        skip_broken: bool,
    ) -> _Other:
        facts, known = opened.facts, opened.recipe.data
        if site is not None:
            known_site(facts, site, trained=True)
        pattern = (known.group if folder_of(data) else "") if group is None else group
        broken: list[Broken] | None = [] if skip_broken else None
        try:
            sites = labelled_sites(data, facts, split, known.size, pattern or None, broken)
        except BadInput as problem:
            if group is None and pattern and "group" in str(problem):
                raise BadInput(
                    f'{problem} The group "{pattern}" is that of the run. Give one that fits these file names '
                    f"({option('group')}), or an empty one."
                ) from None
            raise
        whose = {s.name: site or s.name for s in sites if site is not None or s.name in facts.clients}
        named = data.name if isinstance(data, Federation) else str(data)
        return cls(opened, sites, named, whose, [*left_out_note(broken or []), *_trained_on(opened, data)])

    def modes(self, asked: Sequence[str] | None) -> list[Mode]:
        task = self.opened.task
        if asked:
            return [Mode.read(text).resolved(task) for text in asked]
        everywhere = Mode("averaged" if averages(task) else "global").resolved(task)
        own = [Mode("personal").resolved(task)] if task.personal and self.model_of else []
        return [*own, everywhere]

    @property
    def domains(self) -> Mapping[str, str]:
        return {site.name: site.domain for site in self.sites}

    def notes(self, mode: Mode) -> list[str]:
        left = [s.name for s in self.sites if s.name not in self.model_of]
        if mode.model != "personal" or not left:
            return self.said
        return [*self.said, f"Sites that did not train have no personal model and are left out: {_some(left)}."]

    def owner(self, mode: Mode) -> str | None:
        """The client whose model is tested everywhere, if there is one."""
        whose = set(self.model_of.values())
        return next(iter(whose)) if mode.model == "personal" and len(whose) == 1 else None

    def recorded(self, mode: Mode, split: str) -> Scores | None:
        raise BadInput('"after_local" models are gone after a run. Evaluate "personal", "global" or "averaged".')

    def nothing(self, empty: list[Mode], split: str) -> str:
        return (
            f'"{empty[0]}" cannot be tested on {self.source}: none of its sites '
            f"({_some([s.name for s in self.sites])}) is a client of the run ({_some(self.opened.facts.clients)}). "
            "Name the client whose model is tested "
            f"({option('site')}), or evaluate {'averaged' if averages(self.opened.task) else 'global'}."
        )

    def predictions(self, mode: Mode, split: SplitName) -> dict[str, Predictions]:
        """What a mode predicts for these images."""
        opened, task = self.opened, self.opened.task
        if mode.model == "adapted":
            raise BadInput('"adapted" trains at a site. `fednorms adapt` does that with other data.')
        if mode.model != "global":
            check_kept(task, opened.clients, next(iter(self.model_of.values()), None))
        sent = opened.test_broadcast
        everywhere = unseen_broadcast(task, sent, opened.clients.values())
        found = {}
        for site in self.sites:
            whose = self.model_of.get(site.name)
            personal = mode.model == "personal"
            if personal and whose is None:
                continue
            images = site.splits[split]
            state = opened.clients.get(whose) if personal and whose is not None else None
            if personal and averages(task) and not (state and state.local):
                continue  # it has not trained
            client = Client(site.name, images, state, dict(site.attributes))
            here = sent if personal or mode.model == "global" else everywhere
            here = mode.received(here, whose if personal and whose is not None else site.name)
            with repeatable(opened.recipe.threads, task.seed, "test", sent.round, site.name):
                tensors, mine = model_for(task, here, client, mode)
                found[site.name] = predict_site(task, here, client, images, tensors, mine, mode)
        return found


def _trained_on(opened: OpenRun, data: str | Path | Federation) -> list[str]:
    """A note if other data are the folder that the run trained on, one of its sites, or a folder around it."""
    folder, own = folder_of(data), opened.recipe.data.root or opened.recipe.federation.removeprefix("folder:")
    if folder is None or not Path(own).is_dir():
        return []
    here, there = folder.resolve(), Path(own).resolve()
    trained = here.is_relative_to(there) and set(here.relative_to(there).parts) & set(opened.facts.clients)
    if not (trained or there.is_relative_to(here)):
        return []
    return [
        f"The run trained on images of {own}, so these scores are too good. Without {option('data')}, only its test "
        "images are used."
    ]


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
