"""RBN: batch normalization with a calibration per sample."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fednorms.core.norms import is_batchnorm
from fednorms.core.part import Part, part
from fednorms.core.surgery import Change, swap
from fednorms.layers.representative_norm import RepresentativeNorm


@part("rbn")
class RBN(Part):
    """Center each sample by its own mean feature before batch normalization and scale it by a gate after.

    Paper: Representative Batch Normalization with Feature Calibration. Gao et al. CVPR 2021.
    https://openaccess.thecvf.com/content/CVPR2021/html/Gao_Representative_Batch_Normalization_With_Feature_Calibration_CVPR_2021_paper.html

    x <- x + w_m GAP(x); z = BN(x) without affine; y = gamma z sigmoid(w_v GAP(z) + w_b) + beta. FedNN compares with it.
    Acts on the model; statistics are averaged as BatchNorm's; no state; three numbers per channel more to send.

    >>> RBN()
    rbn
    """

    paper = "Gao et al. 2021"

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_batchnorm, lambda bn, name: RepresentativeNorm.like(bn, name=name))
