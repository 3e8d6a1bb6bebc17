"""FedFA: jitter feature statistics by their variance within a batch and between clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.part import Part, Route, Slot, option, part
from fednorms.core.tree import Tree, branch, join
from fednorms.core.views import Begin, End, Round
from fednorms.layers.feature_augment import FeatureAugment, insert, stages

if TYPE_CHECKING:
    from fednorms.core.net import Net
    from fednorms.core.surgery import Change

FOLLOWED = {"mean": "between_mean", "std": "between_std"}


@part("fedfa")
class FedFA(Part):
    """In training, give each image's channels new means and deviations: gamma (x - mu) / sigma + beta.

    Paper: FedFA: Federated Feature Augmentation. Zhou and Konukoglu. ICLR 2023. https://arxiv.org/abs/2301.12995

    beta ~ N(mu, (1 + g_mu) V_mu), gamma ~ N(sigma, (1 + g_sigma) V_sigma), V the variance over the batch; g is larger
    for channels whose running statistics vary more between clients, with variance Sig. Layers act with probability `p`
    per forward pass, after each stage of the network or after the modules that `after` names (separated by commas).
    Acts on the model. Server state: Sig, unbiased over the round's clients, unchanged if there is only one.
    Communication: 4 numbers per channel down, 6 up. No client state.
    Divergence: the released server computes one variance over clients and channels together (variance="scalar"); the
    default is per channel, as in the text.

    >>> FedFA(after="pool")
    fedfa(after='pool')
    """

    paper = "Zhou and Konukoglu 2023"
    uploads = True
    never_negative = ("*.std", "q/*")
    reduction = "uniform"

    p: float = option(0.5, at_least=0.0, at_most=1.0)
    momentum: float = option(0.99, at_least=0.0, at_most=1.0)
    variance: Literal["channel", "scalar"] = option("channel", choices=("channel", "scalar"))
    after: str = option("")

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        named = [n.strip() for n in self.after.split(",") if n.strip()]
        known = dict(model.named_modules())
        if unknown := [n for n in named if n not in known]:
            raise BadInput(f'fedfa: the model has no module "{unknown[0]}", which the option after names.')
        found = named or stages(model)
        if not found:
            raise BadInput(
                f"fedfa: the stages of a {type(model).__name__} are unknown. Name the modules after which "
                'features are augmented: fedfa(after="pool1,pool2").'
            )
        return insert(model, found, self.p, self.momentum)

    @override
    def route(self, slot: Slot) -> Route:
        between = isinstance(slot.module, FeatureAugment) and slot.leaf in FOLLOWED.values()
        return Route.OWNED if between else Route.SHARED

    @override
    def missing(self, net: Net) -> str | None:
        sent = set(net.exchanged)
        apart = [n for n in net.buffers if _followed(n) in net.buffers and n not in sent]
        return f"shared statistics in every augmented layer ({apart[0]} stays with the client)" if apart else None

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        return Tree({**model, **b.down})

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        # In float64: the server takes the difference of the two.
        m = Tree({n: t.double() for n, t in e.buffers.items() if _followed(n) in e.buffers})
        return e.mine, join(m=m, q=m.map(Tensor.square))

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        if r.sampled < 2:
            return delta, r.mine
        squares = branch(r.up, "q")
        new = Tree()
        for name, m in branch(r.up, "m").items():
            n, q = r.sampled, squares[name]
            if self.variance == "scalar":
                n, m, q = n * m.numel(), m.mean().expand_as(m), q.mean().expand_as(q)
            v = ((q - m * m) * n / (n - 1)).clamp(min=0)
            new[_followed(name)] = v.to(r.model[_followed(name)].dtype)
        return delta, new


def _followed(name: str) -> str:
    """The variance between clients that belongs to a running statistic."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{FOLLOWED.get(leaf, '')}"
