"""The command ``meshwright federate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from planner.cli.options import (
    CalibrationName,
    ClusterName,
    KernelsOption,
    ModelName,
    OutFile,
    SeqLen,
    TrainingOptions,
    name_model,
    parse_pins,
)
from planner.cli.output import (
    emit_json,
    emit_text,
    note,
    tell_of_kernels,
    working,
)
from planner.cli.plan import Pins, read_risk
from planner.errors import StrategyError
from planner.schema.base import require_writable

__all__ = ["FederateCommand"]

Members = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="DEVICES",
        help="Devices of a member, such as 0-3,6; once for each member. By default "
        "the division with the shortest step is searched for.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class FederateCommand:
    """Divide unlike machines into members that train apart and exchange weights."""

    model: ModelName
    cluster: ClusterName
    global_batch: int
    """Samples per optimizer step, over all members."""
    seq_len: SeqLen = None
    out: OutFile = None
    """File for the federation, which meshwright run trains by."""
    exchange: Annotated[str | None, tyro.conf.arg(metavar="METHOD")] = None
    """Exchange of the weights, such as diloco:period=100; by default their mean, as
    often as exchanges take 2 % of the time."""
    weighting: Literal["samples", "equal"] = "samples"
    """Let members count in the mean by their samples, or all equally."""
    member: Members = ()
    most_members: int = 8
    """Largest number of members."""
    pin: Pins = ()
    partitioner: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto"
    """Partitioner that plans each member: auto, or the name of an installed one."""
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be used."""
    risk: Annotated[str, tyro.conf.arg(metavar="QUANTILE|none")] = "0.9"
    """Quantile of the step time that ranks plans; none ranks by the prediction."""
    kernels: KernelsOption = "as-is"
    calibration: CalibrationName = "shipped"
    seed: int = 0
    """Seed of everything random."""
    allow_remote_code: bool = False
    """Run Python code that came with a hf:PATH model; read it first."""
    json: bool = False
    """Print the federation as JSON instead of a summary."""
    explain: bool = False
    """Also print what bounds each member, and the other divisions."""
    training: Annotated[TrainingOptions, tyro.conf.arg(name="")] = field(
        default_factory=TrainingOptions
    )

    def run(self) -> None:
        """Federate, print, write."""
        from planner.federations import federate

        members = tuple(map(_devices, self.member)) or None
        arguments = {
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "exchange": self.exchange,
            "weighting": self.weighting,
            "members": members,
            "most_members": self.most_members,
            "partitioner": self.partitioner,
            "pin": parse_pins(self.pin),
            "precision": None if self.training.any_dtype else self.training.precision(),
            "optimizer": self.training.build_optimizer(),
            "grad_clip_norm": self.training.grad_clip_norm,
            "calibration": self.calibration,
            "memory_fraction": self.memory_fraction,
            "risk": read_risk(self.risk),
            "seed": self.seed,
            "kernels": self.kernels,
        }
        if self.out is not None:
            require_writable(self.out)
        with working(f"dividing {self.cluster} to train {self.model}"):
            model = name_model(
                self.model,
                seq_len=self.seq_len,
                dtype=self.training.dtype or "bfloat16",
                allow_remote_code=self.allow_remote_code,
            )
            made = federate(model, self.cluster, **arguments)  # type: ignore[arg-type]
        tell_of_kernels(made.members[0].plan)
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            emit_json(made.to_data())
            return
        emit_text(made.explain() if self.explain else made.summary())


def _devices(text: str) -> tuple[int, ...]:
    """Read ``0-3,6``.

    Raises:
        StrategyError: If it is no list of devices.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = (word.strip() for word in part.partition("-"))
        words = (first, last or first)
        if not all(word.isascii() and word.isdigit() for word in words):
            raise StrategyError(
                f"--member {text!r} is no list of devices; write ids and ranges, such "
                f"as 0-3,6"
            )
        found.extend(range(int(words[0]), int(words[1]) + 1))
    return tuple(found)
