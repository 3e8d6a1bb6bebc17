"""Scaled weight standardization: the convolution of FedWon, for networks without normalization layers.

Paper: FedWon: Triumphing Multi-domain Federated Learning Without Normalization. Zhuang and Lyu. ICLR 2024.
https://arxiv.org/abs/2306.05879
Paper: Characterizing Signal Propagation to Close the Performance Gap in Unnormalized ResNets. Brock, De and Smith. ICLR
2021. https://arxiv.org/abs/2101.08692
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor, nn

from fednorms.core import noise
from fednorms.layers.convolution import PaddingMode, StandardizedConv2d, geometry
from fednorms.layers.replacement import place

Form = Literal["listing", "formula"]
Init = Literal["keep", "xavier"]


def scaled_weight(weight: Tensor, gain: Tensor | float = 1.0, form: Form = "listing", eps: float = 1e-4) -> Tensor:
    """Filters with mean 0 and a norm that does not depend on the fan-in N.

    gain * (w - mean) / sqrt(max(N * variance, eps)). The listing of FedWon uses the variance with divisor N-1 and
    learns the gain; its formula uses divisor N and a constant. Then the squared norm of a filter is gain^2 * (N-1)/N or
    gain^2. Note max(., eps), not "+ eps".

    >>> scaled_weight(torch.tensor([[1.0, 3.0]]), form="formula").square().sum()
    tensor(1.0000)
    """
    axes = tuple(range(1, weight.dim()))
    fan_in = weight[0].numel()
    var, mean = torch.var_mean(weight, dim=axes, correction=int(form == "listing"), keepdim=True)
    return gain * (weight - mean) * torch.rsqrt((var * fan_in).clamp_min(eps))


class WSConv2d(StandardizedConv2d):
    """Conv2d with scaled weight-standardized filters: y = conv(x, scaled_weight(w, gain)) + b.

    form="listing": a learnable `gain` of shape (out, 1, 1, 1), initially 1; form="formula": the constant `gamma`. A new
    layer starts Xavier-normal as in the listing; `like` keeps the weights of the old layer. In a residual block
    (`scale_residuals`), `scale` multiplies the filters, as if the input were scaled, and a learnable `branch_gain` the
    output.

    >>> conv = WSConv2d.like(nn.Conv2d(3, 4, 3))
    >>> conv.gain.shape
    torch.Size([4, 1, 1, 1])
    >>> sorted(WSConv2d.like(nn.Conv2d(3, 4, 3, bias=False), form="formula").state_dict())
    ['weight']
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        form: Form = "listing",
        gamma: float = 1.0,
        eps: float = 1e-4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        if not self.weight.is_meta:  # where torch would load its compiler needlessly
            nn.init.xavier_normal_(self.weight)
        self.form: Form = form
        self.gamma = gamma
        self.eps = eps
        self.scale = 1.0
        self.alpha = 1.0
        self.register_parameter("gain", None)
        self.register_parameter("branch_gain", None)
        if form == "listing":
            self.gain = nn.Parameter(torch.ones(out_channels, 1, 1, 1, device=device, dtype=dtype))

    @classmethod
    def like(
        cls,
        conv: nn.Conv2d,
        form: Form = "listing",
        add_bias: bool = False,
        gamma: float = 1.0,
        eps: float = 1e-4,
        name: str = "",
        init: Init = "keep",
    ) -> Self:
        """The same convolution (the same Parameter objects), standardized.

        `add_bias` adds a zero bias if there is none. init="xavier" draws the weight again in place, from a seed hashed
        from `name` and the old weights: runs with other seeds start from other weights.
        """
        where = place(conv)
        new = cls(**geometry(conv, name), dtype=where["dtype"], form=form, gamma=gamma, eps=eps)._take(conv)
        if init == "xavier":
            before = conv.weight.detach().flatten()[:64].tolist()
            generator = torch.Generator().manual_seed(noise.seed_of("wsconv", name, *before))
            # On the CPU and in float32: every device and dtype must start from the same numbers.
            drawn = torch.empty(conv.weight.shape, dtype=torch.float32, device="cpu")
            with torch.no_grad():
                new.weight.copy_(nn.init.xavier_normal_(drawn, generator=generator))
        if form == "listing":
            new.gain = nn.Parameter(
                torch.ones(conv.out_channels, 1, 1, 1, **where), requires_grad=conv.weight.requires_grad
            )
        if add_bias and new.bias is None:
            new.bias = nn.Parameter(torch.zeros(conv.out_channels, **where), requires_grad=conv.weight.requires_grad)
        return new

    def effective_weight(self) -> Tensor:
        """The standardized filters times the gain (listing) or the constant (formula), and times `scale`."""
        gain = self.gamma if self.gain is None else self.gain
        filters = scaled_weight(self.weight, gain, self.form, self.eps)
        return filters if self.scale == 1.0 else self.scale * filters

    def end_branch(self, alpha: float) -> None:
        """End a residual branch: the output times alpha g, where g is learned and starts at 0."""
        self.alpha = alpha
        self.branch_gain = nn.Parameter(self.weight.new_zeros(()), requires_grad=self.weight.requires_grad)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the effective weight, and scale what ends a residual branch."""
        y = super().forward(input)
        return y if self.branch_gain is None else self.alpha * self.branch_gain * y

    def folded(self, dims: int) -> nn.Module:
        """A plain convolution; what scales the end of a residual branch becomes part of its filters and bias."""
        new = super().folded(dims)
        if self.branch_gain is not None:
            with torch.no_grad():
                for tensor in new.parameters():
                    tensor.mul_(self.alpha * self.branch_gain)
        return new

    def extra_repr(self) -> str:
        """Geometry and form."""
        return f"{super().extra_repr()}, form={self.form!r}"
