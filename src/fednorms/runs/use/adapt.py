"""Adapt a run's model to a site that never trained: measure its statistics, and fine-tune if asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorms.core.counted import counted
from fednorms.core.errors import BadInput
from fednorms.core.part import Phase
from fednorms.core.passes import depends_on_batch
from fednorms.core.paths import given_path
from fednorms.core.round import carry_of, load, site_state, train
from fednorms.core.states import Broadcast, Client, context_of
from fednorms.core.tree import Tree
from fednorms.data import Site, Split, site_from_folder
from fednorms.data.folders.broken import Broken, left_out_note
from fednorms.data.folders.preparations import preparation
from fednorms.engines.devices import repeatable
from fednorms.evaluation.intervals import Interval
from fednorms.evaluation.modes import Mode, averages, predict_site
from fednorms.evaluation.predictions import Predictions
from fednorms.evaluation.scores import SiteScore
from fednorms.evaluation.statistics import re_estimated, statistics_names
from fednorms.runs.differences import MEAN, Answers, PairedBootstrap, Replicated, difference, within_noise
from fednorms.runs.losses import Loss
from fednorms.runs.option_names import option
from fednorms.runs.use.choose import Chosen, unknown_preparation
from fednorms.runs.use.export import Graphs, check_target, write_model
from fednorms.runs.use.open import OpenRun, Which, open_run
from fednorms.runs.use.scored import Scored


@dataclass(frozen=True)
class Adapted:
    """Scores of a new site's model on held-out images: before, with the site's own statistics, and fine-tuned.

    Scores are None if no image was held out; `fine_tuned` is also None without fine-tuning. `gain` is the accuracy of
    the final model minus that before, with a 95 % interval over the test images, or over the patients if `patients`
    counts them. `path` is the saved model.

    >>> score = SiteScore(0.5, 0.5, 1.0, 4, [0.5])
    >>> Adapted("clinic", score, score, None, {"train": 9, "test": 4}, gain=Interval(0.0, -0.2, 0.2))
    clinic: 50.0 % before, 50.0 % with its own statistics (4 test images, adapted on 9)
      no difference that 4 test images can show: +0.0 points [-20.0, +20.0]
      the model was not saved: name a folder for it with out=
    """

    site: str
    before: SiteScore | None
    after: SiteScore | None
    fine_tuned: SiteScore | None
    samples: dict[str, int]
    path: Path | None = None
    notes: list[str] = field(default_factory=list)
    gain: Interval | None = None
    patients: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        scores = {k: None if s is None else s.to_dict() for k, s in self._scores().items()}
        saved = None if self.path is None else str(self.path)
        gain = None if self.gain is None else self.gain.to_dict()
        known = {"site": self.site, **scores, "gain": gain, "samples": self.samples, "patients": self.patients}
        return known | {"path": saved, "notes": self.notes}

    def _scores(self) -> dict[str, SiteScore | None]:
        return {"before": self.before, "after": self.after, "fine_tuned": self.fine_tuned}

    def __repr__(self) -> str:
        words = {"before": "before", "after": "with its own statistics", "fine_tuned": "fine-tuned"}
        known = [f"{100 * s.accuracy:.1f} % {words[k]}" for k, s in self._scores().items() if s is not None]
        counts = f"({self.samples.get('test', 0)} test images, adapted on {self.samples['train']})"
        lines = [f"{self.site}: {', '.join(known) or 'not tested'} {counts}", *self._verdict()]
        lines += [f"  note: {n}" for n in self.notes]
        saved = (
            f"saved in {self.path}"
            if self.path
            else f"the model was not saved: name a folder for it with {option('out')}"
        )
        return "\n".join([*lines, f"  {saved}"])

    def _verdict(self) -> list[str]:
        """What became of the model."""
        if self.gain is None or not self.gain.defined:
            return []
        low, value, high = (f"{100 * x:+.1f}" for x in (self.gain.low, self.gain.value, self.gain.high))
        images = counted(self.samples.get("test", 0), "test image")
        images += "" if self.patients is None else f" of {counted(self.patients, 'patient')}"
        word = "better than before" if self.gain.low > 0 else "worse than before: do not use it"
        if within_noise(self.gain):
            word = f"no difference that {images} can show"
        elif self.before is not None and self.before.one_class:
            word = f"no verdict, because the {images} are of one class and tell nothing about the others"
        return [f"  {word}: {value} points [{low}, {high}]"]


def _check_request(epochs: int, lr: float | None, test: float, size: int | None) -> None:
    if epochs < 0 or (lr is not None and not 0 <= lr < math.inf) or not 0 <= test < 1:
        raise BadInput(
            f"adapt: epochs and lr must be at least 0 and test a fraction below 1. Got epochs {epochs}, lr {lr} and "
            f"test {test}."
        )
    if lr is not None and not epochs:
        raise BadInput(f"adapt: lr {lr:g} is for fine-tuning, but epochs is 0. Give {option('epochs')} as well.")
    if size is not None and size < 1:
        raise BadInput(f"adapt: size must be at least 1 pixel, got {size}.")


def adapt(
    path: str | Path,
    folder: str | Path,
    out: str | Path | None = None,
    epochs: int = 0,
    lr: float | None = None,
    which: Which = "last",
    test: float = 0.3,
    size: int | None = None,
    group: str | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: str = "auto",
    skip_broken: bool = False,
) -> Adapted:
    """Adapt a run's model to a new site with images in folder/class/image, and test it on a held-out part.

    The model is that of an unseen site: tensors that clients keep are averaged over the clients. Its normalization
    statistics are measured on the site's training images, without labels. With `epochs` the model is then fine-tuned on
    these images, and the statistics are measured once more. Fine-tuning follows the method's own evaluation phases; a
    method without them trains all tensors at `lr` (default: a tenth of the run's rate).

    `test` is the fraction held out; a folder may have its own train/ and test/ instead. `group` is a regular expression
    that finds in a file's name what stays together, such as a patient, so no patient is both adapted to and tested. By
    default it is the run's own; "" is none. `skip_broken` leaves out files that cannot be read and notes them. With
    `out`, the final model is saved as by `export`. `device` is cpu, cuda
    or auto (the run's own, or the CPU if that is not here).

    >>> adapt("nowhere", "folder")
    Traceback (most recent call last):
    fednorms.BadInput: nowhere is not a run: it has no readable recipe.toml (No such file or directory).
    """
    _check_request(epochs, lr, test, size)
    if out is not None:
        out = given_path("out", out)
        check_target(out)
    folder = given_path("folder", folder)
    opened = open_run(path, which, model=model, loss=loss, device=device)
    task, facts = opened.task, opened.facts
    shape = (facts.shape[0], size, size) if size else facts.shape
    stored = shape if size else facts.stored_shape
    if size:
        task.net.probe(shape, facts.num_classes)
    broken: list[Broken] = []
    site = _site(folder, opened, stored, test, group, broken if skip_broken else None)
    if site.train is None:
        raise BadInput(f"{folder} has no training images to adapt to. Put some in folder/class or folder/train/class.")
    start_from = opened.choose(averaged=averages(opened.task))
    sent, client = start_from.sent, Client(site.name, site.train)
    notes = opened.notes + start_from.notes + _notes(opened, epochs) + left_out_note(broken)
    with repeatable(opened.recipe.threads or 1, "adapt", task.seed, site.name):
        mine = site_state(task, sent, client)
        start, estimated, tuned = _models(opened, sent, client, mine, epochs, lr)

        def test_predictions(tensors: Tree | None) -> Predictions | None:
            if tensors is None or site.test is None:
                return None
            return predict_site(task, sent, client, site.test, tensors, mine, Mode("unseen", "global"))

        said = [test_predictions(tensors) for tensors in (start, estimated, tuned)]
    before, after, fine_tuned = (None if p is None else SiteScore.of(p) for p in said)
    gain = _gain(site.name, said[0], said[1] if tuned is None else said[2])
    patients = None if site.test is None or site.test.groups is None else len(set(site.test.groups))
    if site.test is None:
        notes.append("No image was held out, so nothing was tested.")
    saved = None
    if out is not None:
        tensors = estimated if tuned is None else tuned
        mode = Mode("adapted", "own")  # no test of the run is one of this model
        final = Chosen(mode, site.name, tensors, mine, sent, client, measured_here=False, notes=notes)
        last = after if tuned is None else fine_tuned
        told: dict[str, Any] = {"images": len(client.data), "epochs": epochs}
        told |= {
            k: None if v is None else v.to_dict() for k, v in {"before": before, "after": last, "gain": gain}.items()
        }
        tested = _tested(opened, final, said[1] if tuned is None else said[2])
        saved = _save(opened, final, out, stored, model, told, tested)
    counts = {k: len(s) for k, s in site.splits.items()}
    return Adapted(site.name, before, after, fine_tuned, counts, saved, notes, gain, patients)


def _tested(opened: OpenRun, final: Chosen, said: Predictions | None) -> Scored:
    """The scores of the model that is saved, for its card."""
    if depends_on_batch(opened.task):
        never = "its normalization statistics were measured when it was saved; the test used those of each batch."
    else:
        never = "" if said is not None else "no image was held out when it was adapted."
    found = None if never or said is None else {final.client.name: said}
    site, t = final.client.name, opened.state.round
    return Scored(final.mode, site, t, predictions=found, classes=opened.facts.classes, never=never)


def _gain(site: str, before: Predictions | None, after: Predictions | None) -> Interval | None:
    """The accuracy after minus that before, on the same test images."""
    if before is None or after is None:
        return None
    bootstrap = PairedBootstrap({site: site})
    columns = [bootstrap.columns({site: Answers.of(p)})[MEAN] for p in (after, before)]
    return difference(*(Replicated({0: column}) for column in columns))


def _site(
    folder: str | Path,
    opened: OpenRun,
    stored: tuple[int, int, int],
    test: float,
    group: str | None,
    broken: list[Broken] | None,
) -> Site:
    """The new site, split as the run's own folders were unless `group` says otherwise, or it is split already.

    Files that cannot be read are added to the list `broken` if there is one.
    """
    divided = not test or Path(folder, "train").is_dir()
    whose = ("" if divided else opened.recipe.data.group) if group is None else group
    try:
        return site_from_folder(
            folder,
            opened.facts.classes,
            stored[1:],
            stored[0],
            test=test,
            seed=opened.recipe.seed,
            group=whose or None,
            prepared=preparation(opened.facts.prepared),
            skip_broken=broken is not None,
            left_out=broken,
        )
    except BadInput as problem:
        if group is None and whose and "group" in str(problem):
            raise BadInput(
                f'{problem}. The group "{whose}" is that of the run. Give one that fits the file names of this site '
                f"({option('group')}), or an empty one."
            ) from None
        raise


def _models(
    opened: OpenRun, sent: Broadcast, client: Client, mine: dict[str, Tree], epochs: int, lr: float | None
) -> tuple[Tree, Tree, Tree | None]:
    """The model before, with the site's statistics, and fine-tuned from there."""
    task = opened.task
    context = context_of(task, sent.round, client, evaluating=True)
    start = load(task, sent, client, context, mine)
    estimated = re_estimated(task, sent, client, start, mine)
    if not epochs:
        return start, estimated, None
    usual = task.method.evaluation().phases or (Phase(factor=0.1),)
    phases = [replace(p, epochs=epochs, steps=None, lr=p.lr if lr is None else lr) for p in usual]
    if lr is not None:
        phases = [replace(p, factor=1.0) for p in phases]
    carry = carry_of(task, sent, client, context, mine, estimated)
    train(task, carry, phases)
    tuned = carry.model()
    if not tuned.finite():
        raise BadInput(f'Fine-tuning at "{client.name}" diverged. Choose a lower lr or fewer epochs.')
    return start, estimated, re_estimated(task, sent, client, tuned, mine)


def _notes(opened: OpenRun, epochs: int) -> list[str]:
    notes = unknown_preparation(opened.facts)
    if not statistics_names(opened.task.net):
        only = "" if epochs else ", so nothing was adapted (give epochs to fine-tune)"
        notes.append(
            f'Model "{opened.task.net.name}" of "{opened.task.method}" stores no statistics to re-estimate{only}.'
        )
    if epochs and opened.lost_loss:
        notes.append(
            f"Fine-tuned with cross-entropy, because the run's custom loss ({opened.lost_loss}) was not passed."
        )
    return notes


def _save(
    opened: OpenRun,
    final: Chosen,
    out: Path,
    stored: tuple[int, int, int],
    model: nn.Module | None,
    adapted: dict[str, Any],
    tested: Scored,
) -> Path:
    here = opened
    if opened.recipe.device != "cpu":  # exported models are loaded and compared on the CPU
        here = open_run(opened.directory.path, opened.which, model=model, device="cpu")
        data = Split(final.client.data.x, final.client.data.y)
        final = replace(
            final,
            tensors=final.tensors.to("cpu"),
            mine={k: t.to("cpu") for k, t in final.mine.items()},
            sent=here.test_broadcast,
            client=replace(final.client, data=data),
        )
    clients = [final.client] if depends_on_batch(here.task) else []  # their images measure what the model keeps none of
    write_model(here, final, out, final.client.name, tested, Graphs(), model, stored, {"adapted": adapted}, clients)
    return out
