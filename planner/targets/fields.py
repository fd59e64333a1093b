"""The leaves of a Strategy, by the names that targets and errors use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.schema import Strategy

if TYPE_CHECKING:
    from planner.targets.base import Case

__all__ = ["EVERYTHING", "FIELDS", "Field", "value_of"]


def _always(_: Case) -> bool:
    return True


def _pipeline(case: Case) -> bool:
    return case.strategy.mesh.pp > 1


def _sharded(case: Case) -> bool:
    """Where ZeRO divides anything: cp ranks shard with dp_shard."""
    mesh = case.strategy.mesh
    return mesh.dp_shard * mesh.cp > 1


def _tensor(case: Case) -> bool:
    mesh = case.strategy.mesh
    return mesh.tp > 1 or mesh.ep > 1


def _context(case: Case) -> bool:
    return case.strategy.mesh.cp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A leaf of a strategy.

    Attributes:
        default: Its value where nothing is asked for.
        matters: Whether it has any effect in a case.
        means: What it says, for tables.
    """

    default: Any
    means: str
    matters: Callable[[Case], bool] = _always


#: Every leaf; ``stages.modules`` and ``stages.recompute`` are read over all stages.
FIELDS: dict[str, Field] = {
    "mesh.pp": Field(default=1, means="pipeline stages"),
    "mesh.dp_replicate": Field(default=1, means="replicas"),
    "mesh.dp_shard": Field(default=1, means="ways to shard data parallel"),
    "mesh.cp": Field(default=1, means="ways to divide sequences"),
    "mesh.tp": Field(default=1, means="ways to divide tensors"),
    "mesh.ep": Field(default=1, means="ways to deal out experts"),
    "zero_stage": Field(default=0, means="what dp_shard shards", matters=_sharded),
    "schedule": Field(default="GPipe", means="pipeline schedule", matters=_pipeline),
    "virtual_stages": Field(default=1, means="stages a rank", matters=_pipeline),
    "microbatch_size": Field(default=1, means="samples a microbatch"),
    "num_microbatches": Field(default=1, means="microbatches a step"),
    "stages.modules": Field(
        default="even", means="where the model is cut", matters=_pipeline
    ),
    "stages.recompute": Field(default="none", means="activation checkpointing"),
    "sharding.patterns": Field(
        default={}, means="how tp and ep split which module", matters=_tensor
    ),
    "sharding.sequence_parallel": Field(
        default=False, means="sequence parallelism beside tp", matters=_tensor
    ),
    "sharding.loss_parallel": Field(
        default=False, means="loss of sharded logits", matters=_tensor
    ),
    "precision.parameter": Field(default="float32", means="dtype of weights"),
    "precision.compute": Field(default="bfloat16", means="dtype of products"),
    "precision.reduce": Field(default="float32", means="dtype of reductions"),
    "optimizer": Field(default=None, means="optimizer and its settings"),
    "context_algorithm": Field(
        default="all_to_all", means="how divided sequences attend", matters=_context
    ),
    "gradient_compression": Field(default="none", means="compressed gradients"),
    "grad_clip_norm": Field(default=None, means="largest gradient norm"),
    "overlap.forward_prefetch": Field(default=None, means="units gathered ahead"),
    "overlap.backward_prefetch": Field(default=None, means="the same in backward"),
    "overlap.bucket_bytes": Field(default=None, means="gradient bucket of replicas"),
    "compile": Field(default=False, means="torch.compile of blocks"),
    "device_ranges": Field(default=(), means="device of every rank"),
}

#: For launchers that hand over the plan as it is.
EVERYTHING = frozenset(FIELDS)


def value_of(strategy: Strategy, name: str) -> Any:
    """A leaf's value.

    ``stages.recompute`` is one word if all stages have the same, else a list by stage;
    ``stages.modules`` the number of modules of each stage.

    Raises:
        KeyError: If there is no such leaf.
    """
    if name not in FIELDS:
        raise KeyError(name)
    if name == "stages.recompute":
        kinds = [stage.recompute for stage in strategy.stages]
        same = len(set(kinds)) <= 1
        return (kinds[0] if kinds else "none") if same else kinds
    if name == "stages.modules":
        return [len(stage.modules) for stage in strategy.stages]
    value: Any = strategy
    for part in name.split("."):
        value = getattr(value, part)
    return value
