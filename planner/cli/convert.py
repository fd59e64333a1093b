"""The command ``meshwright convert``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from planner.cli.options import ModelName, OptionalDtype
from planner.cli.output import emit_text
from planner.errors import ExecutionError

__all__ = ["ConvertCommand"]


@dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Write the weights of a checkpoint as a folder that transformers loads."""

    checkpoint: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")
    ]
    """Folder given as --checkpoint-dir to run, or one checkpoint in it."""
    model: ModelName
    save_hf: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """New folder for the weights."""
    save_dtype: OptionalDtype = None
    """Numbers to write; by default those of the checkpoint."""
    allow_remote_code: bool = False
    """Run Python code that came with a hf:PATH model; read it first."""

    def run(self) -> None:
        """Read the checkpoint tensor by tensor, and write them."""
        import torch

        from executors.deferred.model import record
        from executors.weights import WeightFolder, save_checkpoint
        from planner.capture import load_model

        checkpoint = _chosen(Path(self.checkpoint))
        source = self.model.removeprefix("hf:")
        folder = WeightFolder(
            path=Path(self.save_hf).absolute(),
            dtype=getattr(torch, self.save_dtype) if self.save_dtype else None,
            companions=Path(source) if source != self.model else None,
        )
        loaded = load_model(self.model, allow_remote_code=self.allow_remote_code)
        save_checkpoint(checkpoint, record(loaded.build)[0], folder)
        emit_text(f"wrote {self.save_hf} from {checkpoint}")


def _chosen(path: Path) -> Path:
    """A checkpoint, the latest of a folder of several.

    Raises:
        ExecutionError: If there is none.
    """
    from executors.checkpoints.folder import CheckpointFolder, is_checkpoint_name

    if is_checkpoint_name(path.name) and path.is_dir():
        return path
    name = CheckpointFolder(path).latest()
    if name is None:
        raise ExecutionError(
            f"{path} holds no checkpoint; name what --checkpoint-dir named, or a "
            f"step-000100 in it"
        )
    return path / name
