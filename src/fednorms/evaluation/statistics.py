"""The stored statistics of normalization layers: which tensors they are, and how to re-estimate them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednorms.core.errors import BadInput
from fednorms.core.net import Net
from fednorms.core.norms import Statistics, keeps_statistics, statistics_of
from fednorms.core.passes import layer_inputs, shuffled_rows
from fednorms.core.states import Broadcast, Client, Task
from fednorms.core.tree import Tree


def statistics_layers(net: Net) -> dict[str, nn.Module]:
    """The layers of a net that test with stored statistics, by name."""
    return {name: m for name, m in net.module.named_modules() if keeps_statistics(m)}


def statistics_names(net: Net) -> list[str]:
    """The tensors of a net that hold means and variances; counters and other buffers are not among them.

    >>> from fednorms.methods.registry import method
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    >>> statistics_names(Net(model, method("fedavg")))
    ['1.running_mean', '1.running_var']
    """
    return [f"{name}.{leaf}" for name, layer in statistics_layers(net).items() for leaf in _kept(layer).names]


def by_batch(net: Net, model: Tree) -> Tree:
    """A copy of a model whose layers, if told to use batch statistics, use only those and no mixture.

    Buffers are copied, since such a forward pass updates them.
    """
    out = Tree({**model, **model.pick(net.buffers).clone()})
    for name, layer in statistics_layers(net).items():
        changed = _kept(layer).batch_only(layer, _tensors(name, layer, model))
        out.update({f"{name}.{leaf}": value for leaf, value in changed.items()})
    return out


def re_estimated(task: Task, sent: Broadcast, client: Client, model: Tree, mine: dict[str, Tree]) -> Tree:
    """Replace stored statistics by those of the site's own images, without labels: the mean over batches.

    m = sum n_b m_b / n, v = sum n_b v_b / n over batches of n_b images, with the batch variance that the layer itself
    records. For BatchNorm that is the unbiased one, so equal batches give the same as BatchNorm with momentum=None.
    Batches are shuffled by a fixed key, because many readers sort images by class. Dropout is off. A model without
    such layers is returned unchanged.
    """
    layers = statistics_layers(task.net)
    if not layers:
        return model
    sums: dict[str, Tensor] = {}
    images: dict[str, int] = {}
    plain = by_batch(task.net, model)
    rows = shuffled_rows(client.name, len(client.data))
    for inputs in layer_inputs(task, sent, client, plain, mine, keeps_statistics, rows, train=False):
        for name, x in inputs.items():
            images[name] = images.get(name, 0) + len(x)
            kept, tensors = _kept(layers[name]), _tensors(name, layers[name], model)
            for leaf, value in zip(kept.names, kept.measure(layers[name], tensors, x), strict=True):
                key = f"{name}.{leaf}"
                sums[key] = sums.get(key, torch.zeros_like(value, dtype=torch.float64)) + len(x) * value.double()
    if not sums:
        raise BadInput(
            f'Site "{client.name}" has too few images to estimate statistics: expected at least 2, found '
            f"{len(client.data)}."
        )
    means = {k: (s / images[k.rpartition(".")[0]]).to(model[k].dtype) for k, s in sums.items()}
    return Tree({**model, **means})


def _kept(layer: nn.Module) -> Statistics:
    found = statistics_of(layer)
    assert found is not None
    return found


def _tensors(name: str, layer: nn.Module, model: Tree) -> dict[str, Tensor]:
    """A layer's own tensors in a model, by their names within the layer."""
    leaves = [*dict(layer.named_parameters(recurse=False)), *dict(layer.named_buffers(recurse=False))]
    return {leaf: model[f"{name}.{leaf}"] for leaf in leaves if f"{name}.{leaf}" in model}
