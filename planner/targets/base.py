"""Launchers, the fields of a strategy that each can express, and their registry."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, Literal

from planner.errors import MeshwrightError, UnknownNameError
from planner.plugins import entry_points
from planner.schema import Strategy
from planner.schema.base import leaf_defaults, leaf_of
from planner.schema.violations import executor_violations

__all__ = [
    "EVERYTHING",
    "FIELDS",
    "GROUP",
    "Case",
    "Field",
    "HostTypes",
    "Rule",
    "Target",
    "Violation",
    "get_target",
    "target_names",
    "value_of",
]

#: Runs of equal hosts in order: (number of hosts, devices in each).
Hosts = tuple[tuple[int, int], ...]

#: Runs of hosts with devices of one type, in order: (number of hosts, their type).
HostTypes = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy, and the facts about model and cluster that rules look at.

    Attributes:
        strategy: The strategy to express.
        hosts: Hosts of the cluster; empty if they are not known.
        layers: Whether the names of modules are real, so that rules may count layers.
            A search asks about kinds of strategies before it cuts the model.
        placed: Whether the devices are those that will be used. A search asks about
            strategies before it places them.
        tied: Groups of parameter names that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: The kind of attention, as in :class:`planner.schema.ModelReference`.
        spatial_sizes: The same.
        device_types: Names of all types in the cluster; empty if they are not known.
        host_types: Runs of hosts with devices of one type; empty if there is one type
            alone, or they are not known.
        num_experts: Experts of a layer; 0 without.
    """

    strategy: Strategy
    hosts: Hosts = ()
    layers: bool = True
    placed: bool = True
    tied: tuple[tuple[str, ...], ...] = ()
    backend: str = "nccl"
    attention: str | None = "causal"
    spatial_sizes: tuple[int, ...] = ()
    device_types: tuple[str, ...] = ()
    host_types: HostTypes = ()
    num_experts: int = 0


# -- Fields of a strategy --------------------------------------------------------


def _always(_: Case) -> bool:
    return True


def _has_pipeline(case: Case) -> bool:
    return case.strategy.mesh.pp > 1


def _is_sharded(case: Case) -> bool:
    """True if ZeRO divides anything: cp ranks shard with dp_shard."""
    mesh = case.strategy.mesh
    return mesh.shards > 1


def _divides_tensors(case: Case) -> bool:
    mesh = case.strategy.mesh
    return mesh.tp > 1 or mesh.ep > 1


def _shares_messages(case: Case) -> bool:
    mesh = case.strategy.mesh
    return mesh.pp > 1 and mesh.tp > 1


