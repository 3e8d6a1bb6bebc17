"""The ClientApp: answers "hello" with the site's card, and trains, evaluates and measures for the server."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fednorms.core.errors import FednormsError
from fednorms.core.states import Broadcast
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.devices import numerics, repeatable
from fednorms.explain.deployable import refuse_obstacles
from fednorms.flower import messages, settings
from fednorms.flower.agreement import Card, read_agreement
from fednorms.flower.messages import ABOUT, FIXED
from fednorms.flower.site import SiteClient, open_site
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe

SiteSource = Callable[[Context, Recipe], Federation]
Answer = Callable[[SiteClient, Broadcast, RecordDict], RecordDict]


def client_app(
    site: SiteSource | None = None, model: Callable[[], nn.Module] | None = None, loss: Loss | None = None
) -> ClientApp:
    """Make the ClientApp of a project, for any recipe and method.

    Args:
        site: returns the data of a site as a `Federation` of one site. By default the node's config names a folder of
            class/image (`data`) and the site's name (`site`).
        model: makes a custom model; torch's generators then have the recipe's seed. The server's app needs the same
            function. By default the recipe names the model.
        loss: a custom loss.
    """
    app = ClientApp()

    def federation_of(context: Context) -> tuple[Recipe, Federation]:
        recipe, deployment = settings.read(context.run_config)
        if "device" in context.node_config:
            recipe = recipe.model_copy(update={"device": str(context.node_config["device"])})
        if site is not None:
            return recipe, site(context, recipe)
        return recipe, open_site(recipe, deployment, context.node_config)

    def hello(message: Message, context: Context) -> RecordDict:
        recipe, federation = federation_of(context)
        order = int(context.node_config.get("partition-id", 0))
        card = Card.of(federation, counts=recipe.class_weights == "balanced", order=order)
        return RecordDict({ABOUT: ConfigRecord({"card": card.to_json()})})

    def at_site(answer: Answer) -> Callable[[Message, Context], RecordDict]:
        def handle(message: Message, context: Context) -> RecordDict:
            recipe, federation = federation_of(context)
            words = messages.about(message.content)
            with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.resolved().threads, recipe.seed):
                start = model() if model else None
                facts = read_agreement(str(words["agreement"]))
                client = SiteClient(recipe, federation, context.node_config, facts, start, loss)
                refuse_obstacles(client.task.method)
                accepted = int(str(words["accepted"]))
                client.recall(accepted)
                sent_once = message.content.array_records.get(FIXED)
                fixed = client.fixed(Tree() if sent_once is None else messages.tree_of(sent_once, client.device))
                names, parts = list(client.task.net.initial), [p.name for p in client.task.method.parts]
                sent = messages.unpack_broadcast(message.content, fixed, names, parts, client.device)
                content = answer(client, sent, message.content)
                content.config_records[ABOUT]["kept"] = client.keep(accepted)  # on disk before the reply is sent
            return content

        return handle

    app.query("hello")(_reporting(hello))
    app.query("measure")(_reporting(at_site(_measure)))
    app.train()(_reporting(at_site(_train)))
    app.evaluate()(_reporting(at_site(_evaluate)))
    return app


def _train(client: SiteClient, sent: Broadcast, content: RecordDict) -> RecordDict:
    done = client.train(sent, score=bool(messages.about(content)["score"]))
    private = client.task.method.privacy is not None  # send nothing that the accountant does not count
    reply = messages.pack_upload(done.uploads[0], {"site": client.site.name}, with_metrics=not private)
    for score in done.after_local.values():
        reply["after_local"] = messages.pack_score(score, class_counts=True)
    return reply


def _measure(client: SiteClient, sent: Broadcast, content: RecordDict) -> RecordDict:
    words = messages.about(content)
    up = client.measure(sent, str(words["part"]), str(words["when"]))
    return RecordDict({ABOUT: ConfigRecord({"site": client.site.name}), messages.UP: messages.array_record(up)})


def _evaluate(client: SiteClient, sent: Broadcast, content: RecordDict) -> RecordDict:
    reply = RecordDict({ABOUT: ConfigRecord({"site": client.site.name})})
    for label in messages.about(content)["tests"]:  # type: ignore[attr-defined]
        mode, _, split = str(label).rpartition("/")
        if (score := client.score(sent, mode, split)) is not None:
            reply[str(label)] = messages.pack_score(score, class_counts=True)
    return reply


def _reporting(answer: Callable[[Message, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    """Send a fednorms error as a reply; Flower reports any other."""

    def handle(message: Message, context: Context) -> Message:
        try:
            content = answer(message, context)
        except FednormsError as error:
            content = RecordDict({ABOUT: ConfigRecord({"error": type(error).__name__, "reason": str(error)})})
        return Message(content, reply_to=message)

    return handle
