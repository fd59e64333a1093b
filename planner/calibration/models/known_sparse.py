"""Models with experts or scans, with their published figures."""

from __future__ import annotations

from typing import Any

from planner.calibration.models.known import LLAMA, NEMOTRON, Known, published

__all__ = ["SPARSE"]

_BRIDGE_HYBRID = "NVIDIA Megatron-Bridge, models/nemotronh/nemotron_h_provider.py"
_NEMOTRON3 = "config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B and -Super-120B-A12B"
_QWEN3 = "Qwen Team 2025 (arXiv:2505.09388), tables 1 and 2; config.json of each size"
_DEEPSEEK2 = "DeepSeek-AI 2024 (arXiv:2405.04434), section 3.1.2 and appendix B"
_MOE = {**LLAMA, "family": "moe"}
_HYBRID: dict[str, Any] = {
    **NEMOTRON,
    "family": "hybrid",
    "vocab": 131072,
    "head_size": 128,
}
_SCAN = (
    "the Mamba-2 scan is traced as chunks of 128 tokens: attention inside, two "
    "products with the state between them; its short convolution is one pass",
)

#: M scan, * attention, - MLP, E experts.
_H56 = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
_NANO = "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"

_HYBRIDS: tuple[Known, ...] = (
    published(
        r"^(nvidia-)?nemotron-?h-?56b",
        "Nemotron-H 56B",
        _BRIDGE_HYBRID,
        _HYBRID,
        len(_H56),
        8192,
        64,
        8,
        32768,
        context=8192,
        notes=_SCAN,
        pattern=_H56,
        scan_heads=256,
        scan_state=256,
    ),
    published(
        r"^(nvidia-)?nemotron-?h-?8b",
        "Nemotron-H 8B",
        _BRIDGE_HYBRID,
        _HYBRID,
        52,
        4096,
        32,
        8,
        21504,
        context=8192,
        notes=_SCAN,
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        scan_heads=128,
    ),
    published(
        r"^(nvidia-)?nemotron-?3-nano",
        "Nemotron 3 Nano",
        _NEMOTRON3,
        _HYBRID,
        len(_NANO),
        2688,
        32,
        2,
        1856,
        context=8192,
        notes=_SCAN,
        pattern=_NANO,
        scan_heads=64,
        experts=128,
        experts_per_token=6,
        expert_inner=1856,
        shared_inner=3712,
    ),
    published(
        r"^(nvidia-)?nemotron-?3-super",
        "Nemotron 3 Super",
        _NEMOTRON3,
        _HYBRID,
        88,
        4096,
        32,
        2,
        2688,
        context=8192,
        notes=(
            *_SCAN,
            "its 40 scan, 40 expert and 8 attention layers are spread evenly",
            "no layer for multi-token prediction",
        ),
        pattern="MEMEM*EMEME" * 8,
        scan_heads=128,
        experts=512,
        experts_per_token=22,
        expert_inner=2688,
        shared_inner=5376,
        latent=1024,
    ),
)

