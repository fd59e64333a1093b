"""Features of a strategy that go together, as data: what the executors are asked.

Whether a combination runs is for :mod:`planner.schema.violations` to say, which planner
and executors read alike; here are the features by name, what each sets, and the table
of all pairs that the documentation shows and the tests run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from planner.schema.methods import Feature, methods
from planner.schema.schedules import ScheduleSpec, schedules
from planner.schema.strategy import Strategy
from planner.schema.strategy_parts import Mesh, Precision, Stage, TensorSharding
from planner.schema.violations import executor_violations

__all__ = [
    "FEATURES",
    "TRIPLES",
    "Cell",
    "Feature",
    "cell",
    "compose",
    "markdown",
    "pairs",
]


def _zero(stage: Literal[1, 2, 3]) -> Feature:
    return Feature(
        name=f"ZeRO {stage}", mesh={"dp_shard": 2}, zero_stage=stage, kind="zero"
    )


def _pipeline(schedule: ScheduleSpec) -> Feature:
    return Feature(
        name=schedule.name,
        mesh={"pp": 2},
        fields={
            "schedule": schedule.name,
            "virtual_stages": schedule.usual_virtual_stages,
            "num_microbatches": 4,
        },
        kind="schedule",
    )


def _context(algorithm: str) -> Feature:
    return Feature(
        name=f"cp {algorithm}",
        mesh={"cp": 2},
        fields={"context_algorithm": algorithm},
        kind="context",
    )


#: In the order of the table.
FEATURES: tuple[Feature, ...] = (
    Feature(name="replicas", mesh={"dp_replicate": 2}),
    _zero(1),
    _zero(2),
    _zero(3),
    Feature(name="tp", mesh={"tp": 2}),
    Feature(name="tp sequence", mesh={"tp": 2}, sharding={"sequence_parallel": True}),
    Feature(name="tp loss", mesh={"tp": 2}, sharding={"loss_parallel": True}),
    _context("all_to_all"),
    _context("ring"),
    Feature(name="ep", mesh={"dp_shard": 2, "ep": 2}, zero_stage=1),
    *map(_pipeline, schedules()),
    Feature(name="recompute selective", recompute="selective", kind="recompute"),
    Feature(name="recompute full", recompute="full", kind="recompute"),
    Feature(name="accumulation", fields={"num_microbatches": 4}),
    Feature(name="clipping", fields={"grad_clip_norm": 0.1}),
    Feature(
        name="bfloat16",
        fields={"precision": Precision(compute="bfloat16")},
        tolerance=(2e-3, 5e-2, 1.5e-1),
    ),
    *(one.feature for one in methods() if one.feature and one.runs),
)

#: Beyond pairs: the meshes that large models are trained on.
TRIPLES: tuple[tuple[str, ...], ...] = (
    ("replicas", "ZeRO 3", "tp sequence"),
    ("1F1B", "ZeRO 2", "tp sequence"),
    ("Interleaved1F1B", "ZeRO 2", "tp sequence"),
    ("ZBVZeroBubble", "ZeRO 2", "tp sequence"),
    ("DualPipeV", "ZeRO 1", "tp loss"),
    ("1F1B", "replicas", "recompute full"),
    ("1F1B", "ZeRO 2", "cp ring"),
    ("ZeRO 3", "tp sequence", "cp ring"),
    ("ZeRO 3", "tp loss", "cp all_to_all"),
    ("1F1B", "ZeRO 2", "ep"),
    ("ZBVZeroBubble", "ZeRO 2", "ep"),
    ("ep", "ZeRO 3", "tp sequence"),
    ("ep", "ZeRO 3", "cp ring"),
    ("ep", "ZeRO 3", "recompute full"),
    ("1F1B", "tp sequence", "bfloat16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Verdict on one combination of features.

    Attributes:
        features: Names.
        strategy: The combination; None if its features exclude each other.
        violations: Violations of what the executors can run; empty if they run it.
    """

    features: tuple[str, ...]
    strategy: Strategy | None
    violations: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """True if the executors run it."""
        return self.strategy is not None and not self.violations


