"""The ClientApp: answers "hello" with the site's card, and trains, evaluates and measures for the server."""

from __future__ import annotations

from collections.abc import Callable
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import nn

from fednorms.core.errors import BadInput, FednormsError
from fednorms.core.states import Broadcast
from fednorms.core.tree import Tree
from fednorms.data import Federation
from fednorms.engines.devices import numerics, repeatable
from fednorms.explain.deployable import refuse_obstacles
from fednorms.flower import messages, schema, settings
from fednorms.flower.agreement import Card, read_agreement
from fednorms.flower.messages import ABOUT, FIXED
from fednorms.flower.policy import Policy
from fednorms.flower.schema import AskWords
from fednorms.flower.settings import Deployment
from fednorms.flower.site import SiteClient, open_site
from fednorms.runs.losses import Loss
from fednorms.runs.recipe import Recipe

SiteSource = Callable[[Context, Recipe], Federation]
Answer = Callable[[SiteClient, Broadcast, AskWords], RecordDict]


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

    def opened(context: Context) -> tuple[Recipe, Deployment, Federation]:
        recipe, deployment = settings.read(context.run_config)
        if "device" in context.node_config:
            recipe = recipe.model_copy(update={"device": str(context.node_config["device"])})
        try:
            found = open_site(recipe, deployment, context.node_config) if site is None else site(context, recipe)
        except Exception as error:  # it may name files, and so patients: only this site's log says more
            log(WARNING, "fednorms: %s", error, exc_info=not isinstance(error, FednormsError))
            raise BadInput("This site's data cannot be opened with the run's settings; its log says why.") from None
        return recipe, deployment, found

    def allowed(context: Context) -> Policy:
        """The site's policy, once it has let the run pass; nothing of the run is opened, built or imported before."""
        policy = Policy.of(context.node_config)
        policy.check(*settings.read(context.run_config), model=model() if model and not policy.statistics else None)
        return policy

    def hello(message: Message, context: Context) -> RecordDict:
        allowed(context)
        recipe, _, federation = opened(context)
        order = int(context.node_config.get("partition-id", 0))
        card = Card.of(federation, counts=recipe.class_weights == "balanced", order=order)
        return RecordDict({ABOUT: ConfigRecord({"card": card.to_json()})})

    def at_site(answer: Answer) -> Callable[[Message, Context], RecordDict]:
        def handle(message: Message, context: Context) -> RecordDict:
            policy = allowed(context)
            recipe, deployment, federation = opened(context)
            words = schema.read_values(schema.AskWords, messages.about(message.content))
            facts = read_agreement(words.agreement)
            with numerics(recipe.precision, recipe.deterministic), repeatable(recipe.resolved().threads, recipe.seed):
                start = model() if model else None
                policy.check(recipe, deployment, len(facts.clients), start)
                client = SiteClient(recipe, federation, context.node_config, facts, policy, start, loss)
                refuse_obstacles(client.task.method)
                if words.round > client.task.rounds:
                    raise BadInput(f"Round {words.round} is not one of the {client.task.rounds} rounds of this run.")
                client.recall(words.accepted)
                sent_once = message.content.array_records.get(FIXED)
                fixed = client.fixed(Tree() if sent_once is None else messages.tree_of(sent_once, client.device))
                names, parts = list(client.task.net.initial), [p.name for p in client.task.method.parts]
                sent = messages.unpack_broadcast(message.content, fixed, names, parts, client.device)
                with client.counted(words.round):
                    content = answer(client, sent, words)
                    content.config_records[ABOUT]["kept"] = client.keep(words.accepted)  # on disk before it is sent
            return content

        return handle

    app.query("hello")(_reporting(hello))
    app.query("measure")(_reporting(at_site(_measure)))
    app.train()(_reporting(at_site(_train)))
    app.evaluate()(_reporting(at_site(_evaluate)))
    return app


def _train(client: SiteClient, sent: Broadcast, words: AskWords) -> RecordDict:
    if sent.round >= client.task.rounds:
        raise BadInput(f"Round {sent.round + 1} is not one of the {client.task.rounds} rounds of this run.")
    mechanism = client.mechanism
    if mechanism is not None:
        if (again := client.answer_again(sent)) is not None:
            return messages.pack_upload(again, {"site": client.site.name}, with_metrics=False)
        client.ledger.check_budget(mechanism, client.policy.epsilon, client.policy.delta)
    done = client.train(sent, score=words.score and client.policy.scores)
    if mechanism is not None:
        client.write_down(sent, done.uploads[0], mechanism, words.accepted)
        log(INFO, "fednorms: %s", client.ledger.spent(client.policy.delta))
    private = client.task.method.privacy is not None  # send nothing that the accountant does not count
    told = not private and client.policy.scores  # the training loss is a score, too
    reply = messages.pack_upload(done.uploads[0], {"site": client.site.name}, with_metrics=told)
    for score in done.after_local.values():
        reply["after_local"] = messages.pack_score(score, class_counts=client.policy.class_counts)
    return reply


def _measure(client: SiteClient, sent: Broadcast, words: AskWords) -> RecordDict:
    up = client.measure(sent, words.part, words.when)
    return RecordDict({ABOUT: ConfigRecord({"site": client.site.name}), messages.UP: messages.array_record(up)})


def _evaluate(client: SiteClient, sent: Broadcast, words: AskWords) -> RecordDict:
    reply = RecordDict({ABOUT: ConfigRecord({"site": client.site.name})})
    for label in words.tests if client.policy.scores else ():
        mode, _, split = label.rpartition("/")
        if (score := client.score(sent, mode, split)) is not None:
            reply[label] = messages.pack_score(score, class_counts=client.policy.class_counts)
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
