"""Candidates for a method of our own, which `own_method.py` searches; importing this file registers them.

What wins becomes a file of `src/fednorms/methods/`; the rest stays, because a published search counts all candidates.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from fednorms.core import noise
from fednorms.core.norms import is_batchnorm, is_norm, norm_layer
from fednorms.core.part import Eval, Part, Pass, Route, Slot, option, part
from fednorms.core.surgery import Change, swap
from fednorms.core.tree import Tree, branch
from fednorms.core.views import Begin, End, Local, Round, Step
from fednorms.layers.replacement import place, width
from fednorms.methods.greg import symmetric_kl


def standardized(x: Tensor, over: str, window: int = 0, eps: float = 1e-4) -> Tensor:
    """Images without their brightness and contrast: minus the mean, divided by the deviation.

    Of the whole image ("image"), of each of its channels ("channel"), or of a square `window` around each pixel.
    """
    if over == "off":
        return x
    axes = (1, 2, 3) if over == "image" else (2, 3)
    mean = x.mean(axes, keepdim=True)
    x = (x - mean) * torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + eps)
    if window:
        near = _near(x.mean(1, keepdim=True) if over == "image" else x, window)
        x = x - near
        power = x.square().mean(1, keepdim=True) if over == "image" else x.square()
        x = x * torch.rsqrt(_near(power, window) + 0.1)
    return x


def _near(x: Tensor, window: int) -> Tensor:
    half = window // 2
    return F.avg_pool2d(F.pad(x, (half, half, half, half), mode="replicate"), window, stride=1)


class FoldedConv(nn.Module):
    """|conv(standardized image)| + shift: the same for an image, its negative, and any brightness and contrast."""

    def __init__(self, conv: nn.Conv2d, over: str, fold: str, window: int) -> None:
        super().__init__()
        self.inner, self.over, self.fold, self.window = conv, over, fold, window
        channels, where = conv.out_channels, place(conv)
        self.shift = nn.Parameter(torch.zeros(channels, **where))
        self.slope = nn.Parameter(torch.full((channels,), -1.0, **where)) if fold == "learned" else None
        conv.bias = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(standardized(x, self.over, self.window))
        if self.fold == "abs":
            z = z.abs()
        elif self.fold == "half":
            half = z.shape[1] // 2
            z = torch.cat([z[:, :half].abs(), z[:, half:]], 1)
        elif self.slope is not None:
            z = F.prelu(z, self.slope)
        return z + self.shift.view(1, -1, 1, 1)


@part("stem")
class Stem(Part):
    """Make the first convolution blind to brightness, contrast and polarity of an image."""

    over: Literal["image", "channel", "off"] = option("image", choices=("image", "channel", "off"))
    fold: Literal["abs", "half", "learned", "off"] = option("abs", choices=("abs", "half", "learned", "off"))
    window: int = option(0, at_least=0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)

        def make(conv: nn.Module, name: str) -> nn.Module:
            assert isinstance(conv, nn.Conv2d)
            return FoldedConv(conv, self.over, self.fold, self.window)

        return swap(model, lambda m: m is first, make)


@part("early_in")
class EarlyIN(Part):
    """Instance normalization in place of the first `layers` norms."""

    layers: int = option(1, at_least=1)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        first = [m for m in model.modules() if is_norm(m)][: self.layers]

        def make(norm: nn.Module, name: str) -> nn.Module:
            return nn.InstanceNorm2d(width(norm, name), affine=True, **place(norm))

        return swap(model, lambda m: any(m is f for f in first), make)


class Affine(nn.Module):
    """gamma x + beta per channel."""

    def __init__(self, channels: int, **where: object) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.ones(channels, **where))  # type: ignore[call-overload]
        self.bias = nn.Parameter(torch.zeros(channels, **where))  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


@part("local_affine")
class LocalAffine(Part):
    """Replace norms by gains and shifts per channel that stay with the client."""

    local: bool = option(True)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        return swap(model, is_norm, lambda norm, name: Affine(width(norm, name), **place(norm)))

    @override
    def route(self, slot: Slot) -> Route:
        return Route.LOCAL if self.local and isinstance(slot.module, Affine) else Route.SHARED


@part("ema")
class EMA(Part):
    """Test a moving average of the server's models, and of what clients keep: a <- d a + (1 - d) w."""

    keep: float = option(0.9, at_least=0.0, at_most=1.0)

    @override
    def init(self, w: Tree) -> tuple[Tree, Tree]:
        return Tree(w), Tree()

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        t = r.context.round + 1
        d = min(self.keep, (t - 1) / (t + 4))
        new = r.model.pick(delta) + delta
        return delta, Tree({k: d * r.mine[k] + (1 - d) * new[k] for k in new})

    @override
    def evaluation(self) -> Eval:
        return Eval(server_model=lambda model, mine: Tree({**model, **mine}))


