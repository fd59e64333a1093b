"""Sets of devices to choose from, and what a plan says of those that it leaves idle.

Where some devices have no bfloat16 and nobody asked for a dtype, a request is answered
more than once: in float32 on all devices, in bfloat16 on those that have it, and in
float16 on all where Meshwright's executors are the target, as they scale the loss. The
best answer by the objective is the plan; the others are told beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.errors import NoFeasiblePlanError
from planner.graph import ModelGraph
from planner.portfolio import ranked_answers
from planner.regimes import Answer, answer_that_fits
from planner.request import PlanOptions, devices_without, make_request
from planner.schema import Plan, Precision, Strategy
from planner.schema.methods import runs_in, slots
from planner.schema.plan_parts import OtherDevices
from planner.search.base import Candidate, SearchResult, preference
from planner.search.expert import ExpertPartitioner
from planner.search.families import NEAR
from planner.space import Regime

__all__ = [
    "ChosenDevices",
    "DeviceChoice",
    "answer_on_devices",
    "idle_devices",
    "list_choices",
    "other_devices",
]


Index = NDArray[np.int64]

#: Devices up to which the whole space is looked through in a fraction of a second.
_FEW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Devices and a dtype in which a request may be answered.

    Attributes:
        cluster: The machines; devices outside of the choice are occupied.
        options: The request in that dtype.
    """

    cluster: Cluster
    options: PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDevices:
    """The best answer among several choices of devices.

    Attributes:
        answer: The answer.
        options: The request in the dtype of the answer.
        others: The choices that were not taken, with their answers; None where nothing
            fits.
    """

    answer: Answer
    options: PlanOptions
    others: tuple[tuple[DeviceChoice, Answer | None], ...] = ()


def idle_devices(cluster: Cluster, strategy: Strategy) -> dict[str, int]:
    """Count the free devices that a strategy leaves idle, by type.

    Args:
        cluster: All machines.
        strategy: What was chosen.
    """
    used = np.asarray(strategy.device_ids())
    return _counted(cluster, np.setdiff1d(cluster.free, used))


def other_devices(chosen: ChosenDevices, plan: Plan) -> tuple[OtherDevices, ...]:
    """Tell of the device sets beside a plan's.

    Where it leaves some idle that have its dtype, the best strategy that was found for
    all of them is told first; if the search found none, one by rules of thumb.

    Args:
        chosen: All that was answered.
        plan: What was chosen.
    """
    request, step_s = chosen.answer.request, plan.prediction.step_time_s
    found = [_told_choice(*other, step_s) for other in chosen.others]
    if plan.strategy.mesh.num_devices < len(request.context.order):
        found.insert(0, _told(chosen.answer, _best_on_all(chosen.answer), step_s))
    return tuple(found)


def _best_on_all(answer: Answer) -> Candidate | None:
    """Return the best strategy that is known for all devices of an answer."""
    request, count = answer.request, len(answer.request.context.order)

    def using_all(results: Iterable[SearchResult]) -> list[Candidate]:
        every = (one for result in results for one in result.candidates)
        return [one for one in every if one.strategy.mesh.num_devices == count]

    found = using_all(answer.results)
    if not found:
        rules = ExpertPartitioner(widen=count <= _FEW)
        found = using_all([rules.search(replace(request, devices="all"))])
    return min(found, key=lambda one: preference(one, request.objective), default=None)


def list_choices(cluster: Cluster, options: PlanOptions) -> list[DeviceChoice]:
    """Return the choices of devices and dtypes in which to answer a request.

    Args:
        cluster: The machines.
        options: The request, in the default precision of all devices.

    Returns:
        At least one, all devices first.
    """
    lacking = devices_without(cluster, "bfloat16")
    found = [DeviceChoice(cluster=cluster, options=options)]
    if not lacking or not options.any_dtype:
        return found
    names = np.array([one.name in lacking for one in cluster.device_types])
    left_out = np.flatnonzero(names[np.asarray(cluster.type_index)])
    taken = np.setdiff1d(np.arange(cluster.num_devices), cluster.free)
    part = cluster.with_occupied(np.union1d(left_out, taken).tolist())
    if part.num_free:
        wide = replace(options, precision=Precision())
        found.append(DeviceChoice(cluster=part, options=wide))
    regime = Regime.from_pins(options.pin)
    scales = all(runs_in(slot, getattr(regime, slot), "float16") for slot in slots())
    if (
        scales
        and options.target == "meshwright"
        and not devices_without(cluster, "float16")
    ):
        half = replace(options, precision=Precision(compute="float16"))
        found.append(DeviceChoice(cluster=cluster, options=half))
    return found


