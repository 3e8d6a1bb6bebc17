"""The analysis of filters that drift at clients."""

from __future__ import annotations

import torch
from torch import nn

from fednorms.core.errors import BadInput
from fednorms.papers.analysis.filter_drift import activations, drifted, relative_change
from fednorms.papers.analysis.findings import Findings
from fednorms.papers.analysis.registry import Drawing, analysis
from fednorms.papers.analysis.stored_run import StoredRun


@analysis("filter-drift", "FedNN Figure 3", Drawing("matrices", y="activation"))
def _filter_drift(stored: StoredRun) -> Findings:
    """How activations change when one client shifts its filters and another scales them, with and without WN.

    A toy: the filters are those of the model's first convolution, WN is weight normalization, and the change is
    relative to the activations before.
    """
    subject = stored.last
    net = subject.run.task.net
    first = next((name for name, m in net.module.named_modules() if isinstance(m, nn.Conv2d) and m.groups == 1), None)
    if first is None:
        raise BadInput(f'Model "{net.name}" has no convolution.')
    weight = subject.tensors(subject.server)[f"{first}.weight"].detach().cpu()
    site = subject.sites[0]
    assert site.test is not None
    x, _ = site.test.batch([0])
    x = subject.run.task.preprocessing.unit(x, dtype=torch.float32)
    scalars, arrays = {}, {}
    for kind, normalized in (("plain", False), ("weight-normalized", True)):
        maps = {name: activations(x, w, normalized=normalized) for name, w in drifted(weight).items()}
        for name, values in maps.items():
            if name != "start":
                scalars[f"{kind}, {name}"] = relative_change(maps["start"], values)
            arrays[f"{kind}, {name}"] = values[0, 0].cpu().numpy()
    return Findings(scalars, arrays=arrays, words={"layer": first})