@part("rdrop")
class RDrop(Part):
    """Add alpha times the symmetric KL divergence between the predictions under two dropout masks."""

    alpha: float = option(0.5, at_least=0.0)

    @override
    def loss(self, s: Step) -> Tensor | float:
        if not self.alpha or s.context.evaluating:
            return 0.0
        key = noise._active.get()
        assert key is not None
        with noise.keyed(torch.cat([key[:1] + 7919, key[1:]])):
            logits, _ = s.forward(s.params, s.x)
        return self.alpha * (symmetric_kl(s.logits, logits) + s.base(logits, s.y) - s.value)


@part("smooth")
class Smooth(Part):
    """Cross-entropy with smoothed labels."""

    by: float = option(0.1, at_least=0.0, at_most=1.0)

    @override
    def objective(self, s: Step) -> Tensor:
        return F.cross_entropy(s.logits, s.y, label_smoothing=self.by)


@part("flip_sign")
class FlipSign(Part):
    """Replace training images by their negatives with probability p: the augmentation that `stem` makes needless."""

    p: float = option(0.5, at_least=0.0, at_most=1.0)

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        if s.testing or s.context.evaluating:
            return x, y
        sign = 1 - 2 * (s.uniform(len(x), 1, 1, 1) < self.p).to(x)
        return x * sign, y


