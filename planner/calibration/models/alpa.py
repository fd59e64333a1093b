"""Alpa's suites, which name their models by family and parameter count alone.

Figures: alpa-projects/alpa, benchmark/alpa/suite_manual_gpt.py (``gpt_specs``),
suite_manual_moe.py (``moe_specs``) and exp_intra_ablation.py (``gpt_1_spec``,
``moe_1_spec``). MLPs of its MoE models are 8 hidden wide, every second layer has
experts, of which two see a token (compute_moe_parameter_count, MoEConfig).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.calibration.points import Point
from planner.errors import CalibrationError

__all__ = ["alpa_figures"]

#: Parameters: layers, hidden, heads, vocabulary.
_GPT = {
    125e6: (12, 768, 12, 51200),
    350e6: (24, 1024, 16, 51200),
    760e6: (24, 1536, 16, 51200),
    1.3e9: (24, 2048, 32, 51200),
    2.6e9: (32, 2560, 32, 51200),
    6.7e9: (32, 4096, 32, 51200),
    15e9: (48, 5120, 40, 51200),
    39e9: (48, 8192, 64, 51200),
    76e9: (60, 10240, 80, 51200),
}
_GPT_ABLATION = {
    455.3e6: (8, 2048, 16, 25600),
    984.9e6: (8, 3072, 24, 25600),
    1715.9e6: (8, 4096, 32, 25600),
    3333.0e6: (8, 5760, 40, 25600),
}
#: Parameters: layers, hidden, heads, vocabulary, experts.
_MOE = {
    380e6: (8, 768, 16, 32000, 8),
    690e6: (8, 768, 16, 32000, 16),
    1.3e9: (16, 768, 16, 32000, 16),
    2.4e9: (16, 1024, 16, 32000, 16),
    10e9: (16, 1536, 16, 32000, 32),
    27e9: (16, 2048, 16, 32000, 48),
    70e9: (32, 2048, 16, 32000, 64),
    140e9: (32, 2048, 16, 32000, 128),
}
_MOE_ABLATION = {
    690.4e6: (8, 1024, 32, 51200, 8),
    1901.4e6: (8, 1280, 40, 51200, 16),
    2722.1e6: (8, 1536, 24, 51200, 16),
    5138.9e6: (8, 1536, 24, 51200, 32),
}
#: GPUs that the first, second, ... size runs on, by whether models are shallow.
#: Source: exp_intra_ablation.py, exp_intra_only.py and exp_inter_only.py there.
_SCALED = {True: (1, 2, 4, 8), False: (1, 2, 4, 8, 16, 32, 64)}
#: Share by which a stated count may miss a table's.
_NEAR = 0.04


def alpa_figures(point: Point) -> tuple[dict[str, Any], list[str]]:
    """Figures of a model called ``gpt`` or ``moe``, and what was assumed.

    Args:
        point: A row without a shape.
    Raises:
        CalibrationError: If it states no parameter count, or one of none of them.
    """
    shallow = "intra_ablation" in point.source
    moe = "moe" in point.model.lower()
    sizes: dict[float, tuple[int, ...]] = {}
    if moe:
        sizes.update(_MOE_ABLATION if shallow else _MOE)
    else:
        sizes.update(_GPT_ABLATION if shallow else _GPT)
    scaled: list[str] = []
    ours = "alpa" in point.source.lower()
    if ours and point.params is None and point.n_gpus in _SCALED[shallow]:
        # The smallest of the GPT models is in no weak scaling.
        first = 0 if shallow or moe else 1
        place = first + _SCALED[shallow].index(point.n_gpus)
        point = replace(point, params=sorted(sizes)[place])
        scaled = [f"the size that Alpa runs on {point.n_gpus} GPUs"]
    if point.params is None:
        raise CalibrationError(
            f"point {point.point_id}: {point.model!r} has neither shape nor parameter "
            f"count; fill layers, hidden, heads and seq"
        )
    params = point.params
    nearest = min(sizes, key=lambda size: abs(size / params - 1))
    if abs(nearest / point.params - 1) > _NEAR:
        raise CalibrationError(
            f"point {point.point_id}: no {point.model!r} of {point.params / 1e9:.3g}e9 "
            f"parameters is known; fill layers, hidden, heads and seq"
        )
    layers, hidden, heads, vocab, *experts = sizes[nearest]
    suite = "exp_intra_ablation.py" if shallow else f"suite_manual_{point.model}.py"
    figures: dict[str, Any] = {
        "family": "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "inner": 4 * hidden,
        "vocab": vocab,
        "seq": 1024,
    }
    assumed = [f"the shape that Alpa's benchmark/alpa/{suite} gives this size"]
    assumed += scaled
    if point.vocab is not None and point.vocab != vocab:
        assumed.append(
            f"a vocabulary of {vocab}, not {point.vocab}, as the parameter count has it"
        )
    if experts:
        figures |= {
            "inner": 8 * hidden,
            "experts": experts[0],
            "experts_per_token": 2,
            "expert_inner": 8 * hidden,
            "expert_every": 2,
        }
        assumed.append("experts in every second layer, each token sent to two")
    return figures, assumed
