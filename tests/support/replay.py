"""A Grid that answers with recorded replies: only the server's work, thousands of times faster than training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.app import Message, RecordDict

from fednorms.engines.devices import numerics, repeatable
from fednorms.flower.roster import Roster
from fednorms.flower.server import open_session
from fednorms.flower.settings import read
from fednorms.runs.result import Result
from fednorms.runs.rounds import play
from tests.support.flower_in_process import config_of, nodes_for, run, travelled

SITES = "clean,faint,foggy"
SHORT = {"rounds": 2, "training__steps": 2, "evaluate_every": 1, "deploy__wait": 1.0, "deploy__deadline": 1.0}
Key = tuple[str, str, object, object]  # site, kind, round, pass
Change = Callable[[str, RecordDict], RecordDict]  # (kind, true reply) -> what the hostile site sends


def _key(site: str, message: Message) -> Key:
    words = message.content["about"]
    return site, message.metadata.message_type.removeprefix("query."), words.get("round"), words.get("when")


@cache
def recorded(method: str, changes: tuple[tuple[str, object], ...] = ()) -> dict[Key, RecordDict]:
    """All replies of an honest run of three sites."""
    found: dict[Key, RecordDict] = {}

    def keep(site: str, message: Message, reply: Message) -> Message:
        found[_key(site, message)] = travelled(reply).content
        return reply

    with TemporaryDirectory() as folder:
        run(method, Path(folder), nodes=nodes_for(SITES), fault=keep, deploy__sites=SITES, **SHORT | dict(changes))
    return found


def _copied(content: RecordDict) -> RecordDict:
    """The same reply in new records; tensors are shared."""
    new = RecordDict()
    for name in content:
        new[name] = type(content[name])(dict(content[name]))
    return new


class Replay:
    """Three nodes whose replies are recorded; `change` decides what one of them sends instead."""

    def __init__(self, replies: dict[Key, RecordDict], hostile: str, change: Change) -> None:
        self.replies_of, self.hostile, self.change = replies, hostile, change
        self.nodes = {100 + i: site for i, site in enumerate(SITES.split(","))}
        self.waiting: dict[str, Message] = {}
        self.numbers = itertools.count(1)

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            number = f"message {next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = number
            site = self.nodes[message.metadata.dst_node_id]
            key = _key(site, message)
            content = self.replies_of[key]
            if site == self.hostile:
                content = self.change(key[1], _copied(content))
            self.waiting[number] = Message(content, reply_to=message)
            ids.append(number)
        return ids

    def pull_messages(self, message_ids):
        return [self.waiting.pop(m) for m in list(message_ids) if m in self.waiting]


def served(method: str, hostile: str, change: Change, **changes) -> Result:
    """The rounds of a run over recorded replies; nothing is written, because a disk would take most of the time.

    `changes` of the config that do not start with "deploy" also change what honest sites reply.
    """
    at_sites = tuple(sorted((k, v) for k, v in changes.items() if not k.startswith("deploy")))
    recipe, deployment = read(config_of(method, Path("nowhere"), **{"deploy__sites": SITES, **SHORT, **changes}))
    recipe = recipe.resolved()
    with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.threads, recipe.seed):
        roster = Roster(Replay(recorded(method, at_sites), hostile, change), deployment)
        roster.gather()
        return play(open_session(recipe, roster), None)
