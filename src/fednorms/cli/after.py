"""`fednorms evaluate`, `predict`, `export` and `adapt`: what a trained run is good for."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fednorms.cli.output import grid, per_cent, print_json, stderr, stdout
from fednorms.cli.parsing import parse
from fednorms.core.errors import BadInput, writing
from fednorms.evaluation.scores import SiteScore
from fednorms.runs.store.atomic import replace_bytes
from fednorms.runs.use.adapt import adapt as adapt_run
from fednorms.runs.use.evaluate import evaluate_run
from fednorms.runs.use.export import export as export_run
from fednorms.runs.use.predict import Prediction
from fednorms.runs.use.predict import predict as predict_images

Which = Literal["last", "best"]


@dataclass
class Evaluate:
    """Test a run's models in any mode; the data it was trained on must be there."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    modes: Annotated[list[str] | None, tyro.conf.arg(metavar="MODE [MODE ...]", help_behavior_hint="")] = None
    """Which model and statistics, as "personal", "global/batch" or "global/batch:32"; without it, those of the recipe.

    Models: global, personal, after_local, adapted, unseen. Statistics: global, own, batch, re-estimated."""
    which: Which = "last"
    """The last round, or the one with the best validation accuracy."""
    split: Literal["test", "val", "train"] = "test"
    """Which data."""
    clients: bool = False
    """Show the sites, too, the worst 20 of each mode (--json has all)."""
    json: bool = False
    """Print one JSON object and nothing else."""


def evaluate(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Evaluate, "evaluate", args)
    scores = evaluate_run(given.run, given.modes, given.which, given.split)
    if given.json:
        print_json({"run": str(given.run), "which": given.which, "scores": {k: s.to_dict() for k, s in scores.items()}})
        return 0
    domains = list(dict.fromkeys(d for s in scores.values() for d in s.domains))
    rows = []
    for name, s in scores.items():
        per_domain = [f"{100 * s.domains[d]:.1f}" if d in s.domains else "-" for d in domains]
        rest = [100 * s.mean, 100 * s.std, 100 * s.pooled, 100 * s.balanced_accuracy]
        rows.append([name, *per_domain, *(f"{r:.1f}" for r in rest), f"{s.loss:.3f}"])
    header = ["model/statistics/split", *domains, "mean", "std", "pooled", "balanced", "loss"]
    console = stdout()
    console.print(grid(header, rows, numbers_from=1))
    for name, s in scores.items() if given.clients else ():
        worst = sorted(s.sites.items(), key=lambda item: item[1].accuracy)[:_MOST_CLIENTS]
        left = len(s.sites) - len(worst)
        console.print(f"\n{name}" + (f", the worst {len(worst)} of {len(s.sites)} sites" if left else ""), markup=False)
        lines = [_client(site, s.domain_of[site], score) for site, score in worst]
        console.print(grid(_OF_CLIENTS, lines, numbers_from=2))
    console.print(f"\nAccuracy in %, {given.which} round; mean and std over sites, pooled over images.", markup=False)
    return 0


_OF_CLIENTS = ("site", "domain", "images", "accuracy", "balanced", "loss")
_MOST_CLIENTS = 20  # lines that a terminal shows at once


def _client(name: str, domain: str, score: SiteScore) -> list[str]:
    shares = (f"{100 * share:.1f}" for share in (score.accuracy, score.balanced_accuracy))
    return [name, domain, f"{score.samples:,}", *shares, f"{score.loss:.3f}"]


@dataclass
class Predict:
    """Classify images with the model of a run, or with one exported or adapted; the training data are not needed."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The directory of the run, or of the exported model."""
    images: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="IMAGE [IMAGE ...]")]
    """Image files, or folders of images."""
    site: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: the model for all)")] = None
    """Use the model of this site."""
    which: Which = "last"
    """The last round, or the one with the best validation accuracy."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.csv", help_behavior_hint="")] = None
    """Write a table (CSV) with the probability of every class, instead of printing."""
    skip_broken: bool = False
    """Leave out images that cannot be read, and name them, instead of stopping."""
    json: bool = False
    """Print one JSON object and nothing else."""


def predict(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Predict, "predict", args)
    if given.out and not given.out.absolute().parent.is_dir():
        raise BadInput(f"--out {given.out}: there is no folder {given.out.parent}; make it first.")
    found = predict_images(given.run, given.images, site=given.site, which=given.which, skip_broken=given.skip_broken)
    if given.out:
        _write_csv(given.out, found)
    if given.json:
        print_json({"predictions": [p.to_dict() for p in found]})
        return 0
    if given.out:
        stdout().print(f"{len(found)} predictions written to {given.out}", markup=False, soft_wrap=True)
    else:
        rows = [[str(p.file), p.label, per_cent(p.probability)] for p in found]
        stdout().print(grid(["file", "class", "probability"], rows, numbers_from=2))
    for note in dict.fromkeys(p.note for p in found if p.note):
        stderr().print(f"note: {note}", markup=False, soft_wrap=True)
    return 0


def _write_csv(path: Path, found: list[Prediction]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "class", "probability", *found[0].probabilities])
    for p in found:
        every = (f"{x:.6f}" for x in p.probabilities.values())
        writer.writerow([p.file, p.label, f"{p.probability:.6f}", *every])
    data = text.getvalue().encode(errors="backslashreplace")  # file names may be no text
    with writing(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)  # a link, a pipe or a terminal stays what it is
        else:
            replace_bytes(path, data)


@dataclass
class Export:
    """Write a model as plain weights (safetensors) with its classes and preprocessing, to use without a run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """A new directory for the model."""
    site: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: the model for all)")] = None
    """Export the model of this site."""
    which: Which = "last"
    """The last round, or the one with the best validation accuracy."""
    onnx: bool = False
    """Write it as ONNX, too."""
    json: bool = False
    """Print one JSON object and nothing else."""


def export(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Export, "export", args)
    done = export_run(given.run, given.out, site=given.site, which=given.which, onnx=given.onnx)
    if given.json:
        print_json(done.to_dict())
    else:
        stdout().print(repr(done), markup=False, soft_wrap=True)
    return 0


@dataclass
class Adapt:
    """Give a new site a model: its own normalisation statistics, then fine-tuning if asked for.

    Images lie in FOLDER/class/image. A part is held out to test the model before and after.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """The new site's images."""
    epochs: int = 0
    """Epochs of fine-tuning (0: statistics only, for which no label is used)."""
    lr: Annotated[
        float | None, tyro.conf.arg(help_behavior_hint="(default: the method's own, or a tenth of the run's)")
    ] = None
    """Learning rate of fine-tuning."""
    test: float = 0.3
    """Fraction of the images that is held out."""
    size: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: as in the run)")] = None
    """Resize images to this many pixels."""
    group: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: as in the run; '' for none)")] = None
    """A regular expression that finds in a file's name what stays together, as "(patient[0-9]+)"."""
    which: Which = "last"
    """Start from the last round, or from the one with the best validation accuracy."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: not saved)")] = None
    """A new directory for the site's model."""
    json: bool = False
    """Print one JSON object and nothing else."""


def adapt(args: Sequence[str]) -> int:
    """The command."""
    given = parse(Adapt, "adapt", args)
    done = adapt_run(
        given.run,
        given.folder,
        out=given.out,
        epochs=given.epochs,
        lr=given.lr,
        which=given.which,
        test=given.test,
        size=given.size,
        group=given.group,
    )
    if given.json:
        print_json(done.to_dict())
    else:
        stdout().print(repr(done), markup=False, soft_wrap=True)
    return 0
