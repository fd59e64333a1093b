"""Commands on strategies and configs: predict, import, compare, methods."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from planner.cli.options import (
    CalibrationName,
    ClusterName,
    ImagesPerSample,
    KernelsOption,
    ModelName,
    OptionalFloat,
    OptionalInt,
    OutFile,
    SeqLen,
    name_model,
)
from planner.cli.output import (
    emit_json,
    emit_table,
    emit_text,
    note,
    tell_of_kernels,
    warn_of_fallbacks,
    working,
)
from planner.errors import PlanFileError, StrategyError
from planner.schema.base import require_writable
from planner.schema.methods import methods

if TYPE_CHECKING:
    from planner.imports import Imported, Wanted
    from planner.schema import Strategy

__all__ = [
    "CompareCommand",
    "ImportCommand",
    "MethodsCommand",
    "PredictCommand",
    "WantedOptions",
    "read_config",
    "tell_ignored",
]


@dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """Predict time and memory of a strategy; exit 2 if it does not fit."""

    strategy: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """JSON or YAML file with a strategy's fields, or a plan."""
    model: ModelName
    cluster: ClusterName
    global_batch: OptionalInt = None
    """Samples per step; must agree with the strategy, which has it by default."""
    seq_len: SeqLen = None
    images_per_sample: ImagesPerSample = 1
    target: Annotated[str, tyro.conf.arg(metavar="TARGET")] = "meshwright"
    """Launcher that runs it, as whose framework it is priced; see export --list."""
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be used."""
    calibration: CalibrationName = "shipped"
    fidelity: Literal["analytic", "simulated"] = "simulated"
    """Closed forms, or the schedule's exact order."""
    kernels: KernelsOption = "as-is"
    out: OutFile = None
    """File for the strategy as a plan, if it fits."""
    allow_remote_code: bool = False
    """Run Python code that came with a hf:PATH model; read it first."""
    json: bool = False
    """Print the priced plan as JSON."""

    def run(self) -> None:
        """Price and print; exit 2 if memory does not suffice."""
        if self.out is not None:
            require_writable(self.out)
        with working(f"pricing {self.strategy}"):
            from planner.api import predict, require_fit
            from planner.strategy_input import read_strategy

            strategy = read_strategy(self.strategy)
            made = predict(
                name_model(
                    self.model,
                    seq_len=self.seq_len,
                    dtype=strategy.precision.compute,
                    allow_remote_code=self.allow_remote_code,
                    images_per_sample=self.images_per_sample,
                ),
                self.cluster,
                strategy,
                global_batch=self.global_batch,
                seq_len=self.seq_len,
                target=self.target,
                memory_fraction=self.memory_fraction,
                calibration=self.calibration,
                fidelity=self.fidelity,
                kernels=self.kernels,
            )
        warn_of_fallbacks(made.provenance.assumptions)
        tell_of_kernels(made)
        if self.json:
            emit_json(made.to_data())
        else:
            emit_text(made.explain())
        require_fit(made)
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")


_Source = Literal[
    "auto",
    "megatron",
    "accelerate",
    "deepspeed",
    "nanotron",
    "torchtitan",
    "axolotl",
    "llamafactory",
]
_Format = Literal[_Source, "strategy"]


