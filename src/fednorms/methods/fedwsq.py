"""FedWSQ: standardized filters, and updates of few bits whose levels suit a normal distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from fednorms.core.part import Part, Slot, option, part
from fednorms.core.surgery import Change, swap_convolutions
from fednorms.core.tree import Tree
from fednorms.core.views import End, Round, Weights
from fednorms.layers.weight_norm import WNConv2d

if TYPE_CHECKING:
    from fednorms.core.net import Net

LEVELS = {  # those with the smallest mean squared error for a standard normal, from two bits on with 0 among them
    1: (-0.7979, 0.7979),
    2: (-1.224, 0.0, 0.7646, 1.7242),
    4: (
        *(-2.6536, -1.9735, -1.508, -1.149, -0.8337, -0.5439, -0.2686, 0.0),
        *(0.2303, 0.4648, 0.7081, 0.9663, 1.2481, 1.5676, 1.9679, 2.6488),
    ),
}


@part("fedwsq")
class FedWSQ(Part):
    """Convolve with standardized filters, and send updates of convolutions as s times the nearest level of d / s.

    Paper: FedWSQ: Efficient Federated Learning with Weight Standardization and Distribution-Aware Non-Uniform
    Quantization. Kim et al. ICCV 2025. https://arxiv.org/abs/2506.23516 (code: github.com/Seongyeol-kim/FedWSQ)

    Filters are those of ws. d = w_k - w_t; the 2^bits levels are the best ones for a standard normal. Each tensor has
    its s, which the server moves by s <- (1 - momentum) s + momentum mean(std(d)) and which starts at `start`. The
    first convolution of the network is quantized with first=True only; biases, norms and the classifier never are.
    bits=32 sends all of d: ws. The paper's networks have gn(groups=2). Acts on the model and on what is sent. Server
    state: s. No client state. Messages are simulated at full precision: `describe` counts all bits of every weight, and
    one number more each way per tensor.
    Divergence: the program also multiplies standardized filters by 0.001. The norm after them undoes that, except for
    the effect of its eps: at 1e-5, its outputs are 15 % smaller after filters of 27 weights, 1 % after those of 576.

    >>> FedWSQ(bits=1)
    fedwsq(bits=1)
    """

    paper = "Kim et al. 2025"
    uploads = True
    reduction = "uniform"
    never_negative = ("*",)

    bits: int = option(4, at_least=1, choices=(1, 2, 4, 32))
    momentum: float = option(0.1, at_least=0.0, at_most=1.0)
    start: float = option(1e-3, above=0.0)
    first: bool = option(False)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap_convolutions(model, head, lambda conv, name: WNConv2d.like(conv, variant="author", name=name))

    @override
    def missing(self, net: Net) -> str | None:
        found = any(self._is_quantized(slot) for slot in net.slots.values())
        return None if found else "convolution after the first one (or set first=true)"

    @override
    def init(self, w: Weights) -> tuple[Tree, Tree]:
        chosen = w.pick(w.names(self._is_quantized))
        return chosen.map(lambda t: torch.full_like(t.flatten()[0], self.start)), Tree()

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def send(self, delta: Tree, e: End) -> Tree:
        if self.bits not in LEVELS:
            return delta
        return Tree({name: self._rounded(d, e.down[name]) if name in e.down else d for name, d in delta.items()})

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        return e.mine, e.delta.pick(e.down).map(torch.std)

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return delta, r.mine * (1 - self.momentum) + r.up * self.momentum

    def _is_quantized(self, slot: Slot) -> bool:
        return isinstance(slot.module, nn.Conv2d) and slot.leaf == "weight" and (self.first or slot.layer > 1)

    def _rounded(self, d: Tensor, s: Tensor) -> Tensor:
        levels = torch.tensor(LEVELS[self.bits], dtype=d.dtype, device=d.device)
        return s * levels[torch.bucketize(d / s, (levels[1:] + levels[:-1]) / 2)]
