"""The roster: which node is which site, and sending messages to sites with a deadline.

A node is a number from Flower. A site is the name in its node's config, and every node is asked once per start for its
site's card. With a roster file (`keys.py`), a node's key must belong to the site that it names, when it joins and at
every reply; a key that is revoked no longer counts, in the running round, too. Without one (in Flower's simulation),
names are believed, and if two nodes claim the same one, the first counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Thread
from time import monotonic

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPError, HTTPStatusError

from fednorms.core.errors import BadInput, RunFailed
from fednorms.data.facts import ACROSS_MACHINES, Facts
from fednorms.data.sizes import Size
from fednorms.flower import messages
from fednorms.flower.agreement import Card, capped, majority
from fednorms.flower.keys import Watched
from fednorms.flower.schema import BadMessage, printable
from fednorms.flower.settings import Deployment

POLL = 0.25  # seconds between two checks for replies
STILL = "its last reply is still being uploaded"
PATIENCE = 5.0  # seconds that one check waits for replies that are being uploaded


@dataclass
class Answers:
    """The replies of sites, and why the others sent none."""

    contents: dict[str, RecordDict] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)


class Roster:
    """The sites of a run and the nodes behind them; `keys` says which key belongs to which site."""

    def __init__(
        self, grid: Grid, deployment: Deployment, keys: Watched | None = None, size: Size | None = None
    ) -> None:
        self.grid, self.deployment, self.keys, self.size = grid, deployment, keys, size
        self.names: list[str] = deployment.site_names  # in the order of the run; fixed once the run has begun
        self.cards: dict[str, Card] = {}  # of every site that ever joined
        self._nodes: dict[int, Card] = {}  # accepted nodes, in the order in which they answered
        self._refused: dict[int, str] = {}
        self._pulls: dict[str, Pull] = {}  # looks for replies that have not ended
        self._late: dict[str, str] = {}  # the message of each site whose reply was still being uploaded at a deadline
        self._greeted: dict[str, int] = {}  # hello messages without a reply so far
        self._online: dict[int, str] = {}  # connected nodes, and when each was started
        self._started: dict[int, str] = {}  # when each node was started that was ever connected
        self._public: dict[int, bytes] = {}  # the key of each node that was ever connected
        self._strangers: set[int] = set()  # nodes whose keys are not in the roster
        self._news: dict[str, str] = {}  # nodes refused since `news` was last called
        self.usual: Card | None = None  # whose data all must fit; until the run has begun, most sites decide

    @property
    def facts(self) -> Facts:
        """The facts of all sites, merged from their cards; their numbers of images are limited."""
        merged = Facts.merged(ACROSS_MACHINES, {name: card.facts for name, card in self.cards.items()}, self.names)
        return replace(merged, samples=sum(self.samples.values()))

    @property
    def samples(self) -> dict[str, int]:
        """The training images that each site counts for; `deploy.max_weight` limits them."""
        return capped(self.cards, self.deployment.max_weight)

    @property
    def unbounded(self) -> list[str]:
        """The sites of the run for which the roster file has no number of images."""
        try:
            known = self.keys.images() if self.keys is not None else self.names
        except BadInput:  # the file is being edited; `look` says so
            return []
        return [name for name in self.names if name not in known]

    # -- who is there -------------------------------------------------------------------------------------------
    def gather(self) -> None:
        """Wait until all sites have joined, or until enough have when the time is up; then fix the names."""
        enough = max(self.deployment.minimum, len(self.names))
        self.wait_for(enough, self.names)
        if not self.names:
            here = sorted({(self.cards[site].order, site) for site in self.here()})
            self.names = [site for _, site in here]
        self._refuse_tie()
        odd, self.usual = self._odd(), self.usual or next(iter(self._majority()), None)
        for node, reason in odd.items():
            self._refused[node] = self._news[f"node {node}"] = reason
            card = self._nodes.pop(node)
            if self.cards.get(card.site) is card:
                del self.cards[card.site]

    def wait_for(self, count: int, names: list[str]) -> None:
        """Wait until this many of the named sites (or of any, if none are named) are connected."""
        end = time.monotonic() + self.deployment.wait
        while True:
            self.look()
            here = [name for name in self.here() if not names or name in names]
            if len(here) >= count and (names or not self._greeted):
                return
            if time.monotonic() > end:
                if len(here) >= min(self.deployment.minimum, count):
                    return
                missing = [name for name in names if name not in here]
                raise RunFailed(
                    f"Too few sites have joined within {self.deployment.wait:g} s: expected {count}, found {len(here)}"
                    + (f"; missing: {', '.join(missing)}" if missing else "")
                    + "".join(f"; refused: {reason}" for reason in (*self._refused.values(), *self._odd().values()))
                    + ". Start their nodes, and run again to continue from the last checkpoint."
                )
            time.sleep(POLL)

    def here(self) -> dict[str, int]:
        """The connected sites, with their nodes."""
        found: dict[str, int] = {}
        odd = self._odd()
        for node, card in self._nodes.items():
            if node in self._online and node not in odd:
                found.setdefault(card.site, node)
        return found

    def _odd(self) -> dict[int, str]:
        """The nodes whose data do not fit those of most sites, with the reason."""
        usual = self.usual or next(iter(self._majority()), None)
        wrong = {n: card.differs(usual) for n, card in self._nodes.items()} if usual is not None else {}
        return {n: f'site "{self._nodes[n].site}" does not fit, {why}' for n, why in wrong.items() if why}

    def _refuse_tie(self) -> None:
        """Refuse to begin where as many sites say one thing as another, and the project does not decide."""
        opinions = [] if self.usual is not None else self._majority()
        if len(opinions) > 1:
            first, second, *_ = opinions
            raise RunFailed(
                f'Sites "{first.site}" and "{second.site}" do not fit together, {second.differs(first)}. No majority '
                "says who is right. Name the classes in deploy.classes and the size of images in data.size, or correct "
                "one of the sites."
            )

    def _majority(self) -> list[Card]:
        first: dict[str, Card] = {}
        for node, card in self._nodes.items():
            if node in self._online:
                first.setdefault(card.site, card)
        return majority(first, self.deployment.class_names, self.size)

    def news(self) -> dict[str, str]:
        """Which nodes were refused since the last call, and why."""
        news, self._news = self._news, {}
        return news

    def look(self) -> None:
        """Update the connected nodes, ask new ones for their cards, and read the cards that have arrived."""
        before, self._online = set(self._online), self._connected()
        for node in before - set(self._online):
            self._refused.pop(node, None)
        for node, start in self._online.items():
            card = self._nodes.get(node)
            moved = self.keys is not None and card is not None and card.site != self._owner(node)
            if self._started.setdefault(node, start) != start or moved:  # its data may be others now: greet it again
                self._started[node] = start
                self._nodes.pop(node, None)
                self._refused.pop(node, None)
                self._greeted = {m: n for m, n in self._greeted.items() if n != node}
        waiting = set(self._greeted.values())
        new = [n for n in self._online if n not in self._nodes and n not in self._refused and n not in waiting]
        hellos = [self._message("query.hello", RecordDict({messages.ABOUT: ConfigRecord({})}), n) for n in sorted(new)]
        if hellos:
            pushed = list(self.grid.push_messages(hellos))
            self._greeted.update({m: n for m, n in zip(pushed, sorted(new), strict=False) if m})
        came = [(self._greeted.pop(number), reply) for number, reply in self._pull(set(self._greeted)).items()]
        for node, reply in sorted(came, key=lambda pair: pair[0]):
            if (reason := self._admit(node, reply)) != "":
                self._refused[node] = self._news[f"node {node}"] = reason
        gone = [m for m, n in self._greeted.items() if n not in self._online]
        for message in gone:
            del self._greeted[message]

    def _connected(self) -> dict[int, str]:
        """The connected nodes whose keys count, and when each was started."""
        if self.keys is None:
            return dict.fromkeys(self.grid.get_node_ids(), "")
        nodes = {n.node_id: n for n in self.grid.get_nodes()}
        self._public |= {number: n.public_key for number, n in nodes.items()}
        strangers = [number for number in nodes if not self._owner(number) and number not in self._strangers]
        self._strangers |= set(strangers)
        self._news |= {f"node {number}": "its key is not in the roster" for number in strangers}
        return {number: n.last_activated_at for number, n in nodes.items() if self._owner(number)}

    def _owner(self, node: int) -> str:
        """The site that a node's key belongs to now; empty if none, or while the roster file cannot be read."""
        assert self.keys is not None
        try:
            return self.keys.owners().get(self._public.get(node, b""), "")
        except BadInput as error:
            self._news["roster"] = str(error)
            return ""

    def _admit(self, node: int, reply: Message | BadMessage) -> str:
        """Accept a node by its card; otherwise say why not."""
        if isinstance(reply, BadMessage):
            return str(reply)
        if reply.has_error():
            return f"its app failed: {printable(reply.error.reason, 5000)}"
        words = messages.about(reply.content)
        if (told := messages.refusal(reply.content)) is not None:
            return told[1]
        try:
            card = Card.from_json(words.get("card"))
        except BadMessage as error:
            return f"its card cannot be read ({error})"
        if self.keys is not None and self._owner(node) != card.site:
            return f'it calls itself "{card.site}", but its key belongs to site "{self._owner(node)}"'
        if self.names and card.site not in self.names:
            return f'site "{card.site}" is not one of {", ".join(self.names)}'
        if self.usual is not None and (wrong := card.differs(self.usual)):
            return f'site "{card.site}" does not fit, {wrong}'
        if card.facts.samples < 1:
            return f'site "{card.site}" has no training images'
        if wrong := self._too_many(card):
            return wrong
        if card.site in self.here():
            self._news[f"node {node}"] = f'a second node is called "{card.site}"; the first one counts'
        else:
            self.cards[card.site] = card
        self._nodes[node] = card
        return ""

    def _too_many(self, card: Card) -> str:
        """Why a card's number of training images is not believed; empty if it is."""
        try:
            registered = self.keys.images().get(card.site) if self.keys is not None else None
        except BadInput as error:
            return str(error)
        most = self.deployment.max_images if registered is None else registered
        if card.facts.samples <= most:
            return ""
        where = "deploy.max_images" if registered is None else "the roster"
        return f'site "{card.site}" claims {card.facts.samples:,} training images, but {where} allows {most:,}'

    # -- asking -------------------------------------------------------------------------------------------------
    def ask(self, kind: str, contents: Mapping[str, RecordDict]) -> Answers:
        """Send each site its message and wait for the replies until the deadline; late ones are never read."""
        self.look()
        here, answers = self.here(), Answers()
        answers.lost = {name: "not connected" for name in contents if name not in here}
        self._late = {name: number for name, number in self._late.items() if not self._over(number)}
        answers.lost |= {name: STILL for name in contents if name in here and name in self._late}
        asked = [name for name in contents if name in here and name not in self._late]
        for name in asked:
            self.cards[name] = self._nodes[here[name]]
        outgoing = [self._message(kind, contents[name], here[name]) for name in asked]
        ids: list[str | None] = list(self.grid.push_messages(outgoing)) if outgoing else []
        ids = ids or [None] * len(asked)  # Flower accepts none of them if they are too large together
        started = {name: self._online[here[name]] for name in asked}
        open_: dict[str, str] = {}
        for name, message in zip(asked, ids, strict=True):
            if message:
                open_[message] = name
            else:
                answers.lost[name] = "the message could not be sent"
        end = time.monotonic() + self.deployment.deadline
        while open_ and time.monotonic() < end:
            for number, reply in self._pull(set(open_)).items():
                name = open_.pop(number)
                if reason := self._gone(name, here[name], started[name]):
                    answers.lost[name] = reason
                else:
                    self._sort(name, reply, answers)
            if open_:
                self.look()  # nodes that connect in the meantime take part in the next round
                gone = {m: self._gone(name, here[name], started[name]) for m, name in open_.items()}
                answers.lost |= {open_.pop(message): reason for message, reason in gone.items() if reason}
                time.sleep(POLL)
        answers.lost |= {name: f"no reply within {self.deployment.deadline:g} s" for name in open_.values()}
        self._late |= {name: message for message, name in open_.items() if not self._over(message)}
        return answers

    def _over(self, number: str) -> bool:
        """Whether the last look for a reply has ended; a late reply is dropped."""
        if number in self._pulls and not self._pulls[number].ended(0.0):
            return False
        self._pulls.pop(number, None)
        return True

    def _gone(self, name: str, node: int, start: str) -> str:
        """Why a node that was asked no longer answers for its site; empty if it may still do so."""
        if self.keys is None:
            return ""
        if self._owner(node) != name:
            return "its key was revoked"
        return "its node was started again, or away for a minute" if self._online.get(node, start) != start else ""

    def _sort(self, name: str, reply: Message | BadMessage, answers: Answers) -> None:
        if isinstance(reply, BadMessage):
            answers.lost[name] = str(reply)
            return
        if reply.has_error():
            answers.lost[name] = printable(reply.error.reason or f"error {reply.error.code}", 5000)
            return
        words = messages.about(reply.content)
        if (told := messages.refusal(reply.content)) is not None:
            where = answers.diverged if told[0] == "Diverged" else answers.lost
            where[name] = told[1]
        elif words.get("site") != name:
            answers.lost[name] = f'answered as "{printable(words.get("site"))}"'
        else:
            answers.contents[name] = reply.content

    def _message(self, kind: str, content: RecordDict, node: int) -> Message:
        return Message(content, node, kind, ttl=self.deployment.deadline + 60)

    def _pull(self, ids: set[str]) -> dict[str, Message | BadMessage]:
        """The replies that have arrived, pulled one at a time: bytes that Flower cannot read cost no other reply."""
        for number in sorted(ids - set(self._pulls)):
            self._pulls[number] = Pull(self.grid, number)
        end = monotonic() + PATIENCE
        found: dict[str, Message | BadMessage] = {}
        for number in sorted(ids):
            if self._pulls[number].ended(end - monotonic()):
                found |= self._pulls.pop(number).found()
        return found


class Pull:
    """One look for a reply, in a thread: Flower waits for hours until a site has uploaded all of a reply."""

    def __init__(self, grid: Grid, number: str) -> None:
        self._grid, self._number = grid, number
        self._found: dict[str, Message | BadMessage] = {}
        self._error: HTTPError | None = None
        self._thread = Thread(target=self._pull, daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Whether it has ended, after waiting so long for it."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def found(self) -> dict[str, Message | BadMessage]:
        """What it has found."""
        if self._error is not None:
            raise self._error
        return self._found

    def _pull(self) -> None:
        try:
            for reply in self._grid.pull_messages([self._number]):
                self._found[self._number] = reply
        except HTTPStatusError as error:  # the link fails at this reply; if it is the link itself, the next look fails
            answer = error.response.status_code
            self._found[self._number] = BadMessage(f"sent a reply that Flower's link cannot hand over ({answer})")
        except HTTPError as error:  # the link, not the site
            self._error = error
        except Exception as error:
            self._found[self._number] = BadMessage(f"sent a message that cannot be read ({printable(repr(error))})")
