"""The leaves of a Strategy, by the names that targets and errors use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.schema import Strategy
from planner.schema.leaves import leaf_defaults, leaf_of

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
        default: Value where nothing is asked for.
        means: What it says, for tables.
        matters: Whether it has any effect in a case.
    """

    default: Any
    means: str
    matters: Callable[[Case], bool] = _always


_FROM_SCHEMA: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What the schema does not say of a leaf; ``default`` where it has another."""

    means: str
    matters: Callable[[Case], bool] = _always
    default: Any = _FROM_SCHEMA


#: Leaves of a strategy whose parts are told as one.
_WHOLE = frozenset({"optimizer"})
#: Leaves that are read over all stages.
_OF_STAGES = ("stages.modules", "stages.recompute")
_NOTES: dict[str, _Note] = {
    "mesh.pp": _Note(means="pipeline stages"),
    "mesh.dp_replicate": _Note(means="replicas"),
    "mesh.dp_shard": _Note(means="ways to shard data parallel"),
    "mesh.cp": _Note(means="ways to divide sequences"),
    "mesh.tp": _Note(means="ways to divide tensors"),
    "mesh.ep": _Note(means="ways to deal out experts"),
    "zero_stage": _Note(means="what dp_shard shards", matters=_sharded),
    "schedule": _Note(means="pipeline schedule", matters=_pipeline),
    "virtual_stages": _Note(means="stages a rank", matters=_pipeline),
    "microbatch_size": _Note(means="samples a microbatch"),
    "num_microbatches": _Note(means="microbatches a step"),
    "stages.modules": _Note(
        means="where the model is cut", matters=_pipeline, default="even"
    ),
    "stages.recompute": _Note(means="activation checkpointing", default="none"),
    "sharding.patterns": _Note(
        means="how tp and ep split which module", matters=_tensor
    ),
    "sharding.sequence_parallel": _Note(
        means="sequence parallelism beside tp", matters=_tensor
    ),
    "sharding.loss_parallel": _Note(means="loss of sharded logits", matters=_tensor),
    "precision.parameter": _Note(means="dtype of weights"),
    "precision.compute": _Note(means="dtype of products"),
    "precision.reduce": _Note(means="dtype of reductions"),
    "optimizer": _Note(means="optimizer and its settings", default=None),
    "context_algorithm": _Note(means="how divided sequences attend", matters=_context),
    "synchronisation": _Note(means="what keeps replicas together"),
    "gradient_compression": _Note(means="compressed gradients"),
    "grad_clip_norm": _Note(means="largest gradient norm"),
    "overlap.forward_prefetch": _Note(means="units gathered ahead"),
    "overlap.backward_prefetch": _Note(means="the same in backward"),
    "overlap.bucket_bytes": _Note(means="gradient bucket of replicas"),
    "compile": _Note(means="torch.compile of blocks"),
    "device_ranges": _Note(means="device of every rank"),
    "semantics": _Note(means="consent to approximate training"),
}


def _leaves() -> Iterator[tuple[str, Any]]:
    """Name and default of every leaf of a strategy."""
    for name, default in leaf_defaults(Strategy, whole=_WHOLE).items():
        if name == "stages":
            yield from ((leaf, None) for leaf in _OF_STAGES)
        else:
            yield name, default


def _field(name: str, default: Any) -> Field:
    note = _NOTES.get(name, _Note(means=name.replace("_", " ").replace(".", ": ")))
    return Field(
        default=default if note.default is _FROM_SCHEMA else note.default,
        means=note.means,
        matters=note.matters,
    )


#: Every leaf of the schema of a strategy, so that a target refuses what it has no words
#: for, also if it was added to the schema yesterday.
FIELDS: dict[str, Field] = {name: _field(name, default) for name, default in _leaves()}

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
    return leaf_of(strategy, name)
