"""A site's side of a run: its data, its state, and the reference engine on both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.passes import passes
from fednorms.core.states import Broadcast, ClientState, Upload
from fednorms.core.tree import Tree
from fednorms.core.views import Mechanism
from fednorms.data import Federation, Preprocessing
from fednorms.data.changes import changed
from fednorms.data.facts import Facts
from fednorms.data.folders import site_from_folder
from fednorms.data.folders.broken import Broken
from fednorms.engines.base import EngineSettings, Trained
from fednorms.engines.loop import Loop
from fednorms.evaluation.modes import Mode
from fednorms.evaluation.scores import SiteScore
from fednorms.flower.generations import NONE, Generations, default_root, file_name
from fednorms.flower.ledger import NEW_RUN, Answer, Ledger, request_of
from fednorms.flower.policy import Policy
from fednorms.flower.settings import Deployment, Scalar, fingerprint
from fednorms.runs.assemble import assemble
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Data, Recipe
from fednorms.runs.session import open_federation
from fednorms.runs.store.clients import ClientStore

AT_THE_SITES = "custom:at the sites"  # the recipe's federation if the data are folders at the sites


def open_site(recipe: Recipe, deployment: Deployment, node: Mapping[str, Scalar]) -> Federation:
    """Open the data of one site, as a federation of one site, as the node's config says.

    `data` is a folder of class/image, and `site` the site's name (default: the folder's). The recipe's options for
    data apply to it, except those that need several sites, which are refused. Without `data`, the site is taken from
    the recipe's federation, by name or by the `partition-id` of Flower's simulation.
    """
    name = str(node.get("site", ""))
    attributes = {k.removeprefix("attribute."): str(v) for k, v in node.items() if k.startswith("attribute.")}
    if "data" not in node:
        return _part_of_federation(recipe, node, name, attributes)
    if not deployment.class_names:
        raise BadInput("deploy.classes is empty. The project must name the classes: the folder names at every site.")
    options = recipe.data
    if options.group and "group" not in node:
        raise BadInput(
            "The run names a pattern for file names (data.group), which only a site may choose. Start the node with "
            "--config group=PATTERN."
        )
    _refuse_several_sites(options)
    left_out: list[Broken] = []
    site = site_from_folder(
        str(node["data"]),
        deployment.class_names,
        size=options.size,
        channels=deployment.channels,
        val=0.1 if options.val is None else options.val,
        test=0.2 if options.test is None else options.test,
        seed=options.seed or 0,
        group=str(node.get("group", "")) or None,
        copies=options.copies,
        skip_broken=options.skip_broken,
        left_out=left_out,
    )
    name = name or site.name
    site = replace(site, name=name, domain=str(node.get("domain", name)), attributes=attributes)
    source = {"group": str(node.get("group", "")), "left_out": [str(one) for one in left_out]}
    made = Federation("site", [site], deployment.class_names, Preprocessing.centered(deployment.channels), source)
    copies = None if options.copies == "keep" else options.copies
    return changed(made, copies, options.subset, options.normalize or None, options.seed or 0)


def _refuse_several_sites(options: Data) -> None:
    """Refuse what no site can do by itself: each opens its own folder only, and ids or images are not compared."""
    for name, given, why in (
        ("group_across", options.group_across, "Sites do not compare ids of patients"),
        ("hold_out", options.hold_out, "A site that shall not train does not join"),
        ("proxy", options.proxy, "No image leaves a site"),
        ("partition", options.partition, "Each site keeps its own images"),
    ):
        if given:
            raise BadInput(f"The run has data.{name}, which cannot apply to folders at the sites. {why}: leave it out.")


def _part_of_federation(
    recipe: Recipe, node: Mapping[str, Scalar], name: str, attributes: dict[str, str]
) -> Federation:
    if recipe.federation == AT_THE_SITES or not (name or "partition-id" in node):
        raise BadInput(
            'The node names no data. Start it with --node-config \'site="north" data="/path/of/class/folders"\'.'
        )
    if "partition-id" not in node and node.get("federation") != recipe.federation and _names_files(recipe):
        raise BadInput(
            "The run names files, and a site opens only those that its own node names. Start it with --data FOLDER, or "
            f'with --config federation="{recipe.federation}".'
        )
    found = open_federation(recipe)
    number = int(node.get("partition-id", 0))
    if not name and number >= len(found.clients):
        raise BadInput(
            f'Federation "{found.name}" has {len(found.clients)} sites and none for partition {number}. '
            "Simulate as many nodes as there are sites."
        )
    site = found.site(name) if name else found.clients[number]
    site = replace(site, attributes={**site.attributes, **attributes})
    return Federation(found.name, [site], found.classes, found.preprocessing, protocol=found.protocol)


def _names_files(recipe: Recipe) -> bool:
    """Whether a recipe says which files to open, instead of naming a federation that the library makes itself."""
    data = recipe.data
    return bool(data.root) or data.partition.startswith("file:") or not re.fullmatch(r"[\w-]+", recipe.federation)


class SiteClient:
    """A site as a client of the run, while it answers one message."""

    def __init__(
        self,
        recipe: Recipe,
        federation: Federation,
        node: Mapping[str, Scalar],
        facts: Facts,
        policy: Policy,
        model: nn.Module | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.site = federation.sites[0]
        root = Path(str(node["state"])) if "state" in node else default_root()
        self.policy = policy
        self.generations = Generations(root.expanduser(), fingerprint(recipe), self.site.name)
        self.ledger = Ledger(root.expanduser(), file_name(self.site.name))
        here = recipe.resolved().model_copy(update={"pretrained": False, "weights": ""})  # the server sends the weights
        self.task = assemble(here, facts, model, loss, deployed=True)
        self.engine = Loop(self.task, federation, federation, ClientStore(2**60), EngineSettings(here.threads))
        self.device = self.task.like.device
        for p in self.task.method.parts:
            p.arrange(federation)  # fails if a part needs attributes that this site lacks

    @contextmanager
    def counted(self, t: int) -> Iterator[None]:
        """Count a message where the policy or the method needs it; meanwhile no other one is answered."""
        if self.policy.messages_per_round is None and self.mechanism is None:
            yield
            return
        with self.ledger.held():
            if self.policy.messages_per_round is not None:
                self.ledger.count(self.generations.recipe, t, self.policy.messages_per_round)
            yield

    def recall(self, accepted: int) -> None:
        """Restore the state that the server accepted last."""
        state = self.generations.load(accepted, self.device)
        if state is not None:
            self.engine.store.put(self.site.name, state)
        self.engine.store.mark_clean()

    def keep(self, accepted: int) -> int:
        """Write a changed state to disk before the reply; returns the round that the server should accept."""
        if self.site.name not in self.engine.store.changed:
            return accepted
        state = self.engine.store[self.site.name]
        self.generations.save(state, accepted)
        return state.round

    def fixed(self, sent: Tree) -> Tree:
        """The tensors that are sent once: those of this message, or those stored from the first one."""
        names = [n for n in self.task.net.initial if n not in set(self.task.net.exchanged)]
        if sent:
            self.generations.save_fixed(sent)
            return sent
        return self.generations.load_fixed(self.device) if names else Tree()

    def measure(self, sent: Broadcast, part: str, when: str) -> Tree:
        """Run one extra pass; what a "setup" pass keeps is stored in the site's state."""
        p, job = next(
            (p, job) for p in self.task.method.parts for job in p.passes() if (p.name, job.when) == (part, when)
        )
        kept, up = self.engine.measure(p, job, sent, [self.site.name])[self.site.name]
        if job.when == "setup":
            self._put(part, kept)
        return up

    def train(self, sent: Broadcast, *, score: bool) -> Trained:
        """Train for a round; a site that joined late first runs the setup passes on its own data."""
        for p, job in passes(self.task, "setup"):
            state = self.engine.store.get(self.site.name)
            if state is None or p.name not in state.parts:
                self._put(p.name, self.engine.measure(p, job, sent, [self.site.name])[self.site.name][0])
        return self.engine.train(sent, [self.site.name], score=score)

    @property
    def mechanism(self) -> Mechanism | None:
        """The noise that this site adds to what it sends; None if it adds none."""
        found = self.task.method.privacy
        mechanism = found[1].mechanism if found else None
        return mechanism if mechanism is not None and mechanism.where == "client" else None

    def answer_again(self, sent: Broadcast) -> Upload | None:
        """The noised answer that was given to this request before; None if there was none."""
        given = self.ledger.find(self.generations.recipe, sent.round, request_of(sent))
        if given is None:
            return None
        if not self.generations.has_answer(sent.round):
            raise BadInput(f"This site has answered round {sent.round + 1} of this run. {NEW_RUN}")
        if given.kept != NONE and (state := self.generations.load(given.kept, self.device)) is not None:
            self.engine.store.put(self.site.name, state)
        return Upload(self.site.name, 0.0, self.generations.load_answer(sent.round, self.device), {})

    def write_down(self, sent: Broadcast, upload: Upload, mechanism: Mechanism, accepted: int) -> None:
        """Store a noised answer with the state that belongs to it, and count it, before it is sent."""
        kept = self.keep(accepted)
        self.generations.save_answer(sent.round, upload.model)
        run, request = self.generations.recipe, request_of(sent)
        answer = Answer(
            run=run, round=sent.round, request=request, clip=mechanism.clip, noise=mechanism.noise, kept=kept
        )
        self.ledger.record(answer)

    def score(self, sent: Broadcast, mode: str, split: str) -> SiteScore | None:
        """Test a mode on a split; None if the site has no such data."""
        if split not in ("val", "test") or split not in self.site.splits:  # never the training images
            return None
        return self.engine.score_sites({self.site.name: sent}, split, Mode.read(mode))[self.site.name]

    def _put(self, part: str, kept: Tree) -> None:
        old = self.engine.store.get(self.site.name) or ClientState(0, Tree(), {})
        self.engine.store.put(self.site.name, replace(old, parts={**old.parts, part: kept}))
