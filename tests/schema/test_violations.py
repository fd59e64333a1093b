"""Violations agree with torch, rule by rule; those of a model hold for every plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

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

from planner.errors import PlanFileError
from planner.schema import (
    Communication,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    Schedule,
    Stage,
    Strategy,
    TensorSharding,
)
from planner.schema.schedules import schedule_names, schedule_spec
from planner.schema.strategy_parts import Collective
from planner.schema.violations import (
    batch_norm_violation,
    executor_violations,
    stream_violation,
)
from tests.distributed.cases import make_plan

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
    spec = schedule_spec(schedule)
    kind = get_schedule_class(str(spec.runs).removeprefix("Schedule"))
    multi = issubclass(kind, PipelineScheduleMulti)
    if spec.single_stage and virtual > 1:
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
            reasons = executor_violations(_strategy(schedule, pipeline, virtual, micro))
            accepted = _torch_accepts(schedule, pipeline, virtual, micro)
            assert accepted == (not reasons), (virtual, micro, reasons)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_a_v_has_two_stages_a_rank(schedule: Schedule) -> None:
    assert "two stages" in executor_violations(_strategy(schedule, 2, 1, 8))[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": Mesh(dp_shard=2, ep=2)}, "ep=2 with zero_stage=0"),
        ({"mesh": Mesh(cp=2, tp=2, ep=2)}, "ep=2 with zero_stage=0"),
        ({"mesh": Mesh(tp=2, ep=2)}, "style 'experts'"),
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
        (
            {"precision": Precision(compute="float8"), "mesh": Mesh(tp=2)},
            "compute=float8 with tp=2",
        ),
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
                "gradient_compression": "onebit_adam",
                "semantics": "approximate",
                "optimizer": Optimizer(name="SGD"),
            },
            "use Adam or AdamW",
        ),
        (
            {
                "mesh": Mesh(dp_replicate=2),
                "gradient_compression": "powersgd",
                "semantics": "approximate",
                "optimizer": Optimizer(name="RMSprop"),
            },
            "optimizer=RMSprop with gradient_compression=powersgd",
        ),
    ],
)
def test_each_refusal_says_value_rule_and_remedy(
    changes: dict[str, object], said: str
) -> None:
    fields = {"precision": FP32, **changes}
    reasons = executor_violations(Strategy(**fields))  # type: ignore[arg-type]
    (reason,) = [r for r in reasons if said in r]
    assert ";" in reason
    assert "\n" not in reason


_NEEDED = Communication(replicas=Collective(algorithm="ring"), buckets="needed")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"grad_clip_norm": 1.0}, "grad_clip_norm=1.0, which needs all sums"),
        ({"precision": Precision(compute="float16")}, "whose loss scale needs all"),
        ({"optimizer": Optimizer(name="Muon")}, "optimizer Muon, which does not"),
        ({"offload": Offload(states="optimizer")}, "offload=optimizer, whose weights"),
        ({"compile": True}, "compile=True, whose blocks cannot wait"),
        (
            {"communication": _NEEDED.model_copy(update={"replicas": Collective()})},
            "bucket by bucket in plain replicas",
        ),
        (
            {"mesh": Mesh(dp_replicate=2, dp_shard=2), "zero_stage": 1},
            "bucket by bucket in plain replicas",
        ),
        (
            {"mesh": Mesh(dp_replicate=2, pp=2), "schedule": "1F1B"},
            "bucket by bucket in plain replicas",
        ),
        (
            {"gradient_compression": "powersgd", "semantics": "approximate"},
            "without a codec",
        ),
    ],
)
def test_what_needs_all_sums_before_an_update_does_not_run_ahead_of_them(
    changes: dict[str, object], told: str
) -> None:
    plain = {"mesh": Mesh(dp_replicate=2), "precision": FP32, "communication": _NEEDED}
    assert executor_violations(Strategy(**plain)) == ()  # type: ignore[arg-type]
    strategy = Strategy(**{**plain, **changes})  # type: ignore[arg-type]
    (reason,) = [r for r in executor_violations(strategy) if told in r]
    assert reason.startswith("communication.buckets=needed with")
    assert "use filled" in reason or "use communication.buckets=filled" in reason


def test_overlap_is_taken_where_it_has_an_effect() -> None:
    both = Overlap(forward_prefetch=2, backward_prefetch=1)
    three = Strategy(mesh=Mesh(dp_shard=2), zero_stage=3, overlap=both, precision=FP32)
    ahead = Overlap(forward_prefetch=2)
    context = Strategy(mesh=Mesh(cp=2), zero_stage=1, overlap=ahead, precision=FP32)
    buckets = Overlap(bucket_bytes=2**20)
    replicas = Strategy(mesh=Mesh(dp_replicate=2), overlap=buckets, precision=FP32)
    assert (
        executor_violations(three)
        == executor_violations(context)
        == executor_violations(replicas)
        == ()
    )


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
        virtual = 1 if schedule_spec(schedule).single_stage else 2
        reasons = executor_violations(_strategy(schedule, 2, virtual, 4, compile=True))
        assert bool(reasons) == (schedule_spec(schedule).splits_backward)


def test_context_needs_attention_that_it_can_serve() -> None:
    ring = Strategy(mesh=Mesh(cp=2), context_algorithm="ring", precision=FP32)
    assert (
        executor_violations(ring) == executor_violations(ring, attention="full") == ()
    )
    assert "use cp=1" in executor_violations(ring, attention=None)[0]
    assert "bfloat16" in executor_violations(ring, backend="nccl")[0]
    narrow = ring.model_copy(update={"precision": Precision()})
    assert executor_violations(narrow, backend="nccl") == ()


def test_loss_parallel_needs_a_head_that_is_split() -> None:
    stages = (Stage(rank=0, modules=("layers.0", "head")),)
    split = TensorSharding(patterns={"head": "colwise"}, loss_parallel=True)
    good = Strategy(mesh=Mesh(tp=2), stages=stages, sharding=split, precision=FP32)
    assert executor_violations(good) == ()
    other = split.model_copy(update={"patterns": {"layers.0": "colwise"}})
    bad = good.model_copy(update={"sharding": other})
    assert "last module head" in executor_violations(bad)[0]


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_the_turn_of_a_v_needs_a_torch_that_does_not_send_to_itself(
    schedule: Schedule,
) -> None:
    strategy = _strategy(schedule, 2, 2, 4)
    for old in ("2.11.0", "2.12.1+cpu"):
        (reason,) = executor_violations(strategy, torch_version=old)
        assert f"schedule {schedule} on gloo with torch {old}" in reason
        assert "use torch 2.13" in reason
        assert not executor_violations(strategy, torch_version=old, backend="nccl")
        other = _strategy("InterleavedZeroBubble", 2, 2, 4)
        assert not executor_violations(other, torch_version=old)
    for new in ("2.13.0+cpu", "2.14.1", "3.0.0a0"):
        assert not executor_violations(strategy, torch_version=new)


def test_split_backward_refuses_what_gives_wrong_gradients() -> None:
    zero3 = _strategy(
        "ZBVZeroBubble", 2, 2, 4, mesh=Mesh(pp=2, dp_shard=2), zero_stage=3
    )
    assert "wrong gradients" in executor_violations(zero3)[0]
    again = _strategy("InterleavedZeroBubble", 2, 2, 4, recompute="full")
    assert "recompute=full" in executor_violations(again)[0]
    assert not executor_violations(
        _strategy("Interleaved1F1B", 2, 2, 4, recompute="full")
    )


def test_tied_parameters_must_be_split_alike() -> None:
    tied = (("embed.weight", "head.weight"),)
    stages = (Stage(rank=0, modules=("embed", "head")),)

    def reasons(**patterns: str) -> tuple[str, ...]:
        sharding = TensorSharding(patterns=patterns)  # type: ignore[arg-type]
        strategy = Strategy(
            mesh=Mesh(tp=2), sharding=sharding, stages=stages, precision=FP32
        )
        return executor_violations(strategy, tied=tied)

    assert "split unlike" in reasons(embed="vocab")[0]
    assert not reasons(embed="vocab", head="colwise")
    assert not reasons(other="colwise")


def test_a_plain_strategy_is_supported() -> None:
    assert executor_violations(Strategy()) == ()


ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise"
}
MIXING = tuple(f"model.{pattern}" for pattern in ATTENTION)


def _stream(
    patterns: dict[str, Any], *, whole: str | None = None, on: bool = True
) -> str | None:
    sharding = TensorSharding(patterns=patterns, sequence_parallel=on)
    return stream_violation(sharding, whole_stream=whole, mixing=MIXING)


def test_a_stream_is_divided_where_every_mixing_layer_is_split() -> None:
    assert _stream(ATTENTION) is None
    assert _stream({f"model.{p}": style for p, style in ATTENTION.items()}) is None
    assert _stream({"self_attn.*": "colwise"}) is None


@pytest.mark.parametrize("left_out", ATTENTION)
def test_each_mixing_layer_left_whole_is_named(left_out: str) -> None:
    patterns = {p: style for p, style in ATTENTION.items() if p != left_out}
    reason = _stream(patterns)
    assert reason is not None
    assert f"no pattern splits model.{left_out}, " in reason
    assert "add it to sharding.patterns" in reason
    # Not split: dealt out by rows of a table, as an embedding is.
    assert _stream(patterns | {left_out: "vocab"}) == reason
    # Of one layer alone.
    assert _stream(patterns | {left_out.replace("*", "0"): "colwise"}) == reason
    assert _stream(patterns, on=False) is None


def test_a_whole_stream_is_refused_for_its_reason() -> None:
    reason = _stream(ATTENTION, whole="tp leaves h.0.attn whole")
    assert reason is not None
    assert reason.startswith("sequence_parallel, but tp leaves h.0.attn whole, ")
    assert _stream(ATTENTION, whole="tp leaves h.0.attn whole", on=False) is None


@pytest.mark.parametrize(
    ("changes", "values", "said"),
    [
        ({"num_microbatches": 4}, None, None),
        ({"microbatch_size": 1}, 1, "one value a channel"),
        ({"microbatch_size": 1, "mesh": Mesh(dp_replicate=2)}, 1, None),
        (
            {"mesh": Mesh(dp_shard=2), "semantics": "approximate"},
            1,
            "one value a channel",
        ),
        ({"microbatch_size": 2, "semantics": "approximate"}, 1, None),
        ({"num_microbatches": 2}, 49, "consent by semantics=approximate"),
        ({"num_microbatches": 2, "semantics": "approximate"}, 49, None),
        ({"mesh": Mesh(pp=2, dp_shard=2)}, 49, "consent by semantics=approximate"),
        ({"mesh": Mesh(pp=2)}, 49, None),
    ],
)
def test_batch_norms_see_the_batch(
    changes: dict[str, Any], values: int | None, said: str | None
) -> None:
    reason = batch_norm_violation(Strategy(**changes), values)
    assert said in reason if said and reason else reason is said


def _refused(plan: Plan, **model: Any) -> str:
    """The same words, from a document that is read and from the executors' table."""
    changed = plan.model.model_copy(update=model)
    text = plan.model_copy(update={"model": changed}).to_json()
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(text)
    facts = ("whole_stream", "mixing", "batch_norm_values")
    (reason,) = executor_violations(
        plan.strategy, **{name: getattr(changed, name) for name in facts}
    )
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    return reason


