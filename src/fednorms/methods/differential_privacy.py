"""Client-level differential privacy: bound what a client can change, and hide it in noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from typing_extensions import override

from fednorms.core.part import Part, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Context, End, Mechanism, Privacy, Round

if TYPE_CHECKING:
    from fednorms.core.net import Net

Draws = Literal["auto", "seeded", "system"]
DRAWS = ("auto", "seeded", "system")


@part("dpcentral")
class CentralDP(Part):
    """Clip a client's update to the length C; add noise N(0, (z C / m)^2) to their sum over m.

    Paper: Learning Differentially Private Recurrent Language Models. McMahan et al. ICLR 2018.
    https://arxiv.org/abs/1710.06963

    What a client sends of the model, parameters and running statistics, is one vector d_k. It becomes d_k min(1, C /
    |d_k|), and the server continues with (sum d_k + N(0, (z C)^2)) / m. C is `clip`, z is `noise`. m is the expected
    number of clients in a round, not how many came, and all have the same weight: one client moves the sum by at most
    C. Whoever sees only the server's models learns little about any client; the metrics report epsilon at `delta`. The
    server itself sees the clipped updates.
    Acts on what is sent, after all other parts, and on the server, before all other parts. No state, nothing more to
    send; counters of batches stay as they were. Statistics take part of C: `silobn`, `fedbn` or `gn` leave all of it to
    the parameters. In a simulation, noise is drawn from the run's seed; in a deployment (draws="auto"), from the
    operating system.

    >>> CentralDP(clip=0.5, noise=1.1)
    dpcentral(clip=0.5, noise=1.1)
    """

    paper = "McMahan et al. 2018"
    weighting = "uniform"

    clip: float = option(1.0, above=0.0)
    noise: float = option(1.0, at_least=0.0)
    delta: float = option(1e-5, above=0.0, at_most=0.5)
    draws: Draws = option("auto", choices=DRAWS)

    @override
    def missing(self, net: Net) -> str | None:
        return None if net.exchanged else "tensor that is sent"

    @override
    def privacy(self) -> Privacy:
        return Privacy(self._protect, self._release, Mechanism(self.clip, self.noise, self.delta, "server"))

    def _protect(self, update: Tree, e: End) -> Tree:
        return _clipped(update, self.clip)

    def _release(self, update: Tree, r: Round) -> Tree:
        if math.isinf(self.clip):
            return update
        m = r.context.cohort
        total = update if r.sampled == m else update * (r.sampled / m)
        return _noisy(total, self.noise * self.clip / m, r.context, self.draws)


@part("dplocal")
class LocalDP(Part):
    """Clip a client's update to the length C and add noise N(0, (z C)^2) to it before it leaves the client.

    Paper: Federated Learning with Differential Privacy: Algorithms and Performance Analysis. Wei et al. IEEE
    Transactions on Information Forensics and Security 2020. https://arxiv.org/abs/1911.00222

    Like `dpcentral`, but a client sends d_k min(1, C / |d_k|) + N(0, (z C)^2), so the server sees no exact update. The
    price is more noise in the mean of m clients: z C / sqrt(m) instead of z C / m. Two updates of one client differ by
    at most 2 C, for which epsilon counts; it grows with the rounds in which a client takes part. Acts on what is sent,
    after all other parts. No state, nothing more to send. In a simulation, noise is drawn from the run's seed; in a
    deployment (draws="auto"), from the site's operating system, once per round. There a site need not trust the server
    with its updates if its policy requires this part and limits clip, noise and epsilon.

    >>> LocalDP(noise=0.1)
    dplocal(noise=0.1)
    """

    paper = "Wei et al. 2020"

    clip: float = option(1.0, above=0.0)
    noise: float = option(1.0, at_least=0.0)
    delta: float = option(1e-5, above=0.0, at_most=0.5)
    draws: Draws = option("auto", choices=DRAWS)

    @override
    def missing(self, net: Net) -> str | None:
        return None if net.exchanged else "tensor that is sent"

    @override
    def privacy(self) -> Privacy:
        return Privacy(self._protect, mechanism=Mechanism(self.clip, self.noise, self.delta, "client"))

    def _protect(self, update: Tree, e: End) -> Tree:
        return _noisy(_clipped(update, self.clip), self.noise * self.clip, e.context, self.draws)


def _clipped(update: Tree, most: float) -> Tree:
    if math.isinf(most):
        return update
    length = update.to(torch.float64).sqnorm().sqrt()
    # Slightly shorter than allowed: rounding must not make it longer.
    factor = torch.where(length > most, most / length * (1 - 1e-6), torch.ones_like(length))
    return update.map(lambda t: t * factor.to(t))


def _noisy(update: Tree, std: float, c: Context, draws: Draws) -> Tree:
    if std == 0 or math.isnan(std):  # no noise, of no or of any length
        return update
    system = draws == "system" or (draws == "auto" and c.deployed)
    return Tree({k: t + std * c.normals(f"privacy {k}", t, system=system) for k, t in update.items()})
