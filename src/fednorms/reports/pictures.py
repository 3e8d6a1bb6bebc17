"""The worst cases as pictures, with labels and predictions; only if asked for."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from fednorms.core.errors import BadInput
from fednorms.data import Federation
from fednorms.evaluation.predictions import Predictions
from fednorms.reports.elements import Html, tag
from fednorms.reports.page import Section, note, paragraph, warning
from fednorms.reports.stored import RunRecord
from fednorms.runs.identity import custom_name
from fednorms.runs.session import open_federation

_MOST, _MOST_OF_A_SITE = 24, 8
_SIDE = 160  # pixels of a picture on the page
_WARNING = "This page contains images of the sites, which may be of patients. Share it as carefully as the images."


def worst_cases(run: RunRecord, federation: Federation | None = None) -> Section:
    """The wrong predictions that gave the true class the lowest probability; needs the run's data."""
    title = "Worst cases"
    said = run.predictions.get(run.result.headline)
    if said is None or run.facts is None:
        return Section(title, [note("The run has not stored its predictions, so its worst cases are not known.")])
    assert run.headline is not None
    data, classes = _data(run, federation), run.facts.classes
    found = [case for site, p in said.items() for case in _of_site(site, p)]
    cases = sorted(found)[:_MOST]
    if not cases:
        return Section(title, [paragraph("Every test image was classified correctly.")])
    shown = []
    for _, site, at in cases:
        split = next(s for s in data.sites if s.name == site).splits[run.headline.split]
        p = said[site]
        if split.y.tolist() != p.labels.tolist():
            raise BadInput(f'The images of site "{site}" are not those that the run was tested on.')
        x, _ = split.batch([at])
        pixels = data.preprocessing.unit(x)[0].clamp(0, 1).mul(255).round().byte().cpu().numpy()
        row, label = p.probabilities[at], int(p.labels[at])
        guess = int(row.argmax())
        truth = f"{classes[label]}, said {classes[guess]}"
        caption = tag(
            "figcaption", tag("b", truth), tag("br"), f"{site}; {_share(row[guess])} sure, truth {_share(row[label])}"
        )
        shown.append(tag("figure", tag("img", src=_picture(pixels), alt=f"{truth} ({site})"), caption))
    lead = f"True class, answer, site, and the probabilities of answer and truth; at most {_MOST_OF_A_SITE} per site."
    return Section(title, [warning(_WARNING), paragraph(lead), tag("div", shown, class_="cases")])


def _of_site(site: str, p: Predictions) -> list[tuple[float, str, int]]:
    """The worst wrong predictions of a site: probability of the true class, site and position."""
    true = p.probabilities[np.arange(len(p)), p.labels]
    wrong = np.flatnonzero(p.probabilities.argmax(1) != p.labels)
    worst = wrong[np.argsort(true[wrong], kind="stable")][:_MOST_OF_A_SITE]
    return [(float(true[i]), site, int(i)) for i in worst]


def _share(probability: float) -> str:
    return f"{100 * probability:.0f} %"


def _data(run: RunRecord, federation: Federation | None) -> Federation:
    """The run's data; refused if they are not those that the run was made on."""
    recipe = run.result.recipe
    if federation is None and recipe.federation.startswith("custom:"):
        raise BadInput(
            f"The run's data were passed as an object ({custom_name(recipe.federation)}). Pass them again, as "
            "federation=, to show images."
        )
    try:
        data = open_federation(recipe) if federation is None else federation
    except BadInput as error:
        raise BadInput(f"Images need the run's data, but they cannot be read: {error}") from error
    if recipe.fingerprint and recipe.fingerprint != data.fingerprint():
        raise BadInput(
            f'Images need the data that the run was made on, but federation "{recipe.federation}" has changed since. '
            "Restore the data, or write the report without images."
        )
    return data


def _picture(pixels: np.ndarray) -> Html:
    """Bytes, channels x height x width, as the source of an image: small ones lossless, large ones as JPEG."""
    layers = np.moveaxis(pixels, 0, -1)
    image = Image.fromarray(layers if layers.shape[-1] == 3 else layers[..., 0])
    small = max(image.size) <= _SIDE
    image.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG" if small else "JPEG", quality=85)
    kind = "png" if small else "jpeg"
    return Html(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}")
