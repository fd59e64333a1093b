"""Models that measurements name, with their published figures.

Each entry says by which names a model goes and where its figures are published;
figures are fields of :class:`planner.calibration.shapes.ModelShape`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KNOWN", "Known", "find_known", "plain_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One model.

    Attributes:
        pattern: Found in its :func:`plain_name`.
        title: For people.
        source: Of the figures.
        figures: Fields of a ModelShape.
        context: Tokens of a sample where a measurement does not say.
        notes: What is simplified.
    """

    pattern: str
    title: str
    source: str
    figures: Mapping[str, Any]
    context: int = 4096
    notes: tuple[str, ...] = field(default=())


def plain_name(name: str) -> str:
    """Lower case, words joined by hyphens, remarks in brackets left out."""
    bare = re.sub(r"\([^)]*\)|\[[^\]]*\]", " ", name.lower())
    return re.sub(r"[^a-z0-9.]+", "-", bare).strip("-")


def _sized(family: str, size: str) -> str:
    """Family and then a size that is not the end of another number or of ``-a3b``."""
    return rf"{family}.*(?<!-a)(?<![0-9.]){re.escape(size)}(?![a-z0-9])"


_LLAMA: dict[str, Any] = {
    "family": "llama",
    "gated": True,
    "tied": False,
    "bias": False,
    "positions": False,
}
_MOE = {**_LLAMA, "family": "moe"}
_MPT: dict[str, Any] = {"family": "gpt", "bias": False, "vocab": 50368}
_NEMOTRON: dict[str, Any] = {
    "family": "gpt",
    "activation": "relu2",
    "tied": False,
    "bias": False,
    "positions": False,
    "vocab": 256000,
}
_HYBRID: dict[str, Any] = {
    **_NEMOTRON,
    "family": "hybrid",
    "vocab": 131072,
    "head_size": 128,
}
_SCAN = (
    "the Mamba-2 scan is traced as chunks of 128 tokens: attention inside, two "
    "products with the state between them; its short convolution is one pass",
)


def _dense(
    pattern: str,
    title: str,
    source: str,
    base: Mapping[str, Any],
    /,
    *sizes: int,
    context: int = 4096,
    notes: tuple[str, ...] = (),
    **more: Any,
) -> Known:
    layers, hidden, heads, kv_heads, inner = sizes
    figures = {
        **base,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "inner": inner,
        **more,
    }
    return Known(
        pattern=pattern,
        title=title,
        source=source,
        figures=figures,
        context=context,
        notes=notes,
    )


_ARXIV_LLAMA2 = "Touvron et al. 2023 (arXiv:2307.09288); config.json of each size"
_ARXIV_LLAMA3 = "Llama Team 2024 (arXiv:2407.21783), table 3; config.json of each size"
_QWEN25 = "Qwen Team 2024 (arXiv:2412.15115), table 1; config.json of each size"
_QWEN3 = "Qwen Team 2025 (arXiv:2505.09388), tables 1 and 2; config.json of each size"
_MPT_SOURCE = "MosaicML llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml"
_NEMO_NEMOTRON = "NVIDIA NeMo, nemo/collections/llm/gpt/model/nemotron.py"
_BRIDGE_HYBRID = "NVIDIA Megatron-Bridge, models/nemotronh/nemotron_h_provider.py"
_NEMOTRON3 = "config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B and -Super-120B-A12B"
_BROWN = "Brown et al. 2020 (arXiv:2005.14165), table 2.1"

