"""Pipeline schedules: one record each, in one registry that every room reads.

A new schedule is one call of :func:`register_schedule`. Its record says when it is
legal, on which rank each stage lies, in which order ranks act, what they hold, and
which class of torch runs it; planner, executors and exporters look it up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from planner.errors import UnknownNameError

__all__ = [
    "ClosedForm",
    "InFlight",
    "Schedule",
    "ScheduleSpec",
    "register_schedule",
    "schedule_name",
    "schedule_names",
    "schedule_spec",
    "schedules",
]

#: Formula of a step's time, where one is known; ``chains`` reads it off the simulator.
#:
#: ======================  ============================================================
#: ``fill``                M slowest rank + one fill
#: ``one_by_one``          the same; a round of pp microbatches waits for the first
#: ``rounds``              rounds of about pp microbatches over the virtual stages
#: ``breadth_first``       every stage runs all microbatches in a row
#: ``chains``              the longest chains of actions, by simulating equal stages
#: ======================  ============================================================
ClosedForm = Literal["fill", "one_by_one", "rounds", "breadth_first", "chains"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Microbatches that a rank holds at once, counted in its virtual stages.

    Rank r of pp holds, of M microbatches and v virtual stages, at most v M and

        per_pp pp + constant - fewer_per_rank r  [+ (v - 1) microbatches a round]

    Between input and weight gradient, where the backward is split, wait at most one
    microbatch and ``more_waiting_per_rank`` r.

    Attributes:
        all: Whether all v M are held, because all forwards come first.
        in_rounds: Whether the term in brackets counts.
    """

    all: bool = False
    per_pp: int = 0
    constant: int = 0
    fewer_per_rank: int = 0
    in_rounds: bool = False
    more_waiting_per_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """One pipeline schedule.

    Attributes:
        name: As plans and pins write it; torch's name where torch has it.
        code: Of the ``schedule`` column of tables, explicit and never reused: compiled
            code and saved tables depend on it.
        virtual_stages: Fewest and most stages of a rank; None for no upper limit.
        folded: Whether rank r holds stages r and 2 pp - 1 - r, a V; else the stages
            loop over the ranks.
        splits_backward: Whether input and weight gradients are actions of their own.
        forwards_first: Whether no backward begins before all forwards are done.
        waits_for_sends: Whether a rank waits until what it sent has left, so that
            nothing sent is kept.
        microbatches_per_stage: Fewest microbatches over pp; 0 if one is enough.
        equal_rounds: Whether max(1, M // pp) rounds must divide M.
        order: ``module:function`` of ``(rank, pp, virtual_stages, num_microbatches)``
            to rows of :class:`planner.simulate.ActionTable`.
        in_flight: What ranks hold.
        closed_form: How the analytic cost model times it.
        prices: ``module:object`` of the pricing of its pipelines, see
            :class:`planner.cost.pipelines.PipelinePricing`.
        representative: Whether enumeration lists it; the others differ from these in
            bubbles and memory alone, and are tried on the best meshes.
        one_stage: Schedule whose name this order has where a rank holds one stage, as
            strategies that were saved before it had one may: they are read and run as
            they are, but none is planned.
        stands_in_for: A representative as fast with less memory, in whose place this
            one is listed where that one is illegal.
        staleness: Steps by which the weights of a backward may be old.
        runs: Class of ``torch.distributed.pipelining.schedules`` that runs it; None if
            the executors cannot.
        runs_on_gloo_since: First torch release (major, minor) whose class runs on gloo.
        source: Where the order is from.
    """

    name: str
    code: int
    virtual_stages: tuple[int, int | None] = (1, 1)
    folded: bool = False
    splits_backward: bool = False
    forwards_first: bool = False
    waits_for_sends: bool = False
    microbatches_per_stage: int = 0
    equal_rounds: bool = False
    order: str
    in_flight: InFlight
    closed_form: ClosedForm = "chains"
    prices: str = "planner.cost.pipelines.flushed:PRICING"
    representative: bool = False
    one_stage: str | None = None
    stands_in_for: str | None = None
    staleness: int = 0
    runs: str | None = None
    runs_on_gloo_since: tuple[int, int] | None = None
    source: str

    @property
    def single_stage(self) -> bool:
        """True if each rank holds exactly one stage."""
        return self.virtual_stages == (1, 1)

    @property
    def usual_virtual_stages(self) -> int:
        """Stages a rank where nothing says how many: the fewest, or two of a loop."""
        least, most = self.virtual_stages
        return least if most == least else max(2, least)

    @property
    def has_textbook_time(self) -> bool:
        """True if equal stages take M slowest rank + fill."""
        return not self.splits_backward and self.closed_form in {
            "fill",
            "one_by_one",
            "rounds",
        }

    def rank_of_stage(self, stage: int, pp: int) -> int:
        """Rank along pp that holds a virtual stage."""
        return min(stage, 2 * pp - 1 - stage) if self.folded else stage % pp

    def violation(
        self, pp: int, virtual_stages: int, num_microbatches: int
    ) -> str | None:
        """Why torch refuses a pipeline of these sizes; None if it runs it.

        Args:
            pp: Ranks.
            virtual_stages: Virtual stages of each rank.
            num_microbatches: Microbatches in a step.

        Returns:
            One line with the value, the rule and the remedy, or None.
        Source: constructors in torch.distributed.pipelining.schedules, torch 2.13.
        """
        for name, value in (
            ("pp", pp),
            ("virtual_stages", virtual_stages),
            ("num_microbatches", num_microbatches),
        ):
            if value < 1:
                return f"{name}={value} is not positive; use 1 or more"
        least, most = self.virtual_stages
        if virtual_stages == 1 and self.one_stage is not None:
            least = 1
        if virtual_stages < least or (most is not None and virtual_stages > most):
            held = {(1, 1): "one stage", (2, 2): "exactly two stages"}.get(
                (least, most or 0),
                f"{least} to {most} stages" if most else f"{least} stages or more",
            )
            other = " or Interleaved1F1B" if self.single_stage else ""
            return (
                f"virtual_stages={virtual_stages} with schedule {self.name}, which "
                f"holds {held} on a rank; use {least}{other}"
            )
        fewest = max(1, self.microbatches_per_stage * pp)
        if num_microbatches < fewest:
            return (
                f"num_microbatches={num_microbatches} is below the {fewest} stages "
                f"that schedule {self.name} must fill; use {fewest} or more, or GPipe"
            )
        rounds = max(1, num_microbatches // pp)
        if self.equal_rounds and num_microbatches % rounds:
            return (
                f"num_microbatches={num_microbatches} does not divide into the "
                f"{rounds} rounds that schedule {self.name} makes of it at pp={pp}; "
                f"use {num_microbatches // pp * pp}, a multiple of pp"
            )
        return None


_REGISTRY: dict[str, ScheduleSpec] = {}


def register_schedule(spec: ScheduleSpec) -> None:
    """Add a schedule.

    Raises:
        ValueError: If its name or its code is taken.
    """
    for other in _REGISTRY.values():
        if spec.name == other.name or spec.code == other.code:
            raise ValueError(
                f"schedule {spec.name} with code {spec.code}: {other.name} has code "
                f"{other.code}; names and codes are never used twice"
            )
    _REGISTRY[spec.name] = spec


def schedules() -> tuple[ScheduleSpec, ...]:
    """All schedules, by code."""
    return tuple(sorted(_REGISTRY.values(), key=lambda spec: spec.code))


def schedule_names() -> tuple[str, ...]:
    """Names of all schedules, by code."""
    return tuple(spec.name for spec in schedules())


def schedule_spec(name: str) -> ScheduleSpec:
    """Look a schedule up.

    Raises:
        UnknownNameError: If there is none of that name; suggests the nearest.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise UnknownNameError("pipeline schedule", name, schedule_names()) from None


def schedule_name(code: int) -> str:
    """Name of the schedule with a code.

    Raises:
        KeyError: If no schedule has it.
    """
    for spec in _REGISTRY.values():
        if spec.code == code:
            return spec.name
    raise KeyError(f"no pipeline schedule has the code {code}")


_TORCH = "torch.distributed.pipelining.schedules, torch 2.13"

for _spec in (
    ScheduleSpec(
        name="GPipe",
        code=0,
        forwards_first=True,
        waits_for_sends=True,
        order="planner.simulate.looped:fill_drain_rows",
        in_flight=InFlight(all=True),
        closed_form="fill",
        representative=True,
        stands_in_for="1F1B",
        runs="ScheduleGPipe",
        source=f"{_TORCH}; Huang et al. 2019, arXiv 1811.06965",
    ),
    ScheduleSpec(
        name="1F1B",
        code=1,
        waits_for_sends=True,
        microbatches_per_stage=1,
        order="planner.simulate.looped:one_forward_one_backward_rows",
        in_flight=InFlight(per_pp=1, fewer_per_rank=1),
        closed_form="one_by_one",
        representative=True,
        runs="Schedule1F1B",
        source=f"{_TORCH}; Narayanan et al. 2019, PipeDream",
    ),
    ScheduleSpec(
        name="Interleaved1F1B",
        code=2,
        virtual_stages=(2, None),
        one_stage="Eager1F1B",
        equal_rounds=True,
        order="planner.simulate.looped:interleaved_rows",
        in_flight=InFlight(per_pp=2, constant=-1, fewer_per_rank=2, in_rounds=True),
        closed_form="rounds",
        representative=True,
        runs="ScheduleInterleaved1F1B",
        source=f"{_TORCH}; Narayanan et al. 2021, arXiv 2104.04473",
    ),
    ScheduleSpec(
        name="LoopedBFS",
        code=3,
        virtual_stages=(1, None),
        forwards_first=True,
        order="planner.simulate.looped:breadth_first_rows",
        in_flight=InFlight(all=True),
        closed_form="breadth_first",
        stands_in_for="Interleaved1F1B",
        runs="ScheduleLoopedBFS",
        source=f"{_TORCH}; Lamy-Poirier 2023, arXiv 2211.05953",
    ),
    ScheduleSpec(
        name="InterleavedZeroBubble",
        code=4,
        virtual_stages=(1, None),
        splits_backward=True,
        equal_rounds=True,
        order="planner.simulate.looped:interleaved_zero_bubble_rows",
        # What later ranks have less in flight waits there for its weight gradient.
        in_flight=InFlight(per_pp=1, in_rounds=True, more_waiting_per_rank=1),
        closed_form="rounds",
        runs="ScheduleInterleavedZeroBubble",
        source=f"{_TORCH}; Qi et al. 2023, arXiv 2401.10241",
    ),
    ScheduleSpec(
        name="ZBVZeroBubble",
        code=5,
        virtual_stages=(2, 2),
        folded=True,
        splits_backward=True,
        order="planner.simulate.folded:zero_bubble_rows",
        # As much as 1F1B, on every rank.
        in_flight=InFlight(per_pp=2, more_waiting_per_rank=2),
        runs="ScheduleZBVZeroBubble",
        runs_on_gloo_since=(2, 13),
        source=f"{_TORCH}; Qi et al. 2024, arXiv 2405.15362",
    ),
    ScheduleSpec(
        name="DualPipeV",
        code=6,
        virtual_stages=(2, 2),
        folded=True,
        splits_backward=True,
        microbatches_per_stage=2,
        order="planner.simulate.folded:dual_pipe_rows",
        # One more than ZBV, because pairs of a forward and a backward overlap.
        in_flight=InFlight(per_pp=2, constant=1, more_waiting_per_rank=1),
        runs="ScheduleDualPipeV",
        runs_on_gloo_since=(2, 13),
        source=f"{_TORCH}; DeepSeek-AI 2024, DualPipe; Sea AI Lab's V shape",
    ),
    # 1F1B with nearly twice as many microbatches under way, which hide transfers.
    ScheduleSpec(
        name="Eager1F1B",
        code=7,
        equal_rounds=True,
        order="planner.simulate.looped:interleaved_rows",
        in_flight=InFlight(per_pp=2, constant=-1, fewer_per_rank=2),
        closed_form="rounds",
        runs="ScheduleInterleaved1F1B",
        source=f"{_TORCH}, of one stage a rank; Zhuang et al. 2023, arXiv 2211.05322",
    ),
):
    register_schedule(_spec)
del _spec


def _known(name: str) -> str:
    try:
        return schedule_spec(name).name
    except UnknownNameError as error:
        raise ValueError(str(error)) from None


#: Name of a registered schedule, as a field of a document.
Schedule = Annotated[
    str,
    AfterValidator(_known),
    WithJsonSchema({"enum": list(schedule_names()), "type": "string"}),
]
