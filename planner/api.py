"""``plan`` and ``predict``: the two questions people ask."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from planner import __version__
from planner.assemble import make_plan
from planner.calibration.choice import (
    CalibrationChoice,
    calibrated_recipe,
    choose_calibration,
)
from planner.cluster import Cluster
from planner.cost import CostModel, Setting
from planner.diagnose import no_feasible_plan
from planner.errors import NoFeasiblePlanError, StrategyError, UnknownNameError
from planner.graph import ModelGraph
from planner.schema import Optimizer, Plan, Precision, Strategy
from planner.search import (
    OBJECTIVES,
    Candidate,
    Objective,
    Request,
    SearchResult,
    get_partitioner,
    preference,
)
from planner.space import Pin, check, normalize_pins, read_pins
from planner.strategy_input import complete_strategy, read_strategy

if TYPE_CHECKING:
    import torch

__all__ = ["make_request", "plan", "predict", "read_model", "require_fit"]

#: What ``partitioner="auto"`` asks; the best answer wins.
_AUTO = ("expert", "exhaustive")


def read_model(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    example_inputs: Any,
    *,
    seq_len: int | None,
    dtype: str,
) -> ModelGraph:
    """A ModelGraph from whatever names a model.

    Args:
        model: A module, a graph that was read before, a reference such as
            ``llama3-8b`` or ``hf:PATH``, a PipeDream profile's path, or the fields of
            a transformers config.
        example_inputs: As :func:`planner.capture.capture` takes them.
        seq_len: Tokens per sample, for references.
        dtype: Compute dtype.
    """
    if isinstance(model, ModelGraph):
        return model
    from planner.capture import capture, load_config, load_model, read_profile

    if isinstance(model, str) and model.endswith(".txt"):
        return read_profile(model)
    if isinstance(model, Mapping):
        loaded = load_config(model, seq_len=seq_len)
        return capture(loaded, example_inputs, dtype=dtype)
    if isinstance(model, str):
        return capture(load_model(model, seq_len=seq_len), example_inputs, dtype=dtype)
    return capture(model, example_inputs, seq_len=seq_len, dtype=dtype)


def _setting(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    precision: Precision,
    optimizer: Optimizer,
    grad_clip_norm: float | None,
    recipe: str,
    calibration: CalibrationChoice,
    memory_fraction: float,
    compiled: bool = False,
) -> Setting:
    if not 0 < memory_fraction <= 1:
        raise StrategyError(
            f"memory_fraction={memory_fraction} is not a share; use above 0 and up to 1"
        )
    if not cluster.num_free:
        raise NoFeasiblePlanError(
            [f"all {cluster.num_devices} devices of {cluster.name} are occupied"]
        )
    fitted = choose_calibration(calibration, cluster)
    return Setting(
        graph=graph,
        cluster=cluster,
        order=np.asarray(cluster.free, dtype=np.int64),
        precision=precision,
        optimizer=optimizer,
        grad_clip_norm=grad_clip_norm,
        recipe=calibrated_recipe(recipe, fitted),
        memory_fraction=memory_fraction,
        compile=compiled,
        calibration=fitted,
    )


def _check_choices(
    global_batch: int,
    objective: str,
    target: str,
    devices: str,
    evaluation_budget: int | None,
) -> None:
    if global_batch < 1:
        raise StrategyError(f"global_batch={global_batch} is below 1; give at least 1")
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    if target not in {"meshwright", "any"}:
        raise UnknownNameError("target", target, ("meshwright", "any"))
    if devices not in {"all", "any"}:
        raise UnknownNameError("choice of devices", devices, ("all", "any"))
    if evaluation_budget is not None and evaluation_budget < 1:
        raise StrategyError(
            f"evaluation_budget={evaluation_budget} is below 1; give at least 1, or "
            f"None to leave it to the partitioner"
        )


def _search(request: Request, partitioner: str | Sequence[str]) -> list[SearchResult]:
    """Answers of all partitioners that were named.

    Raises:
        NoFeasiblePlanError: If none found anything that fits.
    """
    names = [partitioner] if isinstance(partitioner, str) else list(partitioner)
    names = list(_AUTO) if names == ["auto"] else names
    results = [get_partitioner(name).search(request) for name in names]
    if not any(result.candidates for result in results):
        raise no_feasible_plan(request, results)
    return results


def _best(
    results: Sequence[SearchResult], objective: Objective
) -> tuple[SearchResult, Candidate]:
    """The best candidate of all partitioners; the earlier one among equals."""
    found = [(result, c) for result in results for c in result.candidates[:1]]
    return min(found, key=lambda pair: preference(pair[1], objective))


def make_request(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    global_batch: int,
    objective: Objective = "throughput",
    pin: Mapping[str, Any] | None = None,
    target: Literal["meshwright", "any"] = "meshwright",
    devices: Literal["all", "any"] = "all",
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    grad_clip_norm: float | None = None,
    recipe: str = "torch",
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    evaluation_budget: int | None = None,
    seed: int = 0,
) -> Request:
    """What :func:`plan` asks its partitioners, with the same arguments.

    Args:
        graph: The model, read.
        cluster: The devices; the free ones, in the order of their ids, are ranks.

    Raises:
        NoFeasiblePlanError: If every device is occupied.
        StrategyError: If a value has the wrong type or is out of range.
        UnknownNameError: For a name that no registry holds.
    """
    _check_choices(global_batch, objective, target, devices, evaluation_budget)
    pins = read_pins(pin or {})
    setting = _setting(
        graph,
        cluster,
        precision=precision or Precision(),
        optimizer=optimizer or Optimizer(),
        grad_clip_norm=grad_clip_norm,
        recipe=recipe,
        calibration=calibration,
        memory_fraction=memory_fraction,
        compiled=bool(pins.get("compile", False)),
    )
    return Request(
        setting=setting,
        global_batch=global_batch,
        pins=normalize_pins(pins),
        objective=objective,
        target=target,
        seed=seed,
        evaluation_budget=evaluation_budget,
        devices=devices,
    )


def plan(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    cluster: Cluster | str,
    *,
    global_batch: int,
    example_inputs: Any = None,
    seq_len: int | None = None,
    partitioner: str | Sequence[str] = "auto",
    objective: Objective = "throughput",
    pin: Mapping[str, Any] | None = None,
    target: Literal["meshwright", "any"] = "meshwright",
    devices: Literal["all", "any"] = "all",
    precision: Precision | None = None,
    optimizer: Optimizer | None = None,
    grad_clip_norm: float | None = None,
    recipe: str = "torch",
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    evaluation_budget: int | None = None,
    seed: int = 0,
) -> Plan:
    """How a model should be split over a cluster.

    No weight is allocated, nothing is launched. The same request gives the same bytes.

    Args:
        model: A module (real or meta), a ModelGraph, or a reference: ``llama3-8b`` or
            another built-in name, ``hf:PATH``, ``module:factory``; or the fields of a
            transformers config, ``{"model_type": "llama", "hidden_size": 1024}``.
        cluster: A Cluster, or a name such as ``dgx-h100:4``, ``local:4`` or a file.
        global_batch: Samples per optimizer step over all devices.
        example_inputs: What forward takes; see :func:`planner.capture.capture`.
        seq_len: Tokens per sample, where example_inputs are left out.
        partitioner: Registered name, names, or ``auto`` (expert and exhaustive); the
            best strategy that any of them priced is returned.
        objective: ``throughput`` (shortest step), ``throughput_per_device``, or
            ``memory`` (emptiest fullest device).
        pin: Knobs to fix, ``{"tp": 8}``; see :func:`planner.space.read_pins`.
        target: ``meshwright`` keeps to what Meshwright's executors can run; ``any``
            allows all that is legal.
        devices: ``all`` uses every free device if any legal strategy does, and may
            leave out whole types of a mixed cluster; ``any`` lets any fewer win.
        precision: Dtypes; bf16 compute over fp32 weights by default.
        optimizer: AdamW by default.
        grad_clip_norm: Largest gradient norm; None for no clipping.
        recipe: Which framework's constants price the plan: ``torch``, or with a
            calibration any that measurements are of, such as ``megatron``.
        calibration: Fitted constants of GPUs and frameworks: ``shipped``, a file that
            ``meshwright calibrate`` wrote, a Calibration, or None for what the
            cluster's document says. CPUs and devices that were measured (``meshwright
            probe``) always keep what their document says.
        memory_fraction: Share of each device's memory that may be filled.
        evaluation_budget: Most strategies each partitioner may simulate.
        seed: Of everything random.
    Raises:
        NoFeasiblePlanError: If nothing fits: what lacks, by how much, what would fit.
        CalibrationError: If the calibration cannot be read, or the cluster is of CPUs.
        CaptureError: If the model cannot be read.
        ClusterError: If the cluster is described wrongly.
        StrategyError: If a value has the wrong type or is out of range.
        UnknownNameError: For a name that no registry holds; suggests the nearest.
    """
    _check_choices(global_batch, objective, target, devices, evaluation_budget)
    pins = read_pins(pin or {})
    precision = precision or Precision()
    started = time.perf_counter()
    machines, graph = _read(model, cluster, example_inputs, seq_len, precision)
    captured = time.perf_counter()
    request = make_request(
        graph,
        machines,
        global_batch=global_batch,
        objective=objective,
        pin=pins,
        target=target,
        devices=devices,
        precision=precision,
        optimizer=optimizer,
        grad_clip_norm=grad_clip_norm,
        recipe=recipe,
        calibration=calibration,
        memory_fraction=memory_fraction,
        evaluation_budget=evaluation_budget,
        seed=seed,
    )
    results = _search(request, partitioner)
    took = {"capture": captured - started, "search": time.perf_counter() - captured}
    return _assembled(request, results, pins, took)


def _read(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    cluster: Cluster | str,
    example_inputs: Any,
    seq_len: int | None,
    precision: Precision,
) -> tuple[Cluster, ModelGraph]:
    """What cluster and model were named; the cluster first, it is read faster."""
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    # float8 products are traced in the dtype that their inputs are kept in.
    dtype = "bfloat16" if precision.compute == "float8" else precision.compute
    return machines, read_model(model, example_inputs, seq_len=seq_len, dtype=dtype)


def _assembled(
    request: Request,
    results: Sequence[SearchResult],
    pins: Mapping[str, Pin],
    timing_s: Mapping[str, float],
) -> Plan:
    winner, candidate = _best(results, request.objective)
    return make_plan(
        request,
        results=results,
        winner=winner,
        candidate=candidate,
        pinned=pins,
        version=__version__,
        timing_s=timing_s,
    )


def predict(
    model: torch.nn.Module | ModelGraph | str | Mapping[str, Any],
    cluster: Cluster | str,
    strategy: Strategy | Mapping[str, Any] | str | os.PathLike[str],
    *,
    global_batch: int | None = None,
    example_inputs: Any = None,
    seq_len: int | None = None,
    recipe: str = "torch",
    calibration: CalibrationChoice = "shipped",
    memory_fraction: float = 0.9,
    fidelity: Literal["analytic", "simulated"] = "simulated",
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
        recipe: As for :func:`plan`.
        calibration: As for :func:`plan`.
        memory_fraction: As for :func:`plan`.
        fidelity: Which of the two models prices it.
    Returns:
        A Plan around the strategy. It is returned even if memory does not suffice:
        ``prediction.memory`` says by how much.
    Raises:
        StrategyError: If the strategy breaks a rule: value, rule, remedy.
    """
    given = read_strategy(strategy)
    machines, graph = _read(model, cluster, example_inputs, seq_len, given.precision)
    setting = _setting(
        graph,
        machines,
        precision=given.precision,
        optimizer=given.optimizer,
        grad_clip_norm=given.grad_clip_norm,
        recipe=recipe,
        calibration=calibration,
        memory_fraction=memory_fraction,
    )
    request = Request(
        setting=setting, global_batch=global_batch or given.global_batch, target="any"
    )
    check(given, request.facts)
    full, order = complete_strategy(given, setting)
    pricing = CostModel(replace(setting, order=order))
    candidate = Candidate(strategy=full, cost=pricing.cost(full, fidelity))
    result = SearchResult(
        partitioner="given",
        candidates=(candidate,),
        nearest=None,
        evaluations=pricing.evaluations,
        seconds=0.0,
    )
    return _assembled(request, [result], {}, {})


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
