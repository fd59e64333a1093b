"""Texts about a plan, held against its own numbers."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from planner import predict
from planner.schema import Communication, Mesh, Overlap, Stage, Strategy
from planner.schema.describe import paragraph, unpriced
from planner.schema.strategy_parts import BucketOrder, Collective
from planner.units import format_bytes, format_seconds
from tests.cost.made import device, hosts, uniform_graph
from tests.plans import gpt2_plan


def _lines(text: str) -> dict[str, str]:
    return {line[:11].strip(): line[11:] for line in text.splitlines()}


def test_a_summary_has_the_numbers_of_the_plan() -> None:
    plan = gpt2_plan()
    said = _lines(plan.summary())
    assert list(said) == [
        "model",
        "cluster",
        "mesh",
        "schedule",
        "batch",
        "recompute",
        "step",
        "interval",
        "memory",
        "host",
        "found by",
    ]
    low, high = plan.prediction.step_time_interval_s or (0, 0)
    assert said["interval"].startswith(
        f"{format_seconds(low)} to {format_seconds(high)} "
    )
    assert low < plan.prediction.step_time_s < high
    assert said["model"] == "gpt2, 124M parameters"
    assert said["cluster"] == "dgx-a100, 8 of 8 devices used"
    assert said["step"].startswith(format_seconds(plan.prediction.step_time_s) + " (")
    fullest = max(plan.prediction.memory, key=lambda entry: entry.total_bytes)
    used, limit = (format_bytes(x) for x in (fullest.total_bytes, fullest.limit_bytes))
    assert said["memory"].startswith(f"{used} of the {limit} that may be used on ")
    assert f"{64 * 128 / plan.prediction.step_time_s:,.0f} tokens/s" in said["step"]
    counts = plan.provenance.evaluations
    assert said["found by"] == (
        f"{plan.provenance.partitioner}; {counts['analytic']:,} strategies priced in "
        f"closed form, {counts['simulated']:,} simulated"
    )


@pytest.mark.parametrize(
    ("many", "batch"),
    [
        (1, "64 samples a step: 1 microbatch of 8 on each of 8 replicas"),
        (2, "64 samples a step: 2 microbatches of 4 on each of 8 replicas"),
    ],
)
def test_one_is_not_plural(many: int, batch: str) -> None:
    plan = gpt2_plan(dp_shard=8, num_microbatches=many)
    assert _lines(plan.summary())["batch"] == batch
    assert _lines(plan.summary())["schedule"] == "no pipeline"


def test_a_pipeline_says_its_stages() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    sizes = sorted(len(stage.modules) for stage in plan.strategy.stages)
    said = _lines(plan.summary())
    assert re.match(
        rf"1F1B, 2 stages of {sizes[0]}( to {sizes[1]})? units$", said["schedule"]
    )
    assert "pp 2" in said["mesh"]
    assert ", pp rank " in said["memory"]


def test_virtual_stages_are_told_apart() -> None:
    plan = gpt2_plan(pp=2, schedule="Interleaved1F1B", virtual_stages=2)
    said = _lines(plan.summary())["schedule"]
    assert said.startswith("Interleaved1F1B, 4 stages (2 on each pp rank) of ")


def test_the_fullest_device_is_the_one_with_the_least_room() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    roomy, tight = plan.prediction.memory
    roomy = roomy.model_copy(update={"activations_bytes": 60e9, "limit_bytes": 90e9})
    tight = tight.model_copy(
        update={"limit_bytes": tight.total_bytes, "device_type": "small"}
    )
    prediction = plan.prediction.model_copy(update={"memory": (roomy, tight)})
    said = plan.model_copy(update={"prediction": prediction}).summary()
    assert _lines(said)["memory"].endswith("on the fullest device (small, pp rank 1)")


def test_stages_that_recompute_unlike_are_counted() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    kinds = ("none", "full")
    stages = tuple(
        Stage(rank=stage.rank, modules=stage.modules, recompute=kind)
        for stage, kind in zip(plan.strategy.stages, kinds, strict=True)
    )
    strategy = plan.strategy.model_copy(update={"stages": stages})
    mixed = plan.model_copy(update={"strategy": strategy})
    assert "recompute  none on 1 stage, full on 1 stage" in mixed.summary()


def test_a_plan_without_stages_can_be_described() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    strategy = plan.strategy.model_copy(update={"stages": ()})
    said = plan.model_copy(update={"strategy": strategy}).summary()
    assert "schedule   1F1B, 2 stages\n" in said
    assert "recompute  none" in said


def test_what_cannot_be_run_is_said() -> None:
    plan = gpt2_plan().model_copy(update={"not_runnable": ("cp=2 is not run yet",)})
    assert plan.summary().endswith("Meshwright cannot run it: cp=2 is not run yet")


def test_an_explanation_accounts_for_all_the_time() -> None:
    plan = gpt2_plan(pp=2, schedule="1F1B")
    text = plan.explain()
    assert text.startswith(plan.summary())
    assert f"bound by: {plan.provenance.bound_by}" in text
    shares = [float(share) for share in re.findall(r"^ +([\d.]+)%  ", text, re.M)]
    assert len(shares) > 1
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert shares == sorted(shares, reverse=True)


def test_an_explanation_names_runners_up_and_memory() -> None:
    plan = gpt2_plan()
    text = plan.explain()
    assert plan.provenance.alternatives
    for other in plan.provenance.alternatives:
        assert f"{other.label}: {other.reason}" in text
    table = text.split("memory by pp rank:\n")[1].split("\n\n")[0].splitlines()
    header = re.split(r"  +", table[0].strip())
    assert header[:2] == ["rank", "device"]
    assert header[-3:] == ["total", "limit", "in nvidia-smi"]
    assert len(table) == 1 + len(plan.prediction.memory)
    for line, entry in zip(table[1:], plan.prediction.memory, strict=True):
        cells = dict(zip(header, re.split(r"  +", line.strip()), strict=True))
        assert cells.pop("rank") == str(entry.rank)
        assert cells.pop("device") == entry.device_type
        assert cells.pop("in nvidia-smi") == f"{entry.total_bytes / 2**30:.3g} GiB"
        for name, cell in cells.items():
            assert cell == format_bytes(getattr(entry, f"{name}_bytes"))


def test_a_column_of_zeros_is_left_out() -> None:
    plan = gpt2_plan(dp_shard=8)
    assert all(entry.buffers_bytes == 0 for entry in plan.prediction.memory)
    assert " buffers " not in plan.explain()
    assert " buffers " in gpt2_plan(pp=2, schedule="1F1B").explain()


def test_assumptions_are_shown() -> None:
    plan = gpt2_plan()
    guessed = plan.provenance.model_copy(update={"assumptions": ("x > 0 is true",)})
    text = plan.model_copy(update={"provenance": guessed}).explain()
    assert text.endswith("assumed while reading the model:\n  x > 0 is true")


def test_what_no_price_knows_is_said() -> None:
    plan = gpt2_plan(compile=True)
    assert _lines(plan.summary())["not priced"] == "compile=True"
    assert "The prediction leaves out compile=True." in paragraph(plan)
    strategy = plan.strategy.model_copy(
        update={"compile": False, "overlap": Overlap(bucket_bytes=2**20)}
    )
    told = _lines(plan.model_copy(update={"strategy": strategy}).summary())
    assert told["not priced"] == "overlap.bucket_bytes=1048576"
    assert "not priced" not in _lines(gpt2_plan().summary())
    assert "leaves out" not in paragraph(gpt2_plan())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f"overlap.{name}", 4096) for name in Overlap.model_fields),
        ("compile", True),
    ],
)
def test_what_is_said_not_to_be_priced_is_not(field: str, value: object) -> None:
    plain = Strategy(mesh=Mesh(dp_replicate=8), microbatch_size=2)
    slot, _, name = field.partition(".")
    changed: object = Overlap.model_construct(**{name: value}) if name else value
    other = plain.model_copy(update={slot: changed})
    assert unpriced(other) == (f"{field}={value}",)
    one, two = (
        predict(uniform_graph(4), hosts((1, 8, device())), s) for s in (plain, other)
    )
    assert one.prediction == two.prediction


def test_an_order_of_buckets_shortens_the_step_and_is_said() -> None:
    ring = Collective(algorithm="ring")
    made = [
        predict(
            uniform_graph(32),
            hosts((8, 1, device()), between=1e8),
            Strategy(
                mesh=Mesh(dp_replicate=8),
                microbatch_size=2,
                communication=Communication(replicas=ring, buckets=order),
            ),
        )
        for order in get_args(BucketOrder)
    ]
    one, two = (plan.prediction for plan in made)
    assert two.step_time_s < one.step_time_s
    changed = {
        name
        for name, seconds in one.breakdown_s.items()
        if two.breakdown_s[name] != pytest.approx(seconds)
    }
    assert changed == {"data_parallel"}
    assert one.collective_bytes == two.collective_bytes
    assert unpriced(made[1].strategy) == ()
    told = "needs first are summed first, others beside it"
    assert told not in _lines(made[0].summary())["execution"]
    assert told in _lines(made[1].summary())["execution"]


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ("tree", "by tree (on GPUs NCCL's, by NCCL_ALGO=allreduce:tree; else"),
        ("direct", "by direct (messages of our own: NCCL has ring and tree, but no"),
    ],
)
def test_who_sums_is_said(algorithm: Any, told: str) -> None:
    replicas = Collective(algorithm=algorithm)
    strategy = Strategy(
        mesh=Mesh(dp_replicate=8), communication=Communication(replicas=replicas)
    )
    made = predict(uniform_graph(4), hosts((1, 8, device())), strategy)
    assert told in _lines(made.summary())["execution"]
