"""Fuzz over all kinds of messages: whatever one site sends, the server never raises, and the honest sites finish."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")

import json
import math

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednorms.core.tree import Tree
from fednorms.flower import messages
from tests.support.replay import served

METHODS = ("fedavg", "scaffold + fedbn", "hbn", "fedrdn", "fedplvm", "fedproto", "fednova + fedfa", "fedexp", "fednorm")
HONEST = {"faint", "foggy"}

numbers = st.one_of(
    st.sampled_from(
        [0, -1, 1, 2**31, 2**63, -(2**63), 10**15, math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-320, 0.5]
    ),
    st.integers(-(2**62), 2**62),
    st.floats(),
)
texts = st.one_of(st.text(max_size=20), st.sampled_from(["clean", "faint", "\x1b[31m", "../../etc", "x" * 5000, ""]))
scalars = st.one_of(numbers, texts, st.booleans(), st.none())
trees_of_json = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
integers = st.integers(-(2**62), 2**62)
in_config = st.one_of(
    integers, st.floats(), texts, st.booleans(), st.binary(max_size=20),
    st.lists(st.floats(), max_size=12), st.lists(texts, max_size=4), st.lists(integers, max_size=12),
)  # fmt: skip
in_metrics = st.one_of(integers, st.floats(), st.lists(st.floats(), max_size=12), st.sampled_from([0, 1, 2.5, 1e9]))


def _filled(value):
    return lambda t: torch.full_like(t, value) if t.is_floating_point() or math.isfinite(value) else t


def _safe(value):
    return max(min(value, 2.0**62), -(2.0**62)) if math.isfinite(value) else value


changes_of_tensors = st.one_of(
    st.sampled_from([
        lambda t: t.flatten(), lambda t: t[:0] if t.dim() else t, lambda t: t.unsqueeze(0), lambda t: t.double(),
        lambda t: t.half(), lambda t: t.bool(), lambda t: t.to(torch.int64) if not t.isnan().any() else t, lambda t: -t,
        lambda t: t.expand(3, *t.shape), lambda t: t[:1] if t.dim() else t, lambda t: t + 0j, lambda t: t.sum(),
        lambda t: None, lambda t: torch.zeros(0), lambda t: torch.zeros(50_000),
    ]),
    numbers.map(lambda v: _filled(_safe(float(v)))),
    numbers.map(lambda v: lambda t: t * _safe(float(v)) if t.is_floating_point() else t),
)  # fmt: skip


def _card(words: dict) -> dict:
    """The card in a reply; none if an earlier attack has left nothing of it."""
    try:
        said = json.loads(words["card"])
    except (KeyError, TypeError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


@st.composite
def attacks(draw):
    """A function that changes a reply of one kind: (kind, true content) -> content."""
    kind = draw(st.sampled_from(["hello", "train", "evaluate", "measure"]))
    how = draw(st.sampled_from(["words", "card", "cards", "text", "metrics", "tensor", "record", "error", "nothing"]))
    which, value, other = draw(st.integers(0, 30)), draw(in_config), draw(in_metrics)
    card, change, text = draw(trees_of_json), draw(changes_of_tensors), draw(texts)
    more = draw(st.dictionaries(texts, trees_of_json, max_size=3))

    def attack(content: RecordDict) -> RecordDict:
        new = RecordDict({k: content[k] for k in content})
        words = dict(content.config_records.get("about", {}))
        if how == "words":
            name = sorted({*words, "error", "reason", "site", "kept"})[
                which % len({*words, "error", "reason", "site", "kept"})
            ]
            new["about"] = ConfigRecord({**words, name: value})
        elif how in ("card", "cards") and (said := _card(words)):
            name = sorted(said)[which % len(said)]
            new["about"] = ConfigRecord({"card": json.dumps({**said, name: card, **(more if how == "cards" else {})})})
        elif how == "text" and "card" in words:
            new["about"] = ConfigRecord({"card": json.dumps(card) if which % 2 else text})
        elif how == "metrics" and content.metric_records:
            name = sorted(content.metric_records)[which % len(content.metric_records)]
            record = dict(content.metric_records[name])
            key = sorted({*record, "loss"})[which % len({*record, "loss"})]
            new[name] = MetricRecord({**record, key: other})
        elif how == "tensor" and content.array_records:
            name = sorted(content.array_records)[which % len(content.array_records)]
            tree = Tree(messages.tree_of(content.array_records[name]))
            key = sorted(tree)[which % len(tree)] if tree else "none"
            changed = change(tree.pop(key, torch.zeros(2)))
            new[name] = messages.array_record(Tree({**tree, **({} if changed is None else {key: changed})}))
        elif how == "record" and content:
            name = sorted(content)[which % len(content)]
            spare = [ConfigRecord({"a": 1}), MetricRecord({"a": 1}), ArrayRecord([np.zeros(2)]), None][which % 4]
            del new[name]
            if spare is not None:
                new[name if which % 3 else "part:x"] = spare
        elif how == "error":
            new = RecordDict({"about": ConfigRecord({"error": "Diverged" if which % 2 else text, "reason": value})})
        elif how == "nothing":
            new = RecordDict()
        return new

    return kind, attack


def cases(*methods: str):
    return st.tuples(st.sampled_from(methods), st.lists(attacks(), min_size=1, max_size=3))


def finishes(case) -> None:
    method, planned = case

    def change(kind: str, content: RecordDict) -> RecordDict:
        for on, attack in planned:
            if on == kind:
                content = attack(content)
        return content

    result = served(method, "clean", change)
    assert [row["round"] for row in result.history] == [1, 2]
    for row in result.history:
        assert not HONEST & {*row.get("lost", {}), *row["diverged"]}
        for scores in row["scores"].values():
            assert set(scores["sites"]) >= HONEST
            assert 0 <= scores["mean"] <= 1
        json.dumps(row, allow_nan=True)
    assert result._state.model.finite()
    assert all(tree.finite() for tree in result._state.parts.values())


PLAIN = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=60, **PLAIN)
@given(cases("fedavg", "scaffold + fedbn", "hbn", "fedplvm"))
def test_a_sample_of_crafted_messages(case):
    finishes(case)


@pytest.mark.slow
@settings(max_examples=5000, **PLAIN)
@given(cases(*METHODS))
def test_five_thousand_crafted_messages(case):
    finishes(case)
