"""The precisions in which a run can compute; here without torch, because the command line's help shows them."""

from __future__ import annotations

from typing import Literal

Precision = Literal["float32", "tf32", "bfloat16", "float64"]
