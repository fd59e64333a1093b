"""From deferred to real: each process computes its own shards, and nothing else.

A parameter's shard is cut from the whole tensor, which is computed for that moment
alone: beside its shards a process needs memory for one tensor.

The only file that knows how FSDP and DTensor hold a shard: ``DTensor._local_tensor``,
``DTensor._spec``, and that ``fully_shard`` puts its mesh dimensions before those that a
parameter was split along before, and takes parameters on the meta device whose values
come later. Seen to work with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executors.deferred.model import record, replace_plain
from executors.deferred.recording import Recording
from planner.errors import ExecutionError

__all__ = ["Shards", "build_model", "compute_attributes"]

#: Tensors, kept alive so that ids stay theirs, and what stands for them now, by id.
_Made = dict[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A parameter without values.

    Attributes:
        holder: The module that has it.
        name: Its name there.
        source: Deferred tensor with its values, before data parallelism cut it.
        split: Dimensions of the mesh that it had been split along by then.
        empty: Whether it gets no values, and no memory for them.
    """

    holder: nn.Module
    name: str
    source: torch.Tensor
    split: int
    empty: bool


class Shards:
    """The parameters and buffers of a model part, from whole to sharded.

    In order: split the part within :meth:`recorded`, :meth:`to_meta`, shard it over
    data-parallel ranks, :meth:`materialize`. Of a model that was not recorded the
    values are there from the start, and only the device and the dtype change.

    Args:
        model: The part; changed in place.
        recording: Of its tensors; None if they have values.
        device: Where it will run.
        dtype: Of its floating-point tensors; None to keep what they have.
        elsewhere: Names of modules whose trained parameters are to have no values
            here, if they were recorded.
        on_host: Whether shards lie in the host's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording | None,
        device: torch.device,
        dtype: torch.dtype | None,
        elsewhere: Collection[str] = (),
        *,
        on_host: bool = False,
    ) -> None:
        self._shards = torch.device("cpu") if on_host else device
        self._model, self._recording, self._device = model, recording, device
        self._elsewhere = tuple(f"{name}." for name in elsewhere)
        self._waiting: list[_Waiting] = []
        if recording is None:
            model.to(device, dtype)
            return
        if dtype is not None:
            with recording.active():
                model.to(dtype)
        for tensor in (*model.parameters(), *model.buffers()):
            if not recording.defers(tensor):
                tensor.data = tensor.data.to(device)

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """A block in which operations on parameters are recorded like model_fn's."""
        if self._recording is None:
            return contextlib.nullcontext()
        return self._recording.active()

    def to_meta(self) -> None:
        """Reduce deferred parameters to their shapes; give all else its values.

        Parameters go to the meta device, as ``fully_shard`` takes them. Buffers and
        tensors in plain attributes are whole on every rank, and computed here.
        """
        recording = self._recording
        if recording is None:
            return
        made: _Made = {}
        for holder, module in self._model.named_modules():
            away = f"{holder}.".startswith(self._elsewhere)
            for name, old in module._parameters.items():
                if old is not None and recording.defers(_local(old)):
                    empty = away and old.requires_grad
                    self._waiting.append(_waiting(module, name, old, empty))
                    new = made.setdefault(id(old), (old, _on_meta(old)))[1]
                    module._parameters[name] = new
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    value = _valued(buffer, recording, made)
                    module._buffers[name] = value.to(self._device)
            replace_plain(module, lambda t: _valued(t, recording, made))

    def materialize(self) -> None:
        """Give every parameter that waits for them its values; at first call alone.

        Raises:
            ExecutionError: If what a parameter was made from has changed.
        """
        made: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        while self._waiting:
            waiting = self._waiting.pop()
            old = waiting.holder._parameters[waiting.name]
            assert old is not None, waiting.name
            if id(old) not in made:
                made[id(old)] = old, self._materialized(old, waiting)
            waiting.holder._parameters[waiting.name] = made[id(old)][1]
        if made:
            for module in self._model.modules():
                replace_plain(module, lambda t: made.get(id(t), (t, t))[1])

    def _materialized(self, old: nn.Parameter, waiting: _Waiting) -> nn.Parameter:
        assert self._recording is not None
        filled: torch.Tensor
        if isinstance(old, DTensor):
            # Before the whole tensor: what outlives it would break up its memory.
            local = torch.empty_like(old._local_tensor, device=self._shards)
            if waiting.empty:
                local.untyped_storage().resize_(0)
            else:
                values = self._recording.replay(waiting.source)
                local.copy_(_cut(values, old, old.device_mesh.ndim - waiting.split))
            filled = DTensor(  # type: ignore[no-untyped-call]
                local, old._spec, requires_grad=False
            )
        elif waiting.empty:
            filled = torch.empty_like(old, device=self._device, requires_grad=False)
            filled.untyped_storage().resize_(0)
        else:
            filled = _owned(self._recording.replay(waiting.source), self._device)
        made = nn.Parameter(filled, requires_grad=old.requires_grad)
        _hand_hooks_on(waiting.source, made)
        return made