_L2, _L3 = r"llama-?v?2", r"llama-?v?3(\.\d)?"
_L2_TABLE = (
    ("7b", 32, 4096, 32, 32, 11008),
    ("13b", 40, 5120, 40, 40, 13824),
    ("34b", 48, 8192, 64, 8, 22016),
    ("70b", 80, 8192, 64, 8, 28672),
)
_L1_TABLE = (
    ("7b", 32, 4096, 32, 32, 11008),
    ("13b", 40, 5120, 40, 40, 13824),
    ("30b", 60, 6656, 52, 52, 17920),
    ("33b", 60, 6656, 52, 52, 17920),
    ("65b", 80, 8192, 64, 64, 22016),
)
_L3_TABLE = (
    ("1b", 16, 2048, 32, 8, 8192),
    ("3b", 28, 3072, 24, 8, 8192),
    ("8b", 32, 4096, 32, 8, 14336),
    ("70b", 80, 8192, 64, 8, 28672),
    ("405b", 126, 16384, 128, 8, 53248),
)
_QWEN25_TABLE = (
    ("0.5b", 24, 896, 14, 2, 4864),
    ("1.5b", 28, 1536, 12, 2, 8960),
    ("3b", 36, 2048, 16, 2, 11008),
    ("7b", 28, 3584, 28, 4, 18944),
    ("14b", 48, 5120, 40, 8, 13824),
    ("32b", 64, 5120, 40, 8, 27648),
    ("72b", 80, 8192, 64, 8, 29568),
)
_QWEN3_TABLE = (
    ("0.6b", 28, 1024, 16, 8, 3072),
    ("1.7b", 28, 2048, 16, 8, 6144),
    ("4b", 36, 2560, 32, 8, 9728),
    ("8b", 36, 4096, 32, 8, 12288),
    ("14b", 40, 5120, 40, 8, 17408),
    ("32b", 64, 5120, 64, 8, 25600),
)
_MPT_TABLE = (
    ("125m", 12, 768, 12),
    ("350m", 24, 1024, 16),
    ("760m", 24, 1536, 12),
    ("1b", 24, 2048, 16),
    ("3b", 32, 2560, 20),
    ("7b", 32, 4096, 32),
    ("13b", 40, 5120, 40),
    ("30b", 48, 7168, 56),
    ("70b", 80, 8192, 64),
)
_GPT3_TABLE = (
    ("125m", 12, 768, 12),
    ("350m", 24, 1024, 16),
    ("760m", 24, 1536, 16),
    ("1.3b", 24, 2048, 16),
    ("2.7b", 32, 2560, 32),
    ("6.7b", 32, 4096, 32),
    ("13b", 40, 5120, 40),
    ("175b", 96, 12288, 96),
)
_GPT2_TABLE = (
    ("xl", 48, 1600, 25),
    ("large", 36, 1280, 20),
    ("medium", 24, 1024, 16),
    ("", 12, 768, 12),
)


def _llamas() -> list[Known]:
    made = [
        _dense(
            _sized(_L3, size),
            f"Llama 3 {size.upper()}",
            _ARXIV_LLAMA3,
            _LLAMA,
            *figures,
            context=8192,
            vocab=128256,
            tied=size in ("1b", "3b"),
            **({"head_size": 64} if size == "1b" else {}),
        )
        for size, *figures in _L3_TABLE
    ]
    made += [
        _dense(
            _sized(_L2, size),
            f"Llama 2 {size.upper()}",
            _ARXIV_LLAMA2,
            _LLAMA,
            *figures,
            vocab=32000,
        )
        for size, *figures in _L2_TABLE
    ]
    made += [
        _dense(
            _sized(r"llama(?!-?v?[234](?![0-9b]))", size),
            f"Llama {size.upper()}",
            "Touvron et al. 2023 (arXiv:2302.13971), table 2",
            _LLAMA,
            *figures,
            context=2048,
            vocab=32000,
        )
        for size, *figures in _L1_TABLE
    ]
    return made


