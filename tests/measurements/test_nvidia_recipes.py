"""Settings of NVIDIA's recipes and the runs that they are used for."""

from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from planner.cost import RECIPES
from planner.measurements.cases import prepare
from planner.measurements.nvidia_recipes import (
    as_nvidia_ran,
    nvidia_recipe,
    recomputed,
)
from planner.measurements.points import Point
from tests.measurements.rows import point

BRIDGE = "NVIDIA Megatron-Bridge perf summary {} NeMo Container"


def run(release: str, **changes: object) -> Point:
    figures = {
        "source": BRIDGE.format(release),
        "model": "Qwen3_30B_a3B",
        "gpu": "DGX-GB200",
        "precision": "MXFP8",
        "recompute": "",
        "schedule": "",
        "n_gpus": 8,
        "dp": 8,
        "tp": 1,
        "pp": 1,
        "ep": 8,
        "microbatch": 4,
        "global_batch": 512,
        "seq": 4096,
        **dict.fromkeys(("layers", "hidden", "heads", "vocab", "params")),
    }
    return point(**{**figures, **changes})


def test_the_file_is_whole() -> None:
    text = files("planner.measurements").joinpath("data", "nvidia_recipes.csv")
    rows = list(csv.DictReader(text.read_text(encoding="utf-8").splitlines()))
    keys = [
        (row["table"], row["model"], row["device"], row["precision"], release)
        for row in rows
        for release in row["releases"].split()
    ]
    assert len(keys) == len(set(keys))
    for row in rows:
        assert row["table"] in {"bridge", "dgxc"}
        assert row["exchange"] in {"", "alltoall", "deepep", "hybridep"}
        assert {row["overlapped"], row["padded"]} <= {"yes", "no"}
        assert row["attention"] in {"fused", "scores"}
        assert row["known_by"] in {"exact", "layout", "guess"}
        assert row["source"]


@pytest.mark.parametrize(
    ("release", "graphs"),
    [("25.09", "step"), ("26.02", "router"), ("26.04.01", "router"), ("26.06", "step")],
)
def test_recipes_go_by_release(release: str, graphs: str) -> None:
    found = nvidia_recipe(run(release), "gb200-186", "megatron")
    assert found is not None
    assert found[0].graphs == graphs
    assert graphs in found[1]


def test_other_releases_take_the_nearest_before_and_say_so() -> None:
    found = nvidia_recipe(run("26.12"), "gb200-186", "megatron")
    assert found is not None
    assert "26.08" in found[0].releases
    assert found[1].endswith("of 26.06")


def test_precision_counts_within_a_release() -> None:
    four = run("26.04", model="Nemotron_3_Super", precision="NVFP4", gpu="DGX-B300")
    eight = run("26.04", model="Nemotron_3_Super", gpu="DGX-B300")
    set_by = [nvidia_recipe(one, "b300-270", "megatron") for one in (four, eight)]
    assert [one[0].recompute for one in set_by if one] == ["moe_act+layernorm", ""]


@pytest.mark.parametrize(
    ("changes", "device", "framework"),
    [
        ({"model": "Mixtral 8x7B"}, "gb200-186", "megatron"),
        ({}, "mi300x-192", "megatron"),
        ({"source": "torchtitan 2026-02"}, "gb200-186", "torchtitan"),
        ({"source": "somebody's blog"}, "gb200-186", "megatron"),
    ],
)
def test_no_recipe_is_made_up(
    changes: dict[str, object], device: str, framework: str
) -> None:
    assert nvidia_recipe(run("26.02", **changes), device, framework) is None


def test_others_with_megatron_are_taken_to_use_the_recipe_of_their_time() -> None:
    found = nvidia_recipe(
        run("", source="a cloud's results (2026-07)"), "gb200-186", "megatron"
    )
    assert found is not None
    assert found[0].graphs == "step"
    assert "of 26.06" in found[1]


