"""Method: an ordered tuple of parts, and the checks of their combination."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn

from fednorms.core import checks
from fednorms.core.errors import BadInput
from fednorms.core.options import shortened
from fednorms.core.part import PROXY, Eval, Part, Pass, Phase, Route, Slot, Weighting, overrides, reads_rounds
from fednorms.core.training import Training
from fednorms.core.views import Context, Privacy


@dataclass(frozen=True)
class Method:
    """An ordered tuple of parts; no parts at all is FedAvg. `+` joins methods, `str` gives the text form.

    >>> from fednorms.methods.registry import method
    >>> m = method("fedprox(mu=0.01) + fedfn")
    >>> str(m), m == method(str(m)), str(Method())
    ('fedprox(mu=0.01) + fedfn', True, 'fedavg')
    """

    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.parts, (str, Part)) or not all(isinstance(p, Part) for p in self.parts):
            raise BadInput(
                f"Method: expected a tuple of parts, got {self.parts!r}. Use fednorms.method(...) for text or a single "
                "part."
            )
        for p in self.parts:
            _check_part(p)
        problems = [
            *(f"{name} is given twice: list each part once" for name in _repeated([p.name for p in self.parts])),
            *(f"{' and '.join(names)} each {what}: keep one of them" for what, names in self._rivals().items()),
            *self._needing_plain_updates(),
            *self._needing_one_model(),
            *(self._unprotected(*self.privacy) if self.privacy else ()),
            *(problem for p in self.having("passes") for problem in _riding_problems(p)),
        ]
        if problems:
            raise BadInput(f'Method "{shortened(str(self))}": ' + "; ".join(problems) + ".")

    def _rivals(self) -> dict[str, list[str]]:
        """What only one part may do, with the names of the parts where several do it."""
        rules = [(p, p.evaluation()) for p in self.parts]
        doing = {
            "replace the base loss": self.having("objective"),
            "decide how to fine-tune": [p for p, rule in rules if rule.phases],
            "decide which server model is tested": [p for p, rule in rules if rule.server_model],
            "decide with which statistics to test": [p for p, rule in rules if rule.statistics or rule.adapt],
            "decide how to predict": [p for p, rule in rules if rule.predict],
            "give each client a second model": self.doubling,
            "normalize the input": [p for p in self.parts if p.normalizes_input],
            "protect what is sent": [p for p in self.parts if p.privacy()],
            "replace the mean of models": self.having("aggregate"),
            "set the clients' weights": [p for p in self.parts if p.sets_weights],
            "send each client another model": self.having("model_to"),
        }
        return {what: [p.name for p in parts] for what, parts in doing.items() if len(parts) > 1}

    def _needing_plain_updates(self) -> list[str]:
        """The parts that cannot work because another part changes updates before they are sent."""
        if not (changing := self.changing):
            return []
        return [
            f"{p.name} needs the clients' plain updates, which {' and '.join(changing)} changes before they are "
            "sent: keep one of them"
            for p in self.parts
            if p.uses_even_mean or p.needs_plain_updates
        ]

    def _needing_one_model(self) -> list[str]:
        """The parts that cannot work because clients do not start from the server's model."""
        return [
            f"{p.name} needs all clients to start from one model, but {q.name} sends each its own: keep one of them"
            for q in self.having("model_to")
            for p in self.parts
            if p.uses_even_mean or p.needs_one_model or ((how := p.privacy()) and how.release)
        ]

    def _unprotected(self, p: Part, privacy: Privacy) -> list[str]:
        """Why this method cannot keep the promise of a part that protects what is sent."""
        found = [
            f"{q.name} sends its own tensors, which {p.name} does not protect: keep one of them"
            for q in self.parts
            if q.uploads or any(job.when in ("setup", "evaluate") for job in q.passes())
        ]
        if privacy.release is not None:
            found += [
                f"{name} treats clients differently, while {p.name} adds noise for their plain mean: keep one of them"
                for name in self.individual
            ]
        mechanism = privacy.mechanism
        if mechanism and mechanism.noise and math.isinf(mechanism.clip):
            found.append(f"{p.name} needs a finite clip for its noise, or noise=0")
        return found

    def __add__(self, other: Method | Part) -> Method:
        if isinstance(other, str):
            raise BadInput(f'Method: text cannot be added. Write fednorms.method("{self} + {other}").')
        return Method(self.parts + (other.parts if isinstance(other, Method) else (other,)))

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts)) or "fedavg"

    def __repr__(self) -> str:
        return f"method({str(self)!r})"

    @property
    def changing(self) -> list[str]:
        """The parts that change what a client sends of its trained model.

        >>> from fednorms.methods.registry import method
        >>> method("fednova").changing, method("fedprox").changing
        (['fednova'], [])
        """
        return [p.name for p in self.having("send")] + [p.name for p in self.parts if p.privacy()]

    @property
    def individual(self) -> list[str]:
        """The parts for which the server must see each client's update, not only their mean.

        >>> from fednorms.methods.registry import method
        >>> method("fedbn + median").individual, method("fedbn").individual
        (['median'], [])
        """
        hooks = ("receive", "weigh", "remember", "aggregate")
        return [p.name for p in self.parts if any(overrides(p, hook) for hook in hooks)]

    @property
    def doubling(self) -> list[Part]:
        """The parts that give each client a second model, which is tested as its own."""
        return [p for p in self.parts if overrides(p, "twin") or p.evaluation().personal_model]

    @property
    def writing(self) -> list[Part]:
        """The parts whose state at a client changes in every step."""
        return [p for p in self.parts if p.writes_state]

    @property
    def addressing(self) -> list[Part]:
        """The parts for which the server's messages differ by client, so it must know which client it answers."""
        return [p for p in self.parts if any(overrides(p, hook) for hook in ("down_to", "model_to"))]

    @property
    def using_proxy(self) -> list[str]:
        """The parts that learn from labeled images at the server.

        >>> from fednorms.methods.registry import method
        >>> method("fedlaw + fedprox").using_proxy
        ['fedlaw']
        """
        return [p.name for p in self.parts if PROXY in p.requires]

    @property
    def privacy(self) -> tuple[Part, Privacy] | None:
        """The part that protects what clients send, and how; None if there is none.

        >>> from fednorms.methods.registry import method
        >>> method("dpcentral(noise=2)").privacy[1].mechanism.noise, method("fedbn").privacy
        (2.0, None)
        """
        return next(((p, how) for p in self.parts if (how := p.privacy())), None)

    @property
    def moves_without_clients(self) -> bool:
        """Whether the server changes its model even without clients, because noise must hide who took part."""
        return self.privacy is not None and self.privacy[1].release is not None

    def having(self, hook: str) -> list[Part]:
        """The parts that implement a hook, in order.

        >>> from fednorms.methods.registry import method
        >>> [p.name for p in method("fedprox + scaffold").having("loss")]
        ['fedprox']
        """
        return [p for p in self.parts if overrides(p, hook)]

    def settled(self, training: Training) -> Method:
        """This method with every option that depends on the rest of the recipe replaced by its value.

        >>> from fednorms.core.training import Training
        >>> from fednorms.methods.registry import method
        >>> [str(method("scaffold").settled(Training(optimizer=how))) for how in ("sgd", "adamw")]
        ["scaffold(control='difference')", "scaffold(control='gradient')"]
        """
        settled = Method(tuple(checks.one(p, "settled", p.settled(self, training), type(p)) for p in self.parts))
        settled.check_optimizer(training)
        return settled

    def check_optimizer(self, training: Training) -> None:
        """Refuse an optimizer whose updates a part of this method would divide by the wrong weight."""
        dividing = [p for p in self.parts if p.divides_updates]
        kept = training.keep_momentum and training.momentum > 0
        if not dividing or (training.optimizer == "sgd" and not kept):
            return
        what = "keep_momentum = true" if kept else f'optimizer = "{training.optimizer}"'
        why = "then also holds gradients of earlier rounds" if kept else "is then not a weighted sum of gradients"
        raise BadInput(
            f"{what} cannot be combined with {' and '.join(map(str, dividing))}: an update {why}, and the method "
            f"divides it by the weight of this round's gradients. Use SGD without kept momentum"
            f"{', or scaffold(control=gradient)' if any(p.name == 'scaffold' for p in dividing) else ''}, "
            "or leave out the part."
        )

    def phasing(self, training: Training) -> list[str]:
        """The parts that train what clients send in several phases, or at another rate than the round's.

        >>> from fednorms.core.training import Training
        >>> from fednorms.methods.registry import method
        >>> [method(text).phasing(Training()) for text in ("fedrep", "alignfeatures", "perfedavg(beta=0.1)")]
        [[], ['alignfeatures'], ['perfedavg']]
        """
        head = Slot("head.weight", "weight", "param", nn.Linear(1, 1), head=True, trainable=True)
        kept = any(p.route(head) >= Route.LOCAL for p in self.parts)
        found = []
        for p in self.having("plan"):
            phases = [q for q in p.plan([Phase()], _anywhere(training)) if not (kept and q.train == "head")]
            if len(phases) > 1 or any(q.lr is not None or q.factor != 1 for q in phases):  # none: clients rest
                found.append(p.name)
        return found

    def check_phases(self, p: Part, training: Training) -> None:
        """Refuse several phases or other rates for `p`, which divides an update by the steps of one phase."""
        if others := self.phasing(training):
            hint = ", or write scaffold(control=gradient)" if p.name == "scaffold" else ""
            raise BadInput(
                f'Method "{shortened(str(self))}": {p.name} divides an update by the steps of one phase at the rate of '
                f"the round, but {' and '.join(others)} trains in several phases or at another rate: keep one of "
                f"them{hint}."
            )

    @property
    def bound_to_rounds(self) -> list[str]:
        """The parts that compute something else if a run has more rounds.

        >>> from fednorms.methods.registry import method
        >>> method("fedprox + fixbn").bound_to_rounds
        ['fixbn']
        """
        return [p.name for p in self.parts if reads_rounds(type(p))]

    def phases(self, phases: list[Phase], c: Context) -> list[Phase]:
        """The phases of a round of local training after every part's `plan`; without any, clients do not train."""
        for p in self.having("plan"):
            phases = checks.phases(p, p.plan(phases, c)) if phases else phases
        return phases

    def path(self, c: Context) -> dict[str, Hashable]:
        """The code path of every part in this round."""
        return {p.name: checks.hashable(p, p.path(c)) for p in self.having("path")}

    def evaluation(self) -> Eval:
        """The one evaluation rule of all parts together.

        >>> from fednorms.methods.registry import method
        >>> method("fedbn + finetune(epochs=2)").evaluation().phases[0].epochs
        2
        """
        rules = [p.evaluation() for p in self.parts]
        return Eval(
            phases=next((r.phases for r in rules if r.phases), ()),
            server_model=next((r.server_model for r in rules if r.server_model), None),
            predict=next((r.predict for r in rules if r.predict), None),
            statistics=next((r.statistics for r in rules if r.statistics), None),
            unseen=next((r.unseen for r in rules if r.unseen), None),
            adapt=next((r.adapt for r in rules if r.adapt), None),
        )

    def weighting(self, chosen: Weighting | None = None) -> Weighting:
        """How client models are weighted: the recipe's choice, otherwise the parts' own, otherwise by size.

        >>> from fednorms.methods.registry import method
        >>> method("fedbn").weighting(), method("fedprox").weighting(), method("fedbn").weighting("size")
        ('uniform', 'size', 'size')
        """
        if chosen == "size" and self.privacy and self.moves_without_clients:
            raise BadInput(
                f'Method "{self}": {self.privacy[0].name} needs equal weights, because a client with more '
                'data would count for more than its noise hides. Choose weighting="uniform" or "auto".'
            )
        if chosen:
            return chosen
        wanted = {p.weighting: p.name for p in self.parts if p.weighting}
        if len(wanted) > 1:
            asked = " and ".join(f"{name} ({w})" for w, name in wanted.items())
            raise BadInput(
                f'Method "{self}": {asked} ask for different weightings. Choose with weighting="size" or "uniform".'
            )
        return next((w for w in wanted if w), "size")


