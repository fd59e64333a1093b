"""Output of a dry run without a process group, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from executors.dryrun import dry_run, dry_runs
from planner.errors import ExecutionError, FingerprintError
from planner.schema import Optimizer, Plan
from planner.schema.verification import Verification
from tests.distributed.cases import BATCH, LAYERS, SEQ, VOCAB, build, make_plan
from tests.marked import cases

ADAM = Optimizer(name="AdamW", learning_rate=1e-3)


def _changed(plan: Plan, **fields: Any) -> Plan:
    return plan.model_copy(update={"strategy": plan.strategy.model_copy(update=fields)})


def test_memory_is_told_by_category() -> None:
    plan = make_plan("llama", dp_shard=4, zero_stage=3, optimizer=ADAM)
    found = dry_run(plan, lambda: build("llama"), 3)
    memory, weights = found.memory_bytes, 4 * plan.model.parameters
    assert set(memory) == {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
    }
    # A shard, and what is gathered at the peak: not everything.
    assert weights / 4 < memory["parameters"] < weights
    # Two states a parameter and a number of steps for each tensor.
    assert memory["optimizer"] == weights / 4 * 2 + 4 * plan.model.tensors
    logits = BATCH // 4 * SEQ * VOCAB * 4
    assert memory["activations"] > 2 * logits
    assert found.peak_bytes == sum(memory.values())


def test_flops_are_six_a_parameter_and_token_and_attention() -> None:
    plan = make_plan("llama")
    model = build("llama")
    found = dry_run(plan, lambda: build("llama"), 0)
    # Lookups in the embedding multiply nothing.
    products = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    products -= model.get_submodule("model.embed_tokens").weight.numel()  # type: ignore[operator, union-attr]
    # Scores and their products with values: forward twice, backward five times.
    attention = 4 * (2 + 5) * 2 * BATCH * SEQ * SEQ * 32
    assert found.flops == 6 * products * BATCH * SEQ + attention


STEPS: dict[str, dict[str, Any]] = {
    "1F1B": {"pp": 2, "schedule": "1F1B"},
    "V, split backward": {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
    "accumulated shards": {"dp_shard": 2, "zero_stage": 2},
    "GPipe": {"pp": 2, "schedule": "GPipe"},
    "Interleaved1F1B": {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    "LoopedBFS": {"pp": 2, "schedule": "LoopedBFS", "virtual_stages": 2},
    "InterleavedZeroBubble": {
        "pp": 2,
        "schedule": "InterleavedZeroBubble",
        "virtual_stages": 2,
    },
    "DualPipeV": {"pp": 2, "schedule": "DualPipeV", "virtual_stages": 2},
    "Eager1F1B": {"pp": 2, "schedule": "Eager1F1B"},
    "1F1B of ZeRO 3": {
        "pp": 2,
        "schedule": "1F1B",
        "dp_shard": 2,
        "zero_stage": 3,
    },
    "1F1B of ZeRO 2, recomputed": {
        "pp": 2,
        "schedule": "1F1B",
        "dp_shard": 2,
        "zero_stage": 2,
        "recompute": "full",
    },
    "1F1B of tp": {
        "pp": 2,
        "schedule": "1F1B",
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "selective",
        "optimizer": ADAM,
    },
    "accumulated ZeRO 1": {"dp_shard": 2, "zero_stage": 1},
    "accumulated ZeRO 3": {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    "accumulated replicas": {"dp_replicate": 2},
}
QUICK = {"1F1B"}
FURTHER = {"V, split backward", "accumulated shards"}


@pytest.mark.parametrize(
    "name", cases(STEPS, further=FURTHER, slow=set(STEPS) - QUICK - FURTHER)
)
def test_microbatches_that_are_counted_count_as_if_they_were_run(name: str) -> None:
    plan = _longer(make_plan("llama", num_microbatches=4, **STEPS[name]), 10)
    last = plan.strategy.mesh.num_devices - 1
    for rank in (last,) if name in QUICK else (0, last):
        found = dry_run(plan, lambda: build("llama"), rank)
        every = dry_run(plan, lambda: build("llama"), rank, every_microbatch=True)
        assert found.failure is None
        assert found.microbatches_run < found.microbatches == every.microbatches_run
        assert found.memory_bytes == every.memory_bytes
        assert found.collectives == every.collectives
        assert found.flops == every.flops


def _longer(plan: Plan, microbatches: int) -> Plan:
    """The same plan on more samples a step, one a microbatch."""
    longer = _changed(plan, num_microbatches=microbatches, microbatch_size=1)
    samples = longer.strategy.global_batch
    workload = longer.workload.model_copy(update={"global_batch": samples})
    return longer.model_copy(update={"workload": workload})


def test_ranks_of_one_call_are_as_if_alone() -> None:
    plan = make_plan("llama", pp=2, dp_shard=2, zero_stage=2, schedule="1F1B")
    plan = _longer(plan, 5)
    built = []

    def model() -> nn.Module:
        built.append(1)
        return build("llama")

    told: list[int] = []
    together = dry_runs(
        plan, model, (0, 2, 3), on_rank=lambda found: told.append(found.rank)
    )
    # Rank 3 has the same stage as rank 2, and each has copies.
    assert len(built) == 1
    assert told == [0, 2, 3]
    assert together[1] == dry_run(plan, lambda: build("llama"), 2)
    assert together[2].model_copy(update={"rank": 2}) == together[1]


@pytest.mark.slow
def test_any_rank_of_thousands_can_be_one() -> None:
    plan = make_plan("llama", pp=2, schedule="1F1B", num_microbatches=4)
    mesh = plan.strategy.mesh.model_copy(update={"dp_shard": 2048})
    wide = _changed(plan, mesh=mesh, zero_stage=2, microbatch_size=1)
    samples = wide.strategy.global_batch
    workload = wide.workload.model_copy(update={"global_batch": samples})
    wide = wide.model_copy(update={"workload": workload})
    assert wide.strategy.mesh.num_devices == 4096
    first, last = (dry_run(wide, lambda: build("llama"), r) for r in (0, 4095))
    assert (first.pp_rank, last.pp_rank) == (0, 1)
    assert first.failure is None
    assert last.failure is None
    sizes = {entry.kind: entry.group_size for entry in first.collectives}
    assert sizes["reduce_scatter"] == 2048
    assert last.bytes_of("recv") == first.bytes_of("send") > 0


def test_nothing_is_left_of_the_world_that_was_not_there() -> None:
    before = (nn.Module.to, dist.is_initialized())
    dry_run(make_plan("llama", dp_replicate=2), lambda: build("llama"), 1)
    assert (nn.Module.to, dist.is_initialized()) == before == (nn.Module.to, False)
    assert nn.Linear(2, 2).to(torch.float64)(torch.ones(1, 2).double()).shape == (1, 2)


def _broken() -> nn.Module:
    model = build("llama")
    model.get_submodule("model.layers.2").mlp.forward = _raise  # type: ignore[union-attr]
    return model


def _raise(*_: Any) -> Any:
    raise LookupError("no such table")


def test_weights_drawn_until_they_fit_are_built() -> None:
    plan = make_plan("llama")

    def drawn() -> nn.Module:
        model = build("llama")
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
        return model

    assert dry_run(plan, drawn, 0).failure is None


def test_a_failure_names_error_and_module() -> None:
    found = dry_run(make_plan("llama", dp_shard=2, zero_stage=3), _broken, 0)
    assert found.failure == "LookupError: no such table (in model.layers.2.mlp)"
    assert found.memory_bytes == {}


def _curious() -> nn.Module:
    model = build("llama")
    layer = model.get_submodule("model.norm")
    plain = layer.forward
    layer.forward = lambda x: plain(x) if x.sum() > 0 else x  # type: ignore[method-assign]
    return model


def test_a_model_that_branches_on_values_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"does not follow values.*--measure"):
        dry_run(make_plan("llama"), _curious, 0)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "llama",
            {
                "dp_replicate": 2,
                "gradient_compression": "onebit_adam",
                "semantics": "approximate",
                "optimizer": ADAM,
            },
            "gradient_compression=onebit_adam",
        ),
        ("llama", {"cp": 2, "attention": None}, "use cp=1"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ExecutionError, match=said):
        dry_run(make_plan(name, **changes), lambda: build(name), 0)


def test_ranks_and_models_that_are_not_the_plans_are_refused() -> None:
    plan = make_plan("llama", dp_replicate=2)
    with pytest.raises(ExecutionError, match=r"rank 2 .*0 to 1"):
        dry_run(plan, lambda: build("llama"), 2)
    with pytest.raises(FingerprintError, match="the plan is for llama"):
        dry_run(plan, lambda: build("gpt2"), 0)


def test_routing_is_taken_to_be_balanced() -> None:
    plan = make_plan("mixtral", dp_shard=2, ep=2, zero_stage=3)
    found = dry_run(plan, lambda: build("mixtral"), 1)
    assert found.failure is None
    counts = {entry.kind: entry for entry in found.collectives}
    # Every token goes to two experts, through a layer's experts, there and back,
    # in forward and backward; beside it, how many come.
    assert counts["all_to_all"].count == LAYERS * (2 * 2 + 1)
    rows = BATCH // 2 * SEQ * 2
    told = 4 * 8
    assert counts["all_to_all"].bytes == LAYERS * (4 * rows * 32 * 4 + told)
    assert "balanced" in Verification.of(plan, (found,)).assumptions[0]


@pytest.mark.parametrize("how", ["bfloat16", "float16"])
def test_rounded_gradients_are_half_as_large(how: str) -> None:
    both = [
        dry_run(
            make_plan("llama", dp_replicate=2, gradient_compression=kind, **changes),
            lambda: build("llama"),
            1,
        )
        for kind, changes in (("none", {}), (how, {"semantics": "approximate"}))
    ]
    plain, rounded = (found.bytes_of("all_reduce") - 4 for found in both)
    assert plain == 2 * rounded > 0


def test_predictions_are_laid_beside_what_was_found() -> None:
    plan = make_plan("llama", dp_shard=2, zero_stage=2)
    found = dry_run(plan, lambda: build("llama"), 0)
    memory = plan.prediction.memory[0].model_copy(
        update={"activations_bytes": 0.9 * found.peak_bytes, "reserve_bytes": 7}
    )
    traffic = {"reduce_scatter": float(found.bytes_of("reduce_scatter")), "send": 8e6}
    prediction = plan.prediction.model_copy(
        update={"memory": (memory,), "collective_bytes": traffic}
    )
    made = plan.model_copy(update={"prediction": prediction})
    deviations = {
        each.name: each for each in Verification.of(made, (found,)).deviations
    }
    peak = deviations["peak memory, pp rank 0"]
    assert peak.ratio == pytest.approx(0.9)
    assert peak.beyond(0.05)
    assert not peak.beyond(0.11)
    assert deviations["reduce-scatter, busiest rank"].ratio == 1
    assert deviations["send, busiest rank"].ratio is None
    assert deviations["send, busiest rank"].beyond(0.1)
