"""Replicas whose gradients are exchanged in buckets of our own.

torch's DistributedDataParallel regroups its buckets after the first backward, and a
codec that keeps an error of every bucket cannot follow. Here a bucket's parameters stay
the same; what is learned in the first backward is the order in which buckets fill.
Gradients are views of their bucket. A bucket's exchange begins as soon as it is full
and those before it have begun, while the backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import ExecutionError
from planner.schema.buckets import cut_into_buckets

__all__ = [
    "Bucket",
    "BucketedReplicas",
    "Exchange",
    "PlainExchange",
    "agree",
    "local_values",
]


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values that a rank has of a tensor, which are all: no replica is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Part of a bucket as the gradient of a parameter."""
    if not isinstance(parameter, DTensor):
        return view
    return DTensor.from_local(
        view,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are exchanged together.

    Attributes:
        index: Number of the bucket.
        parameters: Whose gradients they are.
        flat: All gradients one after the other, zeros between them. Shape [n].
        views: The gradient of each parameter, a part of ``flat``, of its shape.
        offsets: Where each begins.
    """

    index: int
    parameters: tuple[nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(
        cls, index: int, parameters: Sequence[nn.Parameter], block: int, multiple: int
    ) -> Bucket:
        """Make a bucket of zeros.

        Args:
            index: Its number.
            parameters: Of one dtype and device.
            block: Parameters begin at multiples of it.
            multiple: Its length is one of it.
        """
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // block) * block
        first = parameters[0]
        size = -(-end // multiple) * multiple
        flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        return cls(
            index=index,
            parameters=tuple(parameters),
            flat=flat,
            views=_views(flat, parameters, offsets),
            offsets=tuple(offsets),
        )

    def views_of(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut a tensor like ``flat`` into parts of the parameters' shapes."""
        return _views(flat, self.parameters, self.offsets)

    def gaps(self) -> list[slice]:
        """Return the parts of ``flat`` between parameters, and behind the last."""
        ends = [
            offset + view.numel()
            for offset, view in zip(self.offsets, self.views, strict=True)
        ]
        begins = [*self.offsets[1:], self.flat.numel()]
        return [slice(a, b) for a, b in zip(ends, begins, strict=True) if a < b]


def _views(
    flat: torch.Tensor, parameters: Sequence[nn.Parameter], offsets: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    return tuple(
        flat[offset : offset + one.numel()].view(one.shape)
        for one, offset in zip(parameters, offsets, strict=True)
    )


class Exchange(Protocol):
    """Way in which replicas exchange the gradients of a bucket."""

    def layout(self, ranks: int) -> tuple[int, int]:
        """Return the multiples at which parameters begin, and buckets end."""

    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Make what is kept of each bucket."""

    def run(self, bucket: Bucket) -> Iterator[None]:
        """Turn a bucket's gradients into their mean over replicas, in place.

        Yields after each collective that has begun, before it waits for it.
        """

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that takes what is exchanged, mostly the same."""

    def held(self) -> list[torch.Tensor]:
        """Tensors that live from step to step."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors of this rank that the next step depends on, by name."""

    def restored(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over values of :meth:`state` that were read."""


class PlainExchange:
    """Means of whole gradients, by an all-reduce a bucket."""

    def layout(self, ranks: int) -> tuple[int, int]:
        """Leave no gaps."""
        return 1, 1

    def prepare(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Keep the group alone."""
        self._group = group

    def run(self, bucket: Bucket) -> Iterator[None]:
        """See :meth:`Exchange.run`."""
        # Divided first, so that no sum overflows where the mean would not.
        bucket.flat.div_(self._group.size())
        work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        yield
        assert work is not None
        work.wait()

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the same."""
        return optimizer

    def held(self) -> list[torch.Tensor]:
        """Nothing is kept."""
        return []

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing is kept."""
        return {}

    def restored(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing."""


def agree(
    order: Sequence[int],
    missing: bool,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[list[int], bool]:
    """Agree on an order of buckets and on what is to be expected; collective.

    Args:
        order: In which this rank's buckets were full.
        missing: Whether a parameter got no gradient here.
        group: Replicas.
        device: Of what is sent.

    Returns:
        The first replica's order, and whether any rank missed a gradient.
    """
    told = torch.tensor([int(missing), *order], device=device)
    if group.rank() > 0:
        told[1:] = 0
    # Of the other ranks' zeros and the first one's order, the order is the maximum.
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    fewer, *agreed = told.tolist()
    return agreed, bool(fewer)


class BucketedReplicas(nn.Module):
    """A module whose replicas average their gradients in buckets of our own.

    All parameters that are trained must be of one dtype, on one device.

    Args:
        module: With values, at least one of them trained. Those of the first replica
            are given to all, and its buffers again before every step, as
            DistributedDataParallel does.
        group: Replicas.
        exchange: What is done to a bucket.
        bucket_bytes: Size of a bucket; None for torch's own.
        needed_first: Whether the buckets that wait behind backward end one after the
            other, those that the next forward needs first before others; else they go
            on side by side.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        exchange: Exchange,
        bucket_bytes: int | None = None,
        *,
        needed_first: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.exchange = exchange
        #: Whether gradients are exchanged behind the next backward.
        self.sync = True
        self._group, self._needed_first = group, needed_first
        trained = [p for p in module.parameters() if p.requires_grad]
        block, multiple = exchange.layout(group.size())
        cut = cut_into_buckets([p.nbytes for p in trained], bucket_bytes)
        self.buckets = [
            Bucket.of(index, [trained[i] for i in which], block, multiple)
            for index, which in enumerate(cut)
        ]
        exchange.prepare(self.buckets, group)
        self._order = list(range(len(self.buckets)))
        self._learned = self._fewer = False
        self._fresh = True
        self._waiting: list[int] = []
        self._full: list[int] = []
        self._running: list[Iterator[None]] = []
        self._arrived: set[int] = set()
        self._places = {
            id(p): (bucket.index, view)
            for bucket in self.buckets
            for p, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._reset()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
        self._send([local_values(p.detach()) for p in module.parameters()])

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward, in a step's first microbatch on equal buffers."""
        if self._fresh:
            self._send(list(self.module.buffers()))
            self._fresh = False
        return self.module(*args, **kwargs)

    def _send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all replicas the values of the first, one message a dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        first = dist.get_global_rank(self._group, 0)
        for alike in by_dtype.values():
            flat = torch.cat([one.reshape(-1) for one in alike])
            dist.broadcast(flat, src=first, group=self._group)
            parts = torch.split(flat, [one.numel() for one in alike])
            for one, part in zip(alike, parts, strict=True):
                one.copy_(part.view_as(one))

    def held(self) -> list[torch.Tensor]:
        """Gradients, and what is kept of them, that live from step to step."""
        return [*(bucket.flat for bucket in self.buckets), *self.exchange.held()]

    def _reset(self) -> None:
        self._waiting = [len(bucket.parameters) for bucket in self.buckets]
        self._full, self._running = [], []
        self._arrived = set()

    def _collect(self, parameter: torch.Tensor) -> None:
        """Put a gradient into its bucket; begin the exchange of those that are full."""
        index, view = self._places[id(parameter)]
        grad = parameter.grad
        if grad is not None and grad is not view:
            view.copy_(local_values(grad))
            parameter.grad = _gradient(parameter, view)
        self._arrived.add(id(parameter))
        if not self.sync:
            return
        self._waiting[index] -= 1
        if not self._waiting[index]:
            self._full.append(index)
            self._begin()

    def _begin(self) -> None:
        """Begin the exchange of buckets that are next in order, on all ranks alike."""
        while len(self._running) < len(self._order):
            index = self._order[len(self._running)]
            if self._waiting[index]:
                return
            running = self.exchange.run(self.buckets[index])
            next(running, None)
            self._running.append(running)

    def finish(self) -> None:
        """End a step's backward: exchange what is left, and wait for all; collective.

        Raises:
            ExecutionError: If a parameter got no gradient that had one in the first
                step on every rank.
        """
        missing = [
            (parameter, view)
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if id(parameter) not in self._arrived
        ]
        if missing and self._learned and not self._fewer:
            self._refuse(missing[0][0])
        for _, view in missing:
            view.zero_()
        full = list(self._full)
        self._waiting = [0] * len(self.buckets)
        self._begin()
        if self._needed_first:
            # Buckets are cut from the last layers back: the last is needed first.
            begun = zip(self._order, self._running, strict=True)
            for _, running in sorted(begun, key=lambda one: -one[0]):
                for _ in running:
                    pass
            self._running = []
        while self._running:
            # A round after the other: one bucket's message travels while another's is
            # encoded, in the same order on all ranks.
            self._running = [one for one in self._running if next(one, one) is None]
        if not self._learned:
            rest = [index for index in self._order if index not in full]
            device = self.buckets[0].flat.device
            self._order, self._fewer = agree(
                [*full, *rest], bool(missing), self._group, device
            )
            self._learned = True
        self._leave_out()
        self._reset()
        self._fresh = True

    def _leave_out(self) -> None:
        """Give all parameters their mean, but those that no rank used."""
        used: set[int] | None = None
        if self._fewer:
            every = [p for bucket in self.buckets for p in bucket.parameters]
            told = torch.tensor(
                [int(id(p) in self._arrived) for p in every],
                device=self.buckets[0].flat.device,
            )
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
            used = {id(p) for p, one in zip(every, told.tolist(), strict=True) if one}
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                kept = used is None or id(parameter) in used
                parameter.grad = _gradient(parameter, view) if kept else None

    def _refuse(self, parameter: nn.Parameter) -> None:
        name = next(
            name for name, one in self.module.named_parameters() if one is parameter
        )
        raise ExecutionError(
            f"the loss does not depend on {name} in this step, and did in the first; "
            f"freeze it (requires_grad_(False)), or plan with zero_stage=1, 2 or 3 in "
            f"place of dp_replicate"
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that the next step of this rank depends on, by name."""
        learned = [int(self._learned), int(self._fewer), *self._order]
        return {"order": torch.tensor(learned), **self.exchange.state()}

    def restored(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from values of :meth:`state` that were read.

        Args:
            state: With all names of it.
        """
        learned, fewer, *order = state["order"].tolist()
        self._learned, self._fewer, self._order = bool(learned), bool(fewer), order
        self.exchange.restored(state)