def _divides_sequences(case: Case) -> bool:
    return case.strategy.mesh.cp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A leaf of a strategy's schema.

    Attributes:
        default: Value where nothing is requested.
        means: Its meaning in a few words, for tables.
        matters: Predicate of the cases in which it has any effect.
    """

    default: Any
    means: str
    matters: Callable[[Case], bool] = _always


_FROM_SCHEMA: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """Facts of a leaf that the schema lacks; ``default`` where it is another."""

    means: str
    matters: Callable[[Case], bool] = _always
    default: Any = _FROM_SCHEMA


#: Documents inside a strategy that count as one leaf.
_WHOLE = frozenset({"optimizer"})
#: Leaves that are read over all stages.
_OF_STAGES = ("stages.modules", "stages.recompute")
_NOTES: dict[str, _Note] = {
    "mesh.pp": _Note(means="pipeline stages"),
    "mesh.dp_replicate": _Note(means="replicas"),
    "mesh.dp_shard": _Note(means="ways to shard data parallel"),
    "mesh.cp": _Note(means="ways to divide sequences"),
    "mesh.tp": _Note(means="ways to divide tensors"),
    "mesh.ep": _Note(means="ways to distribute experts"),
    "zero_stage": _Note(means="ZeRO stage of dp_shard", matters=_is_sharded),
    "schedule": _Note(means="pipeline schedule", matters=_has_pipeline),
    "virtual_stages": _Note(means="stages a rank", matters=_has_pipeline),
    "microbatch_size": _Note(means="samples a microbatch"),
    "num_microbatches": _Note(means="microbatches a step"),
    "stages.modules": _Note(
        means="modules of each stage", matters=_has_pipeline, default="even"
    ),
    "stages.recompute": _Note(means="activation checkpointing", default="none"),
    "sharding.patterns": _Note(
        means="modules that tp and ep split", matters=_divides_tensors
    ),
    "sharding.sequence_parallel": _Note(
        means="sequence parallelism beside tp", matters=_divides_tensors
    ),
    "sharding.loss_parallel": _Note(
        means="loss of sharded logits", matters=_divides_tensors
    ),
    "precision.parameter": _Note(means="dtype of weights"),
    "precision.compute": _Note(means="dtype of products"),
    "precision.reduce": _Note(means="dtype of reductions"),
    "optimizer": _Note(means="optimizer and its settings", default=None),
    "context_algorithm": _Note(
        means="attention over divided sequences", matters=_divides_sequences
    ),
    "spatial": _Note(means="shards of images and volumes"),
    "synchronisation": _Note(means="method that keeps replicas together"),
    "asynchrony": _Note(means="updates without a flush of the pipeline"),
    "gradient_compression": _Note(means="compressed gradients"),
    "grad_clip_norm": _Note(means="largest gradient norm"),
    "overlap.forward_prefetch": _Note(means="units gathered ahead in forward"),
    "overlap.backward_prefetch": _Note(means="units gathered ahead in backward"),
    "overlap.bucket_bytes": _Note(means="gradient bucket of replicas"),
    "communication.boundary": _Note(
        means="messages between stages", matters=_shares_messages
    ),
    "communication.replicas.algorithm": _Note(means="messages of replicas' sums"),
    "communication.replicas.order": _Note(means="order of replicas' sums"),
    "communication.replicas.parts": _Note(means="parts of replicas' sums"),
    "communication.replicas.domains": _Note(means="domains of replicas' sums"),
    "communication.replicas.pieces": _Note(means="pieces of replicas' sums"),
    "communication.buckets": _Note(means="order of replicas' gradient buckets"),
    "communication.shards.second_copy": _Note(
        means="ranks that share a second copy of the weights", matters=_is_sharded
    ),
    "communication.shards.weight_bits": _Note(
        means="bits of a gathered weight", matters=_is_sharded
    ),
    "communication.shards.gradient_bits": _Note(
        means="bits of a reduced gradient", matters=_is_sharded
    ),
    "compile": _Note(means="torch.compile of blocks"),
    "loss_chunks": _Note(means="parts of the tokens whose logits are there at once"),
    "offload.states": _Note(means="states in the host's memory"),
    "offload.activations": _Note(means="activations in the host's memory"),
    "device_ranges": _Note(means="device of every rank"),
    "semantics": _Note(means="consent to approximate training"),
}


def _leaves() -> Iterator[tuple[str, Any]]:
    """Yield name and default of every leaf of a strategy."""
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


#: Every leaf of a strategy's schema by dotted name. A leaf that was added to the schema
#: yesterday is among them, so that targets without a word for it report a violation.
FIELDS: dict[str, Field] = {name: _field(name, default) for name, default in _leaves()}

#: All fields, for launchers that hand over the plan unchanged.
EVERYTHING = frozenset(FIELDS)


def value_of(strategy: Strategy, name: str) -> Any:
    """Value of a field.

    ``stages.recompute`` is one word if all stages have the same, else a list by stage;
    ``stages.modules`` is the number of modules of each stage.

    Raises:
        KeyError: If there is no such field.
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


