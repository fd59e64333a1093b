"""Adapter to a simulated world: fake ranks, fake tensors, torch's own code.

One process stands for any rank of any number of them. Collectives return at once, and
tensors have shapes, dtypes and sizes but no memory. Parts of torch that read values
while they set themselves up are told what they would find. The only file that knows
these private parts of torch: the fake process group, ``DeviceMesh``'s arithmetic,
``Module.to`` on fake parameters, the pipeline's warm-up vote, DDP's reducer, the shape
of grouped products, the draw of truncated normal weights, dropout. Seen to work with
torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import _meta_registrations, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.optim import _adafactor, adam
from torch.testing._internal.distributed.fake_pg import FakeStore

from executors.communication import buckets
from executors.dryrun.replicas import FakeReplicas
from executors.strategies import data_parallel, experts
from planner.errors import ExecutionError

__all__ = ["balanced_counts", "fake_group", "fake_tensors"]

#: torch's own.
_GROUPED: Callable[..., torch.Tensor] = _meta_registrations._meta_grouped_mm_common

#: Methods of DeviceMesh that compute ranks with real tensors, where torch has them.
_MESH_METHODS = (
    "__init__",
    "__getitem__",
    "_compute_coordinate_on_dim",
    "_concatenate",
    "_flatten",
    "_get_mesh_tensor_from_full_mesh",
    "_unflatten",
    "get_coordinate",
)


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a world without other processes, for the block.

    Args:
        rank: Of this process.
        world: Number of ranks.

    Raises:
        ExecutionError: If this process is in a group already.
    """
    if dist.is_initialized():
        raise ExecutionError(
            "a dry run needs a process without a process group; start it elsewhere "
            "than under torchrun, or destroy the group first"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(*, on_cpu: bool = False) -> Iterator[FakeTensorMode]:
    """Make tensors without memory in the block; adapt torch as the module lists.

    Args:
        on_cpu: Whether they stand for those of CPU processes. There requests hold what
            they have sent for as long as they are held themselves: gloo's do, NCCL's
            let go of it. And dropout keeps numbers in the dtype of its input, and
            attention with dropout its scores: on GPUs it is fused.
    """
    with ExitStack() as stack:
        if on_cpu:
            stack.enter_context(mock.patch.object(schedules, "_batch_p2p", _holding))
        else:
            attention = "scaled_dot_product_attention"
            stack.enter_context(
                mock.patch.object(nn.functional, attention, _fused_attention)
            )
            library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
            library.impl("dropout", _fused_dropout, "AutogradCPU")
        for name in _MESH_METHODS:
            method = DeviceMesh.__dict__.get(name)
            if method is not None:
                stack.enter_context(
                    mock.patch.object(DeviceMesh, name, _on_real_tensors(method))
                )
        for owner, name, double in (
            (nn.Module, "to", _convert),
            (schedules._PipelineSchedule, "_warmup_p2p", _vote_static),
            (data_parallel, "DistributedDataParallel", FakeReplicas),
            (adam, "_get_value", _value),
            (_adafactor, "adafactor", _unread),
            (buckets, "agree", _agreed),
            (experts, "exchange_counts", balanced_counts),
            (_meta_registrations, "_meta_grouped_mm_common", _grouped_products),
            (nn.init, "_no_grad_trunc_normal_", _undrawn),
        ):
            stack.enter_context(mock.patch.object(owner, name, double))
        # Indices, masks and position tables that exports keep are real tensors.
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _fused_dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Drop elements in the one op that GPUs have for it, which keeps a byte of each."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p == 1:
        return tensor * torch.zeros_like(tensor)
    return torch.native_dropout(tensor, p, train)[0]


#: torch's own.
_ATTENTION: Callable[..., torch.Tensor] = nn.functional.scaled_dot_product_attention


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend without dropout where attention is fused: on CPUs it would not be.

    Kernels of GPUs keep no more for it than a seed. A mask that needs a gradient no
    fused kernel takes.
    """
    learned = attn_mask is not None and attn_mask.requires_grad
    dropout = dropout_p if learned else 0.0
    return _ATTENTION(query, key, value, attn_mask, dropout, *args, **kwargs)


def _unread(*_: Any, **__: Any) -> None:
    """Leave an update out that reads norms of weights; states are there before."""


def _agreed(order: Sequence[int], *_: Any) -> tuple[list[int], bool]:
    """Take a rank's own order of buckets for that of all."""
    return list(order), False


#: torch's own.
_BATCH_P2P: Callable[..., list[Any]] = schedules._batch_p2p


class _Requests(list[Any]):
    """Requests with the tensors that they have sent."""

    sent: tuple[torch.Tensor, ...] = ()


def _holding(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    requests = _Requests(_BATCH_P2P(operations, *args, **kwargs))
    requests.sent = tuple(one.tensor for one in operations if one.op is dist.isend)
    return requests


def _on_real_tensors(method: Any) -> Any:
    if isinstance(method, staticmethod | classmethod):
        return type(method)(_on_real_tensors(method.__func__))

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return method(*args, **kwargs)

    return call


def _convert(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Replace ``Module.to``, which swaps parameters in place; fake ones forbid it.

    Everything is on the one fake device; dtypes change. Tied parameters stay tied.
    """
    _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def parameter(old: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)

    def buffer(old: torch.Tensor) -> torch.Tensor:
        return old.to(dtype)

    def convert(
        held: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        for name, old in held.items():
            if old is not None and old.is_floating_point() and old.dtype != dtype:
                held[name] = made.setdefault(id(old), (old, change(old)))[1]

    if dtype is not None:
        for part in module.modules():
            convert(part._parameters, parameter)
            convert(part._buffers, buffer)
    return module


def _value(number: Any) -> Any:
    """Value of Adam's step counter, which scales numbers and no sizes."""
    return 1.0 if isinstance(number, FakeTensor) else number


def _grouped_products(
    left: torch.Tensor, right: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Result of ``_grouped_mm`` in any dtype; torch's own takes bfloat16 alone.

    On CPUs the op itself takes any float.
    """
    if options.get("scale_a") is not None:
        return _GROUPED(left, right, **options)
    narrow = torch.bfloat16
    found = _GROUPED(left.to(narrow), right.to(narrow), **options)
    return found.to(options.get("out_dtype") or left.dtype)


def _undrawn(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return weights as they are: torch's own draws until it sees that all fit."""
    return tensor


def _vote_static(_: Any, stages: list[Any], *__: Any) -> None:
    """Vote as all ranks would: every stage has been given its metadata."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def balanced_counts(
    expert: torch.Tensor, held: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Counts that ``exchange_counts`` returns if routing is balanced.

    It stands in for that of :mod:`executors.strategies.experts`.

    Rows that do not divide go to the first experts, on every rank alike.

    Args:
        expert: Shape [rows]; has no values.
        held: Experts on each rank.
        group: The ep axis.
    """
    size = group.size()
    counts = torch.empty(size * held, dtype=torch.int64)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    each, rest = divmod(expert.shape[0], size * held)
    shares = [each + (index < rest) for index in range(size * held)]
    sends = [sum(shares[rank * held : (rank + 1) * held]) for rank in range(size)]
    return arriving, sends, [sends[group.rank()]] * size
