"""Spatial parallelism: ranks have parts of every sample, convolutions see all of it.

Convolutions and poolings get the halo of their shard. Operations on single values run
on shards as they are. All others are given whole samples, which are gathered before the
first of them, and which every rank then computes alike. Results are those of one
process, up to the order of sums.

A loss is the same on all ranks, and gradients are those of the sum of their losses;
reductions over data-parallel ranks take the mean.

Source: Oyama et al. 2020, arXiv 2007.12856.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from executors.strategies.collectives import (
    copy_to_region,
    gather_to_region,
    reduce_from_region,
)
from executors.strategies.halo import (
    FIRST_SPATIAL,
    ShardGrid,
    exchange_halo,
    halo_conv,
    halos_and_padding,
    local_region,
)
from planner.errors import ExecutionError
from planner.schema.halo import Window

__all__ = ["apply_halo"]

#: Functions of single values, without their underscores: shards stay shards.
_POINTWISE_NAMES = """
    abs add addcdiv addcmul alpha_dropout bfloat16 celu clamp clamp_max clamp_min
    clone contiguous copy cos detach div divide double dropout elu eq exp fill float
    floor ge gelu gt half hardsigmoid hardswish hardtanh iadd identity imul isfinite
    isub le leaky_relu lerp log log1p log_sigmoid logsigmoid lt maximum minimum mish mul
    multiply ne neg negative ones_like pow radd rand_like reciprocal relu relu6 rmul
    round rsqrt rsub rtruediv selu sigmoid sign silu sin softplus softsign sqrt square
    sub subtract tanh threshold to true_divide truediv type type_as view_as where
    zero zeros_like
"""
_POINTWISE = frozenset(_POINTWISE_NAMES.split())
#: Functions that read no values, or of this rank's tensor itself.
_PLAIN_NAMES = """
    dim element_size get_device grad_fn has_names is_complex is_contiguous
    is_floating_point is_pinned is_shared register_hook requires_grad_ retain_grad
    storage_offset stride untyped_storage data_ptr is_inference _is_view
    register_post_accumulate_grad_hook record_stream is_set_to is_conj is_neg
    __repr__ __hash__ __format__ is_same_size is_coalesced _is_zerotensor is_signed