def test_deepep_sends_a_token_to_a_host_once() -> None:
    row = run("25.09", model="DeepSeekV3 (dropless)", gpu="DGX-H100", precision="FP8")
    found = nvidia_recipe(row, "h100-80", "megatron-2025")
    assert found is not None
    assert found[0].exchange == "deepep"
    recipe = as_nvidia_ran(RECIPES["torch"], found[0], hosts=8, chosen=8)
    # Of 8 experts on no more than 4 hosts: 4 (1 - (3/4)^8) / 8.
    assert recipe.routed_share == pytest.approx(0.45, abs=0.001)
    assert recipe.expert_overlap == 0.9
    alone = as_nvidia_ran(RECIPES["torch"], found[0], hosts=1, chosen=8)
    assert alone.routed_share == pytest.approx(1 / 8)


def test_plain_exchanges_send_every_copy() -> None:
    row = run("26.02", model="Qwen3_235B_a22B", gpu="DGX-H100", precision="FP8")
    found = nvidia_recipe(row, "h100-80", "megatron")
    assert found is not None
    recipe = as_nvidia_ran(RECIPES["torch"], found[0], hosts=4, chosen=8)
    assert recipe.routed_share == 1.0
    assert recipe.launches > 1


@pytest.mark.parametrize(
    ("model", "gpu", "device", "again"),
    [
        ("Nemotron_3_Nano", "DGX-H100", "h100-80", "full"),
        ("GPT OSS 120B", "DGX-B200", "b200-180", "selective"),
        ("DeepSeekV3", "DGX-B200", "b200-180", "none"),
    ],
)
def test_what_is_computed_again(model: str, gpu: str, device: str, again: str) -> None:
    found = nvidia_recipe(run("26.04", model=model, gpu=gpu), device, "megatron")
    assert found is not None
    assert recomputed(found[0]) == again


def test_a_case_has_what_its_recipe_set() -> None:
    case = prepare(run("26.06"))
    assert case.setting.recipe.captured_routing == 1.0
    assert any("CUDA graphs (step)" in why for why in case.why)
    stated = prepare(run("26.04", model="GPT OSS 120B", recompute="none"))
    assert {stage.recompute for stage in stated.strategy.stages} == {"none"}


@pytest.mark.parametrize(
    ("source", "gpu", "fused"),
    [
        ("NVIDIA DGXC benchmarking 25.05", "GB200", False),
        ("NVIDIA DGXC benchmarking 25.05", "H100-80GB", True),
        (BRIDGE.format("25.11"), "DGX-GB200", True),
    ],
)
def test_latent_attention_has_no_kernel_on_early_blackwell(
    source: str, gpu: str, fused: bool
) -> None:
    facts = {"n_gpus": 128, "tp": 2, "dp": 16, "pp": 4, "ep": 32, "microbatch": 1}
    made = run(
        "",
        source=source,
        model="DeepSeek-V3-671B",
        gpu=gpu,
        precision="bf16",
        global_batch=1024,
        **facts,
    )
    assert prepare(made).setting.recipe.fused_attention is fused


@pytest.mark.parametrize(
    ("notes", "exchange", "overlapped"),
    [
        ("dispatcher DeepEP", "deepep", False),
        ("dispatcher DeepEP; 1F1B overlap of exchanges", "deepep", True),
        ("dispatcher A2A", "alltoall", False),
        ("moe-token-dispatcher-type alltoall", "alltoall", False),
        ("dispatcher: all to all, overlap_moe_expert_parallel_comm", "alltoall", True),
        ("all-to-all dispatcher, not HybridEP, no 1F1B overlap", "alltoall", False),
        ("no DeepEP; overlap-moe-expert-parallel-comm off", "hybridep", False),
    ],
)
def test_a_row_says_better_how_tokens_went_to_experts(
    notes: str, exchange: str, overlapped: bool
) -> None:
    # The recipe of this run has HybridEP, without overlap.
    found = nvidia_recipe(run("26.04", notes=notes), "gb200-186", "megatron")
    assert found is not None
    assert (found[0].exchange, found[0].overlapped) == (exchange, overlapped)
    assert ("as the row states" in found[1]) == (exchange != "hybridep")


def test_conferences_say_which_year_s_recipe() -> None:
    row = run("26.04", source="Megatron-Core, SOSP25")
    found = nvidia_recipe(row, "gb200-186", "megatron")
    assert found == nvidia_recipe(
        run("26.04", source="Megatron-Core 2025"), "gb200-186", "megatron"
    )
    assert found is not None
