"""Pipelines that are drained after windows of steps, against counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cost import Cost, CostModel
from planner.schema import Optimizer, Precision
from planner.schema.methods.asynchronous import Asynchronous
from planner.schema.schedules import schedule_spec
from planner.space import Regime, build_strategy
from tests.cost.made import (
    HIDDEN,
    device,
    hosts,
    price_both_ways,
    row,
    setting_for,
    uniform_graph,
)

FULL = Precision(compute="float32")
SGD = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9)
#: Bytes of the weights of a unit.
WEIGHTS = 4.0 * 2 * HIDDEN**2


def _context(
    stages: int,
    settings: Asynchronous | None,
    memory_bandwidth: float = 1e12,
    copies: int = 1,
    **network: float,
) -> Any:
    regime = Regime()
    if settings is not None:
        regime = Regime(asynchrony=settings, semantics="approximate")
    return setting_for(
        uniform_graph(2 * stages),
        hosts(
            (stages * copies, 1, device(memory_bandwidth_bytes_per_s=memory_bandwidth)),
            **network,
        ),
        precision=FULL,
        optimizer=SGD,
        regime=regime,
    )


def _degrees(stages: int, many: int, copies: int = 1) -> dict[str, int]:
    code = schedule_spec("1F1B").code
    assert code is not None
    return {
        "pp": stages,
        "dp_replicate": copies,
        "schedule": code,
        "num_microbatches": many,
    }


def _model(
    stages: int,
    settings: Asynchronous | None,
    many: int = 8,
    copies: int = 1,
    **network: float,
) -> tuple[CostModel, Any]:
    context = _context(stages, settings, copies=copies, **network)
    strategy = build_strategy(
        row(**_degrees(stages, many, copies)),
        unit_names=context.graph.unit_names,
        bounds=list(range(0, 2 * stages + 1, 2)),
        precision=FULL,
        optimizer=SGD,
        regime=context.regime,
    )
    return CostModel(context), strategy


def _cost(*args: Any, **network: float) -> Cost:
    model, strategy = _model(*args, **network)
    return model.cost(strategy)


def _idle(stages: int, drain_every: int) -> float:
    # Updates take no time: the last stage's has no copies to make.
    settings = Asynchronous(drain_every=drain_every)
    parts = _cost(stages, settings, memory_bandwidth=1e18).breakdown_s
    work = parts["compute"] + parts["optimizer"]
    return parts["pipeline_bubble"] / (work + parts["pipeline_bubble"])


@pytest.mark.parametrize(
    ("drain_every", "share"), [(8, 0.273), (128, 0.023), (512, 0.006)]
)
def test_four_equal_stages_are_idle_while_they_drain(
    drain_every: int, share: float
) -> None:
    found = _idle(4, drain_every)
    assert found == pytest.approx(3 / (drain_every + 3), rel=1e-6)
    assert found == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_below_a_twentieth_is_idle_if_drains_are_far_apart(stages: int) -> None:
    """From 19 (S - 1) microbatches on; windows here are of whole steps of eight."""
    few = 19 * (stages - 1)
    assert _idle(stages, -(-(few + 1) // 8) * 8) < 0.05
    assert _idle(stages, few // 8 * 8) > 0.05


def test_a_step_is_its_part_of_a_window() -> None:
    """A drain in each step takes as long as a flush, and updates as many times more."""
    for many in (8, 16):
        found = _cost(4, Asynchronous(drain_every=many), many).breakdown_s
        plain = _cost(4, None, many).breakdown_s
        for part in ("compute", "pipeline_transfer", "data_parallel"):
            assert found[part] == pytest.approx(plain[part], rel=0.01)
        assert found["optimizer"] > many * plain["optimizer"]
    steps = [_cost(4, Asynchronous(drain_every=64), many) for many in (8, 16, 32)]
    assert steps[1].step_time_s == pytest.approx(2 * steps[0].step_time_s)
    assert steps[2].step_time_s == pytest.approx(4 * steps[0].step_time_s)


def test_updates_are_counted_by_microbatch() -> None:
    """The weights are copied, too, where others under way use them."""
    every = _cost(2, Asynchronous(drain_every=64), 8)
    other = _cost(2, Asynchronous(drain_every=64, update_every=4), 8)
    assert every.breakdown_s["optimizer"] == pytest.approx(
        4 * other.breakdown_s["optimizer"]
    )


@pytest.mark.parametrize("update_every", [1, 2])
def test_stages_hold_a_version_for_each_update_that_is_ahead(update_every: int) -> None:
    settings = Asynchronous(drain_every=64, update_every=update_every)
    found, plain = _cost(4, settings).memory, _cost(4, None).memory
    older = np.array([3, 2, 1, 0] if update_every == 1 else [2, 1, 1, 0])
    assert found.parameters - plain.parameters == pytest.approx(older * 2 * WEIGHTS)
    for part in ("optimizer", "activations", "buffers"):
        assert np.array_equal(getattr(found, part), getattr(plain, part)), part
    # Where each backward has an update, none begins beside gradients.
    assert np.array_equal(found.gradients, plain.gradients * (update_every > 1))


@pytest.mark.parametrize("update_every", [1, 2])
def test_copies_average_gradients_before_each_update(update_every: int) -> None:
    """Bytes of two units, and a scalar for each of four tensors, if it has any."""
    settings = Asynchronous(drain_every=64, update_every=update_every)
    found, alone = _cost(4, settings, copies=2), _cost(4, settings)
    updates, size = 8 // update_every, 2 * WEIGHTS + 4 * 4
    assert found.collective_bytes["all_reduce"] == updates * size
    assert found.link_bytes["dp"] == updates * size
    # Of two members each sends half twice, at the rate between their hosts.
    seconds = updates * size / 1e10
    assert found.breakdown_s["data_parallel"] == pytest.approx(seconds)
    for part in ("compute", "optimizer", "pipeline_transfer"):
        assert found.breakdown_s[part] == pytest.approx(alone.breakdown_s[part])
    # Stages wait for each other's updates while the pipeline fills and drains.
    more = found.step_time_s - alone.step_time_s
    assert seconds < more < seconds * (64 + 4) / 64
    # Beside activations of a microbatch less.
    assert (found.memory.total <= alone.memory.total + size).all()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("update_every", [1, 2])
@pytest.mark.parametrize("many", [8, 32])
@pytest.mark.parametrize("stages", [2, 4])
def test_tables_agree_with_the_simulation(
    stages: int, many: int, update_every: int, copies: int
) -> None:
    """Memory is equal, time within a fiftieth."""
    settings = Asynchronous(drain_every=64, update_every=update_every)
    context = _context(stages, settings, copies=copies)
    cost, parts, memory = price_both_ways(context, **_degrees(stages, many, copies))
    # Windows are short: filling and draining them waits for sums, too.
    assert sum(parts.values()) == pytest.approx(cost.step_time_s, rel=0.02 * copies)
    assert parts["optimizer"] <= cost.breakdown_s["optimizer"]
    assert parts["data_parallel"] == pytest.approx(cost.breakdown_s["data_parallel"])
    assert memory == pytest.approx(cost.memory.total.max())


def test_a_drawing_ends_without_a_flush() -> None:
    """It has the actions of the first step's time, no later ones."""
    model, strategy = _model(4, Asynchronous(drain_every=64), between=1e13)
    drawn = model.timeline(strategy)
    cost = model.cost(strategy)
    assert drawn.step_time_s == pytest.approx(cost.step_time_s)
    assert drawn.actions.end_s.max() <= cost.step_time_s
    ends = [drawn.actions.end_s[drawn.actions.rank == rank].max() for rank in range(4)]
    forward = drawn.actions.kind == 0
    # All ranks are at work to the end, but for one action at most.
    longest = (drawn.actions.end_s - drawn.actions.start_s).max()
    assert min(ends) >= cost.step_time_s - 2 * longest
    backwards = [(~forward & (drawn.actions.rank == rank)).sum() for rank in range(4)]
    assert backwards == sorted(backwards)
    assert backwards[0] < 8
