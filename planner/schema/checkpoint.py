"""Contents of a checkpoint's folder, told beside it: ``checkpoint.json``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from planner.schema.base import Document
from planner.schema.strategy_parts import Mesh

__all__ = ["CheckpointRecord", "FileRecord"]

Count = Annotated[int, Field(ge=0)]


class FileRecord(Document):
    """Size and hash of a whole file: enough to tell that one was cut off or changed.

    Attributes:
        bytes: Its size.
        crc32: Of its bytes.
    """

    bytes: Count
    crc32: Count


class CheckpointRecord(Document):
    """A checkpoint: of which model, after which step, in which files.

    Attributes:
        step: Optimizer steps done; also the number of the next batch.
        model_name: As the plan calls the model.
        model_fingerprint: Of the names and shapes of its parameters.
        plan_label: Of the strategy that it was saved under.
        mesh: Of that strategy; under another one random states start anew.
        optimizer: Whose states it holds.
        seed: Of the run.
        files: Every other file of the folder, by name.
        environment: Versions of what wrote it.
        data: Position in the training data of each data-parallel coordinate, one entry
            where all have the same; empty if nothing but ``step`` says it.
        eval_loss: Mean loss of an evaluation after this step; None without one.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "checkpoint"

    schema_version: Literal[1] = 1
    step: Count
    model_name: str
    model_fingerprint: str
    plan_label: str
    mesh: Mesh
    optimizer: str
    seed: int
    files: dict[str, FileRecord] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    data: tuple[dict[str, Any], ...] = ()
    eval_loss: float | None = None
