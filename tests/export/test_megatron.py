"""Megatron-LM: arguments and the script that starts them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ExportError
from planner.export import export, export_files
from planner.export.megatron import megatron_arguments, megatron_layout
from planner.schema import Optimizer, Overlap, Plan, Precision
from planner.targets import Case, StageLayers, get_target
from tests.export.framework_plans import framework_plans
from tests.export.golden_files import check_golden
from tests.export.plans import HOSTILE, PLANS, make_plan, named

OURS = framework_plans(1)


def _said(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {flag: tuple(values) for flag, *values in megatron_arguments(plan)}


def _why(plan: Plan) -> str:
    with pytest.raises(ExportError) as error:
        export_files(plan, "megatron")
    return str(error.value)


@pytest.mark.parametrize("name", ["dense", "experts", "replicas", "virtual"])
def test_golden_files(name: str) -> None:
    check_golden(OURS[name], "megatron", name)


def test_even_stages_need_no_layout() -> None:
    flags = _said(PLANS["pipeline"])
    assert "--pipeline-model-parallel-layout" not in flags
    assert "--num-layers-per-virtual-pipeline-stage" not in flags
    assert _said(PLANS["interleaved"])["--num-layers-per-virtual-pipeline-stage"] == (
        "4",
    )


def test_uneven_stages_are_a_layout() -> None:
    flags = _said(OURS["virtual"])
    assert flags["--pipeline-model-parallel-layout"] == (
        "Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*5L",
    )
    assert "--num-layers-per-virtual-pipeline-stage" not in flags


def test_a_stage_may_be_embedding_or_head_alone() -> None:
    stages = (
        StageLayers(before=("embed",), layers=(), after=()),
        StageLayers(before=(), layers=(0,), after=()),
        StageLayers(before=(), layers=(), after=("norm", "head")),
    )
    assert megatron_layout(stages) == "E|t|L"


def test_zero_1_is_the_distributed_optimizer() -> None:
    flags = _said(OURS["virtual"])
    assert "--use-distributed-optimizer" in flags
    assert flags["--num-distributed-optimizer-instances"] == ("2",)
    assert "--use-distributed-optimizer" not in _said(OURS["replicas"])
    assert "--overlap-grad-reduce" not in _said(OURS["one"])


def test_context_and_buckets() -> None:
    assert _said(OURS["ring"])["--cp-comm-type"] == ("p2p",)
    flags = _said(OURS["ulysses"])
    assert flags["--cp-comm-type"] == ("a2a",)
    assert flags["--ddp-bucket-size"] == ("50000000",)  # bf16: 2 bytes an element
    assert flags["--sgd-momentum"] == ("0.9",)
    assert "--grad-reduce-in-bf16" in flags


def test_what_nobody_gave_is_left_to_megatron() -> None:
    left = ("--clip-grad", "--weight-decay", "--adam-beta1", "--adam-eps")
    assert not set(left) & set(_said(make_plan(mesh={"dp_replicate": 8})))
    given = make_plan(
        mesh={"dp_replicate": 8},
        grad_clip_norm=0.5,
        optimizer=Optimizer(weight_decay=0.0, betas=(0.8, 0.9)),
    )
    flags = _said(given)
    assert flags["--clip-grad"] == ("0.5",)
    assert flags["--weight-decay"] == ("0.0",)
    assert flags["--adam-beta2"] == ("0.9",)


def test_experts_beside_tp_want_sequence_parallelism() -> None:
    strategy = PLANS["tensor"].strategy
    target = get_target("megatron")

    def fields(**facts: Any) -> list[str]:
        return [v.field for v in target.violations(Case(strategy=strategy, **facts))]

    assert not strategy.sharding.sequence_parallel
    assert "sharding.sequence_parallel" in fields(num_experts=8)
    assert "sharding.sequence_parallel" not in fields()


def test_experts_that_tp_does_not_split_are_whole_there_too() -> None:
    plan = PLANS["tensor"]
    assert plan.strategy.mesh.tp > 1
    assert "--expert-tensor-parallel-size" not in _said(plan)
    model = plan.model.model_copy(update={"experts": 8})
    experts = plan.model_copy(update={"model": model})
    assert _said(experts)["--expert-tensor-parallel-size"] == ("1",)
    patterns = {"model.layers.*.mlp.experts.*.up_proj": "colwise"}
    sharding = plan.strategy.sharding.model_copy(update={"patterns": patterns})
    strategy = plan.strategy.model_copy(update={"sharding": sharding})
    split = experts.model_copy(update={"strategy": strategy})
    assert "--expert-tensor-parallel-size" not in _said(split)


def test_tied_weights_stay_tied() -> None:
    plan = PLANS["uneven"]
    assert "--untie-embeddings-and-output-weights" in _said(plan)
    tied = plan.model.model_copy(update={"tied": (("a", "b"),)})
    flags = _said(plan.model_copy(update={"model": tied}))
    assert "--untie-embeddings-and-output-weights" not in flags


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_run_sh_hands_over_quoted_arguments(shell: str, tmp_path: Path) -> None:
    export(named(OURS["virtual"], HOSTILE), "megatron", tmp_path)
    # A torchrun that prints what it is given stands in for the real one.
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "MEGATRON": "/opt/a b",
    }
    done = subprocess.run(
        [shell, str(tmp_path / "run.sh"), "--data-path", "it's $HOME"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    given = done.stdout.splitlines()
    written = shlex.split((tmp_path / "megatron.args").read_text())
    start = given.index("/opt/a b/pretrain_gpt.py")
    assert given[start + 1 :] == [*written, "--data-path", "it's $HOME"]
    assert "Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*5L" in written
    assert not (tmp_path / "pwned").exists()


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero 2": ({"mesh": {"dp_shard": 8}, "zero_stage": 2}, "zero_stage=2"),
    "zero 3": ({"mesh": {"dp_shard": 8}, "zero_stage": 3}, "zero_stage=3"),
    "gpipe": ({"mesh": {"pp": 8}, "schedule": "GPipe"}, "schedule=GPipe"),
    "zero bubble": (
        {"mesh": {"pp": 4, "tp": 2}, "schedule": "DualPipeV", "virtual_stages": 2},
        "schedule=DualPipeV",
    ),
    "eager": ({"mesh": {"pp": 8}, "schedule": "Eager1F1B"}, "use 1F1B or Interleaved"),
    "one virtual stage": (
        {"mesh": {"pp": 8}, "schedule": "Interleaved1F1B"},
        "virtual_stages=1",
    ),
    "rounds": (
        {
            "mesh": {"pp": 4, "tp": 2},
            "schedule": "Interleaved1F1B",
            "virtual_stages": 2,
            "num_microbatches": 6,
        },
        "num_microbatches=6",
    ),
    "ep and tp of whole sequences": (
        {"mesh": {"dp_shard": 4, "tp": 2, "ep": 4}, "zero_stage": 1},
        "use sequence_parallel=true",
    ),
    "weights": (
        {"precision": Precision(parameter="bfloat16")},
        "precision.parameter=bfloat16",
    ),
    "float8": ({"precision": Precision(compute="float8")}, "precision.compute=float8"),
    "reduce": (
        {"precision": Precision(compute="float16", reduce="bfloat16")},
        "precision.reduce=bfloat16",
    ),
    "states": (
        {"optimizer": Optimizer(state_dtype="bfloat16")},
        "optimizer.state_dtype=bfloat16",
    ),
    "decay": (
        {"optimizer": Optimizer(name="Adam", weight_decay=0.1)},
        "optimizer.name=Adam",
    ),
    "compile": ({"compile": True}, "compile=True"),
    "compression": (
        {
            "mesh": {"dp_replicate": 8},
            "gradient_compression": "powersgd",
            "semantics": "approximate",
        },
        "gradient_compression=powersgd",
    ),
    "prefetch": (
        {"overlap": Overlap(backward_prefetch=2)},
        "overlap.backward_prefetch=2",
    ),
    "order": (
        {"mesh": {"tp": 8}, "device_ranges": ((4, 8), (0, 4))},
        "device_ranges=[[4, 8], [0, 4]]",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_it_has_no_word_for_is_refused(case: str) -> None:
    fields, told = _REFUSED[case]
    message = _why(make_plan(**fields))
    assert told in message
    assert "; use" in message or "; plan again" in message


def test_the_head_is_on_the_last_stage() -> None:
    plan = PLANS["uneven"]
    stages = list(plan.strategy.stages)
    moved = (*stages[2].modules, *stages[3].modules[:-1])
    stages[2] = stages[2].model_copy(update={"modules": moved})
    stages[3] = stages[3].model_copy(update={"modules": ("lm_head",)})
    strategy = plan.strategy.model_copy(update={"stages": tuple(stages)})
    assert "stages.modules=[8, 9, 17, 1]" in _why(
        plan.model_copy(update={"strategy": strategy})
    )
    bare = Case(strategy=strategy, layers=False, placed=False)
    assert get_target("megatron").violations(bare) == ()


def test_sequences_must_divide() -> None:
    plan = OURS["ring"]
    workload = plan.workload.model_copy(update={"seq_len": 4100})
    message = _why(plan.model_copy(update={"workload": workload}))
    assert "workload.seq_len=4100: Megatron-LM divides sequences by 8" in message
