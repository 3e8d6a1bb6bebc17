"""A site that sends crafted replies: what it may try, as functions that change one reply."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Message, MetricRecord

from fednorms.flower import messages
from tests.support.flower_in_process import run

SITES = "clean,faint,foggy"  # the hostile one is first by name
HOSTILE, HONEST = "clean", ("faint", "foggy")
QUICK = {"rounds": 1, "training__steps": 2, "training__epochs": 1, "deploy__wait": 1.0, "evaluate_every": 1}

Craft = Callable[[Message], None]


def run_against(craft: Craft, kind: str, folder: Path, method: str = "fedavg", sites: str = SITES, **changes):
    """A run in which one of three sites changes its replies of a kind (hello, train, evaluate or measure)."""

    def fault(site: str, message: Message, reply: Message) -> Message:
        if site == HOSTILE and message.metadata.message_type.removeprefix("query.") == kind and not reply.has_error():
            craft(reply)
        return reply

    nodes = {100 + i: {"site": n, "attribute.modality": n} for i, n in enumerate(sites.split(","))}
    return run(method, folder, nodes=nodes, fault=fault, **{"deploy__sites": sites, **QUICK, **changes})


def card(**values) -> Craft:
    """Say something else on the card."""

    def craft(reply: Message) -> None:
        text = json.dumps(json.loads(reply.content["about"]["card"]) | values)
        reply.content["about"]["card"] = text

    return craft


def card_text(text: str) -> Craft:
    def craft(reply: Message) -> None:
        reply.content["about"]["card"] = text

    return craft


def words(**values) -> Craft:
    """Say something else besides the tensors."""

    def craft(reply: Message) -> None:
        for key, value in values.items():
            reply.content["about"][key] = value

    return craft


def tensor(change, name: str = "conv1.weight", record: str = "model") -> Craft:
    """Send another tensor; `change` gets the true one, and may return None for none."""

    def craft(reply: Message) -> None:
        tree = messages.tree_of(reply.content.array_records[record])
        changed = change(tree.pop(name))
        if changed is not None:
            tree[name] = changed
        reply.content[record] = messages.array_record(tree)

    return craft


def rows(count: int, record: str) -> Craft:
    """Repeat the first row of every tensor of a record."""

    def craft(reply: Message) -> None:
        tree = messages.tree_of(reply.content.array_records[record])
        reply.content[record] = messages.array_record(tree.map(lambda t: t[:1].expand(count, *t.shape[1:])))

    return craft


def metric(**values) -> Craft:
    """Send other metrics of training."""

    def craft(reply: Message) -> None:
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **values})

    return craft


def score(**values) -> Craft:
    """Send other scores, in every test."""

    def craft(reply: Message) -> None:
        for name in list(reply.content.metric_records):
            if name != "metrics":
                reply.content[name] = MetricRecord({**reply.content[name], **values})

    return craft


def without(record: str) -> Craft:
    def craft(reply: Message) -> None:
        reply.content.pop(record, None)

    return craft


def about_nothing(reply: Message) -> None:
    reply.content["about"] = ConfigRecord({})


NAN, INF = math.nan, math.inf
