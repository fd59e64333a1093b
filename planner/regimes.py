"""Ways of training that do not compute exact steps, beside the exact plan.

A request that allows it is answered within each regime that has evidence: a method, by
:mod:`planner.measurements.convergence`, with as many copies as it was tried with or a
half of them, and so on while that is faster. The least time to the same loss wins, the
step over the efficiency of its samples; exact training stays where its own is within
:data:`planner.search.families.NEAR` times that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.cost.offload import host_limit_bytes
from planner.diagnose import fitting
from planner.errors import NoFeasiblePlanError, StrategyError, UnknownNameError
from planner.measurements.convergence import Convergence, convergence
from planner.portfolio import ranked_answers, run_partitioners
from planner.request import PlanOptions
from planner.schema import Offload
from planner.schema.methods import (
    default_value,
    method_names,
    method_of,
    read_method,
    slots,
)
from planner.schema.methods.method import Asynchrony
from planner.schema.plan_parts import Efficiency, OtherRegime
from planner.search import Candidate, Request, SearchResult, score
from planner.search.families import NEAR
from planner.space import Regime, normalize_pins

__all__ = ["Answer", "answer_that_fits", "answer_with_regimes", "evidence_for"]

#: Bases by which a method may be chosen: what was only seen to train may be pinned.
_GOOD = {"own", "published"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answers to a request within one regime.

    Attributes:
        request: The request.
        results: Of its partitioners.
        found: The strategy to choose, and who found it.
        efficiency: Evidence for the regime; None where steps are exact.
        others: Regimes that were not chosen.
    """

    request: Request
    results: Sequence[SearchResult]
    found: tuple[SearchResult, Candidate]
    efficiency: Efficiency | None = None
    others: tuple[OtherRegime, ...] = ()

    @property
    def score(self) -> float:
        """The figure that the objective minimises."""
        candidate = self.found[1]
        devices = candidate.strategy.mesh.num_devices
        return score(candidate.cost, devices, self.request.objective)


#: Chunks of the loss where a plan does not fit without: torchtune's default
#: (CEWithChunkedOutputLoss, num_output_chunks), which torchtitan took over.
_LOSS_CHUNKS = 8


def answer_that_fits(
    request: Request, options: PlanOptions, partitioner: str | Sequence[str]
) -> tuple[Request, list[SearchResult]]:
    """Answer a request; with less memory, for more time, where nothing fits as it is.

    Tried in turn: the loss in chunks; then, on GPUs whose hosts' memory is known, the
    optimizer there as well, weights and gradients too, and activations.

    Args:
        request: What is asked.
        options: The same, with the pins: loss_chunks or offload that is pinned stays
            as it is.
        partitioner: Who answers.

    Returns:
        The request that was answered, and the answers.

    Raises:
        NoFeasiblePlanError: If nothing fits so either.
    """
    try:
        return request, run_partitioners(request, partitioner)
    except NoFeasiblePlanError:
        for regime in _leaner(request, options):
            leaner = replace(request, context=replace(request.context, regime=regime))
            if regime.offload and not _fits(leaner):
                continue
            try:
                return leaner, run_partitioners(leaner, partitioner)
            except NoFeasiblePlanError:
                continue
        # Reasons and remedies are those of what was asked.
        raise


def _leaner(request: Request, options: PlanOptions) -> Iterator[Regime]:
    """Yield regimes that need less memory of devices than a request's own."""
    if request.target != "meshwright":
        return
    regime = request.context.regime
    if "loss_chunks" not in options.pin and request.facts.unchunkable is None:
        regime = replace(regime, loss_chunks=_LOSS_CHUNKS)
        yield regime
    context = request.context
    known = context.on_gpu and math.isfinite(host_limit_bytes(context))
    plain = all(getattr(regime, slot) == default_value(slot) for slot in slots())
    if "offload" in options.pin or not known or not plain or regime.compile:
        return
    # A partitioner that looks at little misses what fits without.
    if _fits(request):
        return
    for name in _OFFLOADS:
        yield replace(regime, offload=Offload.from_name(name))


def _fits(request: Request) -> bool:
    """True if a legal strategy fits by closed forms."""
    return next(fitting(request), None) is not None


#: What is offloaded where nothing fits, the least time first.
_OFFLOADS = ("optimizer", "parameters", "parameters+activations")


def evidence_for(given: Mapping[str, float]) -> tuple[Convergence, ...]:
    """Return what a request says itself, and the evidence that ships for the rest.

    Args:
        given: Efficiency by a method's name, preset or pin.

    Raises:
        UnknownNameError: If there is no such method.
        StrategyError: If an efficiency is not above 0 and up to 1.
    """
    own = []
    for name, eta in given.items():
        if not 0 < eta <= 1:
            raise StrategyError(
                f"efficiency of {name}: {eta} is not above 0 and up to 1; give the "
                f"samples of exact training over those of {name} to the same loss"
            )
        own.append(_own(name, eta))
    shipped = (
        one
        for one in convergence()
        if not any(mine.covers(one.value, one.copies) for mine in own)
    )
    return (*own, *shipped)


