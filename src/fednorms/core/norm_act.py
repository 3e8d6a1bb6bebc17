"""Keep the activation and the drop layer of a fused normalization layer."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class NormAct(nn.Module):
    """A normalization followed by what a fused layer (timm's BatchNormAct2d) applied after it.

    y = act(drop(norm(x))).

    >>> import torch
    >>> NormAct(nn.Identity(), nn.Identity(), nn.ReLU())(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(self, norm: nn.Module, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.drop = drop
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input after drop layer and activation."""
        y: Tensor = self.act(self.drop(self.norm(x)))
        return y

    def folded(self, dims: int) -> nn.Module:
        """The same as a sequence of the three, each folded, with the same names of tensors."""
        parts = {"norm": self.norm, "drop": self.drop, "act": self.act}
        plain = {k: getattr(type(m), "folded", lambda m, _: m)(m, dims) for k, m in parts.items()}
        return nn.Sequential(OrderedDict(plain))


def is_fused(norm: nn.Module) -> bool:
    """Whether a normalization layer itself applies an activation afterwards (timm's *NormAct* classes).

    >>> is_fused(nn.BatchNorm2d(3))
    False
    """
    children = dict(norm.named_children())
    return "act" in children and not isinstance(norm, NormAct)


def keep_act(old: nn.Module, new: nn.Module) -> nn.Module:
    """`new`, followed by the drop layer and activation of `old` if `old` is fused.

    >>> keep_act(nn.BatchNorm2d(4), nn.Identity())
    Identity()
    """
    if not is_fused(old) or isinstance(new, NormAct):
        return new
    children = dict(old.named_children())
    wrapped = NormAct(new, children.get("drop", nn.Identity()), children["act"])
    # Only the wrapper's own flag: the parts kept theirs.
    wrapped.training = old.training
    return wrapped