def answer_on_devices(
    graph: ModelGraph,
    choices: Sequence[DeviceChoice],
    partitioner: str | Sequence[str],
) -> ChosenDevices:
    """Answer a request with each choice of devices, and take the best.

    Training in float16, which scales the loss, must win by
    :data:`planner.search.families.NEAR`.

    Args:
        graph: The model.
        choices: Of :func:`list_choices`. They share the time that is given.
        partitioner: Who answers.

    Raises:
        NoFeasiblePlanError: If nothing fits with any of them.
        MeshwrightError: As of :func:`planner.regimes.answer_that_fits`.
    """
    answers: list[tuple[DeviceChoice, Answer | None]] = []
    failed: list[NoFeasiblePlanError] = []
    for choice in choices:
        try:
            answers.append((choice, _answer(graph, choice, len(choices), partitioner)))
        except NoFeasiblePlanError as error:
            failed.append(error)
            answers.append((choice, None))
    there = [(choice, answer) for choice, answer in answers if answer is not None]
    if not there:
        # Reasons and remedies are those of all devices.
        raise failed[0]

    def rank(pair: tuple[DeviceChoice, Answer]) -> float:
        scaled = pair[0].options.precision.compute == "float16"
        return pair[1].score * (NEAR if scaled else 1.0)

    taken, best = min(there, key=rank)
    others = tuple(pair for pair in answers if pair[0] is not taken)
    return ChosenDevices(answer=best, options=taken.options, others=others)


def _answer(
    graph: ModelGraph,
    choice: DeviceChoice,
    count: int,
    partitioner: str | Sequence[str],
) -> Answer:
    options = choice.options
    request = make_request(graph, choice.cluster, options)
    if request.time_budget_s is not None:
        # Exact training first, with half of the time.
        parts = count * (2 if options.allow_approximate else 1)
        request = replace(request, time_budget_s=request.time_budget_s / parts)
    request, results = answer_that_fits(request, options, partitioner)
    found = ranked_answers(results, request.objective)[0]
    return Answer(request=request, results=results, found=found)


def _counted(cluster: Cluster, devices: Index) -> dict[str, int]:
    kinds = np.sort(np.asarray(cluster.type_index)[devices]).tolist()
    return dict(Counter(cluster.device_types[kind].name for kind in kinds))


def _told_choice(
    choice: DeviceChoice, answer: Answer | None, step_s: float
) -> OtherDevices:
    """Tell of a choice that was not taken."""
    if answer is not None:
        return _told(answer, answer.found[1], step_s)
    return OtherDevices(
        devices=_counted(choice.cluster, choice.cluster.free),
        compute=choice.options.precision.compute,
        reason="no strategy fits, or is legal, there",
    )


def _told(answer: Answer, other: Candidate | None, step_s: float) -> OtherDevices:
    """Tell of the best strategy on other devices beside the plan's step."""
    context = answer.request.context
    if other is None:
        return OtherDevices(
            devices=_counted(context.cluster, context.order),
            compute=context.precision.compute,
            reason="no strategy that uses all of them was found",
        )
    return OtherDevices(
        devices=_counted(context.cluster, np.asarray(other.strategy.device_ids())),
        compute=context.precision.compute,
        label=other.strategy.label(),
        step_time_s=other.cost.step_time_s,
        reason=f"a step takes {other.cost.step_time_s / step_s:.2f} times as long",
    )
