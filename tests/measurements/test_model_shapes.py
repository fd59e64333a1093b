"""Shapes of published measurements, and the graphs of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import CalibrationError
from planner.measurements.known_models import ModelShape
from planner.measurements.model_configs import model_of
from planner.measurements.model_shapes import expected_parameters, shape_of
from planner.measurements.points import Point, parse_points, read_points


def _point(model: str, **columns: Any) -> Point:
    row = {
        "point_id": "7",
        "model": model,
        "gpu": "A100",
        "n_gpus": "8",
        "metric": "iter_time_s",
        "value": "1",
        **{name: str(value) for name, value in columns.items()},
    }
    lines = [",".join(row), ",".join(row.values())]
    (made,) = parse_points(lines, "test")
    return made


def _gpt(**columns: Any) -> Point:
    shape = {"layers": 24, "hidden": 2048, "heads": 16, "seq": 2048, **columns}
    return _point("my model", **shape)


def _parameters(shape: ModelShape) -> int:
    """Scalars, counted on tensors without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_of(shape).build().parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Published: config.json or paper of each.
        ("LLAMA3_70B", 70.55),
        ("LLAMA3.1_405B", 405.85),
        ("Llama3.1-8B", 8.03),
        ("Llama-3.2-1B", 1.236),
        ("meta-llama/Llama-2-7b-hf", 6.738),
        ("llama-65b", 65.29),
        ("llama-30b", 32.53),
        ("InternLM-7B", 7.32),
        ("Nemotron4-340B", 341.0),
        ("DeepSeekV3 (w/ MTP)", 671.0),
        ("DeepSeek-V3-671B", 671.0),
        ("Kimi_K2", 1026.0),
        ("Qwen3_30B_a3B (tokendrop)", 30.53),
        ("Qwen3_235B_a22B", 235.1),
        ("Qwen3-32B", 32.76),
        ("Qwen2.5-7B", 7.616),
        ("Mixtral-8x7B", 46.70),
        ("mixtral_8x22b", 140.6),
        ("GPT OSS 120B", 116.8),
        ("gpt-oss-20b", 20.91),
        ("Grok1-314B", 316.0),
        ("Llama4-Maverick-400B", 400.7),
        ("Llama-4-Scout", 107.8),
        ("Nemotron-H-56B (hybrid mamba)", 56.3),
        ("Nemotron_3_Nano", 31.58),
        ("Nemotron_3_Super", 120.6),
        ("GPT3-175B", 174.6),
        ("gpt2-xl", 1.557),
        ("OPT-66B", 65.7),
        ("bloom-176b", 176.2),
        ("gpt-neox-20b", 20.55),
        ("MPT-7b", 6.658),
        ("DeepSeek-V2", 235.7),
        ("deepseek-v2-lite", 15.7),
        ("CodeLlama-34b", 33.74),
        ("GPT-3 (175B)", 174.6),
        ("falcon-40b", 41.3),
        ("gemma-7b", 8.54),
    ],
)
def test_a_name_is_enough(name: str, billions: float) -> None:
    assert _parameters(shape_of(_point(name))) == pytest.approx(
        billions * 1e9, rel=4e-3
    )


def test_what_is_taken_from_elsewhere_is_said() -> None:
    shape = shape_of(_point("LLAMA3_70B"))
    assert "Llama 3 70B" in shape.assumed[0]
    assert "arXiv" in shape.assumed[0]
    assert "heads, hidden, layers, vocab as published" in shape.assumed
    assert any("8192 tokens" in word for word in shape.assumed)


def test_what_a_row_states_counts_more_than_the_name() -> None:
    stated = {"layers": 4, "heads": 16, "seq": 512, "vocab": 64000}
    shape = shape_of(_point("Llama3-8B", hidden=2048, **stated))
    assert (shape.layers, shape.hidden, shape.heads) == (4, 2048, 16)
    assert (shape.seq, shape.vocab) == (512, 64000)
    # The rest follows: half as wide, and as many queries to a key as before or fewer.
    assert (shape.inner, shape.head_size, shape.kv_heads) == (7168, 128, 8)
    assert any("scaled" in word for word in shape.assumed)


def test_a_hybrid_with_other_layers_keeps_its_pattern() -> None:
    shape = shape_of(_point("Nemotron-H-56B", layers=10))
    assert shape.pattern == "M-M-M-M*-M"
    assert _parameters(shape) < 10e9


def test_an_unknown_name_with_a_shape_is_a_gpt() -> None:
    shape = shape_of(_gpt())
    assert (shape.family, shape.inner, shape.vocab, shape.gated) == (
        "gpt",
        8192,
        51200,
        False,
    )
    assert any("GELU" in word for word in shape.assumed)


def test_parameters_tell_tied_heads_and_inner_sizes() -> None:
    tied = expected_parameters(shape_of(_gpt()))
    assert shape_of(_gpt(params=tied)).tied
    assert not shape_of(_gpt(params=tied + 51200 * 2048)).tied
    wider = tied + 24 * 2 * 2048 * 4096
    assert shape_of(_gpt(params=wider)).inner == pytest.approx(8192 + 4096, abs=64)
    odd = shape_of(_gpt(params=100 * tied))
    assert odd.inner == 8192
    assert any("where the source says" in word for word in odd.assumed)


