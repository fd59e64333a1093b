from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.cost import RECIPES
from planner.measurements.catalogues import frameworks
from planner.measurements.framework_names import framework_of, is_recent, year_of
from planner.measurements.points import read_points
from tests.measurements.rows import point

POINTS = Path(os.environ.get("MESHWRIGHT_DATA", ""), "measured", "points.csv")


@pytest.mark.parametrize("name", sorted(frameworks()))
def test_recipes_go_by_their_framework(name: str) -> None:
    framework = frameworks()[name]
    assert framework.recipe.name == name
    assert framework.zero_stage in (0, 1, 2, 3)
    assert framework.recompute in ("none", "selective", "full")


def test_every_recipe_that_plans_are_priced_with_is_a_framework() -> None:
    assert RECIPES.keys() <= frameworks().keys()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torchtitan benchmarks/llama3", "torchtitan"),
        ("MosaicML llm-foundry", "fsdp"),
        ("vTrain (MICRO24) data", "megatron-deepspeed"),
        ("NVIDIA Megatron-Bridge 25.09", "megatron"),
        ("NeMo 24.12", "megatron"),
        ("Alpa OSDI22 artifact", "alpa"),
        ("InternEvo", "internevo"),
        ("MaxText", "jax"),
        ("DeepSpeed autotuning", "deepspeed"),
        ("BigScience tr11-176B", "megatron-deepspeed"),
        # Has nothing to do with ZeRO.
        ("Zero Bubble Pipeline Parallelism 2024", "megatron-2021"),
        ("nnScaler", "torch"),
        ("nanotron bench_cluster", "nanotron"),
        ("GPT-NeoX-20B", "megatron-deepspeed"),
        ("ColossalAI benchmark", "torch"),
        ("own runs (PyTorch)", "torch"),
    ],
)
def test_sources_name_their_framework(source: str, name: str) -> None:
    found, why = framework_of(point(source=source))
    assert found.startswith(name)  # of whatever age
    assert why == ""


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("V100", "megatron-2021"),
        ("A100-80GB", "megatron-2021"),
        ("H100", "megatron-lm"),
        ("MI300X", "megatron-lm"),
    ],
)
def test_megatron_of_an_age(gpu: str, name: str) -> None:
    found, _ = framework_of(point(source="Megatron-LM", gpu=gpu))
    assert found == name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("Megatron-LM 2022", "megatron-2021"),
        ("Megatron-LM 2024", "megatron-lm"),
        ("a paper, NSDI24, Megatron-LM baseline", "megatron-lm"),
        ("Megatron-LM README 2024", "megatron"),
        ("ROCm Megatron-LM README 2024", "megatron-lm"),
        ("someone's NVIDIA cluster, Megatron-LM 2024", "megatron-lm"),
        ("Scalable training with Megatron Core 2026", "megatron"),
    ],
)
def test_megatron_of_a_year(source: str, name: str) -> None:
    assert framework_of(point(source=source, gpu="A100-80GB"))[0] == name


def test_of_two_systems_in_a_source_megatron_lm_is_the_one_measured() -> None:
    row = {"source": "MegaScale NSDI24", "gpu": "A100-80GB", "pp": 8}
    assert framework_of(point(**row))[0] == "megatron"
    named = "MegaScale NSDI24, Megatron-LM baseline"
    assert framework_of(point(**{**row, "source": named}))[0] == "megatron-lm"


@pytest.mark.parametrize(
    ("source", "gpu", "name"),
    [
        ("a blog", "A100-80GB", "megatron"),
        ("a paper, OSDI22", "A100-80GB", "megatron-2021"),
        ("a paper, SOSP25", "V100-32GB", "megatron-2021"),
        ("a paper, SOSP25, zero bubbles", "T4", "megatron-2021"),
        ("a paper, SOSP25", "GH200", "megatron"),
    ],
)
def test_pipelines_of_nobody(source: str, gpu: str, name: str) -> None:
    assert framework_of(point(source=source, gpu=gpu, pp=4))[0] == name


def test_flash_attention_leaves_old_devices_out() -> None:
    row = {"source": "Megatron-LM 2024", "gpu": "V100-32GB"}
    assert framework_of(point(**row))[0] == "megatron-2021"
    row = {"source": "a paper of 2024", "gpu": "T4", "pp": 4}
    assert framework_of(point(**row))[0] == "megatron-2021"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("NeMo-Framework-Launcher examples/README", "megatron-2025"),
        ("NVIDIA NeMo performance_summary 24.07", "megatron-2025"),
        ("NVIDIA Megatron-Bridge perf summary 25.09 NeMo Container", "megatron-2025"),
        ("NVIDIA DGXC benchmarking 25.05", "megatron-2025"),
        ("NVIDIA Megatron-Bridge perf summary 25.11 NeMo Container", "megatron"),
        ("NVIDIA Megatron-Bridge perf summary 26.04.01", "megatron"),
    ],
)
def test_nemo_of_a_release(source: str, name: str) -> None:
    assert framework_of(point(source=source, gpu="H100"))[0] == name


