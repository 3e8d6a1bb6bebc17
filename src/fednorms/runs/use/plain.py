"""A chosen model as it is handed out: folded into plain layers, with fixed preprocessing and statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.passes import depends_on_batch
from fednorms.core.states import Client
from fednorms.core.surgery import Change
from fednorms.data import Preprocessing
from fednorms.layers.folding import fold
from fednorms.runs.use.batch_statistics import measured_statistics
from fednorms.runs.use.choose import Chosen, check_statistics, input_normalizers, unknown_preparation
from fednorms.runs.use.load import site_preprocessing
from fednorms.runs.use.open import OpenRun


@dataclass(frozen=True)
class Plain:
    """A chosen model as it is handed out: folded, with its preprocessing."""

    module: nn.Module
    preprocessing: Preprocessing
    measure: str | None  # the part that measures the input's statistics, if no site's are known
    stored: tuple[int, int, int]
    folded: list[Change]
    notes: list[str]
    given: bool  # whether it was given statistics that the run's own model does not have

    @property
    def fixed(self) -> Preprocessing | None:
        """What a graph does to images itself."""
        return None if self.measure else self.preprocessing


def plain_model(opened: OpenRun, chosen: Chosen, stored: tuple[int, int, int], clients: list[Client]) -> Plain:
    """Fold a chosen model, fix its preprocessing, and give it statistics if it keeps none; `stored`: its images."""
    task, facts = opened.task, opened.facts
    notes = opened.notes + chosen.notes + unknown_preparation(facts)
    part = next(iter(input_normalizers(task)), None)
    preprocessing = facts.preprocessing
    if part and chosen.measured_here:
        preprocessing = Preprocessing(crop=preprocessing.crop)
        notes.append(
            f"{part.name} normalizes images with a site's own statistics. This model measures them on the images it is "
            "given. To fix them, export the model of a site, or call measured(images) once after loading."
        )
    elif part:
        fixed = site_preprocessing(chosen.mine[part.name]["mean"], chosen.mine[part.name]["std"])
        preprocessing = replace(fixed, crop=preprocessing.crop)
    if facts.dtype != "uint8":
        notes.append("The model was trained on floating-point images. Give it images on that scale, not bytes.")
    if opened.recipe.precision == "bfloat16":
        notes.append("The run computed in bfloat16. This model computes in float32, so scores may differ slightly.")
    if task.method.evaluation().predict:
        notes.append(f'"{task.method}" is tested with prototypes, but the exported model predicts with its classifier.')
    module = task.net.plain(chosen.tensors)
    folded = fold(module, (stored[0], *preprocessing.window(*stored[1:])))
    given = depends_on_batch(task)
    if given:
        if not clients:
            check_statistics(task.net.module, task.net.name)
        module.load_state_dict(measured_statistics(task, chosen.sent, clients, chosen.tensors), strict=False)
        whose = f"site {clients[0].name}" if len(clients) == 1 else f"{len(clients)} sites"
        notes.append(
            f'Model "{task.net.name}" keeps no normalization statistics, and the run\'s tests use those of each test '
            f"batch. This model has statistics measured on the training images of {whose}."
        )
    measure = part.name if part and chosen.measured_here else None
    return Plain(module, preprocessing, measure, stored, folded, notes, given)


def clients_with_data(opened: OpenRun, site: str | None) -> list[Client]:
    """The clients whose images measure the statistics of a model that keeps none: the site's own, or all."""
    try:
        local = opened.local
    except BadInput as error:
        try:
            check_statistics(opened.task.net.module, opened.task.net.name)
        except BadInput as refusal:
            raise BadInput(f"{refusal} Statistics can be measured where the run's data are: {error}") from error
        raise
    names = [site] if site in opened.facts.clients else opened.facts.clients
    return [local.client(name) for name in names if name is not None]