def test_plans_by_hand_are_refused_when_read_and_when_run() -> None:
    parallel = make_plan("llama", tp=2, sequence_parallel=True)
    Plan.from_json(parallel.to_json())
    assert "h.0 whole" in _refused(parallel, whole_stream="tp leaves h.0 whole")
    assert "model.layers.*.conv" in _refused(parallel, mixing=("model.layers.*.conv",))
    small = make_plan("llama", num_microbatches=16, semantics="approximate")
    Plan.from_json(small.to_json())
    assert "no variance" in _refused(small, batch_norm_values=1)


def test_a_plan_that_says_nothing_of_the_stream_does_not_divide_it() -> None:
    """Written before plans knew, or by someone who does not: not trained wrongly."""
    plan = make_plan("llama", tp=2, sequence_parallel=True)
    data = plan.model_dump(mode="json")
    del data["model"]["whole_stream"]
    with pytest.raises(PlanFileError, match=r"nothing is known .*switch it off"):
        Plan.from_data(data, where="plan.json")
    data["strategy"]["sharding"]["sequence_parallel"] = False
    Plan.from_data(data, where="plan.json")


def test_what_strategies_say_without_a_model_is_as_before() -> None:
    assert executor_violations(Strategy(microbatch_size=1)) == ()


SPATIAL: dict[str, tuple[dict[str, Any], str]] = {
    "no volumes": ({"spatial_sizes": ()}, "has no convolutions over them"),
    "odd sizes": ({"spatial_sizes": (5, 4)}, r"does not divide samples of \(5, 4\)"),
    "fewer dimensions": ({"spatial_sizes": (4,), "spatial": (1, 2)}, "does not divide"),
    "tp": ({"mesh": {"cp": 2, "tp": 2}}, "use tp=1"),
    "pp": ({"mesh": {"cp": 2, "pp": 2}}, "use pp=1"),
    "compile": ({"compile": True}, "use compile=False"),
    "local steps": (
        {"synchronisation": {"kind": "local_steps"}, "semantics": "approximate"},
        "all-reduced gradients alone",
    ),
}


@pytest.mark.parametrize("case", SPATIAL)
def test_shards_of_samples_name_what_they_do_not_go_with(case: str) -> None:
    changes, message = SPATIAL[case]
    given = {"mesh": {"cp": 2}, "spatial": (2,), "context_algorithm": "halo"} | changes
    sizes = given.pop("spatial_sizes", (4, 4))
    strategy = Strategy.from_data(given, where="strategy")
    found = executor_violations(strategy, spatial_sizes=sizes)
    assert re.search(message, "; ".join(found))


def test_shards_of_samples_are_as_many_as_ranks() -> None:
    with pytest.raises(ValueError, match="as many, such as spatial="):
        Strategy(mesh=Mesh(cp=4), context_algorithm="halo", spatial=(2,))
    with pytest.raises(ValueError, match="shards of samples need halo"):
        Strategy(mesh=Mesh(cp=2), context_algorithm="ring", spatial=(2,))
    assert not executor_violations(
        Strategy(mesh=Mesh(cp=4), context_algorithm="halo", spatial=(2, 2)),
        spatial_sizes=(8, 6),
    )
