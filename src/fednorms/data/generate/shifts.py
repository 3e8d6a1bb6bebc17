"""A federation with chosen label shift and feature shift. Not from a paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.preprocessing import Preprocessing
from fednorms.data.federation import Federation, Site, Split
from fednorms.data.label_rules import by_class
from fednorms.data.rules import draws
from fednorms.data.splits import split


def shift(
    x: Tensor,
    y: Tensor,
    classes: Sequence[str],
    clients: int = 5,
    label: float = 0.0,
    feature: float = 0.0,
    val: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
) -> Federation:
    """Divide images over clients with chosen strengths of label shift and feature shift, each from 0 to 1.

    label: this fraction of every class is sorted by class and divided in equal blocks; the rest is divided evenly. At 0
    all clients have the same labels, at 1 each has a few classes. The distance from the pooled labels grows linearly.

    feature: client k sees x + feature (c_k(x) - x) with a camera c_k(x) = offset + gain x or offset + gain (1 - x);
    offset and gain are drawn per channel. At 0 all images look the same; the distance from x grows linearly.

    The division does not depend on `feature`, and the cameras do not depend on `label`.

    >>> x, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 3
    >>> made = shift(x, y, list("abc"), clients=3, label=1.0, feature=0.5)
    >>> [site.train.y.unique().numel() for site in made.clients]
    [1, 1, 1]
    """
    wrong = [f"{n} must be 0 to 1, got {v}" for n, v in (("label", label), ("feature", feature)) if not 0 <= v <= 1]
    if not 1 <= clients <= len(y):
        wrong.append(f"clients must be 1 to {len(y)} (the number of images), got {clients}")
    if wrong:
        raise BadInput(f"shift: {'; '.join(wrong)}.")
    unit = Preprocessing().unit(x)
    sites = []
    width = len(str(clients - 1))
    for k, at in enumerate(_divide(y.numpy(), len(classes), clients, label, seed)):
        name = f"client-{k:0{width}d}"
        seen = _through_camera(unit[at], feature, seed, k)
        if x.dtype == torch.uint8:
            seen = (seen * 255).round().to(torch.uint8)
        parts = {p: Split(seen[i], y[at][i]) for p, i in split(y[at], {"val": val, "test": test}, seed, name).items()}
        sites.append(Site(name, name, parts.get("train"), parts.get("val"), parts.get("test")))
    source = {"spec": "shift", "clients": clients, "label": label, "feature": feature, "seed": seed}
    return Federation(f"shift, label {label:g}, feature {feature:g}", sites, classes, source=source)


def _divide(y: np.ndarray, classes: int, clients: int, label: float, seed: int) -> list[np.ndarray]:
    r = draws("shift", "labels", seed)
    order = [r.permutation(at) for at in by_class(y, classes)]
    cuts = [round(label * len(at)) for at in order]
    ranks = r.permutation(classes)
    blocks = np.array_split(np.concatenate([order[c][: cuts[c]] for c in ranks]), clients)
    dealt = np.concatenate([at[cut:] for at, cut in zip(order, cuts, strict=True)])
    # Starting with the last client, because array_split gives what is left over to the first ones.
    return [np.sort(np.concatenate([block, dealt[::-1][clients - 1 - k :: clients]])) for k, block in enumerate(blocks)]


def _through_camera(x: Tensor, feature: float, seed: int, client: int) -> Tensor:
    r = draws("shift", "camera", seed, client)
    channels = x.shape[1]
    gain = torch.from_numpy(r.uniform(0.2, 0.8, (channels, 1, 1))).to(x.dtype)
    offset = (1 - gain) * torch.from_numpy(r.random_sample((channels, 1, 1))).to(x.dtype)
    scene = 1 - x if r.random_sample() < 0.5 else x
    return x + feature * (offset + gain * scene - x)