def _qwens() -> list[Known]:
    made = [
        _dense(
            _sized(r"qwen-?3", size),
            f"Qwen3 {size.upper()}",
            _QWEN3,
            _LLAMA,
            *figures,
            vocab=151936,
            head_size=128,
            qk_norm=True,
            tied=size in ("0.6b", "1.7b", "4b"),
        )
        for size, *figures in _QWEN3_TABLE
    ]
    made += [
        _dense(
            _sized(r"qwen-?2(\.5)?", size),
            f"Qwen2.5 {size.upper()}",
            _QWEN25,
            _LLAMA,
            *figures,
            vocab=152064 if size in ("7b", "14b", "32b", "72b") else 151936,
            tied=size in ("0.5b", "1.5b", "3b"),
            notes=("biases of queries, keys and values are left out",),
        )
        for size, *figures in _QWEN25_TABLE
    ]
    return made


def _gpts() -> list[Known]:
    made = [
        _dense(
            _sized("mpt", size),
            f"MPT-{size}",
            _MPT_SOURCE,
            _MPT,
            layers,
            hidden,
            heads,
            heads,
            4 * hidden,
            context=2048,
        )
        for size, layers, hidden, heads in _MPT_TABLE
    ]
    made += [
        _dense(
            _sized(r"gpt-?3", size),
            f"GPT-3 {size.upper()}",
            _BROWN,
            {"family": "gpt"},
            layers,
            hidden,
            heads,
            heads,
            4 * hidden,
            context=2048,
            vocab=51200,
        )
        for size, layers, hidden, heads in _GPT3_TABLE
    ]
    made += [
        _dense(
            rf"gpt-?2-{size}$" if size else r"gpt-?2$",
            f"GPT-2 {size}".strip(),
            "Radford et al. 2019, table 2; head size 64 as in the released code",
            {"family": "gpt"},
            layers,
            hidden,
            heads,
            heads,
            4 * hidden,
            context=1024,
            vocab=50257,
        )
        for size, layers, hidden, heads in _GPT2_TABLE
    ]
    made += [
        _dense(
            rf"bert-{size}",
            f"BERT {size}",
            "Devlin et al. 2019 (arXiv:1810.04805), section 3",
            {"family": "bert"},
            layers,
            hidden,
            heads,
            heads,
            4 * hidden,
            context=512,
            vocab=30522,
            notes=("the head is a product with the embedding alone",),
        )
        for size, layers, hidden, heads in (
            ("base", 12, 768, 12),
            ("large", 24, 1024, 16),
        )
    ]
    return made


def _nemotrons() -> list[Known]:
    made = [
        _dense(
            pattern,
            title,
            _NEMO_NEMOTRON,
            _NEMOTRON,
            *figures,
        )
        for pattern, title, *figures in (
            (_sized("nemotron", "340b"), "Nemotron-4 340B", 96, 18432, 96, 8, 73728),
            (_sized("nemotron", "15b"), "Nemotron-4 15B", 32, 6144, 48, 8, 24576),
            (_sized("nemotron", "22b"), "Nemotron-3 22B", 40, 6144, 48, 48, 24576),
            (
                r"nemotron(?!-h).*(?<![0-9.])8b(?![a-z0-9])",
                "Nemotron-3 8B",
                32,
                4096,
                32,
                32,
                16384,
            ),
        )
    ]
    h56 = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
    made.append(
        _dense(
            r"nemotron-?h-?56b",
            "Nemotron-H 56B",
            _BRIDGE_HYBRID,
            _HYBRID,
            len(h56),
            8192,
            64,
            8,
            32768,
            context=8192,
            notes=_SCAN,
            pattern=h56,
            scan_heads=256,
            scan_state=256,
        )
    )
    made.append(
        _dense(
            r"nemotron-?h-?8b",
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
        )
    )
    nano = "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
    made.append(
        _dense(
            r"nemotron-?3-nano",
            "Nemotron 3 Nano",
            _NEMOTRON3,
            _HYBRID,
            len(nano),
            2688,
            32,
            2,
            1856,
            context=8192,
            notes=_SCAN,
            pattern=nano,
            scan_heads=64,
            experts=128,
            experts_per_token=6,
            expert_inner=1856,
            shared_inner=3712,
        )
    )
    made.append(
        _dense(
            r"nemotron-?3-super",
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
        )
    )
    return made


