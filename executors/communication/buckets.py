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

from executors.communication.ahead import (
    BackgroundSums,
    BucketUpdates,
    EarlyReads,
    begin_sums,
    sum_sequence,
)
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


class _OpenStep:
    """Buckets of a step whose sums have not been waited for.

    Attributes:
        sums: That go on; None if none do.
        left: Numbers of the buckets that are still to be waited for and updated.
        updates: Of the step; None as long as the optimizer has not been asked.
        cleared: Whether the next step has begun, which has no gradients yet.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self.sums: BackgroundSums | None = None
        self.left: dict[int, None] = {}
        self.updates: BucketUpdates | None = None
        self.cleared = False

    def begin(self) -> None:
        """Owe the sums and updates of all buckets."""
        self.left = dict.fromkeys(range(len(self._buckets)))
        self.updates, self.cleared = None, False

    def end(self, index: int) -> None:
        """Wait for the sum of a bucket and update its weights, if that is owed."""
        if index not in self.left:
            return
        assert self.sums is not None
        self.sums.wait(index)
        del self.left[index]
        if self.updates is not None:
            bucket = self._buckets[index]
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = _gradient(parameter, view)
            self.updates.take(bucket.parameters)
            for parameter in bucket.parameters if self.cleared else ():
                parameter.grad = None
            if bucket.flat.is_cuda:
                # What casts a unit's weights does so on a stream that does not wait.
                torch.cuda.current_stream(bucket.flat.device).synchronize()
        if not self.left:
            self.sums, self.updates = None, None


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
        units: Parts of the module that wait for their own buckets where a step is left
            open; forward waits for those of all other parameters before it begins.

    Attributes:
        sync: Whether gradients are exchanged behind the next backward.
        ahead: Whether the next step may be left open: :meth:`finish` returns while
            sums go on, :meth:`step` leaves updates to the next forward. It takes effect
            with ``needed_first``, once two steps have shown the order of the buckets,
            if each rank has a gradient of every parameter. The exchange must be by
            messages between two ranks, which collectives of the same group do not
            disturb.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        exchange: Exchange,
        bucket_bytes: int | None = None,
        *,
        needed_first: bool = False,
        units: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.exchange = exchange
        self.sync, self.ahead = True, False
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
        self._open = _OpenStep(self.buckets)
        #: Buckets that a forward waits for before it begins, those that the first one
        #: has wanted so far, and the order in which it wanted all of them.
        self._always: set[int] = set()
        self._seen: list[int] = []
        self._wanted: list[int] = []
        #: Sums that backward hides; None as long as that was not seen.
        self._early: int | None = None
        self._await_units(units if needed_first else ())
        self._reset()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]
        self._send([local_values(p.detach()) for p in module.parameters()])

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward, in a step's first microbatch on equal buffers."""
        if self._fresh:
            self._send(list(self.module.buffers()))
            self._fresh = False
        if not self._needed_first:
            return self.module(*args, **kwargs)
        self._open.cleared = True
        learns = self.training and not self._wanted
        if learns:
            self._seen.clear()
        for index in sorted(self._always):
            self._want(index)
        run = self._watched if learns else self.module
        out: object = run(*args, **kwargs)
        # What a forward does without, and what comes behind it, finds all in place.
        self.settle()
        return out

    def _watched(self, *args: object, **kwargs: object) -> object:
        """Run a forward that shows in which order it wants the buckets."""
        places = {one: index for one, (index, _) in self._places.items()}
        with EarlyReads(places, self._seen) as reads:
            out = self.module(*args, **kwargs)
        self._always |= reads.early
        first = [*sorted(self._always), *self._seen, *range(len(self.buckets))]
        self._wanted = list(dict.fromkeys(first))
        return out

    def _await_units(self, units: Sequence[nn.Module]) -> None:
        """Let each unit's forward wait for the buckets that hold its parameters."""
        inside: set[int] = set()
        for unit in units:
            held = {id(p) for p in unit.parameters()} & self._places.keys()
            inside |= held
            numbers = sorted({self._places[one][0] for one in held})

            def wait(*_: object, numbers: Sequence[int] = numbers) -> None:
                for index in numbers:
                    self._want(index)

            # Before what casts the unit's weights.
            unit.register_forward_pre_hook(wait, prepend=True)
        for one in self._places.keys() - inside:
            self._always.add(self._places[one][0])

    def _want(self, index: int) -> None:
        """Have the weights of a bucket in place before they are read."""
        if not self._wanted and index not in self._seen:
            self._seen.append(index)
        self._open.end(index)

    @property
    def is_open(self) -> bool:
        """True if weights are still to be updated, see :attr:`ahead`."""
        return bool(self._open.left)

    def settle(self) -> None:
        """End what a step was left open with: wait for all sums, update all weights."""
        for index in list(self._open.left):
            self._open.end(index)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step of an optimizer, bucket by bucket later on if sums still go on.

        Args:
            optimizer: Updates each parameter by its own gradient and state alone.
        """
        if self.is_open:
            self._open.updates = BucketUpdates(optimizer)
        else:
            optimizer.step()

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
        if self._waiting[index]:
            return
        self._full.append(index)
        if not self._runs_ahead:
            self._begin()
            return
        if self._open.sums is None:
            early = self._early
            order = (
                self._order
                if early is None
                else sum_sequence(self._order, self._wanted, early)
            )
            device = self.buckets[0].flat.device
            self._open.sums = begin_sums(self._sum, order, device)
        self._open.sums.filled(index)

    @property
    def _runs_ahead(self) -> bool:
        """True if the sums of this step go on by themselves."""
        seen = self._learned and not self._fewer and bool(self._wanted)
        return self.ahead and self._needed_first and seen

    @torch.no_grad()
    def _sum(self, index: int) -> None:
        for _ in self.exchange.run(self.buckets[index]):
            pass

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
        if self._open.sums is not None:
            self._leave_open(self._open.sums)
            return
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

    def _leave_open(self, sums: BackgroundSums) -> None:
        """End a backward whose sums go on; the first such one waits for them."""
        self._open.begin()
        if self._early is None:
            # Those that began are what backward hides, as the first replica saw it.
            device = self.buckets[0].flat.device
            told = torch.tensor([sums.begun(), *self._wanted], device=device)
            self.settle()
            first = dist.get_global_rank(self._group, 0)
            dist.broadcast(told, src=first, group=self._group)
            self._early, *self._wanted = told.tolist()
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
