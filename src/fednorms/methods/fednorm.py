"""FedNorm: one set of normalization tensors per modality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.errors import BadInput
from fednorms.core.norms import is_norm
from fednorms.core.part import Part, Route, Slot, part
from fednorms.core.tree import Tree
from fednorms.core.views import Begin, Context, End, Round

if TYPE_CHECKING:
    from fednorms.core.net import Net
    from fednorms.data import Federation

ATTRIBUTE = "modality"


@part("fednorm")
class FedNorm(Part):
    """Average normalization layers only over the clients of the same modality (CT, MRI, ...), all else over everybody.

    Paper: FedNorm: Modality-Based Normalization in Federated Learning for Multi-Modal Liver Segmentation. Bernecker et
    al. arXiv 2022. https://arxiv.org/abs/2205.11096

    norm[m] = sum p_k norm_k / sum p_k over this round's clients k of modality m, for affine parameters and statistics.
    Acts on routes, by module type: the part owns these tensors, and the server keeps one set per modality, named in
    each site's attribute "modality". No client state; every client receives all sets. A modality that has not taken
    part yet starts from the initial model. With one modality it is FedAvg.
    Divergence: FedWon describes FedNorm as keeping BatchNorm local; this part averages per modality, as the paper does.

    >>> FedNorm()
    fednorm
    """

    paper = "Bernecker et al. 2022"
    uploads = True
    never_negative = ("*running_var@*",)
    reduction = "grouped"

    @override
    def arrange(self, federation: Federation) -> Federation:
        without = [site.name for site in federation.sites if ATTRIBUTE not in site.attributes]
        if without:
            raise BadInput(
                f'fednorm needs the attribute "{ATTRIBUTE}" of every site; federation "{federation.name}" has sites '
                f"without it: {', '.join(without[:5])}{' and others' if len(without) > 5 else ''}. "
                f'Give each site attributes={{"{ATTRIBUTE}": "CT"}}, for example.'
            )
        return federation

    @override
    def route(self, slot: Slot) -> Route:
        return Route.OWNED if is_norm(slot.module) else Route.SHARED

    @override
    def missing(self, net: Net) -> str | None:
        return None if net.owned_by.get(self.name) else "normalization tensor that no other part keeps back"

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    def _group(self, c: Context, known: Tree) -> str:
        group = c.attributes.get(ATTRIBUTE, "")
        groups = sorted({name.rsplit("@", 1)[1] for name in known})
        if not group and groups not in ([], [""]):  # a custom federation may have no modalities
            raise BadInput(
                f'fednorm has one model per modality ({", ".join(groups)}), but "{c.client}" has no attribute '
                f'"{ATTRIBUTE}". Give the site one, or choose a site that has one.'
            )
        return group

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        group = self._group(b.context, b.down)
        return Tree({**model, **{k: b.down[f"{k}@{group}"] for k in b.owned if f"{k}@{group}" in b.down}})

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        group = self._group(e.context, e.down)
        return e.mine, Tree({f"{k}@{group}": e.model[k] for k in e.owned})

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta, Tree({**r.mine, **r.up})