def _own(name: str, eta: float) -> Convergence:
    """Evidence that the request brings."""
    every = {known: slot for slot in slots() for known in method_names(slot)}
    kind = name.partition(":")[0]
    if kind not in every:
        raise UnknownNameError("method", kind, every)
    slot = every[kind]
    value = read_method(slot, name)
    return Convergence(
        slot=slot,
        name=name,
        value=value,
        at_most=("period",),
        copies=2**30,
        efficiency=Efficiency(
            eta=eta, gap=0.0, measure="loss", basis="own", source="the request"
        ),
    )


def answer_with_regimes(
    exact: Answer,
    options: PlanOptions,
    partitioner: str | Sequence[str],
) -> Answer:
    """Return the best of an exact answer and those within regimes with evidence.

    Args:
        exact: Answer within the request's own regime.
        options: What is asked; slots that it pins stay as they are.
        partitioner: Who answers within each regime.
    """
    admitted = _admitted(options)
    request, seconds = exact.request, exact.request.time_budget_s
    asked = sum(len([*_copies(request, one)]) for one in admitted)
    if seconds is not None and asked:
        request = replace(request, time_budget_s=seconds / asked)
    best, told = exact, []
    for one in admitted:
        answer = None
        for copies in _copies(request, one):
            found = _within(request, one, copies, partitioner)
            if found is not None and answer and found.score >= answer.score:
                break
            answer = found or answer
        told.append((answer, _told(one, answer, exact)))
        near = NEAR if best is exact else 1.0
        if answer is not None and answer.score * near < best.score:
            best = answer
    others = [other for answer, other in told if answer is not best or answer is None]
    if best is not exact:
        candidate = exact.found[1]
        slower = exact.score / best.score - 1
        others.insert(
            0,
            OtherRegime(
                method="exact",
                label=candidate.strategy.label(),
                step_time_s=candidate.cost.step_time_s,
                break_even=best.score / exact.score * _eta(best),
                reason=f"takes {slower:.0%} longer to the same loss",
            ),
        )
    return replace(best, others=tuple(others))


def _eta(answer: Answer) -> float:
    return answer.efficiency.eta if answer.efficiency is not None else 1.0


def _admitted(options: PlanOptions) -> list[Convergence]:
    """Evidence that is good enough, of slots that the request leaves open.

    None beside another inexact method: evidence is of each by itself.
    """
    pinned = [slot for slot in slots() if slot in options.pin]
    inexact = any(
        method_of(slot, read_method(slot, options.pin[slot])).inexact for slot in pinned
    )
    if inexact or options.objective == "memory":
        return []
    if options.pin.get("semantics") == "exact":
        return []
    return [
        one
        for one in evidence_for(options.efficiency)
        if one.efficiency.basis in _GOOD
        and one.efficiency.gap <= options.accept_gap
        and one.slot not in options.pin
    ]


def _copies(request: Request, one: Convergence) -> Iterator[int | None]:
    """Numbers of copies to try, the largest first; None leaves the number open."""
    if isinstance(one.value, Asynchrony) and one.copies > 1:
        # They sum gradients, so that any number of them trains alike.
        yield request.pins.get("dp_replicate")
        return
    if one.slot == "learning" or isinstance(one.value, Asynchrony):
        # Stages are parts of one copy.
        if request.pins.get("dp_replicate", 1) == 1:
            yield 1
        return
    if "dp_replicate" in request.pins:
        if 1 < request.pins["dp_replicate"] <= one.copies:
            yield request.pins["dp_replicate"]
        return
    devices = len(request.context.order)
    copies = 2 ** (min(one.copies, devices, request.global_batch).bit_length() - 1)
    while copies > 1:
        yield copies
        copies //= 2


def _within(
    request: Request,
    one: Convergence,
    copies: int | None,
    partitioner: str | Sequence[str],
) -> Answer | None:
    """Answer a request by one method, any number of copies if None.

    Returns:
        None if nothing fits.
    """
    regime = replace(
        request.context.regime,
        semantics="approximate",
        efficiency=one.efficiency.eta,
        **{one.slot: one.value},  # type: ignore[arg-type]
    )
    pins = {} if copies is None else normalize_pins({"dp_replicate": copies})
    asked = replace(
        request,
        context=replace(request.context, regime=regime),
        pins={**request.pins, **pins},
    )
    try:
        results = run_partitioners(asked, partitioner)
    except (NoFeasiblePlanError, StrategyError):
        return None
    found = ranked_answers(results, asked.objective)[0]
    return Answer(
        request=asked, results=results, found=found, efficiency=one.efficiency
    )


def _told(one: Convergence, answer: Answer | None, exact: Answer) -> OtherRegime:
    """Say of a regime that was not chosen why."""
    if answer is None:
        return OtherRegime(
            method=one.name,
            efficiency=one.efficiency,
            reason="no strategy fits, or is legal, by this method",
        )
    candidate = answer.found[1]
    eta = one.efficiency.eta
    ratio = answer.score / exact.score
    longer = f"takes {ratio - 1:.0%} longer" if ratio >= 1 else f"saves {1 - ratio:.0%}"
    return OtherRegime(
        method=one.name,
        label=candidate.strategy.label(),
        efficiency=one.efficiency,
        step_time_s=candidate.cost.step_time_s,
        break_even=ratio * eta,
        reason=f"{longer} to the same loss beside exact training",
    )
