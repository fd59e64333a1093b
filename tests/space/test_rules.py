"""Rules: one by one, as masks, and against the simulator and the executors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import StrategyError
from planner.schema import Optimizer, Precision, Strategy
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.schedules import schedule_name, schedule_names
from planner.schema.violations import executor_violations
from planner.space import (
    RECOMPUTE_NAMES,
    RULES,
    Facts,
    Regime,
    StrategyTable,
    build_strategy,
    check,
    gather_facts,
    legal,
    skeleton,
    violations,
)
from tests.cost.made import device, hosts, row, table_of, uniform_graph
from tests.simulate.cases import violation

FACTS = Facts(
    num_devices=16,
    global_batch=16,
    seq_len=64,
    num_units=12,
    tp_dims={"num_heads": 12, "features": 48},
    num_experts=4,
    target="any",
)
DEGREES = st.sampled_from([1, 2, 3, 4, 8])
ROWS = st.fixed_dictionaries(
    {
        "pp": DEGREES,
        "dp_replicate": DEGREES,
        "dp_shard": DEGREES,
        "cp": DEGREES,
        "tp": DEGREES,
        "ep": DEGREES,
        "zero_stage": st.integers(0, 3),
        "schedule": st.integers(0, len(schedule_names()) - 1),
        "virtual_stages": st.integers(1, 3),
        "microbatch_size": st.sampled_from([1, 2, 4]),
        "num_microbatches": st.sampled_from([1, 2, 4, 6, 8, 16]),
        "recompute": st.integers(0, 2),
        "sequence_parallel": st.integers(0, 1),
    }
)


def names_of_violated(values: dict[str, int], facts: Facts) -> set[str]:
    table = table_of(values)
    rules = [rule for rule in RULES if rule.name != "target"]
    violated = {rule.name for rule in rules if rule.violated(table, facts)[0]}
    if not violated and RULES[-1].violated(table, facts)[0]:
        return {RULES[-1].name}
    return violated


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=12),
    target=st.sampled_from(["any", "meshwright"]),
    seq_len=st.sampled_from([None, 64]),
    num_experts=st.sampled_from([0, 4]),
)
def test_the_mask_of_a_table_is_what_rows_say_one_by_one(
    rows: list[dict[str, int]], target: str, seq_len: int | None, num_experts: int
) -> None:
    facts = replace(FACTS, target=target, seq_len=seq_len, num_experts=num_experts)
    mask = legal(table_of(*rows), facts)
    for values, allowed in zip(rows, mask, strict=True):
        reasons = violations(skeleton(values), facts)
        recompute = values["recompute"]
        if recompute and not reasons:
            # Without stages a strategy does not say what it recomputes.
            reasons = tuple(names_of_violated(values, facts))
        assert bool(allowed) == (not reasons), (values, reasons)
        assert all(reasons)


@settings(deadline=None, max_examples=80)
@given(values=ROWS)
def test_the_schedule_rule_is_the_simulators(values: dict[str, int]) -> None:
    violated = "schedule" in names_of_violated(values, FACTS)
    key = (values["pp"], values["virtual_stages"], values["num_microbatches"])
    name = schedule_name(values["schedule"])
    if values["pp"] > 1:
        reason = violation(name, *key)
        assert violated == (reason is not None)
        if reason:
            assert reason in violations(skeleton(values), FACTS)
    else:
        assert violated == (name != "GPipe" or values["virtual_stages"] > 1)


@settings(deadline=None, max_examples=80)
@given(values=ROWS)
def test_the_target_rule_is_the_executors(values: dict[str, int]) -> None:
    facts = replace(FACTS, target="meshwright", num_devices=10**6)
    others = names_of_violated(values, replace(facts, target="any"))
    stages = values["pp"] * values["virtual_stages"]
    if others or (values["virtual_stages"] > 1 and values["pp"] == 1):
        return
    strategy = build_strategy(
        values,
        unit_names=[str(i) for i in range(stages)],
        bounds=range(stages + 1),
        sharding=facts.sharding,
    )
    violates = bool(
        executor_violations(strategy, tied=facts.tied, backend=facts.backend)
    )
    assert ("target" in names_of_violated(values, facts)) == violates, strategy.label()


@pytest.mark.parametrize(
    ("values", "facts", "words"),
    [
        ({"tp": 8}, {}, "tp=8 does not divide num_heads=12; use 1, 2, 3, 4, 6, 12"),
        ({"dp_replicate": 16, "tp": 2}, {}, "needs 32 devices, 16 are free"),
        ({"dp_replicate": 3}, {}, "data parallel 3 is not global_batch=16"),
        ({"pp": 8, "virtual_stages": 2, "schedule": 2}, {}, "more stages than"),
        ({"pp": 4, "schedule": 1}, {}, "num_microbatches=1 is below the 4 stages"),
        ({"schedule": 1}, {}, "needs pp > 1"),
        ({"dp_shard": 4}, {}, "zero_stage=0 with dp_shard=4"),
        ({"zero_stage": 2}, {}, "zero_stage=2 with dp_shard=1 x cp=1"),
        ({"tp": 2}, {"has_sharding": False}, "no module of the model could be split"),
        (
            {"tp": 2},
            {"has_sharding": False, "whole": {"*.qkv": "are cut", "*.out": "are cut"}},
            "could be split (*.qkv, *.out are cut); use tp=1",
        ),
        (
            {"tp": 2, "sequence_parallel": 1},
            {"whole_stream": "tp leaves h.0 whole"},
            "sequence_parallel, but tp leaves h.0 whole",
        ),
        (
            {"tp": 2, "sequence_parallel": 1},
            {"mixing": ("layers.*.q",), "sharding": {"layers.*.up": "colwise"}},
            "sequence_parallel, but no pattern splits layers.*.q, between which",
        ),
        (
            {"tp": 2, "sequence_parallel": 1},
            {"seq_len": None},
            "sequence_parallel, but the model has no sequence",
        ),
        (
            {"microbatch_size": 1, "num_microbatches": 16},
            {"batch_norm_values": 1},
            "or consent by semantics=approximate",
        ),
        (
            {"dp_shard": 2, "num_microbatches": 8},
            {"own_loss": "coupled"},
            "data parallel 2 x num_microbatches=8 divides the batch",
        ),
        ({"sequence_parallel": 1}, {}, "needs tp > 1"),
        ({"cp": 2}, {"seq_len": None}, "no sequence to divide"),
        ({"cp": 3}, {}, "does not divide seq_len=64"),
        ({"ep": 2}, {"num_experts": 0}, "no experts"),
        ({"ep": 2}, {}, "must divide num_experts=4 and dp_shard x cp x tp=1"),
        (
            {"cp": 2, "num_microbatches": 16},
            {"target": "meshwright", "attention": None},
            "neither causal nor full",
        ),
        (
            {"dp_shard": 2, "ep": 2, "zero_stage": 1, "num_microbatches": 8},
            {"target": "meshwright"},
            "without a pattern of style 'experts'",
        ),
    ],
)
def test_every_rule_says_value_rule_and_remedy(
    values: dict[str, int], facts: dict[str, Any], words: str
) -> None:
    strategy = skeleton(row(**values))
    with pytest.raises(StrategyError) as caught:
        check(strategy, replace(FACTS, **facts))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_legal_strategy_passes() -> None:
    values = row(pp=2, dp_shard=2, tp=4, zero_stage=2, schedule=1, num_microbatches=8)
    assert violations(skeleton(values), FACTS) == ()
    check(skeleton(values), FACTS)


def test_tied_parameters_that_tp_splits_unlike_are_refused_before_pricing() -> None:
    tied = (("embed.weight", "head.weight"),)
    facts = replace(FACTS, target="meshwright", tied=tied, sharding={"head": "colwise"})
    assert names_of_violated(row(tp=2, num_microbatches=16), facts) == {"target"}
    alike = replace(facts, sharding={"head": "colwise", "embed": "vocab"})
    assert names_of_violated(row(tp=2, num_microbatches=16), alike) == set()


def test_a_sharding_by_hand_is_judged_by_its_own_patterns() -> None:
    sharding = {"layers.*.q": "colwise", "layers.*.up": "colwise"}
    facts = replace(FACTS, sharding=sharding, mixing=("layers.*.q",))
    bare = skeleton(row(tp=2, sequence_parallel=1, num_microbatches=16))
    assert violations(bare, facts) == ()
    for patterns, refused in (
        ({"q": "colwise"}, False),
        ({"layers.*.up": "colwise"}, True),
    ):
        own = bare.sharding.model_copy(update={"patterns": patterns})
        reasons = violations(bare.model_copy(update={"sharding": own}), facts)
        assert ["splits layers.*.q" in reason for reason in reasons] == [True] * refused


def test_precision_and_optimizer_of_the_request_are_looked_at() -> None:
    plain = replace(FACTS, target="meshwright")
    values = row(num_microbatches=16)
    assert names_of_violated(values, plain) == set()
    for changed in (
        replace(plain, precision=Precision(compute="float8")),
        replace(plain, optimizer=Optimizer(state_dtype="bfloat16")),
    ):
        assert names_of_violated(values, changed) == {"target"}


def test_facts_are_those_of_model_and_free_devices() -> None:
    cluster = hosts((1, 4, device()), (1, 4, device("cpu", backend="gloo")))
    facts = gather_facts(
        uniform_graph(6),
        cluster.with_occupied([1, 2]),
        global_batch=8,
        target="any",
        precision=Precision(),
        optimizer=Optimizer(),
    )
    assert (facts.num_devices, facts.num_units, facts.seq_len) == (6, 6, 1024)
    assert facts.tp_dims == {"features": 512}
    assert facts.has_sharding
    assert facts.sharding == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    assert facts.backend == "gloo"


@settings(deadline=None, max_examples=60)
@given(values=ROWS)
def test_rows_and_strategies_say_the_same(values: dict[str, int]) -> None:
    strategy: Strategy = skeleton(values)
    again = StrategyTable.from_strategies([strategy]).row(0)
    assert again == {**values, "recompute": 0}
    stages = values["pp"] * values["virtual_stages"]
    if schedule_name(values["schedule"]) in {"ZBVZeroBubble", "DualPipeV"}:
        return
    build = partial(
        build_strategy,
        unit_names=[str(i) for i in range(stages)],
        bounds=range(stages + 1),
        sharding={"*.q": "colwise", "*.w1": "experts"},
        grad_clip_norm=1.0,
    )
    full = build(values)
    # A copy of another is what validation would have made.
    like = build_strategy(
        row(), unit_names=["a"], bounds=(0, 1), sharding={}, grad_clip_norm=1.0
    )
    assert build(values, like=like) == full
    assert Strategy.model_validate(full.model_dump()) == full
    assert StrategyTable.from_strategies([full]).row(0) == values
    assert {g.recompute for g in full.stages} == {RECOMPUTE_NAMES[values["recompute"]]}


def test_an_empty_table_is_legal_nowhere() -> None:
    empty = table_of(row())[np.zeros(0, dtype=np.int64)]
    assert len(legal(empty, FACTS)) == 0
    assert len(legal(empty, replace(FACTS, target="meshwright"))) == 0


def _legal_in(regime: Regime, target: str, **degrees: int) -> bool:
    facts = replace(
        FACTS,
        global_batch=2 * degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1),
        precision=Precision(compute="float32"),
        backend="gloo",
        target=target,
        regime=regime,
    )
    table = table_of(row(microbatch_size=2, **degrees))
    return bool(legal(table, facts)[0])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_what_is_legal_in_one_regime_is_no_answer_for_another(
    order: tuple[int, ...],
) -> None:
    """Verdicts of executors and launchers are kept, each regime's apart."""
    regimes = [
        Regime(),
        Regime.from_pins({"synchronisation": "local_steps"}),
        Regime(synchronisation=LocalSteps()),
        Regime.from_pins({"gradient_compression": "float16"}),
    ]
    verdicts: dict[int, list[bool]] = {}
    for index in order:
        verdicts[index] = [
            _legal_in(regimes[index], target, **degrees)
            for target, degrees in (
                ("meshwright", {"dp_replicate": 4}),
                ("meshwright", {"dp_shard": 4, "zero_stage": 1}),
                ("meshwright", {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1}),
                ("any", {"dp_replicate": 4}),
                ("any", {"dp_shard": 4, "zero_stage": 1}),
                ("megatron", {"dp_replicate": 4}),
            )
        ]
    assert verdicts[0] == [True, True, True, True, True, True]
    assert verdicts[1] == [True, False, True, True, False, False]
    # Without consent the executors refuse it; what is legal at all does not ask.
    assert verdicts[2] == [False, False, False, True, False, False]
    assert verdicts[3] == [True, False, False, True, True, False]


def test_a_strategy_is_judged_by_its_own_regime() -> None:
    strategy = skeleton(row(dp_shard=2, zero_stage=1, microbatch_size=8))
    assert violations(strategy, FACTS) == ()
    apart = strategy.model_copy(update={"synchronisation": LocalSteps(period=2)})
    (reason,) = violations(apart, FACTS)
    assert reason.startswith("synchronisation=local_steps:period=2 with dp_replicate=1")
