"""Rules for operations on stacked clients where `torch.func.vmap` has none, or a slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fednorms.core.stacked import above, below, beneath, follows, gradient, is_stacked, level_of
from fednorms.engines.graphs.stacked_conv import Geometry, convolve


class StackedOperations(TorchFunctionMode):
    """Within this context, operations of a stacked step use the rules of this file."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            found = rule(*args, **kwargs)
            if found is not NotImplemented:
                return found
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and _level(args) is not None:
            return _foreach(name.removeprefix("_foreach_"), func, args, kwargs)
        return func(*args, **kwargs)


def _gradient(
    outputs: Any,  # noqa: ANN401
    inputs: Any,  # noqa: ANN401
    grad_outputs: Any = None,  # noqa: ANN401
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:  # noqa: ANN401
    several = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    if not any(is_stacked(t) for t in several):
        return NotImplemented
    if len(several) > 1 or grad_outputs is not None or is_grads_batched or materialize_grads:
        raise NotImplementedError("a gradient of clients that step together takes none of torch's rarer options")
    leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    how = {"create_graph": create_graph, "allow_unused": bool(allow_unused)}
    return tuple(
        gradient(several[0], leaves, retain_graph=create_graph if retain_graph is None else retain_graph, **how)
    )


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """What autocast would do, below which these rules work."""
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None else t.to(dtype) for t in tensors]


# -- layers ---------------------------------------------------------------------------------------------------------
def _pair(value: Any) -> tuple[int, int]:  # noqa: ANN401
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return (found[0], found[-1])


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,  # noqa: ANN401
    padding: Any = 0,  # noqa: ANN401
    dilation: Any = 1,  # noqa: ANN401
    groups: int = 1,
) -> Any:  # noqa: ANN401
    if not (is_stacked(x) and is_stacked(weight)) or groups != 1 or isinstance(padding, str) or x.dim() != 4:
        return NotImplemented
    if bias is not None and not is_stacked(bias):
        return NotImplemented
    level = level_of(x)
    g = Geometry(_pair(x.shape[2:]), _pair(weight.shape[2:]), _pair(stride), _pair(padding), _pair(dilation))
    images, w, b = (None if t is None else below(t) for t in (x, weight, bias))
    with beneath():
        images, w, b = _cast(images, w, b)
        assert images is not None
        assert w is not None
        y = convolve(images.contiguous(), w.contiguous(), g)
        if b is not None:
            y = y + b[:, None, :, None, None]
    return above(y, level)


class _Linear(torch.autograd.Function):
    """x W^T for each client. The gradient of W has the layout of W, so it needs no copy."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.mT)

    @staticmethod
    @override
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), (y,) = ctx.saved_tensors, slopes
        return (
            torch.bmm(y, w) if ctx.needs_input_grad[0] else None,
            torch.bmm(y.mT, x) if ctx.needs_input_grad[1] else None,
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: ANN401
    if not (is_stacked(x) and is_stacked(weight)) or x.dim() < 2 or (bias is not None and not is_stacked(bias)):
        return NotImplemented
    level, shape = level_of(x), x.shape[:-1]
    rows, w, b = (None if t is None else below(t) for t in (x, weight, bias))
    with beneath():
        rows, w, b = _cast(rows, w, b)
        assert rows is not None
        assert w is not None
        y = _Linear.apply(rows.flatten(1, -2) if rows.dim() > 3 else rows, w)
        if b is not None:
            y = y + b[:, None]
        y = y.view(len(y), *shape, -1)
    return above(y, level)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **how: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Attention of each image is its own, so clients are more images."""
    if not all(is_stacked(t) for t in (q, k, v)) or attn_mask is not None or dropout_p:
        return NotImplemented
    level, count, images = level_of(q), len(below(q)), q.shape[0]
    if q.dim() < 4:
        return NotImplemented
    with beneath():
        merged = _cast(*(t.flatten(0, 1) for t in (below(q), below(k), below(v))))
        found = F.scaled_dot_product_attention(*merged, **how)  # type: ignore[arg-type]
        found = found.unflatten(0, (count, images))
    return above(found, level)


# -- lists of tensors -----------------------------------------------------------------------------------------------
def _foreach(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """An operation on lists: at once if all tensors are stacked, otherwise one by one."""
    lists = [a for a in args if isinstance(a, (list, tuple))]
    level = _level(args)
    assert level is not None
    single = [a for a in args if isinstance(a, Tensor)]
    alike = all(is_stacked(t) for some in lists for t in some if isinstance(t, Tensor))
    if alike and name != "norm" and not any(is_stacked(t) for t in single) and _same_shapes(lists):
        plain = [[below(t) for t in a] if isinstance(a, (list, tuple)) else a for a in args]
        with beneath():
            found = func(*plain, **kwargs)
        return found if found is None or name.endswith("_") else [above(t, level) for t in found]
    one = torch.linalg.vector_norm if name == "norm" else getattr(torch.Tensor, name)
    named = dict(kwargs)
    if name in ("addcmul_", "addcmul") and len(args) > 3:
        args, named["value"] = args[:3], args[3]
    results = []
    for i, t in enumerate(args[0]):
        rest = [a[i] if isinstance(a, (list, tuple)) else a for a in args[1:]]
        results.append(one(t, *rest, **named))  # no rule of vmap takes lists
    return None if name.endswith("_") else results


def _level(args: tuple[Any, ...]) -> int | None:
    """The level of the stacked tensors among arguments and lists of them; None if there is none."""
    for a in args:
        for t in a if isinstance(a, (list, tuple)) else [a]:
            if isinstance(t, Tensor) and is_stacked(t):
                return level_of(t)
    return None


def _lerp_(t: Tensor, end: Tensor, weight: Any) -> Any:  # noqa: ANN401
    if not (is_stacked(t) and is_stacked(end)) or isinstance(weight, Tensor) or t.shape != end.shape:
        return NotImplemented
    with beneath():
        below(t).lerp_(below(end), weight)
    return t


def _same_shapes(lists: list[Any]) -> bool:
    return all(len({t.shape for t in row if isinstance(t, Tensor)}) == 1 for row in zip(*lists, strict=True))


def _fused_sgd(w: list[Tensor], grads: list[Tensor], velocity: list[Tensor], **how: Any) -> Any:  # noqa: ANN401
    if not is_stacked(w[0]):
        return NotImplemented
    # The kernel does not compare shapes: a gradient that clients share gets a row for each of them.
    whole = [g if is_stacked(g) else torch.empty_like(t).copy_(g) for t, g in zip(w, grads, strict=True)]
    plain = [[below(t).contiguous() for t in some] for some in (w, whole, velocity)]
    with beneath():
        torch._fused_sgd_(*plain, **how)
    return None


_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    # What a hook asks of autograd.
    torch.Tensor.requires_grad.__get__: follows,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: lambda t: below(t).grad_fn,  # type: ignore[union-attr]
    torch.Tensor.is_leaf.__get__: lambda t: below(t).is_leaf,  # type: ignore[attr-defined]
    torch.Tensor._version.__get__: lambda t: below(t)._version,  # type: ignore[attr-defined]
    torch.autograd.grad: _gradient,
    F.conv2d: _conv2d,
    torch.conv2d: _conv2d,
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    Tensor.lerp_: _lerp_,
    torch._fused_sgd_: _fused_sgd,
}
