"""Broadcasts and uploads as Flower records: one ArrayRecord for the model and one per part, dtypes unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fednorms.core.states import Broadcast, Upload
from fednorms.core.tree import Tree
from fednorms.evaluation.scores import SiteScore

ABOUT, MODEL, FIXED, PART, METRICS = "about", "model", "fixed", "part:", "metrics"
NO_METRICS = {"loss": math.nan, "steps": 0.0, "dropped": 0.0}  # the metrics of a site that does not send any
About = dict[str, str | int | float | bool | list[str]]


def array_record(tree: Tree) -> ArrayRecord:
    """A tree as an ArrayRecord, with the same names, order, shapes and dtypes."""
    return ArrayRecord({k: t.detach().cpu().contiguous() for k, t in tree.items()})


def tree_of(record: ArrayRecord, device: torch.device | str = "cpu") -> Tree:
    """The tree of an ArrayRecord, copied into torch's own memory: rounding may depend on alignment."""
    arrays = ((k, torch.from_numpy(array.numpy())) for k, array in record.items())
    return Tree({k: t.to(device).clone(memory_format=torch.contiguous_format) for k, t in arrays})


def about(content: RecordDict) -> Mapping[str, object]:
    """What a message says besides its tensors."""
    record = content.config_records.get(ABOUT)
    return record if record is not None else {}


def trees(content: RecordDict, device: torch.device | str = "cpu") -> dict[str, Tree]:
    """All trees of a message, by record name."""
    return {name: tree_of(record, device) for name, record in content.array_records.items()}


def pack_broadcast(sent: Broadcast, model: Tree, fixed: Tree, words: About) -> RecordDict:
    """A broadcast as records; `model` holds the tensors that are sent, `fixed` those that are sent only once."""
    content = RecordDict({ABOUT: ConfigRecord({"round": sent.round, **words}), MODEL: array_record(model)})
    if fixed:
        content[FIXED] = array_record(fixed)
    return _with_parts(content, sent.parts)


def unpack_broadcast(
    content: RecordDict, fixed: Tree, names: list[str], parts: list[str], device: torch.device | str
) -> Broadcast:
    """The broadcast in a message; `names` gives the order of its model, `parts` those of the method."""
    found = trees(content, device)
    whole = {**fixed, **found[MODEL]}
    return Broadcast(
        round=int(str(about(content)["round"])),
        model=Tree({name: whole[name] for name in names}),
        parts={name: found.get(PART + name, Tree()) for name in parts},
    )


def pack_upload(upload: Upload, words: About, *, with_metrics: bool = True) -> RecordDict:
    """An upload as records; the metrics are the training loss and the numbers of steps."""
    metrics = {name: float(value) for name, value in upload.metrics.items()} if with_metrics else {}
    content = RecordDict(
        {ABOUT: ConfigRecord(dict(words)), MODEL: array_record(upload.model), METRICS: MetricRecord(metrics)}
    )
    return _with_parts(content, upload.parts)


def unpack_upload(
    content: RecordDict, client: str, weight: float, parts: list[str], device: torch.device | str
) -> Upload:
    """The upload in a message; its sender and weight are what the server knows, not what the message claims."""
    found = trees(content, device)
    metrics = content.metric_records[METRICS]
    return Upload(
        client=client,
        weight=weight,
        model=found[MODEL],
        parts={name: found[PART + name] for name in parts if PART + name in found},
        metrics={name: float(str(metrics.get(name, default))) for name, default in NO_METRICS.items()},
    )


def pack_score(score: SiteScore) -> MetricRecord:
    """A site's scores as a MetricRecord."""
    return MetricRecord(dict(vars(score)))


def unpack_score(record: MetricRecord) -> SiteScore:
    """The inverse of `pack_score`."""
    values = dict(record)
    return SiteScore(**values)


def nbytes(content: RecordDict) -> int:
    """The number of bytes that the tensors of a message take when serialized."""
    return sum(record.count_bytes() for record in content.array_records.values())


def _with_parts(content: RecordDict, parts: Mapping[str, Tree]) -> RecordDict:
    for name, tree in parts.items():
        if tree:
            content[PART + name] = array_record(tree)
    return content
