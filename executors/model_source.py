"""The model of a run: built without values, checked, and made parallel."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from executors.checkpoints.checkpoint import Checkpoints
from executors.checkpoints.snapshot import Inventory
from executors.data import Batch, BatchPart, gather_batch
from executors.deferred.materialize import build_model
from executors.deferred.model import record
from executors.deferred.recording import Recording
from executors.first_step import FirstStepCheck, compare_first_step
from executors.mesh import build_mesh
from executors.names import tied_parameters
from executors.own_loss import Loss
from executors.replicas.membership import Membership
from executors.steps import OptimizerFactory
from executors.strategies.casts import can_cast_weights
from executors.trainer import Trainer
from executors.weights.options import WeightOptions
from planner.errors import ExecutionError, FingerprintError
from planner.schema import Plan, Strategy
from planner.schema.base import (
    fingerprint_parameters,
    hooked_parameter,
    parameter_violation,
)
from planner.schema.fused_kernels import (
    kernel_violation,
    kernel_warning,
    kernels_not_run,
)
from planner.schema.violations import executor_violations, hook_violation

__all__ = ["ModelSource", "check_model", "prepare_trainer", "require_kernels"]

_LOG = logging.getLogger(__name__)


def check_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model that the plan was not made for.

    Raises:
        FingerprintError: With the difference: parameters, tensors, missing modules.
    """
    parameters = dict(model.named_parameters())
    found = fingerprint_parameters((n, p.shape) for n, p in parameters.items())
    if found == plan.model.fingerprint:
        return
    count = sum(parameter.numel() for parameter in parameters.values())
    known = {name for name, _ in model.named_modules()}
    stages = plan.strategy.stages
    missing = [m for stage in stages for m in stage.modules if m not in known]
    lacks = f", lacks the module {missing[0]} (of {len(missing)})" if missing else ""
    raise FingerprintError(
        f"the plan is for {plan.model.name} ({plan.model.parameters:,} parameters in "
        f"{plan.model.tensors} tensors, fingerprint {plan.model.fingerprint}), this "
        f"model has {count:,} in {len(parameters)} ({found}){lacks}; plan again for "
        f"it, or use force if only names differ"
    )


def require_kernels(plan: Plan, model: nn.Module) -> None:
    """Refuse a plan that needs the memory of kernels which the model does not run.

    Where its own code fits as well, a warning tells that it takes longer.

    Raises:
        ExecutionError: If memory would not suffice: kernels, lack and remedies.
    """
    assumed = plan.provenance.kernels
    missing = kernels_not_run(assumed, getattr(model, "config", None))
    violation = kernel_violation(assumed, missing)
    if violation is not None:
        raise ExecutionError(f"this plan cannot be run: {violation}")
    warning = kernel_warning(assumed, missing)
    if warning is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        _LOG.warning("%s", warning)


@dataclass(kw_only=True)
class ModelSource:
    """Builds the model of a run.

    Attributes:
        model_fn: As for :func:`prepare`.
        seed: The same.
        weights: Files that the model's values come from; None for random ones.
    """

    model_fn: Callable[[], nn.Module]
    seed: int
    weights: WeightOptions | None = None
    _recorded: weakref.ref[nn.Module] | None = None

    def record(self) -> tuple[nn.Module, Recording | None]:
        """Build the model that is trained, without values."""
        torch.manual_seed(self.seed)
        model, recording = record(self.model_fn)
        self._recorded = weakref.ref(model)
        return model, recording

    def check(
        self,
        trainer: Trainer,
        batch: Batch | BatchPart,
        inventory: Inventory,
        saved: Checkpoints | None,
    ) -> FirstStepCheck:
        """Compare a batch's loss and gradient with those of the whole model."""
        # Collective over all ranks, although one of them reads.
        alone = dist.new_group([0], backend="gloo")
        whole = batch
        if isinstance(whole, BatchPart):
            whole = gather_batch(whole, trainer.part)

        def build() -> nn.Module:
            dtype = getattr(torch, trainer.plan.strategy.precision.parameter)
            model = build_model(
                self._another, self.seed, device=trainer.place.device, dtype=dtype
            )
            if saved is not None and saved.last is not None:
                saved.read_into(model, alone)
            elif self.weights is not None:
                self.weights.load_whole(model, inventory)
            return model

        return compare_first_step(trainer, build, whole, inventory.first)

    def _another(self) -> nn.Module:
        model = self.model_fn()
        if self._recorded is not None and self._recorded() is model:
            raise ExecutionError(
                "model_fn returned the same model twice; with check_first_step it is "
                "called once more and must build another: lambda: copy.deepcopy(model)"
            )
        return model


def prepare_trainer(
    plan: Plan,
    source: ModelSource,
    device: torch.device,
    force: bool,
    membership: Membership | None = None,
    optimizer: OptimizerFactory | None = None,
    document_separator: int | None = None,
    loss: Loss | None = None,
) -> tuple[Trainer, Inventory]:
    """Check processes, model and strategy, and build this rank's part; collective.

    Args:
        plan: What to do.
        source: Of the model.
        device: Of this process.
        force: Whether the model may be another than the plan's.
        membership: Agreement with the other copies, if the group is one copy's.
        optimizer: As for :func:`prepare`.
        document_separator: The same.
        loss: The same.

    Raises:
        ExecutionError: If the plan cannot be run, or needs other processes.
        FingerprintError: If the plan is for another model.
    """
    place = build_mesh(plan.strategy, device, membership)
    model, recording = source.record()
    _require_runnable(plan, model, device, force)
    if place.process == 0:
        _LOG.info("training %s by %s", plan.model.name, plan.strategy.label())
    inventory = Inventory.of(model)
    trainer = Trainer(
        plan,
        model,
        place,
        recording,
        optimizer=optimizer,
        document_separator=document_separator,
        loss=loss,
    )
    return trainer, inventory


def _hook_violation(strategy: Strategy, model: nn.Module) -> str | None:
    """Why hooks on gradients of a model are not called as in one process."""
    hooked = hooked_parameter(model.named_parameters())
    precision = strategy.precision
    casts = precision.activation_dtype != precision.parameter
    if hooked and casts and (strategy.compile or not can_cast_weights(model)):
        return (
            f"{hooked} has a hook on its gradient, which weights in "
            f"{precision.activation_dtype} of compiled blocks or recurrent layers do "
            f"not call; plan with compute={precision.parameter}, or remove it"
        )
    return hook_violation(
        hooked, strategy.mesh.num_devices, strategy.num_microbatches, precision
    )


def _require_runnable(
    plan: Plan, model: nn.Module, device: torch.device, force: bool
) -> None:
    """Refuse a model or a strategy that cannot be trained here.

    Raises:
        ExecutionError: If the executors cannot run the strategy.
        FingerprintError: If the plan is for another model, and force is not given.
    """
    if not force:
        check_model(plan, model)
    unfit = parameter_violation(model.named_parameters())
    violations = executor_violations(
        plan.strategy,
        tied=tied_parameters(model),
        backend="nccl" if device.type == "cuda" else "gloo",
        attention=plan.model.attention,
        whole_stream=plan.model.whole_stream,
        mixing=plan.model.mixing,
        batch_norm_values=plan.model.batch_norm_values,
        spatial_sizes=plan.model.spatial_sizes,
        experts=plan.model.experts,
    )
    unhooked = _hook_violation(plan.strategy, model)
    reasons = [one for one in (unfit, unhooked, *violations) if one is not None]
    if reasons:
        raise ExecutionError(f"this plan cannot be run: {'; '.join(reasons)}")
    require_kernels(plan, model)