def test_a_name_like_llama_has_a_gate() -> None:
    sizes = {"layers": 26, "hidden": 3200, "heads": 32, "seq": 2048}
    shape = shape_of(_point("open-llama", **sizes))
    assert (shape.family, shape.gated, shape.inner) == ("llama", True, 8704)
    assert shape.vocab == 32000


@pytest.mark.parametrize(
    ("name", "inner"), [("llama 8B", 14336), ("Llama-7B-x", 11008)]
)
def test_a_llama_without_a_version_is_told_by_its_size(name: str, inner: int) -> None:
    shape = shape_of(_point(name, layers=32, hidden=4096, heads=32, seq=2048))
    assert shape.inner == inner
    assert "Llama" in shape.assumed[0]


def test_a_gpt_without_a_shape_is_told_by_its_size() -> None:
    shape = shape_of(_point("Megatron GPT 22B", seq=2048))
    assert (shape.layers, shape.hidden, shape.heads) == (48, 6144, 64)
    assert any("GPT of 2.2e+10" in word for word in shape.assumed)
    with pytest.raises(CalibrationError, match="no layers"):
        shape_of(_point("Megatron GPT 250B", seq=2048))


def test_experts_are_counted_by_name_or_parameters() -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "seq": 256}
    named = shape_of(_point("gpt moe-16", **sizes))
    assert named.experts == 16
    counted = shape_of(_point("my moe", params=_parameters(named), **sizes))
    assert counted.experts == 16
    assert shape_of(_point("my moe", **sizes)).experts == 8
    wide = shape_of(_point("gpt3-6.7b moe-64", seq=2048))
    assert (wide.hidden, wide.experts) == (4096, 64)
    chosen = shape_of(_point("GPT e16k4", **sizes))
    assert (chosen.experts, chosen.experts_per_token) == (16, 4)


def test_heads_need_not_divide_the_hidden_size() -> None:
    shape = shape_of(_gpt(heads=15))
    assert shape.head_size == 128
    assert any("heads=15 do not divide hidden=2048" in word for word in shape.assumed)


def test_parameters_tell_grouped_queries() -> None:
    # config.json of TinyLlama/TinyLlama-1.1B: 4 key heads, inner 5632.
    sizes = {"layers": 22, "hidden": 2048, "heads": 32, "seq": 2048}
    shape = shape_of(_point("TinyLlama", params=1.1e9, **sizes))
    assert (shape.kv_heads, shape.inner) == (4, 5632)


@pytest.mark.parametrize(
    ("model", "source", "params", "billions", "experts"),
    [
        # As Alpa's own counting functions printed them.
        ("gpt", "Alpa results_intra_ablation", 455288000, 0.455288, 0),
        ("gpt", "Alpa results_intra_ablation", 3333038000, 3.333038, 0),
        ("moe", "Alpa results_intra_ablation", 690395000, 0.690395, 8),
        ("moe", "Alpa results_intra_ablation", 5138924000, 5.138924, 32),
        ("moe", "Alpa results_e2e", 690000000, 0.6857, 16),
        ("moe", "Alpa results_e2e", 70415200000, 70.4152, 64),
    ],
)
def test_alpa_names_its_models_by_size(
    model: str, source: str, params: float, billions: float, experts: int
) -> None:
    shape = shape_of(_point(model, source=source, params=params, vocab=51200))
    assert shape.experts == experts
    assert _parameters(shape) == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("point", "match"),
    [
        (_point("wresnet", params=250e6), "no language model"),
        (_point("gpt"), "neither shape nor parameter count"),
        (_point("gpt", params=5e9), "no 'gpt' of 5e"),
        (_point("nobody's", hidden=1024, seq=128), "no layers"),
        (_point("my moe", layers=4, hidden=512, seq=64, params=1e6), "no room"),
    ],
)
def test_what_cannot_be_told_is_refused(point: Point, match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        shape_of(point)


#: Rows whose count is the size in the name, of models that have another.
_COARSE = {
    ("GPT", 1.7e9),
    ("InternLM-7B", 7e9),
    ("Llama2-7b", 7e9),
    ("LLAMA2-7B", 7e9),
    ("Nemotron-8B", 8e9),
    ("Nemotron-22B", 22e9),
    ("Nemotron4-15B", 15e9),
    ("gpt 15B", 15e9),
    ("moe", 1.3e9),
}


def test_every_measurement_of_a_transformer_has_its_parameters() -> None:
    folder = os.environ.get("MESHWRIGHT_DATA")
    if not folder:
        pytest.skip("MESHWRIGHT_DATA names no folder of measurements")
    shapes: dict[ModelShape, set[tuple[str, float]]] = {}
    complete = missed = 0
    for point in read_points(Path(folder) / "measured" / "points.csv"):
        try:
            stated = shapes.setdefault(shape_of(point), set())
        except CalibrationError:
            missed += point.complete
            assert point.model == "wresnet" or not (point.params or point.layers)
            continue
        complete += point.complete
        stated.update({(point.model, point.params)} if point.params else ())
    assert complete > 700
    assert not missed
    for shape, counts in shapes.items():
        found = _parameters(shape) if counts else 0
        for name, count in counts:
            most = 0.07 if (name, count) in _COARSE else 0.02
            assert abs(found / count - 1) <= most, name
