"""How uploads are combined: models by weighted mean, parts' uploads by the reduction that each part declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fednorms.core.errors import BadInput
from fednorms.core.part import Reduction
from fednorms.core.passes import passes
from fednorms.core.states import Combined, Task, Upload
from fednorms.core.tree import Tree, join, mean


def reduce_uploads(trees: list[Tree], weights: list[float], how: Reduction) -> Tree:
    """Combine what clients sent for one part; "grouped" is the weighted mean of each entry over those who sent it.

    >>> rows = [Tree(m=torch.tensor([1.0])), Tree(m=torch.tensor([4.0]))]
    >>> [reduce_uploads(rows, [1.0, 2.0], how)["m"].tolist() for how in ("weighted", "uniform", "sum", "stack")]
    [[3.0], [2.5], [5.0], [[1.0], [4.0]]]
    """
    if how == "grouped":
        return _grouped(trees, weights)
    if how == "list":
        return join(**{str(i): tree for i, tree in enumerate(trees)})
    _refuse_uneven(trees, how)
    if not trees or not trees[0]:
        return Tree()
    if how == "stack":
        return _stack(trees, trees[0])
    counts, equal = [k for k, first in trees[0].items() if is_count(first)], [1.0] * len(trees)
    if how == "sum":
        sums = _stack(trees, counts).map(lambda t: t.sum(dim=0))
        return Tree({**mean(trees, equal) * float(len(trees)), **sums})
    if counts:  # a mean of counters is a number, where models keep the first client's
        trees = [Tree({k: v.double() if k in counts else v for k, v in tree.items()}) for tree in trees]
    return mean(trees, weights if how == "weighted" else equal)


def _grouped(trees: list[Tree], weights: list[float]) -> Tree:
    """The weighted mean of each entry over the clients that sent it.

    These are tensors of models by kind of client; their counters are the first client's, as in any model.
    """
    rows = {name: [(t, w) for t, w in zip(trees, weights, strict=True) if name in t] for tree in trees for name in tree}
    return Tree({k: mean([t.pick([k]) for t, _ in row], [w for _, w in row])[k] for k, row in rows.items()})


def _refuse_uneven(trees: list[Tree], how: Reduction) -> None:
    if uneven := next((i for i, tree in enumerate(trees) if set(tree) != set(trees[0])), 0):
        some = ", ".join(sorted(set(trees[uneven]) ^ set(trees[0]))[:3])
        raise BadInput(
            f'Clients 1 and {uneven + 1} of the round do not send the same entries ({some}), which reduction="{how}" '
            'needs. Send them all, or use reduction="grouped" or "list".'
        )


def _stack(trees: list[Tree], names: Iterable[str]) -> Tree:
    return Tree({k: torch.stack([t[k].to(trees[0][k].device) for t in trees]) for k in names})


def is_count(t: Tensor) -> bool:
    """Whether a tensor holds whole numbers.

    >>> is_count(torch.tensor([3])), is_count(torch.tensor([3.0]))
    (True, False)
    """
    return not (t.is_floating_point() or t.is_complex())


def reductions(task: Task) -> dict[str, Reduction]:
    """How each part's uploads are combined."""
    riding = dict([*passes(task, "before"), *passes(task, "after")])
    return {p.name: riding[p].reduce if p in riding else p.reduction for p in task.method.parts}


def upload_weights(task: Task, uploads: list[Upload]) -> list[float]:
    """One p_k per client (not yet divided by their sum) for models and weighted uploads."""
    uniform = task.method.weighting(task.weighting) == "uniform"
    return [1.0 if uniform else u.weight for u in uploads]


def combine(
    task: Task,
    uploads: list[Upload],
    weights: list[float] | None = None,
    average: Callable[[list[Tree], list[float]], Tree] = mean,
) -> Combined:
    """Combine uploads in the order of client names, so no sum depends on arrival.

    `weights` are by default those of `upload_weights`; with weights, uploads are in the order of client names already.
    `average` combines models.
    """
    if not uploads:  # a round without clients, which only a part that adds noise to it goes through
        return Combined(Tree(), {p.name: Tree() for p in task.method.parts}, 0, Tree())
    if weights is None:
        uploads = sorted(uploads, key=lambda u: u.client)
        weights = upload_weights(task, uploads)
    models = [u.model for u in uploads]
    parts = {}
    for name, how in reductions(task).items():
        try:
            parts[name] = reduce_uploads([u.parts.get(name, Tree()) for u in uploads], weights, how)
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
    even = average(models, [1.0] * len(models)) if any(p.uses_even_mean for p in task.method.parts) else Tree()
    return Combined(average(models, weights), parts, len(uploads), even)
