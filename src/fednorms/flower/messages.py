"""Broadcasts and uploads as Flower records: one ArrayRecord for the model and one per part, dtypes unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fednorms.core.states import Broadcast, Upload
from fednorms.core.tree import Tree
from fednorms.evaluation.scores import SiteScore
from fednorms.flower import schema

ABOUT, MODEL, FIXED, PART, METRICS, UP = "about", "model", "fixed", "part:", "metrics", "up"
NO_METRICS = {"loss": math.nan, "steps": 0.0, "dropped": 0.0}  # the metrics of a site that does not send any
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (
    *_FLOATS,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)  # that torch computes in
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
    known = {MODEL, *(PART + name for name in parts)}
    if unknown := sorted(set(content.array_records) - known):
        raise schema.BadMessage(f"unknown tensors {schema.printable(unknown[0])}")
    if MODEL not in content.array_records or METRICS not in content.metric_records:
        raise schema.BadMessage("no model or no metrics")
    found = _decoded(content, device)
    metrics = schema.read_values(schema.TrainMetrics, content.metric_records[METRICS])
    return Upload(
        client=client,
        weight=weight,
        model=found[MODEL],
        parts={name: found[PART + name] for name in parts if PART + name in found},
        metrics={**NO_METRICS, **metrics.model_dump(exclude_none=True)},
    )


def unpack_measured(content: RecordDict, device: torch.device | str) -> Tree:
    """What a site uploads after an extra pass."""
    if set(content.array_records) != {UP}:
        raise schema.BadMessage(f'tensors "{UP}" expected, got {len(content.array_records)} records')
    return _decoded(content, device)[UP]


def unpack_kept(content: RecordDict) -> int:
    """The round of the state that a site keeps after training."""
    return schema.read_values(schema.TrainWords, about(content)).kept


def refusal(content: RecordDict) -> tuple[str, str] | None:
    """The name and the text of the error that a site answers with; None if it answers with a result."""
    words = about(content)
    return (
        (schema.printable(words.get("error", "")), schema.printable(words["reason"], 2000))
        if "reason" in words
        else None
    )


def pack_score(score: SiteScore, *, class_counts: bool) -> MetricRecord:
    """A site's scores as a MetricRecord; recall per class tells class counts, so it is sent only where they may be."""
    values = dict(vars(score))
    return MetricRecord(values if class_counts else values | {"recall": []})


def unpack_score(record: MetricRecord, classes: int, samples: int) -> SiteScore:
    """The inverse of `pack_score`; `samples` is what the site's card says about the tested split."""
    found = schema.read_values(schema.ScoreRecord, record)
    if found.samples != samples:
        raise schema.BadMessage(f"samples: {samples} expected, as on the site's card, got {found.samples}")
    if found.recall and len(found.recall) != classes:
        raise schema.BadMessage(f"recall: {classes} entries expected, got {len(found.recall)}")
    return SiteScore(**found.model_dump())


def nbytes(content: RecordDict) -> int:
    """The number of bytes that the tensors of a message take when serialized."""
    return sum(record.count_bytes() for record in content.array_records.values())


def _with_parts(content: RecordDict, parts: Mapping[str, Tree]) -> RecordDict:
    for name, tree in parts.items():
        if tree:
            content[PART + name] = array_record(tree)
    return content


def _decoded(content: RecordDict, device: torch.device | str) -> dict[str, Tree]:
    """All trees of a message; bytes from a stranger can make the decoder raise anything."""
    try:
        found = trees(content, device)
    except Exception as error:
        raise schema.BadMessage(f"tensors cannot be read, {type(error).__name__}: {error}") from None
    for name, t in ((name, t) for tree in found.values() for name, t in tree.items()):
        if t.dtype not in DTYPES:
            raise schema.BadMessage(f"{name} is of {str(t.dtype).removeprefix('torch.')}, which no part sends")
    return found
