"""``run`` on a live group: refusals, measurement, data of one's own."""

from __future__ import annotations

from typing import Any

import torch

from executors import run
from executors.data import synthetic_batch
from executors.measuring.traffic import CollectiveCounter
from planner.errors import ExecutionError, FingerprintError
from planner.schema import Plan
from tests.distributed.cases import BATCH, SEQ, build, make_plan
from tests.distributed.pool import Pool


def _error(plan_json: str, model: str, force: bool) -> tuple[str, str]:
    plan = Plan.from_json(plan_json)
    try:
        run(plan, lambda: build(model), steps=1, force=force)
    except (ExecutionError, FingerprintError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_too_few_processes_are_refused_with_both_numbers(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=4)
    for kind, text in pool.run(_error, 2, plan.to_json(), "llama", False):
        assert kind == "ExecutionError"
        assert "2 processes" in text
        assert "needs 4" in text
        assert "\n" not in text


def test_a_plan_for_another_model_is_refused_with_the_difference(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=2)
    for kind, text in pool.run(_error, 2, plan.to_json(), "gpt2", False):
        assert kind == "FingerprintError"
        assert f"{plan.model.parameters:,}" in text
        assert "model.embed_tokens" in text
        assert "\n" not in text


def test_force_still_names_modules_that_are_not_there(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=2)
    for kind, text in pool.run(_error, 2, plan.to_json(), "gpt2", True):
        assert kind == "FingerprintError"
        assert "model.embed_tokens" in text


def test_a_plan_with_violations_is_not_started(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=2, gradient_compression="bfloat16")
    for kind, text in pool.run(_error, 2, plan.to_json(), "llama", False):
        assert kind == "ExecutionError"
        assert "say semantics=approximate" in text


def _tampered(plan_json: str, model: dict[str, Any]) -> str:
    plan = Plan.from_json(plan_json)
    changed = plan.model.model_copy(update=model)
    try:
        run(plan.model_copy(update={"model": changed}), lambda: build("llama"), steps=1)
    except ExecutionError as error:
        return str(error)
    return ""


def test_what_the_model_rules_out_is_not_started(pool: Pool) -> None:
    """By a plan that was changed after it was read, too."""
    plan = make_plan("llama", tp=2, sequence_parallel=True, num_microbatches=16)
    for model, said in (
        ({"whole_stream": "tp leaves h.0 whole"}, "tp leaves h.0 whole"),
        ({"mixing": ("layers.*.conv",)}, "no pattern splits layers.*.conv"),
        ({"batch_norm_values": 1}, "consent by semantics=approximate"),
    ):
        for text in pool.run(_tampered, 2, plan.to_json(), model):
            assert text.startswith("this plan cannot be run: ")
            assert said in text


def _measured(plan_json: str) -> dict[str, object]:
    plan = Plan.from_json(plan_json)
    heard: list[float] = []
    result = run(
        plan,
        lambda: build("llama"),
        steps=4,
        measure=True,
        on_step=lambda report: heard.append(report.loss),
    )
    assert result.measurement is not None
    return {"heard": heard, **result.measurement.model_dump(mode="json")}


def test_measure_counts_what_zero3_must_send(pool: Pool) -> None:
    plan = make_plan("llama", dp_shard=2, zero_stage=3)
    first, second = pool.run(_measured, 2, plan.to_json())
    assert first["heard"] == first["losses"]
    assert second["heard"] == []
    assert len(first["step_times_s"]) == 4
    assert first["median_step_time_s"] > 0
    total = sum(p.numel() for p in build("llama").parameters()) * 4
    shares = 4 + 1 + 1 + 1  # blocks, embedding, head, and what is left to the root
    for rank in first["collectives"]:
        # Freed after forward, gathered again for backward; the root's own share is not.
        assert total < rank["all_gather"]["bytes"] <= 2 * total
        assert rank["reduce_scatter"]["count"] == shares
        assert rank["reduce_scatter"]["bytes"] == total
    # Shards of parameters at least, and less than everything whole with gradients.
    for peak in first["peak_memory_bytes"]:
        assert total / 2 < peak


def test_zero3_takes_less_memory_than_replicas(pool: Pool) -> None:
    peaks = []
    for mesh in ({"dp_replicate": 2}, {"dp_shard": 2, "zero_stage": 3}):
        plan = make_plan("llama", **mesh)
        peaks.append(
            max(pool.run(_measured, 2, plan.to_json())[0]["peak_memory_bytes"])
        )
    assert peaks[1] < peaks[0]


def _own_data(plan_json: str) -> list[list[float]]:
    plan = Plan.from_json(plan_json)
    batches = [synthetic_batch(plan.workload, step) for step in range(2)]
    # The iterable ends after two batches and begins anew.
    again = run(plan, lambda: build("llama"), batches, steps=3)
    function = run(plan, lambda: build("llama"), lambda s: batches[s % 2], steps=3)
    plain = run(plan, lambda: build("llama"), steps=2)
    return [list(r.losses) for r in (again, function, plain)]


def test_data_of_ones_own_may_be_an_iterable_or_a_function(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=2)
    again, function, plain = pool.run(_own_data, 2, plan.to_json())[0]
    assert again == function
    assert again[:2] == plain


def _wrong_size(plan_json: str) -> str:
    batch = {"input_ids": torch.zeros(BATCH - 1, SEQ, dtype=torch.int64)}
    try:
        run(Plan.from_json(plan_json), lambda: build("llama"), [batch], steps=1)
    except ExecutionError as error:
        return str(error)
    return ""


def test_a_batch_of_another_size_is_refused(pool: Pool) -> None:
    plan = make_plan("llama", dp_replicate=2)
    assert f"{BATCH - 1} samples" in pool.run(_wrong_size, 2, plan.to_json())[0]


def _count() -> dict[str, tuple[int, int]]:
    import torch.distributed as dist

    with CollectiveCounter() as counter:
        dist.all_reduce(torch.zeros(10))
        dist.all_gather([torch.zeros(5), torch.zeros(5)], torch.zeros(5))
        dist.barrier()
    return {kind: (t.count, t.bytes) for kind, t in counter.traffic().items()}


def test_traffic_is_counted_at_its_larger_side(pool: Pool) -> None:
    assert pool.run(_count, 2)[0] == {"all_gather": (1, 40), "all_reduce": (1, 40)}
