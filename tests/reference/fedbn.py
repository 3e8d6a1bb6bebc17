"""FedBN, Li et al. 2021: the average skips every tensor of every BatchNorm layer."""

from __future__ import annotations

import copy

from torch import nn

from tests.reference.fedavg import average, train


def fedbn(model: nn.Module, clients, plans, lr, statistics_only=False) -> list[nn.Module]:
    """Returns the clients' models after the last average was loaded (SiloBN with statistics_only, by size)."""
    private = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            tensors = module.named_buffers() if statistics_only else module.state_dict().items()
            private |= {f"{prefix}.{name}" for name, _ in tensors}
    models = [copy.deepcopy(model) for _ in clients]
    for plan in plans:
        for local, (x, y), batches in zip(models, clients, plan, strict=True):
            train(local, x, y, batches, lr)
        weights = [float(len(x)) if statistics_only else 1.0 for x, _ in clients]
        mean = average([m.state_dict() for m in models], weights)
        for local in models:
            own = local.state_dict()
            local.load_state_dict({k: own[k] if k in private else mean[k] for k in own})
    return models
