"""Memory by category against arithmetic by hand, and counts against action tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cost.recipes import Recipe
from planner.cost.result import MemoryParts
from planner.cost.strategy.memory import memory_parts
from planner.cost.table.memory import (
    RULES,
    chunks_between_halves,
    chunks_in_flight,
)
from planner.schema import Optimizer, Precision
from planner.schema.schedules import schedule_names, schedule_spec
from planner.simulate import (
    actions,
    peak_activation_bytes,
    peak_counts,
    peak_in_flight,
    schedule_columns,
)
from tests.cost.made import device, hosts, setting_for, uniform_graph
from tests.simulate.cases import legal

#: 1,000 scalars, on 4 ways of sharding, 100 of them in the first unit.
P, SHARD, UNIT = 1000, 250, 100
MIXED = Precision(parameter="float32", compute="bfloat16", reduce="float32")
FULL = Precision(parameter="float32", compute="float32", reduce="float32")

RULES_OF = schedule_columns(*RULES)


def parts(zero: int, **changes: Any) -> MemoryParts:
    arguments: dict[str, Any] = {
        "parameters": P,
        "sharded": SHARD if zero else P,
        "first_trained": UNIT,
        "zero_stage": zero,
        "pp": 1,
        "num_microbatches": 1,
        "held_bytes": (0.0, 0.0, 0.0),
        "working_bytes": (0.0,) * 8,
        "receive_bytes": 0.0,
    }
    on_gpu = changes.pop("on_gpu", False)
    names = ("precision", "optimizer", "recipe")
    request = {name: changes.pop(name) for name in names if name in changes}
    kind = device(backend="nccl" if on_gpu else "gloo")
    cluster = hosts((1, 1, kind))
    context = setting_for(uniform_graph(2), cluster, **{"precision": FULL, **request})
    return memory_parts(context.scalar_bytes, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [
        # Everything whole: 4 bytes, 4 bytes, two states of 4 bytes.
        (0, 4 * P, 4 * P, 8 * P),
        # States sharded; a shard of weights beside the gathered ones; gradients summed
        # up whole until the last microbatch.
        (1, 4 * SHARD + 4 * P, 4 * P, 8 * SHARD),
        # Gradients reduced unit by unit; what the first unit's were copied to stays.
        (2, 4 * SHARD + 4 * P, 4 * SHARD + 4 * UNIT, 8 * SHARD),
        # Weights gathered unit by unit, too.
        (3, 4 * SHARD, 4 * SHARD + 4 * UNIT, 8 * SHARD),
    ],
)
def test_zero_stages_in_float32(
    zero: int, parameters: int, gradients: int, optimizer: int
) -> None:
    found = parts(zero, num_microbatches=2)
    assert found.parameters == parameters
    assert found.gradients == gradients
    assert found.optimizer == optimizer


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients"),
    [
        (0, 4 * P + 2 * P, 4 * P),
        # One microbatch's gradients are reduced as they come.
        (1, 4 * SHARD + 2 * P, 4 * SHARD),
        (2, 4 * SHARD + 2 * P, 4 * SHARD),
        (3, 4 * SHARD, 4 * SHARD),
    ],
)
def test_bfloat16_compute_adds_a_copy_of_two_bytes(
    zero: int, parameters: int, gradients: int
) -> None:
    found = parts(zero, precision=MIXED)
    assert found.parameters == parameters
    assert found.gradients == gradients


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_that_stay_beside_their_sum(zero: int) -> None:
    recipe = Recipe(name="x", gradients="both")
    for pp in (1, 2):
        kept = parts(zero, precision=MIXED, num_microbatches=2, pp=pp)
        both = parts(zero, precision=MIXED, num_microbatches=2, pp=pp, recipe=recipe)
        # Without a pipeline ZeRO 2 reduces unit by unit, and nothing whole stays.
        whole = 0 if zero == 2 and pp == 1 else 2 * P
        assert both.gradients == kept.gradients + whole
        narrow = {"precision": FULL, "num_microbatches": 2, "pp": pp}
        one = parts(zero, recipe=recipe, **narrow)
        assert one.gradients == parts(zero, **narrow).gradients


def test_gradients_accumulate_in_the_wider_dtype() -> None:
    # ZeRO 1 keeps whole gradients between microbatches, in float32.
    several = parts(1, precision=MIXED, num_microbatches=2)
    assert several.gradients == 4 * P


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_in_flight_depends_on_the_zero_stage(zero: int) -> None:
    working = {"working_bytes": (1.0, 20.0, 300.0, 4000.0) * 2}
    for many in (1, 2):
        found = parts(zero, precision=MIXED, num_microbatches=many, **working)
        # ZeRO 1 reduces nothing before its last microbatch, and no weights are wanted
        # behind it.
        last = many == 1
        unitwise = {
            1: 4000.0 if last else 1.0,
            2: 4000.0 if last else 20.0,
            3: 300.0,
        }[zero]
        assert found.activations == unitwise
    assert parts(zero, pp=2, num_microbatches=4, **working).activations == 1.0


def test_the_first_backward_has_all_in_flight_and_no_gradients() -> None:
    held = {"held_bytes": (9000.0, 9000.0 - 4 * P - 1, 0.0), "num_microbatches": 4}
    first = parts(0, precision=MIXED, pp=2, **held)
    assert (first.gradients, first.activations) == (0, 9000)
    more = {**held, "held_bytes": (9000.0, 9000.0, 0.0)}
    later = parts(0, precision=MIXED, pp=2, **more)
    assert (later.gradients, later.activations) == (4 * P, 9000)
    recipe = Recipe(name="x", gradients_ahead=True)
    ahead = parts(0, precision=MIXED, pp=2, recipe=recipe, **held)
    assert (ahead.gradients, ahead.activations) == (4 * P, 9000)


def test_zero_3_gathers_a_stage_that_backward_follows_upon_backward() -> None:
    between = 9000.0 - 4 * P
    held = {"pp": 2, "num_microbatches": 4, "precision": MIXED}
    found = parts(3, held_bytes=(between, 9000.0, between), **held)
    assert (found.parameters, found.activations) == (4 * SHARD, 9000)
    found = parts(3, held_bytes=(between, 9000.0, 9000.0 - 2 * P + 1), **held)
    assert (found.parameters, found.activations) == (4 * SHARD + 2 * P, 7001)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_keeps_stages_gathered_and_gradients_whole(zero: int) -> None:
    found = parts(zero, pp=4, num_microbatches=8)
    assert found.parameters == 4 * SHARD + 4 * P
    assert found.gradients == 4 * P


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (Optimizer(name="SGD"), 0),
        (Optimizer(name="SGD", momentum=0.9), 4),
        (Optimizer(name="AdamW"), 8),
        (Optimizer(name="AdamW", state_dtype="bfloat16"), 4),
    ],
)
def test_optimizers_hold_their_states(optimizer: Optimizer, states: int) -> None:
    assert parts(0, optimizer=optimizer).optimizer == states * P
    assert parts(3, optimizer=optimizer).optimizer == states * SHARD


def test_activations_buffers_and_reserve() -> None:
    lean = Recipe(name="lean", receive_buffers="in_flight", reserve_bytes=7.0)
    numbers = {
        "held_bytes": (100.0, 100.0, 0.0),
        "working_bytes": (10.0,) * 8,
        "receive_bytes": 3.0,
    }
    on_cpu = parts(0, **numbers, num_microbatches=5)
    assert on_cpu.activations == 110
    assert on_cpu.buffers == 15
    assert on_cpu.reserve == 0
    on_gpu = parts(0, **numbers, num_microbatches=5, on_gpu=True, recipe=lean)
    assert on_gpu.activations == 110
    assert on_gpu.buffers == 3
    assert on_gpu.reserve == pytest.approx(7 + 110 * 0.03)
    categories = ("parameters", "gradients", "optimizer", "activations", "buffers")
    total = sum(float(getattr(on_gpu, name)) for name in categories) + 7 + 3.3
    assert on_gpu.total == pytest.approx(total)


def test_arguments_broadcast_against_each_other() -> None:
    zero, many = np.arange(4)[:, None], np.array([1, 3])
    found = parts(1, zero_stage=zero, num_microbatches=many, precision=MIXED, pp=2)
    assert found.total.shape == (4, 2)
    for i, j in np.ndindex(4, 2):
        one = parts(
            1,
            zero_stage=int(zero[i, 0]),
            num_microbatches=int(many[j]),
            precision=MIXED,
            pp=2,
        )
        assert found.gradients[i, j] == one.gradients
        assert found.total[i, j] == one.total


def counted(schedule: str, pp: int, virtual: int, many: int) -> np.ndarray:
    code = schedule_spec(schedule).code  # type: ignore[arg-type]
    ranks = [
        chunks_in_flight(RULES_OF, code, pp, virtual, many, rank) for rank in range(pp)
    ]
    return np.array(ranks, dtype=float)


CASES = legal((2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 4, 6, 8, 12, 16, 24))


@pytest.mark.parametrize(
    "schedule", [name for name in schedule_names() if name != "ZBVZeroBubble"]
)
def test_chunks_in_flight_equal_the_action_tables(schedule: str) -> None:
    cases = [case for case in CASES if case[0] == schedule]
    assert cases
    for case in cases:
        table = actions(*case)
        exact = peak_activation_bytes(table, 1.0)
        assert counted(*case).tolist() == exact.tolist(), case


def test_a_single_stage_holds_what_peak_in_flight_says() -> None:
    for case in CASES:
        if case[0] in {"GPipe", "1F1B", "Eager1F1B"}:
            assert counted(*case).tolist() == peak_in_flight(actions(*case)).tolist()


def test_chunks_in_flight_bound_a_v_with_few_microbatches() -> None:
    cases = [case for case in CASES if case[0] == "ZBVZeroBubble"]
    assert cases
    for case in cases:
        exact = peak_activation_bytes(actions(*case), 1.0)
        assert (counted(*case) >= exact).all(), (case, counted(*case), exact)
        if case[3] >= 2 * case[1]:
            assert counted(*case).tolist() == exact.tolist(), case


def test_chunks_between_the_halves_are_bounded() -> None:
    for case in CASES:
        code = schedule_spec(case[0]).code
        pp = case[1]
        bound = [
            chunks_between_halves(RULES_OF, code, *case[1:], rank) for rank in range(pp)
        ]
        exact = peak_counts(actions(*case)).split
        assert (np.array(bound) >= exact).all(), (case, bound, exact)
        if not exact.any():
            assert not any(bound), case


def test_frozen_parameters_take_their_own_memory_alone() -> None:
    # Of 1,000 scalars 40 are trained; of those ZeRO leaves 10, the first unit has 8.
    for zero, gradients, optimizer in (
        (0, 4 * 40, 8 * 40),
        (1, 4 * 40, 8 * 10),
        (2, 4 * 10 + 4 * 8, 8 * 10),
        (3, 4 * 10 + 4 * 8, 8 * 10),
    ):
        shard, many = 10 if zero else 40, {"num_microbatches": 2}
        found = parts(zero, trained=40, trained_sharded=shard, first_trained=8, **many)
        assert found.parameters == parts(zero, **many).parameters
        assert found.gradients == gradients
        assert found.optimizer == optimizer


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients"),
    [
        (0, 6 * P, 2 * P),
        (2, 4 * SHARD + 2 * P, 2 * P),
        (3, 4 * SHARD + 2 * P, 2 * SHARD),
    ],
)
def test_one_program_gathers_first_and_keeps_gradients_as_computed(
    zero: int, parameters: int, gradients: int
) -> None:
    recipe = Recipe(name="x", gradients="computed", gathers_whole=True)
    found = parts(zero, precision=MIXED, recipe=recipe)
    assert found.parameters == parameters
    assert found.gradients == gradients
    assert found.optimizer == parts(zero, precision=MIXED).optimizer


@pytest.mark.parametrize(
    ("zero", "gradients"),
    [(0, 2 * P), (1, 2 * P), (2, 2 * SHARD)],
)
def test_computed_gradients_are_sharded_as_backward_goes(
    zero: int, gradients: int
) -> None:
    recipe = Recipe(name="x", gradients="computed")
    assert parts(zero, precision=MIXED, recipe=recipe).gradients == gradients
