"""The protocol that every source of training data has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from executors.data.batches import Batch
from executors.data.parts import BatchPart

__all__ = ["DataSource"]


@runtime_checkable
class DataSource(Protocol):
    """Data of a run, as one rank reads it."""

    def batch(self, step: int) -> Batch | BatchPart:
        """This rank's part of the batch of a step, from 0; or the global batch.

        Raises:
            ExecutionError: If the data is empty, too short, or does not fit the plan.
        """

    def state_dict(self) -> dict[str, Any]:
        """Position behind the last batch; JSON values and tensors.

        Under a plan with other replicas it means the same.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ExecutionError: If it is one in other data.
        """

    def close(self) -> None:
        """End threads and processes that read ahead."""