def compose(
    names: Iterable[str],
    units: Sequence[str],
    patterns: dict[str, Any],
) -> Strategy | None:
    """The smallest strategy that has some features.

    Args:
        names: Of features.
        units: FQNs of the model's pipeline units, at least one for each stage.
        patterns: How its modules are split; those that the mesh has no axis for are
            left out.

    Returns:
        None if two of the features exclude each other.
    """
    known = {feature.name: feature for feature in FEATURES}
    chosen = [known[name] for name in names]
    kinds = [feature.kind for feature in chosen if feature.kind]
    if len(set(kinds)) < len(kinds):
        return None
    degrees: dict[str, int] = {}
    fields: dict[str, Any] = {"precision": Precision(compute="float32")}
    sharding: dict[str, Any] = {}
    for feature in chosen:
        fields |= feature.fields
        sharding |= feature.sharding
        for axis, degree in feature.mesh.items():
            degrees[axis] = max(degree, degrees.get(axis, 1))
    mesh = Mesh(**degrees)
    again = [feature.recompute for feature in chosen if feature.recompute != "none"]
    bare = Strategy(mesh=mesh, **fields)
    divided = mesh.tp > 1 or bare.synchronisation.cuts(mesh.dp_replicate)
    used = {
        pattern: style
        for pattern, style in patterns.items()
        if (mesh.ep > 1 if style == "experts" else divided)
    }
    return bare.model_copy(
        update={
            "zero_stage": max(feature.zero_stage for feature in chosen),
            "sharding": TensorSharding(patterns=used, **sharding),
            "stages": _stages(bare, units, again[0] if again else "none"),
        }
    )


def _stages(bare: Strategy, units: Sequence[str], recompute: Any) -> tuple[Stage, ...]:
    count = bare.mesh.pp * bare.virtual_stages
    bounds = [round(len(units) * index / count) for index in range(count + 1)]
    return tuple(
        Stage(
            rank=bare.rank_of_stage(index),
            modules=tuple(units[bounds[index] : bounds[index + 1]]),
            recompute=recompute,
        )
        for index in range(count)
    )


#: Stand-ins for a model in the table.
_UNITS = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")
_PATTERNS = {"layers.*.up": "colwise", "head": "colwise", "layers.*.experts": "experts"}


def cell(names: Iterable[str]) -> Cell:
    """Judge a combination of features on a model that all of them fit."""
    features = tuple(names)
    strategy = compose(features, _UNITS, dict(_PATTERNS))
    if strategy is None:
        return Cell(features=features, strategy=None)
    return Cell(
        features=features, strategy=strategy, violations=executor_violations(strategy)
    )


def pairs() -> tuple[Cell, ...]:
    """Every pair of features, in the order of the table."""
    names = [feature.name for feature in FEATURES]
    return tuple(cell(pair) for pair in combinations(names, 2))


def markdown() -> str:
    """The table of the documentation: ✓ runs, a letter is refused, · excludes."""
    names = [feature.name for feature in FEATURES]
    found = {frozenset(c.features): c for c in pairs()}
    letters: dict[str, str] = {}
    rows = []
    for row, name in enumerate(names[1:], start=1):
        marks = [
            _mark(found[frozenset((name, other))], letters) for other in names[:row]
        ]
        rows.append(f"| {name} | " + " | ".join(marks) + " |")
    head = [
        "| | " + " | ".join(names[:-1]) + " |",
        "|---" * len(names) + "|",
    ]
    padded = [r + " |" * (len(names) - 2 - i) for i, r in enumerate(rows)]
    notes = [f"- {letter}: {reason}" for reason, letter in letters.items()]
    return "\n".join([*head, *padded, "", *notes]) + "\n"


def _mark(found: Cell, letters: dict[str, str]) -> str:
    if found.strategy is None:
        return "·"
    if not found.violations:
        return "✓"
    # One letter for a rule, whatever the schedule or axis that it names.
    rule = found.violations[0].partition("; ")[2]
    return letters.setdefault(rule, chr(ord("a") + len(letters)))
