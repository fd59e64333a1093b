"""The strategy nearest to a given one among those that a target can express."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.schema import Communication, Overlap, Stage, Strategy
from planner.schema.base import leaf_defaults
from planner.schema.methods import slots
from planner.targets.base import Case, Target

__all__ = ["nearest_expressible"]

#: Edits on top of each other, and strategies looked at, before giving up.
_DEEPEST, _MOST = 5, 2000


def nearest_expressible(target: Target, case: Case) -> Strategy | None:
    """Find the strategy with the fewest edits that the target can express.

    An edit folds one axis of the mesh into another (devices and global batch stay the
    same), or sets one other field to a plainer value. It has no price: plan again
    within the target's limits for the best one.

    Args:
        target: The launcher.
        case: A case that it cannot express. Stages of edited strategies have no names,
            so that rules about layers do not count.
    Returns:
        None if no strategy is near.
    """
    reached = {case.strategy.model_dump_json()}
    front = [case.strategy]
    for _ in range(_DEEPEST):
        ahead: list[Strategy] = []
        for strategy in front:
            for edited in _edits(strategy):
                key = edited.model_dump_json()
                if key in reached:
                    continue
                reached.add(key)
                bare = replace(case, strategy=edited, layers=False)
                if not target.violations(bare):
                    return edited
                ahead.append(edited)
                if len(reached) > _MOST:
                    return None
        front = ahead
    return None


def _edits(strategy: Strategy) -> Iterator[Strategy]:
    """Yield strategies one edit away, the gentlest edit first."""
    yield from _plainer(strategy)
    yield from _folded(strategy)


#: Defaults that every launcher can express.
_PLAIN: dict[str, Any] = {
    "device_ranges": (),
    "overlap": Overlap(),
    "communication": Communication(),
    **{slot: leaf_defaults(Strategy)[slot] for slot in slots()},
    "context_algorithm": "ring",
    "compile": False,
}


def _plainer(strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategy with one field at a plainer value."""
    for name, plain in _PLAIN.items():
        # No plainer algorithm serves shards of samples.
        fixed = name == "context_algorithm" and bool(strategy.spatial)
        if getattr(strategy, name) != plain and not fixed:
            yield _with(strategy, **{name: plain})
    kinds = Counter(stage.recompute for stage in strategy.stages)
    for kind in [k for k, _ in kinds.most_common()] + ["full", "none"]:
        stages = tuple(
            stage.model_copy(update={"recompute": kind}) for stage in strategy.stages
        )
        if stages != strategy.stages:
            yield _with(strategy, stages=stages)
    sharding = strategy.sharding
    for flag in ("sequence_parallel", "loss_parallel"):
        if strategy.mesh.tp > 1:
            turned = {flag: not getattr(sharding, flag)}
            yield _with(strategy, sharding=sharding.model_copy(update=turned))
    for zero_stage in (1, 2, 3, 0):
        if zero_stage != strategy.zero_stage and strategy.mesh.shards > 1:
            yield _with(strategy, zero_stage=zero_stage)
    if strategy.mesh.pp > 1:
        for schedule in ("1F1B", "Interleaved1F1B", "GPipe"):
            virtual = 2 if schedule == "Interleaved1F1B" else 1
            if schedule != strategy.schedule:
                yield from _remade(strategy, schedule=schedule, virtual_stages=virtual)


def _folded(strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategy with one axis folded into another, on the same devices."""
    mesh = strategy.mesh
    for one in ("ep", "pp", "cp", "dp_replicate", "tp", "dp_shard"):
        degree = getattr(mesh, one)
        if degree == 1:
            continue
        if one == "ep":
            yield from _remade(strategy, mesh=mesh.model_copy(update={"ep": 1}))
            continue
        for other in ("dp_shard", "dp_replicate", "tp", "pp"):
            if other == one:
                continue
            update = {one: 1, other: getattr(mesh, other) * degree}
            yield from _remade(strategy, mesh=mesh.model_copy(update=update))


def _remade(strategy: Strategy, **update: Any) -> Iterator[Strategy]:
    """Yield the strategy with another mesh or schedule, if batch and stages divide."""
    mesh = update.get("mesh", strategy.mesh)
    per_replica, rest = divmod(strategy.global_batch, mesh.data_parallel)
    microbatches = max(1, per_replica // strategy.microbatch_size)
    size = per_replica // microbatches
    if rest or size * microbatches != per_replica:
        return
    if mesh.pp == 1:
        update |= {"schedule": "GPipe", "virtual_stages": 1}
    elif strategy.mesh.pp == 1 and "schedule" not in update:
        update |= {"schedule": "1F1B", "virtual_stages": 1}
    if mesh.dp_shard > 1 and strategy.mesh.dp_shard == 1 and strategy.zero_stage == 0:
        update["zero_stage"] = 1
    update |= {"microbatch_size": size, "num_microbatches": microbatches}
    bare = _with(strategy, **update)
    stages = _cut_again(bare)
    if stages is not None:
        yield _with(bare, stages=stages)


def _cut_again(strategy: Strategy) -> tuple[Stage, ...] | None:
    """Cut the modules into as many stages as the mesh has; None if they are too few."""
    if not strategy.stages:
        return ()
    modules = [name for stage in strategy.stages for name in stage.modules]
    kind = Counter(stage.recompute for stage in strategy.stages).most_common(1)[0][0]
    count = strategy.mesh.pp * strategy.virtual_stages
    bounds = [len(modules) * index // count for index in range(count + 1)]
    if count > len(modules):
        return None
    return tuple(
        Stage(
            rank=strategy.rank_of_stage(index),
            modules=tuple(modules[bounds[index] : bounds[index + 1]]),
            recompute=kind,
        )
        for index in range(count)
    )


def _with(strategy: Strategy, **update: Any) -> Strategy:
    return strategy.model_copy(update=update)