def _anywhere(training: Training) -> Context:
    """A context that stands for any round and client, to ask for the phases of a round."""
    return Context(
        round=0,
        rounds=1,
        lr=training.lr,
        lr_0=training.lr,
        momentum=training.momentum,
        keeps_momentum=False,
        batch_size=training.batch_size,
        client="",
        samples=1,
        relative=1.0,
        clients=1,
    )


def _check_part(p: Part) -> None:
    """Check that a part is registered, and what its hooks without arguments return."""
    if not hasattr(p, "name"):
        raise nameless(p)
    checks.one(p, "evaluation", p.evaluation(), Eval)
    checks.several(p, "passes", p.passes(), Pass)
    if (privacy := p.privacy()) is not None:
        checks.one(p, "privacy", privacy, Privacy)


def nameless(p: Part) -> BadInput:
    """The error for a part whose class was not registered with `@fn.part`."""
    kind = type(p).__name__
    return BadInput(f'{kind} has no name. Put @fn.part("{kind.lower()}") above its class.')


def _riding_problems(p: Part) -> list[str]:
    """Why a part's passes cannot run in one training call."""
    riding = [job for job in p.passes() if job.when in ("before", "after")]
    if len(riding) > 1:
        return [f"{p.name} has {len(riding)} passes before or after training, and a part may have only one"]
    if riding and overrides(p, "finish") and p.uploads and riding[0].reduce != p.reduction:
        return [f"{p.name} reduces what its pass sends by {riding[0].reduce} and what finish sends by {p.reduction}"]
    return []


def _repeated(items: list[str]) -> list[str]:
    return sorted({i for i in items if items.count(i) > 1})