_MLA: dict[str, Any] = {
    **_MOE,
    "family": "deepseek",
    "head_size": 128,
    "query_rank": 1536,
    "key_rank": 512,
    "rotary_size": 64,
    "experts_per_token": 8,
    "expert_inner": 2048,
    "shared_inner": 2048,
}
_QWEN: dict[str, Any] = {
    **_MOE,
    "vocab": 151936,
    "head_size": 128,
    "qk_norm": True,
    "experts": 128,
    "experts_per_token": 8,
}
_SCOUT: dict[str, Any] = {
    **_MOE,
    "vocab": 202048,
    "head_size": 128,
    "experts_per_token": 1,
    "expert_inner": 8192,
    "shared_inner": 8192,
}
_OSS: dict[str, Any] = {
    **_MOE,
    "vocab": 201088,
    "head_size": 64,
    "experts_per_token": 4,
    "expert_inner": 2880,
}
_WINDOWS = (
    "every layer attends to all tokens before, where each second one sees 128",
    "biases and attention sinks are left out",
)
_CHUNKS = ("every layer attends to all tokens before, where most see 8,192",)
_NO_MTP = ("no layer for multi-token prediction",)
_ENTRIES: tuple[tuple[str, str, str, dict[str, Any], tuple[Any, ...]], ...] = (
    (
        r"deepseek-?v-?3",
        "DeepSeek-V3",
        "DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2",
        {**_MLA, "vocab": 129280, "experts": 256, "dense_first": 3},
        (61, 7168, 128, 128, 18432, _NO_MTP),
    ),
    (
        r"deepseek-?v-?2-lite",
        "DeepSeek-V2-Lite",
        _DEEPSEEK2,
        {
            **_MLA,
            "vocab": 102400,
            "query_rank": 0,
            "experts": 64,
            "experts_per_token": 6,
            "expert_inner": 1408,
            "shared_inner": 2816,
            "dense_first": 1,
        },
        (27, 2048, 16, 16, 10944, ()),
    ),
    (
        r"deepseek-?v-?2",
        "DeepSeek-V2",
        _DEEPSEEK2,
        {
            **_MLA,
            "vocab": 102400,
            "experts": 160,
            "experts_per_token": 6,
            "expert_inner": 1536,
            "shared_inner": 3072,
            "dense_first": 1,
        },
        (60, 5120, 128, 128, 12288, ()),
    ),
    (
        r"kimi-?k-?2",
        "Kimi K2",
        "config.json of moonshotai/Kimi-K2-Base",
        {**_MLA, "vocab": 163840, "experts": 384, "dense_first": 1},
        (61, 7168, 64, 64, 18432, ()),
    ),
    (
        r"qwen-?3-30b",
        "Qwen3 30B-A3B",
        _QWEN3,
        {**_QWEN, "expert_inner": 768},
        (48, 2048, 32, 4, 6144, ()),
    ),
    (
        r"qwen-?3-235b",
        "Qwen3 235B-A22B",
        _QWEN3,
        {**_QWEN, "expert_inner": 1536},
        (94, 4096, 64, 4, 12288, ()),
    ),
    (
        r"mixtral.*8x22b",
        "Mixtral 8x22B",
        "config.json of mistralai/Mixtral-8x22B-v0.3",
        {
            **_MOE,
            "vocab": 32768,
            "experts": 8,
            "experts_per_token": 2,
            "expert_inner": 16384,
        },
        (56, 6144, 48, 8, 16384, ()),
    ),
    (
        r"mixtral",
        "Mixtral 8x7B",
        "Jiang et al. 2024 (arXiv:2401.04088), table 1",
        {
            **_MOE,
            "vocab": 32000,
            "experts": 8,
            "experts_per_token": 2,
            "expert_inner": 14336,
        },
        (32, 4096, 32, 8, 14336, ()),
    ),
    (
        r"gpt-?oss.*120b",
        "gpt-oss 120B",
        "config.json of openai/gpt-oss-120b and gpt-oss-20b",
        {**_OSS, "experts": 128},
        (36, 2880, 64, 8, 2880, _WINDOWS),
    ),
    (
        r"gpt-?oss.*20b",
        "gpt-oss 20B",
        "config.json of openai/gpt-oss-120b and gpt-oss-20b",
        {**_OSS, "experts": 32},
        (24, 2880, 64, 8, 2880, _WINDOWS),
    ),
    (
        r"grok-?1",
        "Grok-1",
        "xai-org/grok-1, run.py",
        {
            **_MOE,
            "vocab": 131072,
            "tied": True,
            "experts": 8,
            "experts_per_token": 2,
            "expert_inner": 32768,
        },
        (64, 6144, 48, 8, 32768, ()),
    ),
    (
        r"llama-?4.*maverick",
        "Llama 4 Maverick",
        "config.json of meta-llama/Llama-4-Maverick-17B-128E",
        {**_SCOUT, "experts": 128, "expert_every": 2},
        (48, 5120, 40, 8, 16384, _CHUNKS),
    ),
    (
        r"llama-?4.*scout",
        "Llama 4 Scout",
        "config.json of meta-llama/Llama-4-Scout-17B-16E",
        {**_SCOUT, "experts": 16},
        (48, 5120, 40, 8, 16384, _CHUNKS),
    ),
)

#: All of them.
SPARSE: tuple[Known, ...] = (
    *(
        published(pattern, title, source, base, *sizes, notes=notes)
        for pattern, title, source, base, (*sizes, notes) in _ENTRIES
    ),
    *_HYBRIDS,
)
