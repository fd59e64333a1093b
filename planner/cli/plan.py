"""The command ``meshwright plan``; plans of several partitioners side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    TrainingOptions,
    name_model,
    parse_pins,
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
from planner.errors import MeshwrightError, NoFeasiblePlanError, StrategyError
from planner.schema import PINNABLE, Plan
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.graph import ModelGraph
    from planner.request import PlanOptions

__all__ = [
    "Contender",
    "Pins",
    "PlanCommand",
    "as_data",
    "compare",
    "emit_contenders",
    "read_risk",
]

Pins = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="KNOB=VALUE",
        help=f"Fix a knob and plan the rest: {', '.join(PINNABLE[:-1])} or "
        f"{PINNABLE[-1]}. May be given several times.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan a model on a cluster and write the plan."""

    model: ModelName
    cluster: ClusterName
    global_batch: int
    """Samples per optimizer step, over all devices."""
    seq_len: SeqLen = None
    images_per_sample: ImagesPerSample = 1
    out: OutFile = None
    """File for the plan."""
    pin: Pins = ()
    partitioner: Annotated[str, tyro.conf.arg(metavar="NAME[,NAME...]")] = "auto"
    """Partitioners that search: auto, or names of installed ones."""
    compare: bool = False
    """Compare the plans of all installed (or named) partitioners; keep the best one."""
    # planner.search has the same names; importing it here would slow every command.
    objective: Literal["throughput", "throughput_per_device", "memory"] = "throughput"
    """Quantity to optimise."""
    target: Annotated[str, tyro.conf.arg(metavar="TARGET")] = "meshwright"
    """Limits to keep: meshwright (its executors), a launcher (export --list), any."""
    devices: Literal["all", "any"] = "all"
    """Use all free devices, or the number that is fastest."""
    memory_fraction: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.9
    """Share of each device's memory that may be used."""
    risk: Annotated[str, tyro.conf.arg(metavar="QUANTILE|none")] = "0.9"
    """Quantile of the step time that ranks plans; none ranks by the prediction."""
    calibration: CalibrationName = "shipped"
    evaluation_budget: OptionalInt = None
    """Number of strategies that each partitioner may simulate."""
    time_budget_s: OptionalFloat = None
    """Time limit of the search in seconds; with --compare, of each partitioner."""
    seed: int = 0
    """Seed of everything random."""
    uncertified: bool = False
    """Return the plan without training a small twin of it first."""
    allow_approximate: bool = False
    """Also consider methods with inexact steps, by evidence of their progress."""
    accept_gap: Annotated[float, tyro.conf.arg(metavar="POINTS")] = 0.5
    """Final quality that such a method may lose: accuracy points, or percent."""
    efficiency: Annotated[tuple[str, ...], tyro.conf.arg(metavar="METHOD=ETA")] = ()
    """Own evidence for methods: progress of a sample beside exact training's."""
    kernels: KernelsOption = "as-is"
    allow_remote_code: bool = False
    """Run Python code that came with a hf:PATH model; read it first."""
    json: bool = False
    """Print the plan as JSON instead of a summary."""
    explain: bool = False
    """Also print the plan's bottleneck and the costs of the runners-up."""
    training: Annotated[TrainingOptions, tyro.conf.arg(name="")] = field(
        default_factory=TrainingOptions
    )

    def run(self) -> None:
        """Plan, print, write."""
        arguments = self._arguments()
        if self.out is not None:
            require_writable(self.out)
        contenders: tuple[Contender, ...] = ()
        with working(f"planning {self.model} on {self.cluster}"):
            model = name_model(
                self.model,
                seq_len=self.seq_len,
                dtype=arguments["precision"].activation_dtype,
                allow_remote_code=self.allow_remote_code,
                images_per_sample=self.images_per_sample,
            )
            if self.compare:
                made, contenders = self._compare(model, arguments)
            else:
                made = self._plan(model, arguments)
        warn_of_fallbacks(made.provenance.assumptions)
        tell_of_kernels(made)
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            more = {"contenders": as_data(contenders)} if self.compare else {}
            emit_json({**made.to_data(), **more})
            return
        if contenders:
            emit_contenders(contenders)
            emit_text("")
        emit_text(made.explain() if self.explain else made.summary())

    def _plan(self, model: str | ModelGraph, arguments: Mapping[str, Any]) -> Plan:
        from planner.api import plan

        if self.training.any_dtype:
            arguments = {**arguments, "precision": None}
        return plan(
            model,
            self.cluster,
            seq_len=self.seq_len,
            partitioner=self._asked(),
            certify=False if self.uncertified else None,
            **arguments,
        )

    def _compare(
        self, model: str | ModelGraph, arguments: Mapping[str, Any]
    ) -> tuple[Plan, tuple[Contender, ...]]:
        from planner.request import PlanOptions

        options = PlanOptions(**arguments, any_dtype=self.training.any_dtype)
        return compare(
            model, self.cluster, self._asked(), options, seq_len=self.seq_len
        )

    def _asked(self) -> str | tuple[str, ...]:
        """Return one partitioner's name, or several.

        Raises:
            StrategyError: If one is empty.
        """
        names = tuple(name.strip() for name in self.partitioner.split(","))
        if not all(names):
            raise StrategyError(
                f"--partitioner {self.partitioner!r} has an empty name; write NAME,NAME"
            )
        return names[0] if len(names) == 1 else names

    def _arguments(self) -> dict[str, Any]:
        """Arguments of :func:`planner.api.plan` that a request shares with others.

        Raises:
            StrategyError: If a pin or a number is wrong.
        """
        if self.accept_gap != 0.5 and not self.allow_approximate:
            raise StrategyError(
                f"--accept-gap {self.accept_gap} has no effect without "
                f"--allow-approximate; give both, or neither"
            )
        return {
            "global_batch": self.global_batch,
            "objective": self.objective,
            "pin": parse_pins(self.pin),
            "target": self.target,
            "devices": self.devices,
            "precision": self.training.precision(self.cluster),
            "optimizer": self.training.build_optimizer(),
            "grad_clip_norm": self.training.grad_clip_norm,
            "memory_fraction": self.memory_fraction,
            "risk": read_risk(self.risk),
            "calibration": self.calibration,
            "evaluation_budget": self.evaluation_budget,
            "time_budget_s": self.time_budget_s,
            "seed": self.seed,
            "allow_approximate": self.allow_approximate,
            "accept_gap": self.accept_gap,
            "efficiency": dict(map(_efficiency, self.efficiency)),
            "kernels": self.kernels,
        }