def test_recipes_that_notes_name_are_of_the_source_s_year() -> None:
    notes = "run with the recipes of dgxc-benchmarking"
    old, new = (
        framework_of(point(source=f"a cloud's results ({year})", notes=notes))[0]
        for year in ("2025-03", "2026-04")
    )
    assert (old, new) == ("megatron-2025", "megatron")


@pytest.mark.parametrize("column", ["notes", "schedule", "precision", "model"])
def test_other_columns_count_where_the_source_says_nothing(column: str) -> None:
    name, why = framework_of(point(source="a blog", **{column: "run with DeepSpeed"}))
    assert name == "deepspeed"
    assert column in why
    assert framework_of(point(source="a blog", model="Megatron 8B"))[1].startswith(
        "framework not named"
    )


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"tp": None, "pp": None}, "torchtitan"),
        ({"tp": 1, "pp": 1}, "megatron"),
        ({"tp": 1, "pp": 4}, "megatron"),
        ({"tp": 4, "pp": 1}, "megatron"),
        ({"tp": 1, "pp": 1, "zero": 1}, "megatron"),
        ({"tp": 4, "pp": 1, "zero": 3}, "torchtitan"),
    ],
)
def test_who_names_none_is_told_what_was_taken(plan: dict[str, int], name: str) -> None:
    found, why = framework_of(point(source="a blog", **plan))
    assert found == name
    assert name in why


@pytest.mark.parametrize(
    ("gpu", "recent"),
    [
        ("H100-80GB", True),
        ("p5.48xlarge H100", True),
        ("GH200", True),
        ("RTX 4090", True),
        ("RTX 6000 Ada", True),
        ("L40S", True),
        ("H20", True),
        ("A100 40GB PCIe", False),
        ("RTX A4000", False),
        ("RTX 3090", False),
        ("V100-SXM2-32GB", False),
        ("T4", False),
        ("Quadro RTX 5000", False),
    ],
)
def test_devices_tell_an_age(gpu: str, recent: bool) -> None:
    assert is_recent(point(source="DeepSpeed", gpu=gpu)) == recent
    # A year moves those between, not those that flash attention leaves out.
    old = any(word in gpu for word in ("V100", "T4", "Quadro"))
    assert is_recent(point(source="DeepSpeed 2024", gpu=gpu)) != old


def test_figures_of_notes_are_no_releases() -> None:
    row = {"source": "a blog", "gpu": "H100", "notes": "peak 24.5 GB, 25.0 s a step"}
    assert "not named" in framework_of(point(**row))[1]


@pytest.mark.parametrize("source", ["output of a run", "Alpaca", "a hypotenuse"])
def test_words_within_words_name_nothing(source: str) -> None:
    assert "not named" in framework_of(point(source=source))[1]


@pytest.mark.skipif(not POINTS.is_file(), reason="no measured/points.csv at hand")
def test_every_published_source_has_a_framework() -> None:
    for row in read_points(POINTS):
        assert framework_of(row)[0] in frameworks()


def test_zero_3_beside_megatron_is_somebody_s() -> None:
    row = {"source": "Megatron-LM 2022", "gpu": "A100-80GB", "zero": 3}
    assert framework_of(point(**row))[0] == "deepspeed"
    assert framework_of(point(**row, notes="FSDP, tp 8"))[0] == "torch"


@pytest.mark.parametrize(
    ("source", "year"),
    [
        ("Korthikanti 2022 Table 5", 2022),
        ("a README (2023-2024)", 2024),
        ("vTrain (MICRO24) data/ground_truth_multi.csv", 2024),
        ("Alpa OSDI22 artifact", 2022),
        ("somebody, EuroSys '24", 2024),
        ("somebody, NeurIPS 22", 2022),
        ("Megatron-LM SC21 Table 2", 2021),
        ("somebody, SC '21", 2021),
        ("somebody, PVLDB23", 2023),
        ("arXiv:2401.10241", 2024),
        ("arXiv 2401.10241v2", 2024),
    ],
)
def test_a_year_in_full_of_a_conference_or_of_arxiv(source: str, year: int) -> None:
    assert year_of(source) == year


@pytest.mark.parametrize(
    "source",
    [
        "2048 GPUs",
        "2024 GPUs",
        "2024 x A100",
        "cluster 32",
        "SC 32 GPUs",
        "micro 16 sweep",
        "fast-20 run",
        "container 26.04",
        "a blog",
    ],
)
def test_numbers_that_are_no_years(source: str) -> None:
    assert year_of(source) is None
