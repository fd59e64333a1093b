"""A measured run and ``predict`` price one model alike: they read the same graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import predict
from planner.cost import CostModel
from planner.measurements.cases import prepare, recipe_under
from planner.measurements.catalogues import frameworks
from planner.measurements.store import shipped
from tests.measurements.rows import point

#: Models as rows name them, as users do, and tokens of a sample.
# Of models with a vocabulary that no power of two divides, rows count a padded one.
MODELS = {
    "Llama2-7B": ("llama2-7b", 4096),
    "Llama2-70B": ("llama2-70b", 4096),
    "Llama3-8B": ("llama3-8b", 8192),
    "Llama3-70B": ("llama3-70b", 8192),
    "Llama3.1-405B": ("llama3-405b", 8192),
    "Qwen2.5-7B": ("qwen2.5-7b", 4096),
    "Qwen3-8B": ("qwen3-8b", 4096),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", 4096),
    "Mixtral-8x7B": ("mixtral-8x7b", 4096),
    "Mixtral-8x22B": ("mixtral-8x22b", 4096),
    "DeepSeek-V3": ("deepseek-v3", 4096),
    "Qwen2.5-72B": ("qwen2.5-72b", 4096),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_row_and_a_reference_cost_the_same(name: str) -> None:
    reference, seq = MODELS[name]
    case = prepare(
        point(
            model=name,
            source="torchtitan 2025",
            layers=None,
            hidden=None,
            heads=None,
            vocab=None,
            seq=seq,
            gpu="H100",
            n_gpus=64,
            dp=None,
            # A model's own table of tp may split less than the framework of a row.
            tp=1,
            pp=2,
            microbatch=1,
            global_batch=128,
            zero=3,
            schedule="1f1b",
            recompute="none",
        )
    )
    recipe = recipe_under(
        shipped(), case.framework, frameworks()[case.framework].recipe
    )
    setting = replace(case.setting, recipe=recipe, calibration=shipped())
    scored = CostModel(setting).cost(case.strategy)
    plan = predict(
        reference,
        setting.cluster,
        case.strategy.model_copy(update={"precision": setting.precision}),
        seq_len=seq,
        recipe=case.framework,
    )
    assert plan.prediction.step_time_s == pytest.approx(scored.step_time_s, rel=0.02)
    peak = scored.peak_memory_bytes
    assert plan.prediction.peak_memory_bytes == pytest.approx(peak, rel=0.02)
