"""State that a replica which joins a run takes from one that trains."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from executors.replicas.pieces import local_part

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["pack_state", "take_state"]


def pack_state(trainer: Trainer) -> torch.Tensor:
    """Weights, buffers, states of both optimizers and number of steps done, as bytes.

    Args:
        trainer: Between two steps.

    Returns:
        On the CPU, of dtype uint8. Shape [n].
    """
    state = {
        "done": trainer.done,
        "tensors": [tensor.cpu() for tensor in _tensors(trainer)],
        "optimizer": _local(trainer.optimizer.state_dict()),
    }
    written = io.BytesIO()
    torch.save(state, written)
    return torch.from_numpy(np.frombuffer(written.getbuffer(), dtype=np.uint8).copy())


def take_state(trainer: Trainer, packed: torch.Tensor) -> int:
    """Go on from the state of another replica.

    Args:
        trainer: Of the same plan and model; all of its state is overwritten, but for
            random generators and what the replica alone keeps between exchanges.
        packed: What :func:`pack_state` returned there.

    Returns:
        Steps done; also the number of the first one to do.
    """
    read = io.BytesIO(packed.numpy().tobytes())
    state: dict[str, Any] = torch.load(read, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for tensor, value in zip(_tensors(trainer), state["tensors"], strict=True):
            tensor.copy_(value)
    _load(trainer.optimizer, state["optimizer"])
    trainer.done = int(state["done"])
    trainer.replicas.restored(complete=True)
    return trainer.done


def _local(states: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's states, without the meshes that tensors are divided over."""
    kept = {
        index: {
            name: local_part(value) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        for index, state in states["state"].items()
    }
    return states | {"state": kept}


def _load(optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    """Load states that have been through :func:`_local`."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    for index, state in states["state"].items():
        parameter = parameters[index]
        if not isinstance(parameter, DTensor):
            continue
        local = parameter.to_local()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == local.shape:
                state[name] = DTensor.from_local(
                    value.to(local.device),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                )
    optimizer.load_state_dict(states)


def _tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    """Live tensors of a replica, in an order that is equal on all."""
    for part in trainer.parts.values():
        for tensor in (*part.inner.parameters(), *part.inner.buffers()):
            yield local_part(tensor)
    for kept in trainer.replicas.state().values():
        yield from kept.values()
