"""AdaBN: test with batch normalization statistics measured on the tested site's images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fednorms.core.norms import keeps_statistics
from fednorms.core.part import Eval, Part, part

if TYPE_CHECKING:
    from fednorms.core.net import Net


@part("adabn")
class AdaBN(Part):
    """Before a test, measure the running statistics again on the site's images, without labels; training is unchanged.

    Paper: Adaptive Batch Normalization for Practical Domain Adaptation. Li et al. Pattern Recognition 80, 2018.
    https://doi.org/10.1016/j.patcog.2018.03.005

    m = sum n_b m_b / n and v = sum n_b v_b / n over batches b. These are the statistics "re-estimated" of an
    evaluation; this part makes them the default for global, personal and unseen models. SiloBN uses them for new sites.
    Acts on evaluation only. No state, no communication.

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
