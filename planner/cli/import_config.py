"""The command ``meshwright import``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from planner.cli.options import OptionalInt, OutFile
from planner.cli.output import emit_text, note
from planner.errors import PlanFileError
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.imports import Imported, Wanted

__all__ = ["ImportCommand", "WantedOptions", "read_config", "tell_ignored"]


@dataclass(frozen=True, kw_only=True)
class WantedOptions:
    """What a config may leave to others; checked against it where it does not."""

    world_size: OptionalInt = None
    """Processes, where the config does not say."""
    microbatch_size: OptionalInt = None
    """Samples per microbatch, where the config does not say (accelerate)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the training script recomputes, where the config does not (DeepSpeed)."""

    def wanted(self, global_batch: int | None) -> Wanted:
        """As the readers take it."""
        from planner.imports import Wanted

        return Wanted(
            world_size=self.world_size,
            global_batch=global_batch,
            microbatch_size=self.microbatch_size,
        )


def read_config(file: str) -> str:
    """A config's text.

    Raises:
        PlanFileError: If it cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{file} is no text: {error.reason}") from error
    except OSError as error:
        raise PlanFileError(f"cannot read {file}: {error.strerror}") from error


def tell_ignored(imported: Imported) -> None:
    """Say on stderr what has no meaning for a strategy."""
    for entry in imported.ignored:
        note(f"ignored {entry.key}: {entry.why}")


@dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Read another launcher's config as a strategy that predict prices."""

    source: Annotated[
        Literal["megatron", "accelerate", "deepspeed"], tyro.conf.Positional
    ]
    """Whose config it is."""
    file: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FILE", help_behavior_hint=""),
    ] = None
    """The config; of Megatron a file with arguments."""
    args: Annotated[
        str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")
    ] = None
    """Megatron's arguments themselves, in place of a file; write --args="…"."""
    global_batch: OptionalInt = None
    """Samples per step, where the config does not say."""
    model: Annotated[
        str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")
    ] = None
    """The model that it is for: names the modules of the stages, where the config says
    how many layers each has. Without it, predict cuts the model."""
    options: Annotated[WantedOptions, tyro.conf.arg(name="")] = field(
        default_factory=WantedOptions
    )
    out: OutFile = None
    """Where to write the strategy; printed if left out."""

    def run(self) -> None:
        """Read, say what is ignored, write.

        Raises:
            PlanFileError: If not exactly one of file and arguments is given.
        """
        from planner.imports import import_text, name_stages

        if (self.file is None) == (self.args is None):
            raise PlanFileError("give a FILE, or Megatron's arguments with --args")
        if self.args is not None and self.source != "megatron":
            raise PlanFileError(f"--args is Megatron's; give {self.source}'s FILE")
        if self.out is not None:
            require_writable(self.out)
        text = self.args if self.args is not None else read_config(self.file or "")
        found = import_text(
            self.source,
            text,
            self.options.wanted(self.global_batch),
            self.file or "--args",
            recompute=self.options.recompute,
        )
        strategy = found.strategy
        if self.model is not None:
            from planner.api import read_model

            graph = read_model(self.model, None, seq_len=None, dtype="bfloat16")
            strategy = name_stages(found, graph.unit_names)
        tell_ignored(found)
        if found.cut and len(set(found.cut)) > 1 and self.model is None:
            note(
                f"ignored stages of {', '.join(map(str, found.cut))} layers: their "
                f"modules are the model's; name it with --model"
            )
        if self.out is None:
            emit_text(strategy.to_json().rstrip())
            return
        strategy.save(self.out)
        note(f"wrote {self.out}")
