"""How the sites of a federation differ in size, labels and pixels, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fednorms.core.errors import BadInput, writing
from fednorms.core.optional import new_figure
from fednorms.core.options import nearest
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.rules import draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKED_AT = 512  # images per site whose pixels are measured
_ROWS = 24  # sites in the picture
_PIXELS = 66  # of an image in the picture


@dataclass(frozen=True)
class SiteView:
    """One site: labels are those of its training data, or of its test data if it has no training data."""

    name: str
    domain: str
    train: int
    val: int
    test: int
    labels: tuple[int, ...]
    label_shift: float  # total variation distance of its labels from the pooled ones
    mean: tuple[float, ...]  # per channel, in [0, 1]
    std: tuple[float, ...]
    feature_shift: float  # distance of its channels' means and deviations from the pooled ones, in pooled deviations


@dataclass(frozen=True)
class View:
    """A federation in numbers; `label_shift` and `feature_shift` are means over the clients.

    Label shift of client k: TV_k = 1/2 sum_c |p_k(c) - p(c)| with p the labels of all training data; 0 if all are
    equal, near 1 if each client has different classes. Feature shift: the mean over channels of
    sqrt((m_k - m)^2 + (s_k - s)^2) / s with means m and standard deviations s of pixels; it sees brightness, contrast
    and tint, not texture.
    """

    name: str
    classes: tuple[str, ...]
    sites: tuple[SiteView, ...]
    label_shift: float
    feature_shift: float
    size_ratio: float  # largest client over smallest

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "sites": [vars(site) for site in self.sites]}


def view(federation: Federation) -> View:
    """Measure a federation.

    >>> from fednorms.data.registry import federation
    >>> found = view(federation("digits-shift"))
    >>> found.label_shift < 0.02 < found.feature_shift
    True
    """
    shown = [(site, _looked_at(site)) for site in (*federation.clients, *federation.unseen)]
    clients = len(federation.clients)
    counts = np.array([np.bincount(part.y.numpy(), minlength=federation.num_classes) for _, part in shown])
    pooled = counts[:clients].sum(0) / counts[:clients].sum()
    moments = np.array([_moments(part, federation) for _, part in shown])  # sites x (mean, mean of squares) x channels
    weight = counts[:clients].sum(1) / counts[:clients].sum()
    m, s = _deviation(np.tensordot(weight, moments[:clients], 1))
    rows = []
    for (site, _), labels, moment in zip(shown, counts, moments, strict=True):
        mean, std = _deviation(moment)
        rows.append(
            SiteView(
                site.name,
                site.domain,
                len(site.train or ()),
                len(site.val or ()),
                len(site.test or ()),
                tuple(labels.tolist()),
                float(np.abs(labels / labels.sum() - pooled).sum() / 2),
                tuple(mean.tolist()),
                tuple(std.tolist()),
                float(np.mean(np.sqrt((mean - m) ** 2 + (std - s) ** 2) / np.maximum(s, 1e-6))),
            )
        )
    sizes = [row.train for row in rows[:clients]]
    return View(
        federation.name,
        tuple(federation.classes),
        tuple(rows),
        float(np.mean([row.label_shift for row in rows[:clients]])),
        float(np.mean([row.feature_shift for row in rows[:clients]])),
        max(sizes) / min(sizes),
    )


def picture(federation: Federation, path: str | Path, images: int = 8, found: View | None = None) -> Path:
    """Draw sample images of every site, the labels of every client and their sizes, as one PNG.

    Of more than 24 sites, 24 are drawn. Needs matplotlib (the extra "report").
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("The picture needs matplotlib: pip install 'fednorms[report]'.") from None
    file = Path(path)
    if file.suffix.lower() != ".png":
        raise BadInput(f'The picture is a PNG file: its name must end in .png, got "{path}".')
    found = found or view(federation)
    rows = [found.sites[i] for i in _even(len(found.sites), _ROWS)]
    # Without pyplot there is no window and no global state.
    figure = Figure(figsize=(4.5 + 0.55 * images, 1.6 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 3, width_ratios=[0.55 * images, 2.2, 1.0])
    left, middle, right = (figure.add_subplot(grid[0, i]) for i in range(3))
    left.imshow(_mosaic([federation.site(row.name) for row in rows], federation, images), aspect="auto")
    left.set_yticks([(i + 0.5) * _PIXELS for i in range(len(rows))], [_short(row.name) for row in rows])
    left.set_xticks([])
    left.set_title("images")
    shares = np.array([np.array(row.labels) / max(1, sum(row.labels)) for row in rows])
    middle.imshow(shares, aspect="auto", cmap="Greens", vmin=0)
    middle.set_title("labels")
    middle.set_yticks([])
    ticks = _even(len(found.classes), 12)
    middle.set_xticks(ticks, [_short(found.classes[i], 10) for i in ticks], rotation=90)
    places = np.arange(len(rows))
    right.barh(places, [row.train or row.test for row in rows], color="0.45")
    right.set_ylim(len(rows) - 0.5, -0.5)
    right.set_yticks([])
    right.set_title("size")
    figure.suptitle(
        f"{found.name}: {len(federation.clients)} clients, label shift {found.label_shift:.2f}, "
        f"feature shift {found.feature_shift:.2f}",
        fontsize=10,
        wrap=True,
    )
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
    return file


def _looked_at(site: Site) -> Split:
    part = site.train or site.test or site.val
    assert part is not None  # a federation has no site without data
    return part


def _even(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, evenly spaced."""
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).round().astype(int).tolist()


def _moments(part: Split, federation: Federation) -> np.ndarray:
    x = federation.preprocessing.unit(part.batch(_even(len(part), _LOOKED_AT))[0], torch.float64)
    return torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))]).numpy()


def _deviation(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, square = moments
    return mean, np.sqrt(np.maximum(square - mean**2, 0))


def _mosaic(sites: Sequence[Site], federation: Federation, images: int) -> np.ndarray:
    canvas = torch.ones(3, len(sites) * _PIXELS, images * _PIXELS)
    for i, site in enumerate(sites):
        part = _looked_at(site)
        for j, at in enumerate(_one_of_each(part.y, images)):
            _put(canvas, i, j, federation, part, at)
    return canvas.permute(1, 2, 0).numpy()


def _put(canvas: Tensor, i: int, j: int, federation: Federation, part: Split, at: int) -> None:
    """Draw one image of a split into row i and column j."""
    x = federation.preprocessing.unit(part.batch([at])[0])[0]
    color = x[:3] if len(x) >= 3 else x[:1].expand(3, -1, -1)
    rows, columns = (slice(k * _PIXELS + 1, (k + 1) * _PIXELS - 1) for k in (i, j))  # a white line between
    seen = _visible(color).unsqueeze(0)
    canvas[:, rows, columns] = functional.interpolate(seen, size=(_PIXELS - 2,) * 2, mode="area")[0]


def sites_by_class(
    federation: Federation, sites: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> Figure:
    """Draw one image of every site and class, chosen at random; a class that a site does not have stays white."""
    known = list(federation.classes)
    if unknown := [c for c in classes or () if c not in known]:
        raise BadInput(f'Federation "{federation.name}" has no class "{unknown[0]}": {nearest(unknown[0], known)}')
    everyone = [*federation.clients, *federation.unseen]
    rows = [everyone[i] for i in _even(len(everyone), 12)] if sites is None else [federation.site(s) for s in sites]
    columns = [known[i] for i in _even(len(known), 10)] if classes is None else list(classes)
    canvas = torch.ones(3, len(rows) * _PIXELS, len(columns) * _PIXELS)
    for i, site in enumerate(rows):
        part = _looked_at(site)
        order = draws("show", len(part)).permutation(len(part))
        labels = part.y.numpy()[order]
        for j, name in enumerate(columns):
            if len(here := np.flatnonzero(labels == known.index(name))):
                _put(canvas, i, j, federation, part, int(order[here[0]]))
    figure = new_figure(1.8 + 0.62 * len(columns), 1.1 + 0.62 * len(rows))
    axis = figure.subplots()
    axis.imshow(canvas.permute(1, 2, 0).numpy())
    axis.set_yticks([(i + 0.5) * _PIXELS for i in range(len(rows))], [_short(site.name) for site in rows])
    axis.set_xticks([(j + 0.5) * _PIXELS for j in range(len(columns))], [_short(c, 10) for c in columns], rotation=45)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(f"{federation.name}: {len(rows)} of {len(everyone)} sites, {len(columns)} of {len(known)} classes")
    return figure


def _visible(x: Tensor) -> Tensor:
    """Values in [0, 1]: images that were stored normalized are rescaled."""
    if x.min() < 0 or x.max() > 1:
        x = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-6)
    return x


def _one_of_each(y: Tensor, most: int) -> list[int]:
    """Positions of up to `most` images, one class after the other, chosen at random."""
    labels = y.numpy()
    shuffled = draws("show", len(labels)).permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    ranks = np.concatenate([np.arange(n) for n in np.bincount(labels) if n]) if len(order) else order
    return [int(i) for i in order[np.lexsort((labels[order], ranks))][:most]]


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
