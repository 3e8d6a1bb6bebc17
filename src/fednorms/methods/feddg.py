"""FedDG: images that take on the low frequencies of other clients' images, in an episode of two losses."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fednorms.core.part import Part, Pass, option, part
from fednorms.core.tree import Tree
from fednorms.core.views import Local, Round, Step


def low_frequencies(x: Tensor, half: int) -> Tensor:
    """The Fourier coefficients of images (N, C, H, W) at frequencies from -half to half in both directions.

    >>> low_frequencies(torch.ones(1, 1, 2, 3), 0).real
    tensor([[[[6.]]]])
    """
    rows, columns = (_waves(size, half, x) for size in x.shape[-2:])
    return torch.einsum("nchw,kh,lw->nckl", x.to(rows), rows.conj(), columns.conj())


def with_amplitudes(x: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Images whose amplitudes at low frequencies go this share of the way to the target's (N, C, K, K); phases stay.

    >>> x, flat = torch.rand(1, 1, 4, 4), torch.zeros(1, 1, 1, 1)
    >>> torch.allclose(with_amplitudes(x, flat, torch.ones(1)), x - x.mean())
    True
    """
    half = target.shape[-1] // 2
    found = low_frequencies(x, half)
    own = amplitudes(found)
    phase = torch.polar(torch.ones_like(own), found.angle())
    phase = torch.where(_is_mean(half, x.device), torch.ones_like(phase), phase)
    change = share.view(-1, 1, 1, 1) * (target - own) * phase
    rows, columns = (_waves(size, half, x) for size in x.shape[-2:])
    moved = torch.einsum("nckl,kh,lw->nchw", change, rows, columns).real / (x.shape[-2] * x.shape[-1])
    return x + moved


def amplitudes(found: Tensor) -> Tensor:
    """|F| of coefficients; at frequency 0 it keeps its sign, so normalizing images changes it as it changes them."""
    return torch.where(_is_mean(found.shape[-1] // 2, found.device), found.real, found.abs())


@part("feddg")
class FedDG(Part):
    """Add L(w - step clip(dL/dw); x'), x' with low-frequency amplitudes A + l (A_j - A), A_j of another client's image.

    Paper: FedDG: Federated Domain Generalization on Medical Image Segmentation via Episodic Learning in Continuous
    Frequency Space. Liu et al. CVPR 2021. https://arxiv.org/abs/2103.06030 (code: github.com/liuquande/FedDG-ELCFS)

    A are the amplitudes of the 2D Fourier transform per channel at up to b = floor(low min(H, W)) waves per image; x'
    keeps the phases of x. Before the first round every client sends A of `spectra` random images, and gets those of all
    others; each image of a step draws one. l is uniform in (0, 1). The inner gradient is clipped per number to `clip`,
    and dL/dw is a constant in the second loss, whose gradient is that at the moved weights. Acts on the data and the
    loss, with a second forward and backward pass. Client state: none. Server state: A. Communication: once, spectra x
    C (2b + 1)^2 numbers up and those of all other clients down: of single images, at low=0 their mean color.
    Divergence: the paper segments images; its second loss also has a term at boundaries, which do not exist here.
    The program swaps amplitudes, l = 1 (variant="author"), keeps an eighth of the images, clips x' to the range of
    pixels and counts it in running statistics.

    >>> FedDG(low=0.01)
    feddg(low=0.01)
    """

    paper = "Liu et al. 2021"
    uploads = True

    low: float = option(0.003, at_least=0.0, at_most=0.4)
    step: float = option(0.001, at_least=0.0)
    clip: float = option(100.0, above=0.0)
    spectra: int = option(16, at_least=1)
    variant: Literal["paper", "author"] = option("paper", choices=("paper", "author"))

    @override
    def passes(self) -> list[Pass]:
        return [Pass("setup", self._measure, _kept, reduce="grouped")]

    def _measure(self, local: Local) -> tuple[Tree, Tree]:
        """Amplitudes of random training images as the network gets them, under the client's name."""
        found = [amplitudes(low_frequencies(x, math.floor(self.low * min(x.shape[-2:])))) for x, _ in local.epoch()]
        if not found:  # too few images for a batch
            return Tree(), Tree()
        rows = torch.cat(found)
        chosen = (local.uniform(0, self.spectra) * len(rows)).long()
        return Tree(), Tree({f"{local.context.client}/amplitudes": rows[chosen]})

    @override
    def down_to(self, mine: Tree, client: str) -> Tree:
        others = [t for name, t in sorted(mine.items()) if name != f"{client}/amplitudes"]
        return Tree(amplitudes=torch.cat(others)) if others else Tree()

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not s.down or s.context.evaluating:  # fine-tuning minimizes the client's own loss
            return 0.0
        moving = s.params.pick(name for name, t in s.params.items() if t.requires_grad)
        g = torch.autograd.grad(s.value, list(moving.values()), retain_graph=True, allow_unused=True)
        slope = Tree({name: t for name, t in zip(moving, g, strict=True) if t is not None})
        moved = {name: moving[name] - self.step * t.clamp(-self.clip, self.clip) for name, t in slope.items()}
        logits, _ = s.forward(Tree({**s.params, **moved}), self._shifted(s))
        return s.base(logits, s.y)

    @torch.no_grad()
    def _shifted(self, s: Step) -> Tensor:
        draws = s.uniform(2, len(s.x))
        chosen = s.down["amplitudes"][(draws[0] * len(s.down["amplitudes"])).long()]
        return with_amplitudes(s.x, chosen, draws[1] if self.variant == "paper" else torch.ones_like(draws[1]))


def _kept(up: Tree, r: Round) -> Tree:
    return up


def _waves(size: int, half: int, like: Tensor) -> Tensor:
    """e^(2 pi i k n / size) for frequencies k and positions n."""
    k, n = torch.arange(-half, half + 1, device=like.device), torch.arange(size, device=like.device)
    angle = torch.outer(k, n).double() * (2 * math.pi / size)
    return torch.polar(torch.ones_like(angle), angle).to(torch.promote_types(like.dtype, torch.complex64))


def _is_mean(half: int, device: torch.device) -> Tensor:
    """Where the frequency 0 is."""
    zero = torch.arange(-half, half + 1, device=device) == 0
    return zero.unsqueeze(1) & zero
