"""Broadcasts and uploads as Flower records: one ArrayRecord for the model and one per part, dtypes as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fednorms.core.states import Broadcast, Upload
from fednorms.core.tree import Tree
from fednorms.evaluation.scores import SiteScore

ABOUT, MODEL, FIXED, PART, METRICS = "about", "model", "fixed", "part:", "metrics"
SILENT = {"loss": math.nan, "steps": 0.0, "dropped": 0.0}  # how the training went, if a site does not tell
About = dict[str, str | int | float | bool | list[str]]


def array_record(tree: Tree) -> ArrayRecord:
    """A tree as an ArrayRecord: names, order, shapes and dtypes stay."""
    return ArrayRecord({k: t.detach().cpu().contiguous() for k, t in tree.items()})


def tree_of(record: ArrayRecord, device: torch.device | str = "cpu") -> Tree:
    """The tree of an ArrayRecord, copied into torch's own memory: kernels may round by alignment."""
    arrays = ((k, torch.from_numpy(array.numpy())) for k, array in record.items())
    return Tree({k: t.to(device).clone(memory_format=torch.contiguous_format) for k, t in arrays})


def about(content: RecordDict) -> Mapping[str, object]:
    """What a message says beside its tensors."""
    record = content.config_records.get(ABOUT)
    return record if record is not None else {}


def trees(content: RecordDict, device: torch.device | str = "cpu") -> dict[str, Tree]:
    """All trees of a message by the names of their records."""
    return {name: tree_of(record, device) for name, record in content.array_records.items()}


def pack_broadcast(sent: Broadcast, model: Tree, fixed: Tree, words: About) -> RecordDict:
    """A broadcast as records; `model` are the tensors that travel, `fixed` those that travel once."""
    content = RecordDict({ABOUT: ConfigRecord({"round": sent.round, **words}), MODEL: array_record(model)})
    if fixed:
        content[FIXED] = array_record(fixed)
    return _with_parts(content, sent.parts)


def unpack_broadcast(
    content: RecordDict, fixed: Tree, names: list[str], parts: list[str], device: torch.device | str
) -> Broadcast:
    """The broadcast of a message; `names` orders its model, `parts` are the method's."""
    found = trees(content, device)
    whole = {**fixed, **found[MODEL]}
    return Broadcast(
        round=int(str(about(content)["round"])),
        model=Tree({name: whole[name] for name in names}),
        parts={name: found.get(PART + name, Tree()) for name in parts},
    )


def pack_upload(upload: Upload, words: About, *, telling: bool = True) -> RecordDict:
    """An upload as records; `telling` also how the training went: its loss, and how many steps there were."""
    metrics = {name: float(value) for name, value in upload.metrics.items()} if telling else {}
    content = RecordDict(
        {ABOUT: ConfigRecord(dict(words)), MODEL: array_record(upload.model), METRICS: MetricRecord(metrics)}
    )
    return _with_parts(content, upload.parts)


def unpack_upload(
    content: RecordDict, client: str, weight: float, parts: list[str], device: torch.device | str
) -> Upload:
    """The upload of a message; who sent it and how much it weighs is what the server knows, not what is claimed."""
    found = trees(content, device)
    metrics = content.metric_records[METRICS]
    return Upload(
        client=client,
        weight=weight,
        model=found[MODEL],
        parts={name: found[PART + name] for name in parts if PART + name in found},
        metrics={name: float(str(metrics.get(name, silent))) for name, silent in SILENT.items()},
    )


def pack_score(score: SiteScore) -> MetricRecord:
    """A site's scores as a MetricRecord."""
    return MetricRecord(dict(vars(score)))


def unpack_score(record: MetricRecord) -> SiteScore:
    """The inverse of `pack_score`."""
    values = dict(record)
    return SiteScore(**values)


def nbytes(content: RecordDict) -> int:
    """How many bytes the tensors of a message take, as they are serialised."""
    return sum(record.count_bytes() for record in content.array_records.values())


def _with_parts(content: RecordDict, parts: Mapping[str, Tree]) -> RecordDict:
    for name, tree in parts.items():
        if tree:
            content[PART + name] = array_record(tree)
    return content