def _hand_hooks_on(old: torch.Tensor, new: nn.Parameter) -> None:
    """Give a parameter the hooks that model_fn put on the gradient of the first one."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def compute_attributes(model: nn.Module, recording: Recording) -> None:
    """Give tensors in plain attributes of a whole model their values, in place.

    ``torch.export`` takes them for constants, which it wants the values of.
    """
    made: _Made = {}
    for module in model.modules():
        replace_plain(
            module,
            lambda t: t if isinstance(t, nn.Parameter) else _valued(t, recording, made),
        )


def _valued(tensor: torch.Tensor, recording: Recording, made: _Made) -> torch.Tensor:
    """Look up the stand-in that was made for a tensor, or compute its values."""
    if id(tensor) not in made and recording.defers(tensor):
        made[id(tensor)] = tensor, recording.replay(tensor)
    return made.get(id(tensor), (tensor, tensor))[1]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _waiting(holder: nn.Module, name: str, old: nn.Parameter, empty: bool) -> _Waiting:
    split = old.device_mesh.ndim if isinstance(old, DTensor) else 0
    return _Waiting(
        holder=holder, name=name, source=_local(old), split=split, empty=empty
    )


def _on_meta(old: nn.Parameter) -> nn.Parameter:
    like = _local(old)
    meta: torch.Tensor = torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device="meta"
    )
    if isinstance(old, DTensor):
        meta = DTensor.from_local(
            meta,
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )
    return nn.Parameter(meta, requires_grad=old.requires_grad)


def _cut(whole: torch.Tensor, parameter: DTensor, outer: int) -> torch.Tensor:
    """This rank's piece along the first ``outer`` dimensions of a parameter's mesh.

    As ``torch.chunk`` cuts: pieces of equal size but for the last ones, which may be
    smaller or empty.
    """
    mesh = parameter.device_mesh
    for axis in range(outer):
        dim = getattr(parameter.placements[axis], "dim", None)
        if dim is not None:
            length = whole.shape[dim]
            piece = -(-length // mesh.size(axis))
            begin = min(piece * mesh.get_local_rank(axis), length)
            whole = whole.narrow(dim, begin, min(piece, length - begin))
    expected = parameter._local_tensor.shape
    if whole.shape != expected:
        raise ExecutionError(
            f"a shard of {tuple(expected)} was to be cut as {tuple(whole.shape)} from "
            f"a parameter of {tuple(parameter.shape)} placed {parameter.placements}; "
            f"this release of torch cuts otherwise; use one that Meshwright supports"
        )
    return whole


def _owned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move values to a device, into memory that holds nothing else."""
    moved = values.to(device)
    if moved.untyped_storage().nbytes() != moved.nbytes:
        moved = moved.clone()
    return moved


def build_model(
    model_fn: Callable[[], nn.Module],
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The whole model with the values that :func:`executors.run` starts from.

    They belong to the seed alone: no plan, number of processes or rank changes them.
    They are not those of ``torch.manual_seed(seed); model_fn()``, because every random
    operation has a seed of its own, drawn from torch's generator in its turn.

    Args:
        model_fn: Builds the model, on the CPU; as for ``run``.
        seed: As for ``run``.
        device: Where its parameters and buffers are put, one after the other.
        dtype: Of those that are floating-point; None to keep what they have.

    Returns:
        The model; torch's generator is as it was before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, recording = record(model_fn)
    shards = Shards(model, recording, torch.device(device), dtype)
    shards.to_meta()
    shards.materialize()
    return model
