"""A site that sends crafted replies: what it may try, as functions that change one reply."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fednorms.core.tree import Tree
from fednorms.flower import messages
from fednorms.runs.result import Result
from tests.support.replay import served

HOSTILE, HONEST = "clean", ("faint", "foggy")  # the hostile one is first by name

Craft = Callable[[RecordDict], None]


def run_against(craft: Craft, kind: str, method: str = "fedavg", **changes) -> Result:
    """A run in which one of three sites changes its replies of a kind (hello, train, evaluate or measure)."""

    def change(asked: str, content: RecordDict) -> RecordDict:
        if asked == kind:
            craft(content)
        return content

    return served(method, HOSTILE, change, **changes)


def honest_run(method: str = "fedavg", **changes) -> Result:
    """The same run without the hostile site."""
    return run_against(lambda content: content.clear(), "train", method, **changes)


def card(**values) -> Craft:
    """Say something else on the card."""

    def craft(reply: RecordDict) -> None:
        text = json.dumps(json.loads(reply["about"]["card"]) | values)
        reply["about"]["card"] = text

    return craft


def card_text(text: str) -> Craft:
    def craft(reply: RecordDict) -> None:
        reply["about"]["card"] = text

    return craft


def words(**values) -> Craft:
    """Say something else besides the tensors."""

    def craft(reply: RecordDict) -> None:
        for key, value in values.items():
            reply["about"][key] = value

    return craft


def tensor(change, name: str = "conv1.weight", record: str = "model") -> Craft:
    """Send another tensor; `change` gets the true one, and may return None for none."""

    def craft(reply: RecordDict) -> None:
        tree = messages.tree_of(reply.array_records[record])
        changed = change(tree.pop(name))
        if changed is not None:
            tree[name] = changed
        reply[record] = messages.array_record(tree)

    return craft


def named(name: str) -> Craft:
    """Send one more tensor, under this name."""

    def craft(reply: RecordDict) -> None:
        tree = messages.tree_of(reply.array_records["model"])
        reply["model"] = messages.array_record(Tree({**tree, name: next(iter(tree.values()))}))

    return craft


def rows(count: int, record: str) -> Craft:
    """Repeat the first row of every tensor of a record."""

    def craft(reply: RecordDict) -> None:
        tree = messages.tree_of(reply.array_records[record])
        reply[record] = messages.array_record(tree.map(lambda t: t[:1].expand(count, *t.shape[1:])))

    return craft


def metric(**values) -> Craft:
    """Send other metrics of training."""

    def craft(reply: RecordDict) -> None:
        reply["metrics"] = MetricRecord({**reply["metrics"], **values})

    return craft


def score(**values) -> Craft:
    """Send other scores, in every test."""

    def craft(reply: RecordDict) -> None:
        for name in list(reply.metric_records):
            if name != "metrics":
                reply[name] = MetricRecord({**reply[name], **values})

    return craft


def without(record: str) -> Craft:
    def craft(reply: RecordDict) -> None:
        reply.pop(record, None)

    return craft


def about_nothing(reply: RecordDict) -> None:
    reply["about"] = ConfigRecord({})


NAN, INF = math.nan, math.inf