"""
_PLAIN = frozenset(_PLAIN_NAMES.split())
_RANDOM = frozenset({"dropout", "alpha_dropout", "rand_like"})
_CONVS = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_MAX_POOLS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})
_AVERAGE_POOLS = frozenset({"avg_pool1d", "avg_pool2d", "avg_pool3d"})


def _each(value: Any, dims: int) -> list[int]:
    """Sizes along each spatial dimension, of one number or a list."""
    given = list(value) if isinstance(value, list | tuple) else [value]
    return [int(each) for each in (given * dims if len(given) == 1 else given)]


def _named(names: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Arguments by name, of a function of torch's without a signature."""
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def _windows(
    dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[Window, ...]:
    kernels, dilations = _each(kernel, dims), _each(dilation, dims)
    if padding in ("same", "valid"):
        wanted = padding == "same"
        totals = [wanted * d * (k - 1) for k, d in zip(kernels, dilations, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(each, each) for each in _each(padding, dims)]
    rows = zip(kernels, _each(stride, dims), sides, dilations, strict=True)
    return tuple(
        Window(kernel=k, stride=s, before=side[0], behind=side[1], dilation=d)
        for k, s, side, d in rows
    )


class _Shards(TorchFunctionMode):
    """Mode in which functions of torch work on shards of samples.

    Shards are known by their storage, which in-place functions and the hooks of
    ``fully_shard`` keep; nothing but single values is computed of a view of one.
    """

    def __init__(self, grid: ShardGrid) -> None:
        super().__init__()
        self.grid = grid
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._state = threading.local()

    @property
    def entered(self) -> bool:
        """True in this thread between entry and exit."""
        return bool(getattr(self._state, "depth", 0))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Work on shards in the block, in this thread."""
        if self.entered:
            yield
            return
        self._state.depth = 1
        self._state.grad = torch.is_grad_enabled()
        try:
            with self:
                yield
        finally:
            self._state.depth = 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with plain tensors in the block."""
        before = getattr(self._state, "paused", False)
        self._state.paused = True
        try:
            yield
        finally:
            self._state.paused = before

    def mark(self, value: torch.Tensor) -> torch.Tensor:
        """Note that a tensor is a shard, as long as its storage lives."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._shapes:
            weakref.finalize(storage, self._shapes.pop, key, None).atexit = False
        self._shapes[key] = tuple(value.shape)
        return value

    def holds(self, value: Any) -> bool:
        """Return True for a shard."""
        if not isinstance(value, torch.Tensor) or value.ndim <= FIRST_SPATIAL:
            return False
        shape = self._shapes.get(value.untyped_storage()._cdata)
        return shape is not None and shape == tuple(value.shape)

    def whole_shape(self, value: torch.Tensor) -> torch.Size:
        """Shape of the sample that a tensor is a shard of."""
        sizes = list(value.shape)
        for axis, factor in enumerate(self.grid.factors):
            sizes[FIRST_SPATIAL + axis] *= factor
        return torch.Size(sizes)

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """Put a sample together of the shards of all ranks; gradients are summed."""
        if self._state.grad and not torch.is_grad_enabled() and value.requires_grad:
            raise ExecutionError(
                "a torch.autograd.Function, or code under no_grad, reads more than "
                "single values of a sample that ranks share, so that its gradient "
                "would be wrong; write it with functions of torch, or use cp=1"
            )
        factors, count = self.grid.factors, len(self.grid.factors)
        parts = gather_to_region(value.unsqueeze(0), self.grid.group, 0)
        parts = parts.view(*factors, *value.shape)
        # [f1, f2, batch, channels, d1, d2, ...] to [batch, channels, f1 d1, f2 d2, ...]
        order = [count, count + 1]
        for axis in range(value.ndim - FIRST_SPATIAL):
            order += [axis] if axis < count else []
            order.append(count + FIRST_SPATIAL + axis)
        return parts.permute(order).reshape(self.whole_shape(value))

    def own_shard(self, value: torch.Tensor) -> torch.Tensor:
        """Cut this rank's shard out of a sample that every rank has."""
        region = local_region(
            value.shape[FIRST_SPATIAL:], self.grid.group.rank(), self.grid.factors
        )
        return value[(slice(None), slice(None), *region)].contiguous()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(self._state, "paused", False):
            return func(*args, **kwargs)
        shards = [each for each in _flat((args, kwargs)) if self.holds(each)]
        if not shards:
            return func(*args, **kwargs)
        return self._call(func, shards[0], args, kwargs)

    def _call(
        self,
        func: Callable[..., Any],
        shard: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            field = getattr(getattr(func, "__self__", None), "__name__", "")
            if field in ("T", "mT", "H", "mH"):
                return func(*self._plain(args))
            return self.whole_shape(shard) if field == "shape" else func(*args)
        if name in _PLAIN:
            return func(*args, **kwargs)
        if name in ("size", "numel", "nelement"):
            shape = self.whole_shape(shard)
            at = [*args[1:], *kwargs.values()]
            return shape.numel() if name != "size" else shape[at[0]] if at else shape
        made = self._on_shards(func, name, shard, args, kwargs)
        if made is not None:
            return self.mark(made) if made.ndim > FIRST_SPATIAL else made
        in_place = name == "__setitem__" or re.fullmatch(r"[^_].*[^_]_", name)
        if "out" in kwargs or (in_place and self.holds(args[0])):
            raise ExecutionError(
                f"{name} in place of a sample that ranks share would change a copy of "
                f"it; write it out of place, or use cp=1"
            )
        return func(*self._plain(args), **self._plain(kwargs))

    def _on_shards(
        self,
        func: Callable[..., Any],
        name: str,
        shard: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Shard of a function's result; None if the function needs whole samples."""
        if name in _CONVS:
            return self._convolve(args, kwargs)
        if name in _MAX_POOLS or name in _AVERAGE_POOLS:
            return self._pool(func, name, args, kwargs)
        if name == "cross_entropy":
            return self._cross_entropy(func, args, kwargs)
        if name in _TRANSPOSED:
            return self._expand(func, args, kwargs)
        if name == "interpolate":
            return _enlarge(func, args, kwargs)
        if name in ("cat", "concat"):
            return self._join(func, shard, args, kwargs)
        short = name.strip("_")
        if short in _POINTWISE:
            return self._pointwise(func, short, shard, args, kwargs)
        return None

    def _plain(self, value: Any) -> Any:
        """Gather the shards among nested arguments."""
        if isinstance(value, torch.Tensor):
            return self.gathered(value) if self.holds(value) else value
        if isinstance(value, list | tuple):
            parts = [self._plain(each) for each in value]
            return type(value)(parts) if type(value) in (list, tuple) else value
        if isinstance(value, dict):
            return {key: self._plain(each) for key, each in value.items()}
        return value

    def _divisible(self, value: torch.Tensor, windows: Sequence[Window]) -> bool:
        sizes = self.whole_shape(value)[FIRST_SPATIAL:]
        pairs = zip(windows, sizes, self.grid.factors, strict=False)
        return all(w.violation(size, parts) is None for w, size, parts in pairs)

    def _convolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        given = _named("input weight bias stride padding dilation groups", args, kwargs)
        value, weight = given["input"], given["weight"]
        windows = _windows(
            weight.ndim - FIRST_SPATIAL,
            list(weight.shape[FIRST_SPATIAL:]),
            given.get("stride", 1),
            given.get("padding", 0),
            given.get("dilation", 1),
        )
        if value.ndim != weight.ndim or not self.holds(value):
            return None
        if self.holds(weight) or not self._divisible(value, windows):
            return None
        return halo_conv(
            value,
            weight,
            given.get("bias"),
            self.grid,
            windows,
            given.get("groups", 1),
        )

    def _pool(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        highest = name in _MAX_POOLS
        names = "input kernel_size stride padding"
        names += (
            " dilation ceil_mode return_indices"
            if highest
            else " ceil_mode count_include_pad divisor_override"
        )
        given = _named(names, args, kwargs)
        value = given["input"]
        dims, kernel = int(name[-2]), given["kernel_size"]
        stride = given.get("stride")
        windows = _windows(
            dims,
            kernel,
            kernel if stride is None or stride == [] else stride,
            given.get("padding", 0),
            given.get("dilation", 1),
        )
        if value.ndim != dims + FIRST_SPATIAL or given.get("return_indices"):
            return None
        if given.get("ceil_mode") or not self._divisible(value, windows):
            return None
        padded = any(window.before for window in windows)
        if not highest and padded and not given.get("count_include_pad", True):
            return None
        fill = -torch.inf if highest else 0.0
        halos, padding, value = halos_and_padding(value, self.grid, windows, fill)
        if any(map(any, halos)):
            value = exchange_halo(value, self.grid, halos, fill=fill)
        rest = {
            key: each
            for key, each in given.items()
            if key not in ("input", "kernel_size", "stride", "padding")
        }
        strides = [window.stride for window in windows]
        made: torch.Tensor = func(value, _each(kernel, dims), strides, padding, **rest)
        return made

    def _expand(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Transposed convolution whose windows do not overlap, on the shard alone."""
        names = "input weight bias stride padding output_padding groups dilation"
        given = _named(names, args, kwargs)
        dims = given["weight"].ndim - FIRST_SPATIAL
        kernel = list(given["weight"].shape[FIRST_SPATIAL:])
        plain = (
            _each(given.get("stride", 1), dims) == kernel
            and not any(_each(given.get("padding", 0), dims))
            and not any(_each(given.get("output_padding", 0), dims))
            and set(_each(given.get("dilation", 1), dims)) == {1}
            and given["input"].ndim == dims + FIRST_SPATIAL
            and self.holds(given["input"])
        )
        return cast("torch.Tensor", func(*args, **kwargs)) if plain else None

    def _join(
        self,
        func: Callable[..., Any],
        shard: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        given = _named("tensors dim", args, kwargs)
        dim, parts = given.get("dim", 0), given["tensors"]
        if dim not in (0, 1, -shard.ndim, 1 - shard.ndim) or "out" in given:
            return None
        made: torch.Tensor = func([self._like(each, shard) for each in parts], dim)
        return made

    def _cross_entropy(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Mean cross entropy of the classes of a sample's values, of all shards."""
        names = "input target weight size_average ignore_index reduce reduction"
        given = _named(names + " label_smoothing", args, kwargs)
        scores, target = given["input"], given["target"]
        if given.get("reduction", "mean") != "mean" or target.is_floating_point():
            return None
        others = (given.get(name) for name in ("weight", "size_average", "reduce"))
        if any(other is not None for other in others) or not self.holds(scores):
            return None
        whole = self.whole_shape(scores)
        of_values = target.shape == (*whole[:1], *whole[FIRST_SPATIAL:])
        if given.get("label_smoothing") or not of_values:
            return None
        ignored = given.get("ignore_index", -100)
        own = self.own_shard(target.unsqueeze(1)).squeeze(1)
        total: torch.Tensor = func(scores, own, ignore_index=ignored, reduction="sum")
        # Every rank has the sum, and a part of the gradient of every rank's.
        total = copy_to_region(
            reduce_from_region(total, self.grid.group), self.grid.group
        )
        return torch.div(total, (target != ignored).sum())

    def _like(self, value: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Shard of a tensor beside another: cut out of a whole one."""
        return value if self.holds(value) else self.own_shard(value)

    def _pointwise(
        self,
        func: Callable[..., Any],
        name: str,
        shard: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        if name in _RANDOM and _draws(name, args, kwargs):
            raise ExecutionError(
                f"{name} of a sample that ranks share would draw other numbers than "
                f"one process; set its probability to 0, move it behind the gather, "
                f"or use cp=1"
            )
        whole = self.whole_shape(shard)

        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or self.holds(value):
                return value
            spatial = value.shape[max(0, FIRST_SPATIAL - shard.ndim + value.ndim) :]
            if all(size == 1 for size in spatial):
                return value
            return self.own_shard(value) if value.shape == whole else None

        listed = [local(value) for value in args]
        named = {key: local(value) for key, value in kwargs.items()}
        dropped = any(
            new is None and old is not None
            for new, old in zip(
                (*listed, *named.values()), (*args, *kwargs.values()), strict=True
            )
        )
        # In place, a whole tensor would be left as it is.
        if dropped or (args and listed[0] is not args[0]):
            return None
        if any(
            self.holds(value) and value.shape != shard.shape
            for value in _flat((listed, named))
        ):
            return None
        made = func(*listed, **named)
        same = isinstance(made, torch.Tensor) and made.shape == shard.shape
        return made if same else None


def _draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a function draws random numbers for its arguments."""
    if name == "rand_like":
        return True
    names = "input p training" if "train" not in kwargs else "input p train"
    given = _named(names, args, kwargs)
    training = given.get("training", given.get("train", True))
    return bool(training) and given.get("p", 0.5) != 0


def _enlarge(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Repeat values a whole number of times along each dimension."""
    given = _named("input size scale_factor mode", args, kwargs)
    scale = given.get("scale_factor")
    factors = scale if isinstance(scale, list | tuple) else [scale]
    whole = all(factor is not None and float(factor).is_integer() for factor in factors)
    if given.get("mode", "nearest") != "nearest" or given.get("size") or not whole:
        return None
    return cast("torch.Tensor", func(*args, **kwargs))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)
    else:
        yield value


# -- The model ---------------------------------------------------------------------


def apply_halo(
    model: nn.Module,
    units: Sequence[str],
    group: dist.ProcessGroup,
    *,
    factors: Sequence[int],
    inputs: Collection[str],
) -> None:
    """Let a model compute on shards of its samples, in place.

    Units enter the mode by themselves, too, so that recomputation does the same in
    whichever thread autograd runs it. Batch norms must have been made to take their
    statistics over the ranks of the group, see
    :func:`executors.strategies.batch_norms.synchronise_batch_norms`.

    Args:
        model: The model.
        units: FQNs of its pipeline units.
        group: The cp axis.
        factors: Shards along each spatial dimension, from the first on.
        inputs: Names of what forward is given shards of.

    Raises:
        ExecutionError: If a module computes statistics of its own over samples.
    """
    mode = _Shards(ShardGrid(group=group, factors=tuple(factors)))
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__dict__["forward"] = _norm(module.forward, mode)
    for fqn in units:
        module = model.get_submodule(fqn)
        if module is not model:
            module.__dict__["forward"] = _within(module.forward, mode)
    model.__dict__["forward"] = _on_inputs(model.forward, mode, frozenset(inputs))


def _norm(forward: Callable[..., Any], mode: _Shards) -> Callable[..., Any]:
    copies = mode.grid.group.size()

    def call(value: torch.Tensor) -> torch.Tensor:
        with mode.off():
            shard = mode.holds(value)
            made: torch.Tensor = forward(value, 1 if shard else copies)
            return mode.mark(made) if shard else made

    return call


def _within(forward: Callable[..., Any], mode: _Shards) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode.on():
            return forward(*args, **kwargs)

    return call


def _on_inputs(
    forward: Callable[..., Any], mode: _Shards, inputs: frozenset[str]
) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in kwargs.items():
            if name in inputs:
                mode.mark(value)
        with mode.on():
            output = forward(**kwargs)
            with mode.off():
                return _whole(output, mode)

    return call


def _whole(output: Any, mode: _Shards) -> Any:
    """Gather the shards in a model's output."""
    if isinstance(output, torch.Tensor):
        return mode.gathered(output) if mode.holds(output) else output
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = _whole(value, mode)
        return output
    if isinstance(output, list | tuple):
        return type(output)([_whole(each, mode) for each in output])
    return output
