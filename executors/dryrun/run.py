"""A dry run: one process does a whole step as any ranks of a plan, on fake tensors.

The trainer, and all that it is made of, is the one that trains. What it cannot show:
whether ranks match (each is run alone), and anything that depends on values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor

from executors.communication.buckets import BucketedReplicas
from executors.data import synthetic_batch
from executors.dryrun.ledger import Ledger
from executors.dryrun.replay import UnsettledError
from executors.dryrun.replicas import FakeReplicas
from executors.dryrun.source import ModelSource
from executors.dryrun.step import replayed_step
from executors.dryrun.trace import StepTrace
from executors.dryrun.world import fake_group, fake_tensors
from executors.exception_chain import chain, explain
from executors.mesh import ProcessMesh, build_mesh
from executors.model_source import check_model, require_kernels
from executors.names import tied_parameters
from executors.offloading import mark_on_host, on_host
from executors.replicas import HoldingReplicas, skipped_parameters
from executors.steps import PlainStep
from executors.strategies.context import whole_sequences
from executors.trainer import Trainer
from planner.errors import ExecutionError, FingerprintError
from planner.schema import Plan
from planner.schema.measurement import Traffic, mean_traffic
from planner.schema.methods import methods_of
from planner.schema.verification import (
    GroupTraffic,
    RankVerification,
    VerifiedPhase,
)
from planner.schema.violations import executor_violations

__all__ = ["dry_run", "dry_runs"]

_LOG = logging.getLogger(__name__)

#: Microbatches that are run: few, as many as it takes for all parts to settle, or all.
_Mode = Literal["quick", "patient", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DryStep:
    """Findings of one step: memory by category, traffic by kind and group, FLOPs."""

    memory_bytes: Mapping[str, int]
    traffic: Mapping[tuple[str, int], Traffic]
    flops: int


#: Raised where a value is asked for that a fake tensor does not have.
_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def dry_run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    rank: int,
    *,
    force: bool = False,
    every_microbatch: bool = False,
) -> RankVerification:
    """Do what :func:`dry_runs` does for one rank."""
    (found,) = dry_runs(
        plan, model_fn, (rank,), force=force, every_microbatch=every_microbatch
    )
    return found


def dry_runs(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    ranks: Sequence[int],
    *,
    force: bool = False,
    every_microbatch: bool = False,
    on_rank: Callable[[RankVerification], None] | None = None,
) -> tuple[RankVerification, ...]:
    """Build some ranks' parts of a plan and train one step each, allocating nothing.

    To be called in a process without a process group; torch is adapted for the time
    of the call, so that other threads must leave it alone. What is counted is a step
    with optimizer states in place, as every step but the first. Microbatches that do
    the same are run until that is seen, then counted; see
    :mod:`executors.dryrun.replay`.

    Args:
        plan: What to do.
        model_fn: Builds the whole model; called on fake tensors, once for ranks on
            different stages.
        ranks: Which ranks to be, of as many as the plan has.
        force: Run although the model's fingerprint is another one.
        every_microbatch: Run every microbatch.
        on_rank: Told of each rank when it is done.

    Returns:
        What the step of each rank took, or where it failed.

    Raises:
        ExecutionError: If there is no such rank, the plan cannot be run at all, or
            follows values: 1-bit Adam, a model that branches on what it computes.
        FingerprintError: If the plan is for another model.
    """
    for rank in ranks:
        _check(plan, rank)
    # A compiler needs values to run on; what ranks hold and send is the same.
    plan = plan.model_copy(
        update={"strategy": plan.strategy.model_copy(update={"compile": False})}
    )
    found = []
    with fake_tensors(on_cpu=set(plan.cluster.device_types) == {"cpu"}):
        source = ModelSource(
            model_fn,
            lambda model: _check_model(plan, model, force),
            pipelined=len(plan.strategy.run_stages) > 1,
        )
        for rank in ranks:
            modes: tuple[_Mode, ...] = ("quick", "patient", "all")
            for mode in modes[2:] if every_microbatch else modes:
                result = _run_rank(plan, source, rank, mode)
                if result is not None:
                    break
            assert result is not None
            found.append(result)
            if on_rank is not None:
                on_rank(result)
    return tuple(found)


def _run_rank(
    plan: Plan, source: ModelSource, rank: int, mode: _Mode
) -> RankVerification | None:
    """Run a step as one rank.

    Returns:
        None if microbatches that were to be counted in this mode must be run.
    """
    strategy = plan.strategy
    pp_rank = strategy.mesh.coordinates(rank)["pp"]
    trace = StepTrace()
    with ExitStack() as stack:
        with unset_fake_temporarily():
            stack.enter_context(fake_group(rank, strategy.mesh.num_devices))
            place = build_mesh(strategy, torch.device("cpu"))
        stack.enter_context(whole_sequences())
        stages = enumerate(strategy.run_stages)
        own = tuple(index for index, stage in stages if stage.rank == pp_rank)
        model = source.take(own)
        try:
            with source.shared():
                ran, steps = _step(plan, model, place, trace, mode)
        except FingerprintError:
            raise
        except Exception as error:
            if any(isinstance(each, UnsettledError) for each in chain(error)):
                _LOG.info("rank %d: more microbatches are run: %s", rank, error)
                return None
            source.discard()
            _raise_for_values(error, model)
            _LOG.info("rank %d:", rank, exc_info=True)
            said = f"{type(error).__name__}: {explain(error, model)}"
            return RankVerification(rank=rank, pp_rank=pp_rank, failure=said)
    return _verification(plan, rank, ran, steps)


def _verification(
    plan: Plan, rank: int, ran: int, steps: Mapping[str, _DryStep]
) -> RankVerification:
    """Findings about a rank, from a step of each phase."""
    shares = plan.strategy.phases
    phases = tuple(
        VerifiedPhase(
            name=name,
            share=shares[name],
            memory_bytes=dict(step.memory_bytes),
            collectives=_by_group(step.traffic),
        )
        for name, step in steps.items()
    )
    mean = mean_traffic((shares[name], step.traffic) for name, step in steps.items())
    flops = sum(shares[name] * step.flops for name, step in steps.items())
    return RankVerification(
        rank=rank,
        pp_rank=plan.strategy.mesh.coordinates(rank)["pp"],
        memory_bytes=max(
            (phase.memory_bytes for phase in phases), key=lambda m: sum(m.values())
        ),
        collectives=_by_group(mean),
        phases=phases if len(phases) > 1 else (),
        flops=round(flops),
        microbatches=plan.strategy.num_microbatches,
        microbatches_run=ran,
    )


def _by_group(traffic: Mapping[tuple[str, int], Traffic]) -> tuple[GroupTraffic, ...]:
    return tuple(
        GroupTraffic(kind=kind, group_size=size, count=each.count, bytes=each.bytes)
        for (kind, size), each in sorted(traffic.items())
    )


def _check(plan: Plan, rank: int) -> None:
    strategy = plan.strategy
    world = strategy.mesh.num_devices
    if not 0 <= rank < world:
        raise ExecutionError(
            f"rank {rank} of a plan for {world}; ranks are 0 to {world - 1}"
        )
    for method, value in methods_of(strategy):
        if method.unverified:
            raise ExecutionError(
                f"verify does not follow {method.slot}={value}, {method.unverified}; "
                f"measure it with run --measure, or verify the plan without"
            )


def _check_model(plan: Plan, model: nn.Module, force: bool) -> None:
    if not force:
        check_model(plan, model)
    on_gpu = any(entry.device_type != "cpu" for entry in plan.prediction.memory)
    violations = executor_violations(
        plan.strategy,
        tied=tied_parameters(model),
        backend="nccl" if on_gpu else "gloo",
        attention=plan.model.attention,
        whole_stream=plan.model.whole_stream,
        mixing=plan.model.mixing,
        batch_norm_values=plan.model.batch_norm_values,
        spatial_sizes=plan.model.spatial_sizes,
        experts=plan.model.experts,
    )
    if violations:
        raise ExecutionError(f"this plan cannot be run: {'; '.join(violations)}")
    require_kernels(plan, model)


def _raise_for_values(error: Exception, model: nn.Module) -> None:
    found = next((e for e in chain(error) if isinstance(e, _VALUES)), None)
    if found is not None:
        raise ExecutionError(
            f"verify does not follow values, which the step asks for: "
            f"{explain(found, model)}; measure the plan with run --measure"
        ) from error


def _step(
    plan: Plan,
    model: nn.Module,
    place: ProcessMesh,
    trace: StepTrace,
    mode: _Mode,
) -> tuple[int, dict[str, _DryStep]]:
    """Build, make optimizer states, then train a step of each phase that is counted.

    Returns:
        Number of microbatches that were run, and the step of each phase.
    """
    trainer = Trainer(plan, model, place)
    inputs = _local_inputs(plan, trainer)
    found = {}
    with trace:
        modules = [part.module for part in trainer.parts.values()]
        parameters = [p for module in modules for p in module.parameters()]
        _tag_lasting(trainer, parameters, inputs, trace.ledger)
        for phase in plan.strategy.phases:
            trainer.force(phase)
            for _ in range(trainer.replicas.lead_in):
                _update(trainer, inputs, trace, mode)
            trainer.optimizer.zero_grad()
            trace.restart()
            ran = _update(trainer, inputs, trace, mode)
            for parameter in parameters:
                if parameter.grad is not None:
                    trace.ledger.tag(parameter.grad, "gradients")
            peak = trace.ledger.peak()
            found[phase] = _DryStep(
                memory_bytes={str(name): size for name, size in peak.items()},
                traffic=trace.tally.by_group(),
                flops=trace.flops,
            )
    return ran, found


def _update(
    trainer: Trainer, inputs: dict[str, torch.Tensor], trace: StepTrace, mode: _Mode
) -> int:
    """Train one step; return the number of microbatches that were run."""
    if mode == "all" or not isinstance(trainer.step_rule, PlainStep):
        # A step of its own decides itself what a microbatch does.
        trainer.update(inputs)
        return trainer.plan.strategy.num_microbatches
    with replayed_step(trainer, trace, patient=mode == "patient") as replay:
        trainer.update(inputs)
    return len(replay.ran)


def _tag_lasting(
    trainer: Trainer,
    parameters: Sequence[nn.Parameter],
    inputs: dict[str, torch.Tensor],
    ledger: Ledger,
) -> None:
    """Tag the tensors that live from step to step; make optimizer states."""
    modules = [part.module for part in trainer.parts.values()]
    if trainer.plan.strategy.offload.states == "parameters":
        _leave_to_host(trainer, parameters)
    for parameter in parameters:
        ledger.tag(parameter, "parameters")
    for module in modules:
        for tensor in _held(module):
            ledger.tag(tensor, "gradients")
    for tensor in (*inputs.values(), *(b for m in modules for b in m.buffers())):
        ledger.tag(tensor, "buffers")
    _make_states(trainer)
    for state in trainer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                ledger.tag(value, "optimizer")


def _leave_to_host(trainer: Trainer, parameters: Sequence[nn.Parameter]) -> None:
    """Mark what ``fully_shard`` keeps on the host, and what an update takes there."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mark_on_host(parameter)
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda one: mark_on_host(one.grad) if one.grad is not None else None
            )
    blocks = ExitStack()
    trainer.optimizer.register_step_pre_hook(lambda *_: blocks.enter_context(on_host()))
    trainer.optimizer.register_step_post_hook(lambda *_: blocks.close())


def _held(module: nn.Module) -> list[torch.Tensor]:
    """Gradients that live between steps, as a reducer's buckets do."""
    if isinstance(module, BucketedReplicas):
        return module.held()
    return module.buckets() if isinstance(module, FakeReplicas) else []


def _local_inputs(plan: Plan, trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's slice of a synthetic batch, whose targets all count."""
    workload = plan.workload
    # Nothing is computed, so that any number of terms will do for the mean.
    trainer.loss.count = float(workload.global_batch)
    samples = workload.global_batch // plan.strategy.mesh.data_parallel
    made = synthetic_batch(workload, 0, samples=samples)
    # What comes onto the device of a rank that has shards of samples.
    return trainer.own_tokens(made) if plan.strategy.spatial else made


def _make_states(trainer: Trainer) -> None:
    """Step the optimizer once on zeros, which makes its states."""
    skipped = skipped_parameters(trainer.replicas)
    if isinstance(trainer.replicas, HoldingReplicas):
        skipped = trainer.replicas.skipped()
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in skipped:
                parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
