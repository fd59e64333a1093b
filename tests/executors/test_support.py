"""The table of what can be run agrees with torch, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    get_schedule_class,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.schema import (
    Mesh,
    Optimizer,
    Overlap,
    Precision,
    Schedule,
    Stage,
    Strategy,
    TensorSharding,
)
from planner.schema.schedules import schedule_names, schedule_spec
from planner.schema.support import unsupported

FP32 = Precision(compute="float32")


def _strategy(
    schedule: Schedule, pp: int, virtual: int, micro: int, **changes: object
) -> Strategy:
    shell = Strategy(mesh=Mesh(pp=pp), schedule=schedule, virtual_stages=virtual)
    recompute = changes.pop("recompute", "none")
    stages = tuple(
        Stage(rank=shell.rank_of_stage(i), modules=(f"m{i}",), recompute=recompute)  # type: ignore[arg-type]
        for i in range(pp * virtual)
    )
    fields = {"mesh": Mesh(pp=pp), "precision": FP32, **changes}
    return Strategy(
        schedule=schedule,
        virtual_stages=virtual,
        num_microbatches=micro,
        stages=stages,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture(params=[2, 3, 4])
def pipeline(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def _torch_accepts(schedule: Schedule, pp: int, virtual: int, micro: int) -> bool:
    kind = get_schedule_class(schedule)
    multi = issubclass(kind, PipelineScheduleMulti)
    if not multi and virtual > 1:
        return False
    shell = Strategy(mesh=Mesh(pp=pp), schedule=schedule, virtual_stages=virtual)
    try:
        stages = [
            PipelineStage(nn.Linear(1, 1), index, pp * virtual, torch.device("cpu"))
            for index in shell.stages_of_rank(0)
        ]
        kind(stages if multi else stages[0], micro, loss_fn=nn.MSELoss())
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", schedule_names())
def test_schedules_are_refused_where_torch_refuses_them(
    pipeline: int, schedule: Schedule
) -> None:
    for virtual in (1, 2, 3):
        for micro in range(1, 13):
            if schedule in ("ZBVZeroBubble", "DualPipeV") and virtual != 2:
                # A V has no other shape; torch would look for stages that are not.
                continue
            reasons = unsupported(_strategy(schedule, pipeline, virtual, micro))
            accepted = _torch_accepts(schedule, pipeline, virtual, micro)
            assert accepted == (not reasons), (virtual, micro, reasons)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_a_v_has_two_stages_a_rank(schedule: Schedule) -> None:
    assert "two stages" in unsupported(_strategy(schedule, 2, 1, 8))[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": Mesh(dp_shard=2, ep=2)}, "ep=2 with zero_stage=0"),
        ({"mesh": Mesh(dp_shard=2, ep=2), "zero_stage": 3}, "style 'experts'"),
        ({"gradient_compression": "powersgd"}, "semantics=exact"),
        (
            {
                "mesh": Mesh(dp_shard=2),
                "zero_stage": 2,
                "gradient_compression": "bfloat16",
                "semantics": "approximate",
            },
            "plain replicas",
        ),
        ({"mesh": Mesh(pp=2), "num_microbatches": 2}, "without stages"),
        ({"mesh": Mesh(tp=2)}, "without stages"),
        ({"virtual_stages": 2}, "virtual_stages=2"),
        ({"precision": Precision(compute="float8")}, "float8"),
        (
            {"precision": Precision(parameter="bfloat16", compute="float32")},
            "compute=float32",
        ),
        ({"optimizer": Optimizer(state_dtype="bfloat16")}, "state_dtype=bfloat16"),
        ({"sharding": TensorSharding(loss_parallel=True)}, "loss_parallel"),
        ({"compile": True}, "compile=True without stages"),
        (
            {
                "mesh": Mesh(dp_shard=2, ep=2),
                "zero_stage": 1,
                "stages": (Stage(rank=0, modules=("m",)),),
                "sharding": TensorSharding(patterns={"experts": "experts"}),
                "compile": True,
            },
            "compile=True with ep=2",
        ),
        (
            {
                "mesh": Mesh(tp=2),
                "stages": (Stage(rank=0, modules=("m",)),),
                "sharding": TensorSharding(patterns={"m": "colwise"}),
                "compile": True,
            },
            "compile=True with tp=2",
        ),
        ({"overlap": Overlap(forward_prefetch=1)}, "forward_prefetch=1 without ZeRO"),
        (
            {
                "mesh": Mesh(dp_shard=2),
                "zero_stage": 2,
                "overlap": Overlap(backward_prefetch=1),
            },
            "backward_prefetch=1 with zero_stage=2",
        ),
        (
            {
                "mesh": Mesh(dp_shard=2),
                "zero_stage": 3,
                "overlap": Overlap(bucket_bytes=2**20),
            },
            "bucket_bytes=1048576 with dp_shard2",
        ),
        (
            {
                "mesh": Mesh(dp_replicate=2),
                "gradient_compression": "powersgd",
                "semantics": "approximate",
                "overlap": Overlap(bucket_bytes=2**20),
            },
            "with powersgd",
        ),
    ],
)
def test_each_refusal_says_value_rule_and_remedy(
    changes: dict[str, object], said: str
) -> None:
    fields = {"precision": FP32, **changes}
    reasons = unsupported(Strategy(**fields))  # type: ignore[arg-type]
    (reason,) = [r for r in reasons if said in r]
    assert ";" in reason
    assert "\n" not in reason


def test_overlap_is_taken_where_it_has_an_effect() -> None:
    both = Overlap(forward_prefetch=2, backward_prefetch=1)
    three = Strategy(mesh=Mesh(dp_shard=2), zero_stage=3, overlap=both, precision=FP32)
    ahead = Overlap(forward_prefetch=2)
    context = Strategy(mesh=Mesh(cp=2), zero_stage=1, overlap=ahead, precision=FP32)
    buckets = Overlap(bucket_bytes=2**20)
    replicas = Strategy(mesh=Mesh(dp_replicate=2), overlap=buckets, precision=FP32)
    assert unsupported(three) == unsupported(context) == unsupported(replicas) == ()


@pytest.mark.parametrize("field", ["forward_prefetch", "backward_prefetch"])
@pytest.mark.parametrize("value", [0, -1, 65])
def test_prefetch_depths_have_a_range(field: str, value: int) -> None:
    with pytest.raises(ValidationError, match=field):
        Overlap(**{field: value})


@pytest.mark.parametrize("value", [0, 1023, 2**41])
def test_bucket_sizes_have_a_range(value: int) -> None:
    with pytest.raises(ValidationError, match="bucket_bytes"):
        Overlap(bucket_bytes=value)


def test_compiled_blocks_need_a_backward_in_one_piece() -> None:
    for schedule in schedule_names():
        virtual = 1 if schedule in ("GPipe", "1F1B") else 2
        reasons = unsupported(_strategy(schedule, 2, virtual, 4, compile=True))
        assert bool(reasons) == (schedule_spec(schedule).splits_backward)


def test_context_needs_attention_that_it_can_serve() -> None:
    ring = Strategy(mesh=Mesh(cp=2), context_algorithm="ring", precision=FP32)
    assert unsupported(ring) == unsupported(ring, attention="full") == ()
    assert "use cp=1" in unsupported(ring, attention=None)[0]
    assert "bfloat16" in unsupported(ring, backend="nccl")[0]
    narrow = ring.model_copy(update={"precision": Precision()})
    assert unsupported(narrow, backend="nccl") == ()


def test_loss_parallel_needs_a_head_that_is_split() -> None:
    stages = (Stage(rank=0, modules=("layers.0", "head")),)
    split = TensorSharding(patterns={"head": "colwise"}, loss_parallel=True)
    good = Strategy(mesh=Mesh(tp=2), stages=stages, sharding=split, precision=FP32)
    assert unsupported(good) == ()
    other = split.model_copy(update={"patterns": {"layers.0": "colwise"}})
    bad = good.model_copy(update={"sharding": other})
    assert "last module head" in unsupported(bad)[0]


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_the_turn_of_a_v_needs_a_torch_that_does_not_send_to_itself(
    schedule: Schedule,
) -> None:
    strategy = _strategy(schedule, 2, 2, 4)
    for old in ("2.11.0", "2.12.1+cpu"):
        (reason,) = unsupported(strategy, torch_version=old)
        assert f"schedule {schedule} on gloo with torch {old}" in reason
        assert "use torch 2.13" in reason
        assert not unsupported(strategy, torch_version=old, backend="nccl")
        other = _strategy("InterleavedZeroBubble", 2, 2, 4)
        assert not unsupported(other, torch_version=old)
    for new in ("2.13.0+cpu", "2.14.1", "3.0.0a0"):
        assert not unsupported(strategy, torch_version=new)


def test_split_backward_refuses_what_gives_wrong_gradients() -> None:
    zero3 = _strategy(
        "ZBVZeroBubble", 2, 2, 4, mesh=Mesh(pp=2, dp_shard=2), zero_stage=3
    )
    assert "wrong gradients" in unsupported(zero3)[0]
    again = _strategy("InterleavedZeroBubble", 2, 2, 4, recompute="full")
    assert "recompute=full" in unsupported(again)[0]
    assert not unsupported(_strategy("Interleaved1F1B", 2, 2, 4, recompute="full"))


def test_tied_parameters_must_be_split_alike() -> None:
    tied = (("embed.weight", "head.weight"),)
    stages = (Stage(rank=0, modules=("embed", "head")),)

    def reasons(**patterns: str) -> tuple[str, ...]:
        sharding = TensorSharding(patterns=patterns)  # type: ignore[arg-type]
        strategy = Strategy(
            mesh=Mesh(tp=2), sharding=sharding, stages=stages, precision=FP32
        )
        return unsupported(strategy, tied=tied)

    assert "split unlike" in reasons(embed="vocab")[0]
    assert not reasons(embed="vocab", head="colwise")
    assert not reasons(other="colwise")


def test_a_plain_strategy_is_supported() -> None:
    assert unsupported(Strategy()) == ()
