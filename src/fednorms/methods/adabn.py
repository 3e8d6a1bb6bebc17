"""AdaBN: test with batch-normalisation statistics measured on the tested site's own images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.norms import keeps_statistics
from fednorms.core.part import Eval, Part, part

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("adabn")
class AdaBN(Part):
    """Before a test, measure the running statistics anew on the site's images (no labels); training is unchanged.

    m = sum n_b m_b / n and v = sum n_b v_b / n over batches b: the statistics "re-estimated" of an evaluation, here the
    default for global, personal and unseen models. Paper: Li et al., Adaptive batch normalization for practical domain
    adaptation, 2018; SiloBN uses it for new sites. Acts on evaluation alone; no state, no communication.

    >>> AdaBN().evaluation().statistics
    're-estimated'
    """

    paper = "Li et al. 2018"

    @override
    def missing(self, net: Net) -> str | None:
        found = any(keeps_statistics(m) for m in net.module.modules())
        return None if found else "layer with running statistics"

    @override
    def evaluation(self) -> Eval:
        return Eval(statistics="re-estimated")