def _experts() -> list[Known]:
    mla = {
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
    qwen = {
        **_MOE,
        "vocab": 151936,
        "head_size": 128,
        "qk_norm": True,
        "experts": 128,
        "experts_per_token": 8,
    }
    scout = {
        **_MOE,
        "vocab": 202048,
        "head_size": 128,
        "experts_per_token": 1,
        "expert_inner": 8192,
        "shared_inner": 8192,
    }
    oss = {
        **_MOE,
        "vocab": 201088,
        "head_size": 64,
        "experts_per_token": 4,
        "expert_inner": 2880,
    }
    windows = (
        "every layer attends to all tokens before, where each second one sees 128",
        "biases and attention sinks are left out",
    )
    chunks = ("every layer attends to all tokens before, where most see 8,192",)
    no_mtp = ("no layer for multi-token prediction",)
    entries: tuple[tuple[str, str, str, dict[str, Any], tuple[Any, ...]], ...] = (
        (
            r"deepseek-?v-?3",
            "DeepSeek-V3",
            "DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2",
            {**mla, "vocab": 129280, "experts": 256, "dense_first": 3},
            (61, 7168, 128, 128, 18432, no_mtp),
        ),
        (
            r"kimi-?k-?2",
            "Kimi K2",
            "config.json of moonshotai/Kimi-K2-Base",
            {**mla, "vocab": 163840, "experts": 384, "dense_first": 1},
            (61, 7168, 64, 64, 18432, ()),
        ),
        (
            r"qwen-?3-30b",
            "Qwen3 30B-A3B",
            _QWEN3,
            {**qwen, "expert_inner": 768},
            (48, 2048, 32, 4, 6144, ()),
        ),
        (
            r"qwen-?3-235b",
            "Qwen3 235B-A22B",
            _QWEN3,
            {**qwen, "expert_inner": 1536},
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
            "OpenAI 2025 (arXiv:2508.10925), table 1; config.json",
            {**oss, "experts": 128},
            (36, 2880, 64, 8, 2880, windows),
        ),
        (
            r"gpt-?oss.*20b",
            "gpt-oss 20B",
            "OpenAI 2025 (arXiv:2508.10925), table 1; config.json",
            {**oss, "experts": 32},
            (24, 2880, 64, 8, 2880, windows),
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
            {**scout, "experts": 128, "expert_every": 2},
            (48, 5120, 40, 8, 16384, chunks),
        ),
        (
            r"llama-?4.*scout",
            "Llama 4 Scout",
            "config.json of meta-llama/Llama-4-Scout-17B-16E",
            {**scout, "experts": 16},
            (48, 5120, 40, 8, 16384, chunks),
        ),
    )
    return [
        _dense(pattern, title, source, base, *sizes, notes=notes)
        for pattern, title, source, base, (*sizes, notes) in entries
    ]


#: The first whose pattern is found counts.
KNOWN: tuple[Known, ...] = (
    *_experts(),
    *_nemotrons(),
    _dense(
        r"internlm(?!-?[23]).*7b",
        "InternLM-7B",
        "InternLM/InternEvo, configs/7B_sft.py",
        _LLAMA,
        32,
        4096,
        32,
        32,
        11008,
        context=2048,
        vocab=103168,
    ),
    _dense(
        r"mistral.*7b",
        "Mistral 7B",
        "Jiang et al. 2023 (arXiv:2310.06825), table 1",
        _LLAMA,
        32,
        4096,
        32,
        8,
        14336,
        vocab=32000,
    ),
    *_llamas(),
    *_qwens(),
    *_gpts(),
)


def find_known(name: str) -> Known | None:
    """The model that a measurement names, if it is one of these."""
    plain = plain_name(name)
    return next((known for known in KNOWN if re.search(known.pattern, plain)), None)