def _efficiency(text: str) -> tuple[str, float]:
    """Read an ``--efficiency``: the method may have settings with signs of their own.

    Raises:
        StrategyError: If it is not METHOD=NUMBER.
    """
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise StrategyError(
            f"--efficiency {text!r} is not METHOD=ETA, such as diloco=0.97"
        ) from None


def read_risk(text: str) -> float | Literal["none"]:
    """Read ``--risk``.

    Raises:
        StrategyError: If it is neither a number nor none.
    """
    if text == "none":
        return "none"
    try:
        return float(text)
    except ValueError:
        raise StrategyError(
            f"--risk {text!r} is no number; give 0.5 or more and below 1, or none"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """The result of one partitioner.

    Attributes:
        partitioner: Its registered name.
        step_time_s: Predicted; None if it has no plan.
        over_best: Share by which its plan is worse than the best one, by the
            objective.
        devices: Number that the plan uses.
        strategy: Label of the strategy.
        evaluations: Strategies priced, by fidelity.
        seconds: Wall time of the search.
        why_none: Reason why there is no plan.
    """

    partitioner: str
    step_time_s: float | None = None
    over_best: float | None = None
    devices: int | None = None
    strategy: str | None = None
    evaluations: Mapping[str, int] | None = None
    seconds: float | None = None
    why_none: str | None = None


def compare(
    model: str | ModelGraph,
    cluster: str,
    partitioner: str | Sequence[str],
    options: PlanOptions,
    *,
    seq_len: int | None,
) -> tuple[Plan, tuple[Contender, ...]]:
    """Plan with each of several partitioners, each with the whole budget.

    Args:
        model: Read once.
        cluster: A name, as for :func:`planner.api.plan`.
        partitioner: Names; ``auto`` stands for all that are installed.
        options: Further arguments of ``plan``.
        seq_len: Tokens a sample.
    Returns:
        The best plan, which names all contenders, and one entry each, best first.
    Raises:
        MeshwrightError: If none of them has a plan.
    """
    from planner.api import plan_graph, read_model
    from planner.cluster import Cluster
    from planner.portfolio import names_of
    from planner.search import partitioner_names

    names = partitioner_names() if partitioner == "auto" else names_of(partitioner)
    machines = Cluster.parse(cluster)
    graph = read_model(
        model, None, seq_len=seq_len, dtype=options.precision.activation_dtype
    )
    plans: dict[str, Plan] = {}
    failed: dict[str, MeshwrightError] = {}
    for name in names:
        try:
            plans[name] = plan_graph(graph, machines, options, partitioner=name)
        except MeshwrightError as error:
            failed[name] = error
    if not plans:
        raise _reason(list(failed.values()))
    # Sums of equal parts in another order differ in their last bits.
    ranked = sorted(plans, key=lambda name: float(f"{_score(plans[name]):.10g}"))
    best = plans[ranked[0]]
    found = [_contender(name, plans[name], _score(best)) for name in ranked]
    found += [Contender(partitioner=n, why_none=str(e)) for n, e in failed.items()]
    asked = tuple(c for name in ranked for c in plans[name].provenance.contenders)
    provenance = best.provenance.model_copy(update={"contenders": asked})
    return best.model_copy(update={"provenance": provenance}), tuple(found)


def _reason(errors: Sequence[MeshwrightError]) -> MeshwrightError:
    """The error to raise: that nothing fits, if a partitioner found that out."""
    lacking = (error for error in errors if isinstance(error, NoFeasiblePlanError))
    return next(lacking, errors[0])


def _score(plan: Plan) -> float:
    """The number that the plan's objective minimises."""
    objective, prediction = plan.provenance.objective, plan.prediction
    if objective == "memory":
        return max(entry.total_bytes for entry in prediction.memory)
    if objective == "throughput_per_device":
        return prediction.step_time_s * plan.strategy.mesh.num_devices
    return prediction.step_time_s


def _contender(name: str, plan: Plan, best: float) -> Contender:
    return Contender(
        partitioner=name,
        step_time_s=plan.prediction.step_time_s,
        over_best=_score(plan) / best - 1,
        devices=plan.strategy.mesh.num_devices,
        strategy=plan.strategy.label(),
        evaluations=plan.provenance.evaluations,
        seconds=plan.timing_s["search"],
    )


def as_data(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return the contenders as JSON values."""
    return [asdict(one) for one in contenders]


def emit_contenders(contenders: Sequence[Contender]) -> None:
    """Print a table, one line each."""
    emit_table(
        (
            "partitioner",
            "step time",
            "over the best",
            "devices",
            "simulated",
            "closed form",
            "seconds",
            "strategy",
        ),
        [_cells(one) for one in contenders],
    )


def _cells(one: Contender) -> tuple[str, ...]:
    if one.step_time_s is None or one.over_best is None or one.evaluations is None:
        return (one.partitioner, "none", *[""] * 5, one.why_none or "")
    return (
        one.partitioner,
        f"{one.step_time_s:.4g} s",
        f"{one.over_best:.2%}",
        str(one.devices),
        f"{one.evaluations['simulated']:,}",
        f"{one.evaluations['analytic']:,}",
        f"{one.seconds:.2f}",
        str(one.strategy),
    )
