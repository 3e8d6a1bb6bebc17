"""Residual blocks without normalization: signals scaled as in NF-ResNets.

Paper: Characterizing Signal Propagation to Close the Performance Gap in Unnormalized ResNets. Brock, De and Smith. ICLR
2021. https://arxiv.org/abs/2101.08692
Paper: Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks. De and Smith. NeurIPS
2020. https://arxiv.org/abs/2002.10444
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fednorms.core.errors import BadInput
from fednorms.core.norms import is_norm
from fednorms.core.surgery import Change, short
from fednorms.layers.scaled_ws import WSConv2d


@dataclass(frozen=True)
class _Block:
    """A residual block: the first convolution of its branch, the last one, and the norm that followed it."""

    opening: list[WSConv2d]
    ending: WSConv2d | None
    norm: nn.Module
    added: bool
    """Whether anything is added to the branch."""
    restarts: bool
    """Whether the block's output has the variance of its branch and of a convolution: there is no plain shortcut."""


def scale_residuals(model: nn.Module, alpha: float = 0.2) -> list[Change]:
    """Make the residual blocks of a network of WSConv2d those of an NF-ResNet: h' = h + alpha g f(beta h).

    beta = 1 / sqrt(v), v the variance of h if every branch f has variance 1: v <- 1 at a block whose shortcut is a
    convolution (which also gets beta h), then v <- v + alpha^2 at every block; g is learned, one for each branch, and
    starts at 0 (SkipInit). An activation after the sum, as in torchvision's blocks, stays where it is. beta becomes
    part of the filters of the first convolution and alpha g of the last one: no layer is added.

    >>> from fednorms.layers import is_norm, no_norm_like, swap
    >>> from fednorms.models import build
    >>> net = build("resnet20", 10)
    >>> _ = swap(net, is_norm, lambda norm, name: no_norm_like(norm))
    >>> _ = swap(net, nn.Conv2d, lambda conv, name: WSConv2d.like(conv))
    >>> [str(c) for c in scale_residuals(net)][:2]
    ['blocks.0: h + f(h) -> h + 0.2 g f(1.000 h)', 'blocks.1: h + f(h) -> h + 0.2 g f(0.981 h)']
    """
    changes, variance = [], 1.0
    for name, block in _blocks(model):
        beta = variance**-0.5
        for conv in block.opening:
            conv.scale = beta
        if block.restarts:
            variance = 1.0
        if block.added and block.ending is not None:
            block.ending.end_branch(alpha)
            variance += alpha**2
            changes.append(Change(name, "h + f(h)", f"h + {alpha:g} g f({beta:.3f} h)"))
    return changes


def branch_ends(model: nn.Module) -> list[nn.Module]:
    """The layer that follows the last convolution of each residual branch; none in a network without known blocks.

    >>> from fednorms.models import build
    >>> len(branch_ends(build("resnet20", 10))), branch_ends(build("cnn-small", 10))
    (9, [])
    """
    blocks = (_resnet_block(module) or _inverted_block(module) for module in model.modules())
    return [block.norm for block in blocks if block is not None]


def _blocks(model: nn.Module) -> Iterator[tuple[str, _Block]]:
    """The residual blocks of a network, in the order of the forward pass."""
    found = False
    for name, module in model.named_modules():
        block = _resnet_block(module) or _inverted_block(module)
        if block is None:
            continue
        found = True
        if is_norm(block.norm):
            raise BadInput(
                f'nf_residual: the branch of "{name}" still ends in {short(block.norm)}. Remove normalization first, '
                'as "nonorm + wsconv(nf_residual=true)" and "fedwon(nf_residual=true)" do.'
            )
        if odd := _odd(model, name, module, block):
            raise BadInput(f'nf_residual: block "{name}" of this {type(model).__name__} {odd}. Leave out nf_residual.')
        yield name, block
    if not found:
        raise BadInput(
            f"nf_residual: no residual blocks are known in this {type(model).__name__}. It works with the plain "
            "ResNets of this library, torchvision and timm, and with torchvision's MobileNets. Leave it out for others."
        )


def _odd(model: nn.Module, name: str, module: nn.Module, block: _Block) -> str:
    """Why a block cannot be scaled by its first and last convolution, in words; empty if it can."""
    path = name.split(".")
    above = [model.get_submodule(".".join(path[:i])) for i in range(1, len(path))]
    if any(isinstance(m, nn.ModuleList) for m in above):
        return "is in a list of parallel blocks, so the variance of its input is unknown"
    if not block.opening or (block.added and block.ending is None):
        return "has no standardized convolution at its start or end"
    if block.added and not isinstance(block.norm, nn.Identity):
        return f"ends in {short(block.norm)}, not in a convolution"
    if module._modules.get("se") is not None:
        return "has a gate after its last convolution, which would see the scaled branch"
    return ""


def _resnet_block(module: nn.Module) -> _Block | None:
    """conv1, conv2 (, conv3), each with its norm after it; the shortcut is `downsample` or `shortcut`."""
    names = list(module._modules)
    last = max((n for n in names if n in ("conv2", "conv3")), default="")
    norm = next((n for n in (f"bn{last[4:]}", f"norm{last[4:]}") if n in names), "")
    if not (last and norm and "conv1" in names and (hasattr(module, "downsample") or hasattr(module, "shortcut"))):
        return None
    if names.index(norm) < names.index(last):  # normalized before each convolution: another kind of block
        return None
    shortcut = module._modules.get("downsample") or module._modules.get("shortcut")
    across = _convolutions(shortcut) if shortcut is not None else []
    opening, ending = (_convolutions(module.get_submodule(n)) for n in ("conv1", last))
    end = ending[-1] if ending else None
    first = [*opening, *across] if opening else []
    return _Block(first, end, module.get_submodule(norm), added=True, restarts=bool(across))


def _inverted_block(module: nn.Module) -> _Block | None:
    """Inverted residuals of torchvision: one sequence of layers, with or without a shortcut around it."""
    added = getattr(module, "use_res_connect", None)
    row = module._modules.get("conv") or module._modules.get("block")
    if added is None or row is None:
        return None
    convolutions = _convolutions(row)
    last = [m for m in row.modules() if not list(m.children())][-1]
    end = convolutions[-1] if convolutions else None
    return _Block(convolutions[:1], end, last, added=added, restarts=not added)


def _convolutions(module: nn.Module) -> list[WSConv2d]:
    return [m for m in module.modules() if isinstance(m, WSConv2d)]
