"""Messages of a pipeline that hands activations on, and nothing back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from executors.steps import ParallelModel

__all__ = ["Relay"]


class Relay:
    """Messages of one rank in a step: from the stage before it, to the one behind it.

    Args:
        trainer: Of the rank.
        index: Number of its stage.
    """

    def __init__(self, trainer: ParallelModel, index: int) -> None:
        self._group = trainer.place.group("pp")
        self._device, self._index = trainer.place.device, index
        self._like = trainer.sends[index - 1][0] if index else None
        # What is sent must live until it has arrived.
        self._sent: list[tuple[torch.Tensor, dist.Work | None]] = []

    def receive(self, samples: int) -> list[torch.Tensor]:
        """Wait for what the stage before made of a microbatch; nothing if none is."""
        if self._like is None:
            return []
        shape = (samples, *self._like.shape[1:])
        got = torch.empty(shape, dtype=self._like.dtype, device=self._device)
        dist.recv(got, group=self._group, group_src=self._index - 1)
        return [got]

    def send(self, made: torch.Tensor) -> None:
        """Begin to send what this stage made of a microbatch."""
        work = dist.isend(made, group=self._group, group_dst=self._index + 1)
        self._sent.append((made, work))

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for _, work in self._sent:
            if work is not None:
                work.wait()