@part("mixup")
class Mixup(Part):
    """Train on mixtures of a batch's images and their labels, each with its neighbor in the batch.

    Paper: mixup: Beyond Empirical Risk Minimization. Zhang et al. ICLR 2018. https://arxiv.org/abs/1710.09412
    kind="cutmix" pastes a square of the neighbor instead (https://arxiv.org/abs/1905.04899). Shares are uniform
    (alpha=1 of the papers), and of every image the larger part is its own. `p` of all images are mixed.
    """

    kind: Literal["mixup", "cutmix"] = option("mixup", choices=("mixup", "cutmix"))
    p: float = option(1.0, at_least=0.0, at_most=1.0)

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        if s.testing or s.context.evaluating:
            return x, y
        share, (row, column) = self._drawn(s, x)
        if self.kind == "mixup":
            return x + share.view(-1, 1, 1, 1) * (x.roll(1, 0) - x), y
        inside = torch.ones_like(x[:, :1])
        for axis, start in ((2, row), (3, column)):
            size = x.shape[axis]
            at, side = torch.arange(size, device=x.device), (share.sqrt() * size).round().view(-1, 1)
            here = ((at - (start.view(-1, 1) * size).floor()) % size < side).to(x)
            inside = inside * (here.view(-1, 1, size, 1) if axis == 2 else here.view(-1, 1, 1, size))
        return torch.where(inside > 0, x.roll(1, 0), x), y

    @override
    def objective(self, s: Step) -> Tensor:
        if s.testing or s.context.evaluating:
            return F.cross_entropy(s.logits, s.y)
        share, _ = self._drawn(s, s.x)
        if self.kind == "cutmix":
            height, width_ = s.x.shape[-2:]
            share = (share.sqrt() * height).round() * (share.sqrt() * width_).round() / (height * width_)
        own, other = (F.cross_entropy(s.logits, y, reduction="none") for y in (s.y, s.y.roll(1, 0)))
        return (own + share * (other - own)).mean()

    def _drawn(self, s: Step, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The neighbor's share for every image, from 0 to 1/2, and a place; the same numbers in both hooks."""
        with noise.one_pass():
            u, mixed, row, column = (s.uniform(len(x)) for _ in range(4))
        return 0.5 * u * (mixed < self.p).to(u), (row, column)


@part("randconv")
class RandConv(Part):
    """Send training images through random filters with probability p, each through its own.

    Paper: Robust and Generalizable Visual Representation Learning via Random Convolutions. Xu et al. ICLR 2021.
    https://arxiv.org/abs/2007.13003. The filtered image is mixed with the image itself in a uniform share and keeps its
    mean and deviation. Filters of one pixel change colors, contrast and polarity; wider ones change texture, too.
    """

    p: float = option(0.5, at_least=0.0, at_most=1.0)
    size: int = option(1, choices=(1, 3))
    same: bool = option(True)  # keep the mean and deviation of the image

    @override
    def batch(self, x: Tensor, y: Tensor, s: Step) -> tuple[Tensor, Tensor]:
        if s.testing or s.context.evaluating:
            return x, y
        n, c, height, width_ = x.shape
        taps = c * self.size**2
        radius, angle = s.uniform(n, c, taps), s.uniform(n, c, taps)
        filters = (-2 / taps * radius.log()).sqrt() * (2 * torch.pi * angle).cos()  # normal, of variance 1 / taps
        around = F.unfold(x, self.size, padding=self.size // 2) if self.size > 1 else x.flatten(2)
        out = torch.bmm(filters, around).view(n, c, height, width_)
        keep = s.uniform(n, 1, 1, 1)
        out = keep * x + (1 - keep) * out
        if self.same:
            axes = (1, 2, 3)
            scale = x.std(axes, keepdim=True) / (out.std(axes, keepdim=True) + 1e-4)
            out = (out - out.mean(axes, keepdim=True)) * scale + x.mean(axes, keepdim=True)
        return torch.where(s.uniform(n, 1, 1, 1) < self.p, out, x), y


@part("ebbn")
class EBBN(Part):
    """BN statistics shrunk per channel: lambda own + (1 - lambda) federation, lambda = b / (b + s / n).

    b is the variance of the statistic between sites without the sampling error s / n, s what one image contributes,
    and n a site's images times `power`. A new site has lambda = 0.
    """

    reduction = "stack"
    uploads = True

    power: float = option(1.0, above=0.0)

    @override
    def route(self, slot: Slot) -> Route:
        return Route.SENT if is_batchnorm(slot.module) and slot.kind == "buffer" else Route.SHARED

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def finish(self, e: End) -> tuple[Tree, Tree]:
        return Tree(e.down), Tree({k: v for k, v in e.buffers.items() if v.is_floating_point()})

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        out, images = Tree(), self.power * r.context.samples / r.total
        for name, sites in r.up.items():
            if name.endswith("running_mean"):
                one = r.up[name.replace("running_mean", "running_var")].mean(0)
            else:
                one = 2 * sites.square().mean(0)
            between = (sites.var(0) - one / images).clamp(min=0)
            out[f"lambda/{name}"] = between / (between + one / images + 1e-12)
            out[f"mean/{name}"] = sites.mean(0)
        return delta, out

    @override
    def evaluation(self) -> Eval:
        def shrunk(model: Tree, mine: Tree) -> Tree:
            means, share = branch(mine, "mean"), branch(mine, "lambda")
            return Tree({k: m + share[k] * (model[k] - m) for k, m in means.items()})

        return Eval(personal_model=shrunk)


class _Gate:
    """How much of each site's branch every image of the current batch takes, as the first layer has found."""

    def __init__(self) -> None:
        self.shares: Tensor | None = None


def look(x: Tensor) -> Tensor:
    """What tells the sites' images apart: light, contrast, sharpness at two scales, and color, each (N,)."""
    light = x.mean(1)
    across, fine = light[:, :, 1:] - light[:, :, :-1], light[:, :, 2:] - 2 * light[:, :, 1:-1] + light[:, :, :-2]
    values = [light.mean((1, 2)), *(_log_size(t) for t in (light - light.mean((1, 2), keepdim=True), across, fine))]
    if x.shape[1] == 3:
        for color in (x[:, 0] - x[:, 1], x[:, 1] - x[:, 2]):
            values += [color.mean((1, 2)), _log_size(color)]
    return torch.stack(values, 1)


def _log_size(t: Tensor) -> Tensor:
    return 0.5 * (t.square().mean((1, 2)) + 1e-4).log()


class LookingConv(nn.Module):
    """A convolution that also tells from an image's look which sites it may be of: a Gaussian per site."""

    def __init__(self, conv: nn.Module, sites: int, channels: int, gate: _Gate, sharp: float, **where: object) -> None:
        super().__init__()
        self.inner, self.gate, self.sharp = conv, gate, sharp
        size = 8 if channels == 3 else 4
        self.register_buffer("look_mean", torch.zeros(sites, size, **where))  # type: ignore[call-overload]
        self.register_buffer("look_var", torch.ones(sites, size, **where))  # type: ignore[call-overload]
        self.register_buffer("branch", torch.full((sites,), 1 / sites, **where))  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = look(x)
            if self.training:
                self._move(self.look_mean, seen.mean(0))
                self._move(self.look_var, (seen - self.look_mean.T @ self.branch).square().mean(0))
            else:
                spread = self.look_var + 1e-2
                each = (seen[:, None] - self.look_mean).square() / spread + spread.log()
                self.gate.shares = (-0.5 * self.sharp * each.sum(2)).softmax(1)
        return self.inner(x)

    def _move(self, rows: Tensor, value: Tensor) -> None:
        rows.add_(0.1 * self.branch[:, None] * (value - rows))


@norm_layer()
class BranchNorm(nn.Module):
    """Batch normalization with one set of gains, shifts and statistics per site.

    In training, the site's own set. In a test, the sum of all sets' outputs, each times the probability that the image
    is of that site.
    """

    def __init__(self, channels: int, sites: int, gate: _Gate, **where: object) -> None:
        super().__init__()
        self.channels, self.gate, self.eps = channels, gate, 1e-5
        ones = torch.ones(sites, channels, **where)  # type: ignore[call-overload]
        self.weight, self.bias = nn.Parameter(ones.clone()), nn.Parameter(torch.zeros_like(ones))
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", ones.clone())
        self.register_buffer("branch", torch.full_like(ones[:, 0], 1 / sites))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, self.channels, *[1] * (x.dim() - 2))
        if self.training:
            with torch.no_grad():
                axes = [0, *range(2, x.dim())]
                self._move(self.running_mean, x.mean(axes))
                self._move(self.running_var, x.var(axes))
            return F.batch_norm(x, None, None, self.branch @ self.weight, self.branch @ self.bias, True, 0.0, self.eps)
        gains = self.weight * torch.rsqrt(self.running_var + self.eps)
        shares = self.gate.shares
        assert shares is not None
        return x * (shares @ gains).view(shape) + (shares @ (self.bias - gains * self.running_mean)).view(shape)

    def _move(self, rows: Tensor, value: Tensor) -> None:
        rows.add_(0.1 * self.branch[:, None] * (value - rows))


@part("route_bn")
class RouteBN(Part):
    """One model with every site's BN layers, of which each image takes those of the sites that it looks like."""

    weighting = "uniform"

    sites: int = option(5, at_least=1)
    sharp: float = option(1.0, above=0.0)

    @override
    def surgery(self, model: nn.Module, head: list[str]) -> list[Change]:
        gate = _Gate()
        first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)

        def make(norm: nn.Module, name: str) -> nn.Module:
            return BranchNorm(width(norm, name), self.sites, gate, **place(norm))

        def looking(conv: nn.Module, name: str) -> nn.Module:
            assert isinstance(conv, nn.Conv2d)
            return LookingConv(conv, self.sites, conv.in_channels, gate, self.sharp, **place(conv))

        return [*swap(model, is_batchnorm, make), *swap(model, lambda m: m is first, looking)]

    @override
    def route(self, slot: Slot) -> Route:
        mine = isinstance(slot.module, (BranchNorm, LookingConv)) and slot.leaf == "branch"
        return Route.OWNED if mine else Route.SHARED

    @override
    def passes(self) -> list[Pass]:
        def client(local: Local) -> tuple[Tree, Tree]:
            return Tree(), Tree(name=_number(local.context.client, local.model))

        return [Pass("setup", client, lambda up, r: Tree(up), reduce="stack")]

    @override
    def down(self, mine: Tree) -> Tree:
        return mine

    @override
    def begin(self, model: Tree, b: Begin) -> Tree:
        out = Tree(model)
        for name in b.owned:
            if not b.down:  # in the setup pass
                break
            mine = (b.down["name"] == _number(b.context.client, model)).to(model[name])
            out[name] = torch.where(mine.sum() > 0, mine, torch.full_like(mine, 1 / self.sites))
        return out

    @override
    def server(self, delta: Tree, r: Round) -> tuple[Tree, Tree]:
        return self._whole(delta, r), r.mine

    @override
    def stats(self, delta: Tree, r: Round) -> Tree:
        return self._whole(delta, r)

    def _whole(self, delta: Tree, r: Round) -> Tree:
        """Only one site moved each row, so the sum of the updates is that site's."""
        rows = set(r.context.names(lambda slot: isinstance(slot.module, (BranchNorm, LookingConv))))
        return Tree({k: v * r.sampled if k in rows else v for k, v in delta.items()})


def _number(name: str, model: Tree) -> Tensor:
    like = next(t for t in model.values() if t.is_floating_point())
    return torch.full_like(like.flatten()[0], noise.seed_of("site", name) % 2**23, dtype=torch.float32)
