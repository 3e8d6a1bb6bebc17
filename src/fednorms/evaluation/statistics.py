"""The statistics that normalisation layers test with: which tensors they are, and measuring them anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from fednorms.errors import BadInput
from fednorms.layers.adaptive_group_norm import AdaptiveGroupNorm
from fednorms.layers.global_norm import GlobalNorm
from fednorms.layers.hybrid_norm import HybridNorm, raw_moments
from fednorms.layers.mixed_norm import MixedNorm
from fednorms.layers.moments import instance_moments
from fednorms.layers.norms import keeps_statistics
from fednorms.layers.representative_norm import RepresentativeNorm, centred
from fednorms.layers.switchable_norm import SwitchableNorm
from fednorms.net import Net
from fednorms.passes import layer_inputs, shuffled_rows
from fednorms.states import Broadcast, Client, Task
from fednorms.tree import Tree


def statistics_layers(net: Net) -> dict[str, nn.Module]:
    """The layers of a net that test with stored statistics, by name."""
    return {name: m for name, m in net.module.named_modules() if keeps_statistics(m)}


def statistics_names(net: Net) -> list[str]:
    """The tensors of a net that hold means and variances; counters and other buffers are not among them.

    >>> from fednorms.method import method
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    >>> statistics_names(Net(model, method("fedavg")))
    ['1.running_mean', '1.running_var']
    """
    return [f"{name}.{leaf}" for name, layer in statistics_layers(net).items() for leaf in _leaves(layer)]


def by_batch(net: Net, model: Tree) -> Tree:
    """A copy of a model whose layers, told to use batch statistics, use those alone and not a mixture.

    Buffers are copied, since such a forward pass updates them.
    """
    out = Tree({**model, **model.pick(net.buffers).clone()})
    for name, layer in statistics_layers(net).items():
        if isinstance(layer, HybridNorm):
            out[f"{name}.phi"] = torch.full_like(model[f"{name}.phi"], torch.inf)  # sigmoid: all weight on the batch
        elif isinstance(layer, MixedNorm):
            out[f"{name}.active"] = torch.zeros_like(model[f"{name}.active"])
    return out


def re_estimated(task: Task, sent: Broadcast, client: Client, model: Tree, mine: dict[str, Tree]) -> Tree:
    """Replace stored statistics by those of the site's own images (no labels used): the mean over batches.

    m = sum n_b m_b / n, v = sum n_b v_b / n over batches of n_b images, with the batch variance that the layer itself
    records (BatchNorm: the unbiased one, so that equal batches give what BatchNorm with momentum=None measures).
    Batches are shuffled by a fixed key, since many readers sort images by class. Dropout is off. A model without such
    layers comes back as it is.
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
            if isinstance(layers[name], RepresentativeNorm):
                x = centred(x, model[f"{name}.centre"])
            for leaf, value in _recorded(layers[name], x).items():
                key = f"{name}.{leaf}"
                sums[key] = sums.get(key, torch.zeros_like(value, dtype=torch.float64)) + len(x) * value.double()
    if not sums:
        raise BadInput(
            f'Site "{client.name}" has {len(client.data)} image(s), too few to estimate statistics from: '
            "give it at least two."
        )
    means = {k: (s / images[k.rpartition(".")[0]]).to(model[k].dtype) for k, s in sums.items()}
    return Tree({**model, **means})


def _leaves(layer: nn.Module) -> tuple[str, str]:
    return ("mean", "var") if isinstance(layer, (GlobalNorm, HybridNorm)) else ("running_mean", "running_var")


def _recorded(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What a layer records of one batch."""
    if isinstance(layer, (AdaptiveGroupNorm, SwitchableNorm)):
        pair = layer.batch_statistics(x)
    elif isinstance(layer, _InstanceNorm):
        means, variances = instance_moments(x, unbiased=True)
        pair = means.mean(0), variances.mean(0)
    else:
        m, v, count = raw_moments(x)
        pair = m, v * (count / max(count - 1, 1))
    return dict(zip(_leaves(layer), pair, strict=True))
