"""Tensors in the host's memory: optimizer states, and activations until backward.

Weights and gradients are ``fully_shard``'s to offload, see
:mod:`executors.strategies.data_parallel`. On CPU processes everything runs likewise,
with copies within the one memory, so that steps are the same to the bit.

How a DTensor holds a shard is torch's own, as in
:mod:`executors.deferred.materialize`: one whose mesh is of GPUs may have its shard on
the CPU, as ``CPUOffloadPolicy`` has it. Seen to work with torch 2.13, on CPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "HostOptimizer",
    "TwinOptimizer",
    "allocates_on_host",
    "held_as",
    "is_on_host",
    "mark_on_host",
    "offload_activations",
    "on_host",
]

_CPU = torch.device("cpu")


class _Blocks:
    """Number of blocks of :func:`on_host` that the process is in."""

    depth = 0


@contextmanager
def on_host() -> Iterator[None]:
    """A block in which all memory that is taken is the host's: dry runs ask for it."""
    _Blocks.depth += 1
    try:
        yield
    finally:
        _Blocks.depth -= 1


def allocates_on_host() -> bool:
    """True within :func:`on_host`."""
    return _Blocks.depth > 0


def mark_on_host(tensor: torch.Tensor) -> None:
    """Say that a tensor's memory is the host's, though it may look like a device's."""
    storage: Any = _local(tensor).untyped_storage()
    storage.on_host = True


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """True for memory of tensors that were marked."""
    return getattr(storage, "on_host", False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _spec(tensor: torch.Tensor) -> Any:
    """Division of a tensor over ranks; None if it is whole."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def _divided(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A tensor that is divided as another, of which this is a part."""
    if spec is None:
        return local
    made: torch.Tensor = DTensor(  # type: ignore[no-untyped-call]
        local, spec, requires_grad=False
    )
    return made


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host like a tensor's, without its values; pinned for a GPU."""
    local = _local(tensor)
    pinned = local.device.type == "cuda"
    made = torch.empty_like(local, device=_CPU, requires_grad=False, pin_memory=pinned)
    mark_on_host(made)
    return made


class TwinOptimizer(torch.optim.Optimizer):
    """An optimizer that works on other tensors than the model's parameters.

    Args:
        inner: Of the model's parameters, without states; it has their twins from then
            on. Both have one state of each.

    Attributes:
        inner: The same.
        twins: Twin of each parameter.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        groups = [{**g, "params": [*g["params"]]} for g in inner.param_groups]
        super().__init__(groups, inner.defaults)
        self.inner = inner
        self.twins: dict[nn.Parameter, nn.Parameter] = {}
        for group in inner.param_groups:
            group["params"] = [self._twin(parameter) for parameter in group["params"]]

    def _twin(self, parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(self.copied(parameter))
        self.twins[parameter] = made
        self.inner.state[made] = self.state[parameter]
        return made

    def copied(self, parameter: nn.Parameter) -> torch.Tensor:
        """Tensor that stands for a parameter."""
        raise NotImplementedError

    def hand_on_settings(self) -> None:
        """Give the inner optimizer the learning rates that schedulers have set here."""
        for mine, theirs in zip(
            self.param_groups, self.inner.param_groups, strict=True
        ):
            theirs |= {key: value for key, value in mine.items() if key != "params"}


class HostOptimizer(TwinOptimizer):
    """An optimizer whose states and updates are the host's.

    Each step sends gradients to the host, updates a copy of the weights there, and
    sends them back. Weights that something else has changed since are read anew.

    Args:
        inner: See :class:`TwinOptimizer`.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._seen: dict[nn.Parameter, int] = {}
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}

    def copied(self, parameter: nn.Parameter) -> torch.Tensor:
        """Memory of the host for a parameter."""
        return _divided(_on_cpu(parameter), _spec(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights on the host, and then on the device."""
        assert closure is None, "a closure is not called"
        self.hand_on_settings()
        with on_host():
            for parameter, twin in self.twins.items():
                self._send(parameter, twin)
            _wait(self.twins)
            self.inner.step()
        for parameter, twin in self.twins.items():
            if parameter.grad is not None:
                own = _local(parameter.detach())
                own.copy_(_local(twin.detach()), non_blocking=True)
                self._seen[parameter] = own._version
        _wait(self.twins)

    def _send(self, parameter: nn.Parameter, twin: nn.Parameter) -> None:
        """Give the host a gradient, and the weights if it has others."""
        own = _local(parameter.detach())
        if self._seen.get(parameter) != own._version:
            _local(twin.detach()).copy_(own, non_blocking=True)
            self._seen[parameter] = own._version
        if parameter.grad is None:
            twin.grad = None
            return
        if parameter not in self._gradients:
            self._gradients[parameter] = _on_cpu(parameter.grad)
        kept = self._gradients[parameter]
        kept.copy_(_local(parameter.grad), non_blocking=True)
        twin.grad = _divided(kept, _spec(parameter.grad))


def held_as(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> nn.Parameter:
    """The tensor that an optimizer updates for a parameter, and states are like."""
    if isinstance(optimizer, TwinOptimizer):
        return optimizer.twins[parameter]
    return parameter


def _wait(parameters: Iterable[nn.Parameter]) -> None:
    """Let copies from and to pinned memory end."""
    if any(_local(parameter).device.type == "cuda" for parameter in parameters):
        torch.cuda.current_stream().synchronize()


# -- Activations -----------------------------------------------------------------

#: Storages below this many bytes stay where they are.
_SMALLEST = 1024


class _Kept:
    """Memory of the device that was sent to the host.

    Args:
        flat: All of it, as one row.
        stream: On which copies to the host run; None on a CPU.
    """

    def __init__(self, flat: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self.source: Any = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        self._device = flat.device
        self._back: weakref.ref[torch.Tensor] | None = None
        self._event: torch.cuda.Event | None = None
        self._host = _on_cpu(flat)
        if stream is None:
            self._host.copy_(flat)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
            self._event = stream.record_event()
        # The allocator is not to give the memory away before.
        flat.record_stream(stream)

    def back(self) -> torch.Tensor:
        """The row on the device, fetched once while anything reads it."""
        found = self._back() if self._back is not None else None
        if found is None:
            if self._event is not None:
                torch.cuda.current_stream().wait_event(self._event)
            found = torch.empty_like(self._host, device=self._device)
            found.copy_(self._host, non_blocking=True)
            self._back = weakref.ref(found)
        return found


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor: which of a row it is."""

    kept: _Kept
    spec: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Activations:
    """Tensors that a part's units save, in the host's memory; each storage once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept: dict[tuple[int, int, torch.dtype], weakref.ref[_Kept]] = {}

    def forward(
        self, unit: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a unit's forward; what it saves but for its weights is sent away."""
        stays = {
            _local(tensor).untyped_storage()._cdata
            for tensor in (*unit.parameters(), *unit.buffers())
        }
        with saved_tensors_hooks(partial(self._pack, stays), self._unpack):
            return inner(*args, **kwargs)

    @torch.no_grad()
    def _pack(self, stays: set[int], tensor: torch.Tensor) -> Any:
        local = _local(tensor.detach())
        storage = local.untyped_storage()
        if storage._cdata in stays or storage.nbytes() < _SMALLEST:
            return tensor
        key = (storage._cdata, local._version, local.dtype)
        reference = self._kept.get(key)
        kept = reference() if reference is not None else None
        if kept is None or kept.source.expired():
            row = (storage.nbytes() // local.element_size(),)
            kept = _Kept(local.as_strided(row, (1,), 0), self._stream)
            self._forget()
            self._kept[key] = weakref.ref(kept)
        return _Packed(
            kept,
            _spec(tensor),
            tuple(local.shape),
            local.stride(),
            int(local.storage_offset()),
        )

    def _forget(self) -> None:
        for key in [key for key, kept in self._kept.items() if kept() is None]:
            del self._kept[key]

    @staticmethod
    @torch.no_grad()
    def _unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            assert isinstance(packed, torch.Tensor)
            return packed
        row = packed.kept.back()
        local = row.as_strided(packed.size, packed.stride, packed.offset)
        return _divided(local, packed.spec)


def offload_activations(
    model: nn.Module, units: Iterable[str], device: torch.device
) -> None:
    """Keep what units' recomputation begins with in the host's memory, in place.

    Copies to the host run beside the forward; what is fetched is waited for. Weights
    and buffers of a unit stay where they are.

    Args:
        model: The model, or one stage of it; recomputation is wrapped already, so that
            what it begins with is what is saved.
        units: FQNs of its pipeline units; those without parameters are left alone.
        device: Where they are computed.
    """
    activations = _Activations(device)
    for name in units:
        unit = model.get_submodule(name)
        if any(True for _ in unit.parameters()):
            unit.__dict__["forward"] = partial(activations.forward, unit, unit.forward)
