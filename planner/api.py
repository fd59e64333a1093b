"""``plan`` and ``predict``: the two questions people ask."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from planner import __version__
from planner.assemble import make_plan
from planner.certificate import Certifier, certifies
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.device_sets import (
    answer_on_devices,
    idle_devices,
    list_choices,
    other_devices,
)
from planner.errors import NoFeasiblePlanError
from planner.graph import ModelGraph
from planner.graph.fused_kernels import with_fused_kernels
from planner.measurements.store import CalibrationChoice
from planner.portfolio import ranked_answers
from planner.regimes import Answer, answer_with_regimes
from planner.request import (
    DEFAULT_RISK,
    PlanOptions,
    default_precision,
    make_context,
    recipe_of,
    require_kernel_choice,
)
from planner.schema import Optimizer, Plan, Precision, Strategy
from planner.schema.fused_kernels import KernelChoice
from planner.search import Candidate, Objective, Request, SearchResult
from planner.search.communication.boundaries import with_shared_boundaries
from planner.search.communication.finalists import with_own_sums
from planner.search.families import in_order
from planner.space import Pin, Regime, check
from planner.strategy_input import complete_strategy, read_strategy

if TYPE_CHECKING:
    import torch

__all__ = ["plan", "plan_graph", "predict", "read_model", "require_fit"]


def read_model(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    example_inputs: Any,
    *,
    seq_len: int | None,
    dtype: str,
    images_per_sample: int = 1,
) -> ModelGraph:
    """A ModelGraph from whatever names a model.

    Args:
        model: A module, a graph that was read before, a reference such as
            ``llama3-8b`` or ``hf:PATH``, a PipeDream profile's path, or the fields of
            a transformers config.
        example_inputs: As :func:`planner.capture.capture` takes them.
        seq_len: Tokens per sample, for references.
        dtype: Compute dtype.
        images_per_sample: As :func:`planner.capture.load_model` takes it.
    """
    if isinstance(model, ModelGraph):
        return model
    from planner.capture import capture, load_config, load_model, read_profile

    if isinstance(model, str) and model.endswith(".txt"):
        return read_profile(model)
    if isinstance(model, Mapping):
        loaded = load_config(
            model, seq_len=seq_len, images_per_sample=images_per_sample
        )
        return capture(loaded, example_inputs, dtype=dtype)
    if isinstance(model, str):
        loaded = load_model(model, seq_len=seq_len, images_per_sample=images_per_sample)
        return capture(loaded, example_inputs, dtype=dtype)
    return capture(model, example_inputs, seq_len=seq_len, dtype=dtype)


def plan(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    cluster: Cluster | str,
    *,
    global_batch: int,
    example_inputs: Any = None,
    seq_len: int | None = None,
    images_per_sample: int = 1,
    partitioner: str | Sequence[str] = "auto",
    objective: Objective = "throughput",
    pin: Mapping[str, Any] | None = None,
    target: str = "meshwright",
    devices: Literal["all", "any"] = "all",
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    grad_clip_norm: float | None = None,
    recipe: str | None = None,
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    risk: float | Literal["none"] = DEFAULT_RISK,
    evaluation_budget: int | None = None,
    time_budget_s: float | None = None,
    seed: int = 0,
    certify: bool | None = None,
    allow_approximate: bool = False,
    accept_gap: float = 0.5,
    efficiency: Mapping[str, float] | None = None,
    kernels: KernelChoice = "as-is",
) -> Plan:
    """Choose how a model is split over a cluster.

    No weight is allocated, nothing is launched. The same request gives the same bytes.

    Args:
        model: A module (real or meta), a ModelGraph, or a reference: ``llama3-8b`` or
            another built-in name, ``hf:PATH``, ``module:factory``; or the fields of a
            transformers config, ``{"model_type": "llama", "hidden_size": 1024}``.
        cluster: A Cluster, or a name such as ``dgx-h100:4``, ``local:4`` or a file.
        global_batch: Samples per optimizer step over all devices.
        example_inputs: What forward takes; see :func:`planner.capture.capture`.
        seq_len: Tokens per sample, where example_inputs are left out.
        images_per_sample: Pictures, or recordings, of each sample, where a reference's
            model reads any beside its text; 0 for text alone.
        partitioner: Registered name, names, or ``auto`` (expert, learned, exhaustive
            and evolutionary race); the best strategy that any of them priced is
            returned.
        objective: ``throughput`` (shortest step), ``throughput_per_device``, or
            ``memory`` (emptiest fullest device).
        pin: Knobs to fix, ``{"tp": 8}``; see :func:`planner.space.read_pins`.
        target: ``meshwright`` keeps to what Meshwright's executors can run; ``any``
            allows all that is legal; a launcher's name (``meshwright export --list``)
            keeps to plans that the launcher can express, so that they can be
            exported to it.
        devices: ``all`` uses every free device if any legal strategy does, and may
            leave out whole types of a mixed cluster; ``any`` lets any fewer win.
        precision: Dtypes; by default bf16 compute over fp32 weights. If a device has
            no bf16, the best of three is returned: fp32 on all devices, bf16 on those
            that have it, and fp16 on all (only for Meshwright's executors, which scale
            the loss, and only if it is 3 % faster).
        optimizer: AdamW by default.
        grad_clip_norm: Largest gradient norm; None for no clipping.
        recipe: Which framework's constants price the plan: with a calibration any that
            measurements are of, such as ``megatron``. None for the target's: of
            Meshwright's executors and of most launchers that is ``torch``.
        calibration: Fitted constants of GPUs and frameworks: ``shipped``, a file that
            ``meshwright calibrate`` wrote, a Calibration, or None for what the
            cluster's document says. CPUs and devices that were measured (``meshwright
            probe``) always keep what their document says.
        memory_fraction: Share of each device's memory that may be filled.
        risk: Quantile of the step time's distribution by which plans are ranked, from
            0.5 on and below 1. What nobody has measured is less certain, so that it
            must win by more than its uncertainty. ``none`` ranks by the predicted time
            alone. CPUs and measured clusters are ranked so in any case.
        evaluation_budget: Most strategies each partitioner may simulate; those that
            race share the sum.
        time_budget_s: Seconds after which the best plan so far is returned, shared by
            the partitioners; the first plan that fits is waited for, and reading the
            model does not count. None lets each of them finish. What is found in a
            given time depends on the machine.
        seed: Of everything random.
        certify: Before a plan is returned, train a small twin of it (its axes at
            degree 2, a few layers) on processes of this machine, and compare with
            plain training; of plans that differ the next is taken. None does so unless
            the environment has ``MESHWRIGHT_CERTIFY=0``. Plans for other launchers,
            and models given as graphs, are not certified.
        allow_approximate: Also consider methods whose steps are not those of exact
            training, by evidence of how far a sample brings them (``meshwright
            methods``): the shortest time to the same loss wins. Without it nothing
            inexact is returned that is not pinned.
        accept_gap: Most of the final quality that such a method may lose, in accuracy
            points or percent of perplexity, whichever its evidence has.
        efficiency: Own evidence: samples of exact training over those of a method to
            the same loss, by its name or pin, ``{"diloco:period=100": 0.97}``.
        kernels: ``as-is`` prices the code that the model is read with; ``fused`` the
            kernels that stand in for eager attention, selective scans token by token
            and loops over experts, once they are installed. The plan says which.
    Raises:
        NoFeasiblePlanError: If nothing fits: what lacks, by how much, what would fit;
            or if no plan that fits trains as the model does in one process.
        CalibrationError: If the calibration cannot be read, or the cluster is of CPUs.
        CaptureError: If the model cannot be read.
        ClusterError: If the cluster is described wrongly.
        StrategyError: If a value has the wrong type or is out of range.
        UnknownNameError: For a name that no registry holds; suggests the nearest.
    """
    # The cluster first: it is read faster.
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    options = PlanOptions(
        global_batch=global_batch,
        objective=objective,
        pin=pin or {},
        target=target,
        devices=devices,
        precision=default_precision(machines, precision)[0],
        optimizer=optimizer or Optimizer(),
        grad_clip_norm=grad_clip_norm,
        recipe=recipe,
        calibration=calibration,
        memory_fraction=memory_fraction,
        risk=risk,
        evaluation_budget=evaluation_budget,
        time_budget_s=time_budget_s,
        seed=seed,
        allow_approximate=allow_approximate,
        accept_gap=accept_gap,
        efficiency=efficiency or {},
        kernels=kernels,
        any_dtype=precision is None,
    )
    started = time.perf_counter()
    trains = target == "meshwright" and not isinstance(model, ModelGraph)
    wanted = trains and certifies(certify)
    start = Certifier(model) if wanted else nullcontext()
    with _older_objects_frozen(), start as certifier:
        if certifier is not None:
            certifier.prepare()
        graph = read_model(
            model,
            example_inputs,
            seq_len=seq_len,
            images_per_sample=images_per_sample,
            dtype=options.precision.activation_dtype,
        )
        made = plan_graph(
            graph,
            machines,
            options,
            partitioner=partitioner,
            certifier=certifier,
        )
    capture_s = time.perf_counter() - started - made.timing_s["search"]
    return made.model_copy(update={"timing_s": {"capture": capture_s, **made.timing_s}})


@contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """While open, keep the garbage collector from what was there before.

    It would visit every object of torch and of the libraries around it, half a million,
    in a quarter of a second. What planning itself leaves is collected as ever.
    """
    if gc.get_freeze_count():
        # Of the caller's: to thaw would take in those, too.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def plan_graph(
    graph: ModelGraph,
    cluster: Cluster,
    options: PlanOptions,
    *,
    partitioner: str | Sequence[str] = "auto",
    certifier: Certifier | None = None,
) -> Plan:
    """Plan a model that was read before.

    Args:
        graph: The model.
        cluster: The devices.
        options: What is asked of the partitioners.
        partitioner: As for :func:`plan`.
        certifier: Certifies plans of the same model; None to certify none.
    Raises:
        NoFeasiblePlanError: If nothing fits, or nothing that fits is certified.
        MeshwrightError: As :func:`plan`.
    """
    started = time.perf_counter()
    if options.kernels == "fused":
        graph = with_fused_kernels(graph)
    choices = list_choices(cluster, options)
    chosen = answer_on_devices(graph, choices, partitioner)
    answer, options = chosen.answer, chosen.options
    if options.allow_approximate:
        answer = answer_with_regimes(answer, options, partitioner)
    # A plan tells the time that was given, not each question's part of it.
    whole = replace(answer.request, time_budget_s=options.time_budget_s)
    answer = replace(answer, request=whole)
    timing_s = {"search": time.perf_counter() - started}
    ranked = _ranked(answer, options.pin)
    made = _assembled(answer, ranked[0], options.pin, timing_s)
    if certifier is not None and not made.not_runnable:
        made = _certified(made, answer, ranked, certifier)
    devices = {
        "idle": idle_devices(cluster, made.strategy),
        "device_sets": other_devices(replace(chosen, answer=answer), made),
    }
    provenance = made.provenance.model_copy(update=devices)
    # Devices that were left out are marked as occupied in the answer's cluster.
    whole_cluster = {"cluster": cluster.reference(), "provenance": provenance}
    return made.model_copy(update=whole_cluster)


#: What a certificate that speaks against a plan says of it.
_AGAINST = {
    "wrong": "does not train as one process does",
    "late": "cannot be run",
    "crashed": "ends in an error when it is run",
    "hung": "does not end when it is run",
}
#: Plans of different axes that are certified before there is said to be none.
_MOST_TRIED = 12
#: Plans of the same axes among them, while there are others.
_MOST_ALIKE = 2


def _certified(
    made: Plan,
    answer: Answer,
    ranked: Sequence[tuple[SearchResult, Candidate]],
    certifier: Certifier,
) -> Plan:
    """Return the best plan whose certificate does not speak against it.

    Args:
        made: The best plan.
        answer: What was asked, and all that was answered.
        ranked: Candidates, the best plan's first.
        certifier: Certifies plans of the model.
    Raises:
        NoFeasiblePlanError: If there is none.
    """
    violations: dict[str, str] = {}
    pins, timing_s = made.provenance.pinned, made.timing_s
    for found in _kinds_in_turn(ranked, failed := []):
        if found[1].strategy != made.strategy:
            made = _assembled(answer, found, pins, timing_s)
        certificate = certifier.certify(made)
        if certificate.verdict in ("right", "unknown"):
            return made.model_copy(update={"certificate": certificate})
        failed.append(_axes(found[1]))
        against = _AGAINST[certificate.verdict]
        violations[certificate.strategy] = f"{against}: {certificate.reason}"
        if len(violations) == _MOST_TRIED:
            break
    raise NoFeasiblePlanError(
        [f"{label} {reason}" for label, reason in violations.items()]
    )


def _axes(candidate: Candidate) -> frozenset[str]:
    degrees = candidate.strategy.mesh.model_dump()
    return frozenset(axis for axis, degree in degrees.items() if degree > 1)


def _kinds_in_turn(
    ranked: Sequence[tuple[SearchResult, Candidate]], failed: list[frozenset[str]]
) -> Iterator[tuple[SearchResult, Candidate]]:
    """Go through candidates, those of axes that failed twice after all others.

    Args:
        ranked: The best first.
        failed: Axes of those that failed; grows meanwhile.
    """
    waiting = list(ranked)
    while waiting:
        axes = [_axes(candidate) for _, candidate in waiting]
        hopeful = (at for at, one in enumerate(axes) if failed.count(one) < _MOST_ALIKE)
        yield waiting.pop(next(hopeful, 0))


def _ranked(
    answer: Answer, pins: Mapping[str, Pin]
) -> list[tuple[SearchResult, Candidate]]:
    """Return what was found, the one to choose first.

    That has messages of its own for sums, and shares those between stages, if that is
    faster and nothing of it is pinned.
    """
    every = ranked_answers(answer.results, answer.request.objective)
    winner, best = answer.found
    found = [
        (winner, in_order(answer.request, best)),
        *(one for one in every if one[1] is not best),
    ]
    request, candidates = answer.request, [candidate for _, candidate in found]
    if "replicas" not in pins:
        candidates.insert(0, with_own_sums(request, candidates))
    if "boundary" not in pins:
        candidates.insert(0, with_shared_boundaries(request, candidates))
    chosen = candidates[0]
    return found if chosen is found[0][1] else [(winner, chosen), *found]


def _assembled(
    answer: Answer,
    found: tuple[SearchResult, Candidate],
    pins: Mapping[str, Pin],
    timing_s: Mapping[str, float],
) -> Plan:
    winner, candidate = found
    return make_plan(
        answer.request,
        results=answer.results,
        winner=winner,
        candidate=candidate,
        pinned=pins,
        version=__version__,
        timing_s=timing_s,
        regimes=answer.others,
    )


def predict(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    cluster: Cluster | str,
    strategy: Strategy | Mapping[str, Any] | str | os.PathLike[str],
    *,
    global_batch: int | None = None,
    example_inputs: Any = None,
    seq_len: int | None = None,
    images_per_sample: int = 1,
    recipe: str | None = None,
    target: str = "any",
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    fidelity: Literal["analytic", "simulated"] = "simulated",
    kernels: KernelChoice = "as-is",
) -> Plan:
    """Price a strategy chosen by hand, without launching anything.

    Stages may be left out: the model is then cut exactly for the strategy's pipeline,
    with the recomputation of its first stage (or none) everywhere.

    Args:
        model: As for :func:`plan`.
        cluster: As for :func:`plan`.
        strategy: A Strategy, its JSON fields, or a file with them (a plan file, too).
        global_batch: Checked against the strategy's; taken from it if None.
        example_inputs: As for :func:`plan`.
        seq_len: As for :func:`plan`.
        images_per_sample: As for :func:`plan`.
        recipe: As for :func:`plan`.
        target: Launcher that will run it, whose framework's constants price it; ``any``
            for Meshwright's own executors.
        calibration: As for :func:`plan`.
        memory_fraction: As for :func:`plan`.
        fidelity: Which of the two models prices it.
        kernels: As for :func:`plan`.
    Returns:
        A Plan around the strategy. It is returned even if memory does not suffice:
        ``prediction.memory`` says by how much.
    Raises:
        StrategyError: If the strategy breaks a rule: value, rule, remedy.
        UnknownNameError: If there is no such choice of kernels.
    """
    require_kernel_choice(kernels)
    given = read_strategy(strategy)
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    graph = read_model(
        model,
        example_inputs,
        seq_len=seq_len,
        images_per_sample=images_per_sample,
        dtype=given.precision.activation_dtype,
    )
    if kernels == "fused":
        graph = with_fused_kernels(graph)
    context = make_context(
        graph,
        machines,
        precision=given.precision,
        optimizer=given.optimizer,
        grad_clip_norm=given.grad_clip_norm,
        recipe=recipe_of(recipe, target, calibration),
        calibration=calibration,
        memory_fraction=memory_fraction,
        regime=Regime.of(given),
    )
    request = Request(
        context=context, global_batch=global_batch or given.global_batch, target="any"
    )
    check(given, request.facts)
    full, order = complete_strategy(given, context)
    pricing = CostModel(replace(context, order=order))
    candidate = Candidate(strategy=full, cost=pricing.cost(full, fidelity))
    result = SearchResult(
        partitioner="given",
        candidates=(candidate,),
        nearest=None,
        evaluations=pricing.evaluations,
        seconds=0.0,
    )
    found = (result, candidate)
    answer = Answer(request=request, results=[result], found=found)
    return _assembled(answer, found, {}, {})


def require_fit(priced: Plan) -> None:
    """Refuse a predicted plan that is over a device's memory.

    Raises:
        NoFeasiblePlanError: Naming the fullest device type and what it lacks.
    """
    for entry in priced.prediction.memory:
        lack = entry.total_bytes - entry.limit_bytes
        if lack > 0:
            raise NoFeasiblePlanError(
                [
                    f"pp rank {entry.rank} ({entry.device_type}) needs "
                    f"{entry.total_bytes / 1e9:.2f} GB, {lack / 1e9:.2f} GB more than "
                    f"its limit of {entry.limit_bytes / 1e9:.2f} GB"
                ]
            )
