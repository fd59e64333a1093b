"""Pipelines whose stages update their weights behind each backward, without a flush."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from planner.schema.methods.all_reduce import AllReduce
from planner.schema.methods.method import Asynchrony, Feature, Method, Recompute

if TYPE_CHECKING:
    from planner.schema.strategy import Strategy
    from planner.schema.violations import Case

__all__ = ["METHODS", "Asynchronous"]

_SOURCE = (
    "Narayanan et al. 2019, PipeDream, SOSP; Menon et al. 2024, Ravnest, arXiv "
    "2401.01728"
)


class Asynchronous(Asynchrony):
    """Stages update their weights behind each backward; the pipeline is not flushed.

    The order is 1F1B's over ``drain_every`` microbatches. Stage s of S, from 0, has up
    to S - 1 - s microbatches under way while it updates, so that its backward of a
    microbatch is of weights that have been updated by as many others since. These
    weights are stashed from the forward to the backward: each update is by a gradient,
    though one of older weights.

    w[s, m + 1] = optimizer(w[s, m], grad f_m(w[0, max(m - (S - 1), 0)], ...,
    w[S - 1, m])), for microbatch m since the pipeline was drained, and update_every 1

    Source: Narayanan et al. 2019, PipeDream, section 3.3; Menon et al. 2024, arXiv
    2401.01728.

    Attributes:
        update_every: Microbatches whose mean gradient makes an update.
        drain_every: Microbatches from one time that no microbatch is under way to the
            next. A run is saved there.
        learning_rate_scale: Factor on the optimizer's learning rate; None for one over
            the number of stages.
        recompute: Recomputation that stages must have; ``any`` leaves it open.
    """

    unflushed: ClassVar[bool] = True

    kind: Literal["asynchronous"] = "asynchronous"
    update_every: Annotated[int, Field(ge=1, le=2**13)] = 1
    drain_every: Annotated[int, Field(ge=1, le=2**13)] = 512
    learning_rate_scale: Annotated[float, Field(gt=0)] | None = None
    recompute: Literal["any", "none", "selective", "full"] = "any"

    @model_validator(mode="after")
    def _drains_after_updates(self) -> Self:
        if self.drain_every % self.update_every:
            more = -(-self.drain_every // self.update_every) * self.update_every
            raise ValueError(
                f"drain_every={self.drain_every} is no multiple of update_every="
                f"{self.update_every}, so that a gradient would wait; use {more}"
            )
        return self

    @property
    def wanted_recompute(self) -> Recompute | None:
        """Recomputation that every stage must have; None for any."""
        return None if self.recompute == "any" else self.recompute

    @property
    def update_interval(self) -> int:
        """Microbatches of an update."""
        return self.update_every

    def steps_to_drain(self, num_microbatches: int) -> int:
        """Steps from drain to drain.

        Args:
            num_microbatches: Of a step; it divides ``drain_every``.
        """
        return max(self.drain_every // num_microbatches, 1)

    def updates(self, num_microbatches: Any) -> Any:
        """Updates of each weight in a step, on average."""
        return num_microbatches / self.update_every

    def older_versions(self, stage: int, stages: int) -> int:
        """Most versions of a stage's weights that are kept beside the newest."""
        return -(-(stages - 1 - stage) // self.update_every)

    def rate_scale(self, stages: int) -> float:
        """Factor on the optimizer's learning rate."""
        return self.learning_rate_scale or 1 / stages


def _settings(strategy: Strategy) -> Asynchronous:
    value = strategy.asynchrony
    assert isinstance(value, Asynchronous)
    return value


def _pipeline_alone(case: Case) -> str | None:
    strategy = case.strategy
    shown, mesh = f"asynchrony={strategy.asynchrony}", strategy.mesh
    if mesh.pp == 1:
        return (
            f"{shown} with pp=1; stages of a pipeline are what does not wait, use "
            f"pp > 1 or asynchrony=flushed"
        )
    if strategy.schedule != "1F1B" or strategy.virtual_stages > 1:
        held = f", virtual_stages={strategy.virtual_stages}"
        return (
            f"{shown} with schedule={strategy.schedule}"
            f"{held if strategy.virtual_stages > 1 else ''}; its order is that of 1F1B "
            f"with one stage a rank, use schedule=1F1B"
        )
    for axis in ("dp_shard", "cp", "tp", "ep"):
        degree = getattr(mesh, axis)
        if degree > 1:
            return (
                f"{shown} with {axis}={degree}; weights are stashed whole, by the one "
                f"device of a stage, use {axis}=1 or asynchrony=flushed"
            )
    return None


def _copies(case: Case) -> str | None:
    strategy = case.strategy
    shown, copies = f"asynchrony={strategy.asynchrony}", strategy.mesh.dp_replicate
    value = strategy.synchronisation
    if copies == 1 or isinstance(value, AllReduce):
        return None
    if not value.between_steps:
        return (
            f"{shown} with dp_replicate={copies} and synchronisation={value}; copies "
            f"of a stage average gradients before each update, or weights when the "
            f"pipeline is drained, use synchronisation=all_reduce or local_steps, or "
            f"asynchrony=flushed"
        )
    steps = _settings(strategy).steps_to_drain(strategy.num_microbatches)
    if any(every % steps for every in value.acts_every):
        return (
            f"{shown} with synchronisation={value} and num_microbatches="
            f"{strategy.num_microbatches}; copies meet when the pipeline is drained, "
            f"every {steps} steps, use a period of as many or a multiple of it"
        )
    return None


def _whole_windows(case: Case) -> str | None:
    strategy, value = case.strategy, _settings(case.strategy)
    many = strategy.num_microbatches
    if value.drain_every % many:
        more = -(-value.drain_every // many) * many
        return (
            f"asynchrony={value} with num_microbatches={many}; the pipeline is drained "
            f"after whole steps, use drain_every={more} or another multiple of {many}"
        )
    if many % value.update_every:
        return (
            f"asynchrony={value} with num_microbatches={many}; a step has whole "
            f"updates, use an update_every that divides {many}"
        )
    return None


#: First beta of NAdam from which gradients of older weights do no harm (the same).
_LONG_MEMORY = 0.99


def _optimizer(case: Case) -> str | None:
    strategy = case.strategy
    optimizer = strategy.optimizer
    if optimizer.name == "SGD":
        return None
    betas = optimizer.used_betas
    if optimizer.name == "NAdam" and betas is not None and betas[0] >= _LONG_MEMORY:
        return None
    shown = optimizer.name if betas is None else f"{optimizer.name} (betas {betas})"
    return (
        f"asynchrony={strategy.asynchrony} with optimizer={shown}; gradients of older "
        f"weights harm it, by one step already (arXiv 2606.30634), use SGD, NAdam of "
        f"betas=({_LONG_MEMORY}, 0.999), or asynchrony=flushed"
    )


def _stages_never_meet(case: Case) -> str | None:
    strategy, shown = case.strategy, f"asynchrony={case.strategy.asynchrony}"
    if strategy.grad_clip_norm is not None:
        return (
            f"grad_clip_norm={strategy.grad_clip_norm} with {shown}; its norm is over "
            f"all stages, which are never updated together, leave it out or use "
            f"asynchrony=flushed"
        )
    stage_of = {
        module: index
        for index, stage in enumerate(strategy.stages)
        for module in stage.modules
    }
    for group in case.tied:
        holders = {_holder(name, stage_of) for name in group}
        # Where stages are not known yet, ends of a pipeline are what shares weights.
        if len(holders) > 1 or None in holders:
            return (
                f"tied weights ({', '.join(group)}) in several stages with {shown}; "
                f"stages that share them are never updated together, untie them or use "
                f"asynchrony=flushed"
            )
    return None


def _holder(parameter: str, stage_of: dict[str, int]) -> int | None:
    """Stage that holds a parameter; None if none is known to."""
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        if module in stage_of:
            return stage_of[module]
    return None


def _recomputation(case: Case) -> str | None:
    value, wanted = case.strategy.asynchrony, case.strategy.asynchrony.wanted_recompute
    found = next((kind for kind in case.recompute if kind != wanted), None)
    if wanted is None or found is None:
        return None
    return (
        f"asynchrony={value} with recompute={found}; its stages have "
        f"recompute={wanted}, use that or recompute=any"
    )


def _plain_arithmetic(case: Case) -> str | None:
    strategy, precision = case.strategy, case.strategy.precision
    shown = f"asynchrony={strategy.asynchrony}"
    if precision.compute not in (precision.parameter, "bfloat16"):
        return (
            f"{shown} with parameter={precision.parameter} and compute="
            f"{precision.compute}; stashed weights are cast to bfloat16 alone, whose "
            f"gradients need no scale that all stages agree on, use "
            f"compute=bfloat16 or asynchrony=flushed"
        )
    if strategy.compile:
        return (
            f"{shown} with compile=True; compiled code is made for weights that are "
            f"updated in place, use compile=False"
        )
    return None


METHODS = (
    Method(
        kind="asynchronous",
        slot="asynchrony",
        document=Asynchronous,
        words=(
            "stages update their weights behind each backward, and the pipeline is "
            "drained every {drain_every} microbatches"
        ),
        inexact="gradients are of weights that are older in all stages but the last",
        limits=(
            _pipeline_alone,
            _copies,
            _whole_windows,
            _optimizer,
            _stages_never_meet,
            _recomputation,
        ),
        violations=(_plain_arithmetic,),
        feature=Feature(
            name="asynchronous",
            mesh={"pp": 2},
            fields={
                "schedule": "1F1B",
                "num_microbatches": 4,
                "optimizer": {"name": "SGD"},
                "asynchrony": Asynchronous(drain_every=4),
                "semantics": "approximate",
            },
            kind="schedule",
            # An update for each microbatch, by gradients of older weights.
            tolerance=(2e-1, float("inf"), float("inf")),
        ),
        presets={
            "pipedream": Asynchronous(),
            # Stages keep inputs, and compute again at the weights of the forward.
            "ravnest": Asynchronous(recompute="full"),
        },
        prices="planner.cost.pipelines.asynchronous:AsynchronousPricing",
        runs="executors.replicas.asynchronous:AsynchronousReplicas",
        page="methods/asynchronous.md",
        test="tests/distributed/test_asynchronous.py",
        source=_SOURCE,
    ),
)