@dataclass(frozen=True, kw_only=True)
class WantedOptions:
    """Values that a config may lack; they must agree with it where it has them."""

    world_size: OptionalInt = None
    """Number of processes, if the config does not have it."""
    microbatch_size: OptionalInt = None
    """Samples per microbatch, if the config does not have it (accelerate)."""
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        tyro.conf.arg(metavar="{none,selective,full}", help_behavior_hint=""),
    ] = None
    """Activations that the training script recomputes, if the config does not say."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float8"] | None,
        tyro.conf.arg(
            metavar="{float32,bfloat16,float16,float8}", help_behavior_hint=""
        ),
    ] = None
    """Data type of matrix products, if the config leaves it to the trainer."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """Function that makes the config, in a Python file with several (torchtitan)."""
    without_offload: bool = False
    """Price the config without what it offloads to the host."""

    def wanted(self, global_batch: int | None, script_words: str = "") -> Wanted:
        """Return the values for the readers."""
        from planner.imports import Wanted

        return Wanted(
            world_size=self.world_size,
            global_batch=global_batch,
            microbatch_size=self.microbatch_size,
            dtype=self.dtype,
            recompute=self.recompute,
            recipe=self.recipe,
            script_words=script_words,
            without_offload=self.without_offload,
        )

    def require_none(self, file: str) -> None:
        """Refuse options for a strategy or a plan, which says all of it.

        Raises:
            StrategyError: Naming those that were given.
        """
        given = [
            f"--{item.name.replace('_', '-')}"
            for item in fields(self)
            if getattr(self, item.name) != item.default
        ]
        if given:
            raise StrategyError(
                f"{file} is a strategy or a plan, on which {', '.join(given)} has no "
                f"effect; leave it out, or change the file"
            )


def read_config(file: str) -> str:
    """Read a config's text.

    Raises:
        PlanFileError: If it cannot be read.
    """
    from planner.reading import read_text

    return read_text(file, "config", pipe=True)


def tell_ignored(imported: Imported) -> None:
    """List on stderr the keys without a meaning for a strategy."""
    for entry in imported.ignored:
        note(f"ignored {entry.key}: {entry.why}")


@dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Read another launcher's config as a strategy that predict prices."""

    source: Annotated[_Source, tyro.conf.Positional]
    """Launcher of the config; auto recognises it by the file's content."""
    file: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FILE", help_behavior_hint=""),
    ] = None
    """The config; for Megatron a file with arguments, or a script that starts it."""
    args: Annotated[
        str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")
    ] = None
    """Megatron's arguments themselves, instead of a file: --args="…"; with a script,
    the assignments and arguments that it is started with."""
    global_batch: OptionalInt = None
    """Samples per step, if the config does not have it."""
    model: Annotated[
        str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")
    ] = None
    """The config's model, to name the modules of its stages."""
    options: Annotated[WantedOptions, tyro.conf.arg(name="")] = field(
        default_factory=WantedOptions
    )
    out: OutFile = None
    """File for the strategy; printed by default."""

    def run(self) -> None:
        """Read, list ignored keys, write.

        Raises:
            PlanFileError: If neither a file nor arguments are given, or arguments with
                another launcher's file.
        """
        from planner.imports import detect_source, import_text, name_stages

        if self.file is None and self.args is None:
            raise PlanFileError("give a FILE, or Megatron's arguments with --args")
        if self.out is not None:
            require_writable(self.out)
        bare = self.file is None
        text = self.args or "" if bare else read_config(self.file or "")
        source: str = self.source
        if source == "auto":
            source = "megatron" if bare else detect_source(text, self.file or "")
            if source in ("plan", "strategy"):
                raise PlanFileError(
                    f"{self.file} is a {source} already; price it with meshwright "
                    f"predict --strategy {self.file}"
                )
        if self.args is not None and source != "megatron":
            raise PlanFileError(f"--args is Megatron's; give {source}'s FILE alone")
        found = import_text(
            source,
            text,
            self.options.wanted(self.global_batch, "" if bare else self.args or ""),
            self.file or "--args",
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


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Compare your current config with the plan that Meshwright would make."""

    current: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A launcher's config as meshwright import reads it, a strategy, or a plan."""
    model: ModelName
    cluster: ClusterName
    global_batch: OptionalInt = None
    """Samples per step, if the config does not have it."""
    format: _Format = "auto"
    """Format of the file; recognised by its content by default."""
    seq_len: SeqLen = None
    target: Annotated[str, tyro.conf.arg(metavar="TARGET")] = "meshwright"
    """Launcher whose limits the plan keeps; see plan --target."""
    calibration: CalibrationName = "shipped"
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be used."""
    time_budget_s: OptionalFloat = None
    """Time limit of the search in seconds."""
    kernels: KernelsOption = "as-is"
    options: Annotated[WantedOptions, tyro.conf.arg(name="")] = field(
        default_factory=WantedOptions
    )
    out: OutFile = None
    """File for the plan."""
    json: bool = False
    """Print both plans and the verdict as JSON."""

    def run(self) -> None:
        """Price, plan, lay side by side."""
        if self.out is not None:
            require_writable(self.out)
        current = self._read()
        with working(f"planning {self.model} on {self.cluster}"):
            from planner.compare import compare_with_plan

            found = compare_with_plan(
                current,
                self.model,
                self.cluster,
                seq_len=self.seq_len,
                target=self.target,
                calibration=self.calibration,
                memory_fraction=self.memory_fraction,
                time_budget_s=self.time_budget_s,
                kernels=self.kernels,
            )
        warn_of_fallbacks(found.ours.provenance.assumptions)
        tell_of_kernels(found.ours)
        if self.out is not None:
            found.ours.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            emit_json(found.data())
            return
        emit_table(["", "current", "ours"], found.rows())
        emit_text(f"\n{found.verdict()}")

    def _read(self) -> Imported | Strategy:
        """Read the current config.

        Raises:
            StrategyError: If it is for another batch than asked for.
        """
        from planner.imports import detect_source, import_text
        from planner.strategy_input import read_strategy

        text, source = read_config(self.current), self.format
        kind = detect_source(text, self.current) if source == "auto" else source
        if kind not in ("plan", "strategy"):
            found = import_text(
                kind,
                text,
                self.options.wanted(self.global_batch),
                self.current,
            )
            tell_ignored(found)
            return found
        self.options.require_none(self.current)
        strategy = read_strategy(self.current)
        if self.global_batch not in (None, strategy.global_batch):
            raise StrategyError(
                f"{self.current} trains {strategy.global_batch} samples a step, not "
                f"global_batch={self.global_batch}; leave it out, or change the file"
            )
        return strategy


@dataclass(frozen=True, kw_only=True)
class MethodsCommand:
    """List training methods, by the field of a strategy that each fills."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """Print names, presets, and what is inexact about each."""
        if self.json:
            emit_json(
                [
                    {
                        "slot": one.slot,
                        "method": one.kind,
                        "settings": list(one.settings),
                        "presets": {k: str(v) for k, v in one.presets.items()},
                        "default": one.default,
                        "inexact": one.inexact,
                        "runs": one.runs is not None,
                        "page": f"docs/{one.page}",
                        "source": one.source,
                    }
                    for one in methods()
                ]
            )
            return
        rows = []
        for one in methods():
            name = one.kind + (" (default)" if one.default else "")
            rows.append((one.slot, name, one.inexact or "exact"))
            presets = one.presets.items()
            rows += [(one.slot, f"  {key}", str(value)) for key, value in presets]
        emit_table(("pin", "method", "training, or settings of a preset"), rows)