# -- Targets ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A limit of a target that a case exceeds.

    Attributes:
        field: Field of the strategy, such as ``mesh.pp``.
        value: Its value in the case.
        why: Reason of the limit: a clause, without the value.
        remedy: Change that keeps the limit: a clause.
    """

    field: str
    value: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={self.value}: {self.why}; {self.remedy}"


#: One limit of a target; returns None if the case keeps it.
Rule = Callable[[Case], Violation | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A launcher and its limits.

    Every field of :data:`planner.targets.FIELDS` that is neither in ``says`` nor in
    ``leaves`` must have its default value: a field that the target has no word for is a
    violation, and never dropped.

    Attributes:
        name: Name on the command line.
        title: Name in the launcher's own documentation.
        version: Release that the files are written for.
        runs: ``meshwright`` if Meshwright's executors run the plan there, ``itself`` if
            the framework trains by its own code.
        says: Fields that the written files carry.
        leaves: Fields that the user's training script decides; the files name them.
        reasons: Reason by field for having no word for it, a clause, where one is
            known.
        rules: Limits beyond single fields.
        even_layers: Whether it cuts pipelines into stages of equally many layers by
            itself.
        sizes: Fields whose numbers its rules look at, such as ``mesh.tp``. A search
            asks rules once for all strategies that have the same axes, schedule and
            kinds; a rule that looks at more than whether a number is above 1 must have
            the field named here.
        optimizers: Those that it has, where its files carry one.
        limits: Its limits for readers, one clause each.
        check: Checks that its files have passed, for readers.
        recipe: Framework, of :mod:`planner.measurements`, that plans are priced as.
    """

    name: str
    title: str
    version: str
    runs: Literal["meshwright", "itself"]
    says: frozenset[str]
    leaves: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    rules: tuple[Rule, ...] = ()
    even_layers: bool = False
    sizes: frozenset[str] = frozenset()
    optimizers: frozenset[str] = frozenset({"AdamW", "Adam", "SGD"})
    limits: tuple[str, ...] = ()
    check: str = ""
    recipe: str = "torch"

    def __post_init__(self) -> None:
        named = self.says | self.leaves | self.sizes | set(self.reasons)
        unknown = named - set(FIELDS)
        if unknown or self.says & self.leaves:
            raise ValueError(
                f"target {self.name} names {sorted(unknown)}, which no strategy has, "
                f"or says and leaves {sorted(self.says & self.leaves)}"
            )

    def violations(self, case: Case) -> tuple[Violation, ...]:
        """Return the limits that a case exceeds; none if it can be expressed."""
        return tuple(self._violations(case))

    def _violations(self, case: Case) -> Iterator[Violation]:
        no_word = f"{self.title} {self.version} has no word for it"
        for name, leaf in FIELDS.items():
            if name in self.says or name in self.leaves or not leaf.matters(case):
                continue
            value = value_of(case.strategy, name)
            if value != leaf.default:
                yield Violation(
                    field=name,
                    value=str(value),
                    why=self.reasons.get(name, no_word),
                    remedy=f"use {leaf.default}",
                )
        name = case.strategy.optimizer.name
        if self.runs == "itself" and name not in self.optimizers:
            yield Violation(
                field="optimizer.name",
                value=name,
                why=f"{self.title} {self.version} has no word for it",
                remedy=f"use {' or '.join(sorted(self.optimizers))}",
            )
        ema = case.strategy.optimizer.ema
        if self.runs == "itself" and ema is not None:
            yield Violation(
                field="optimizer.ema", value=str(ema), why=no_word, remedy="use None"
            )
        for rule in self.rules:
            violation = rule(case)
            if violation is not None:
                yield violation
        if self.runs == "meshwright":
            yield from _not_run(case)


def _not_run(case: Case) -> Iterator[Violation]:
    """Yield the reasons why Meshwright's executors do not run a case."""
    for reason in executor_violations(
        case.strategy,
        tied=case.tied,
        backend=case.backend,
        attention=case.attention,
        spatial_sizes=case.spatial_sizes,
        experts=case.num_experts,
    ):
        clause, _, remedy = reason.partition("; ")
        yield Violation(
            field="strategy",
            value=case.strategy.label(),
            why=f"Meshwright's executors do not run it: {clause}",
            remedy=remedy or "choose another",
        )


# -- Registry --------------------------------------------------------------------

#: Entry-point group under which anyone can ship a :class:`Target`. The function that
#: writes its files goes under ``meshwright.exporters``, by the same name.
GROUP = "meshwright.targets"

#: Targets that ship: name to the module of :mod:`planner.targets` that declares it.
_SHIPPED = {
    "json": "launchers",
    "torchrun": "launchers",
    "slurm": "launchers",
    "kubeflow": "launchers",
    "jobset": "launchers",
    "skypilot": "launchers",
    "ray": "launchers",
    "torchtitan": "torchtitan",
    "torchtitan-0.2": "torchtitan",
    "megatron": "megatron",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "nanotron": "nanotron",
}


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def target_names() -> tuple[str, ...]:
    """Names of all installed targets: those that ship, then the others, sorted."""
    others = sorted(set(_registered()) - set(_SHIPPED))
    return (*_SHIPPED, *others)


@cache
def get_target(name: str) -> Target:
    """Load a target's declaration.

    Raises:
        UnknownNameError: If no target of that name is installed.
        MeshwrightError: If the object registered under the name is no Target.
    """
    if name in _SHIPPED:
        module = importlib.import_module(f"planner.targets.{_SHIPPED[name]}")
        found: Target = next(t for t in module.TARGETS if t.name == name)
        return found
    points = _registered()
    if name not in points:
        raise UnknownNameError("target", name, target_names())
    try:
        made = points[name].load()
    except ImportError as error:
        raise MeshwrightError(
            f"target {name!r} needs {error.name!r}, which is not installed; install it "
            f"or choose another target"
        ) from error
    if not isinstance(made, Target):
        raise MeshwrightError(
            f"target {name!r} ({points[name].value}) is no planner.targets.Target"
        )
    return made
