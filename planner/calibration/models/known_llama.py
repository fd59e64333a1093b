"""Dense models built like Llama, with their published figures."""

from __future__ import annotations

from planner.calibration.models.known import LLAMA, Known, published, sized

__all__ = ["LLAMAS"]

_ARXIV_LLAMA2 = "Touvron et al. 2023 (arXiv:2307.09288); config.json of each size"
_ARXIV_LLAMA3 = "Llama Team 2024 (arXiv:2407.21783), table 3; config.json of each size"
_QWEN25 = "Qwen Team 2024 (arXiv:2412.15115), table 1; config.json of each size"
_QWEN3 = "Qwen Team 2025 (arXiv:2505.09388), tables 1 and 2; config.json of each size"

_L2, _L3 = r"(llama-?v?2|code-?llama)", r"llama-?v?3(\.\d)?"
#: Size: layers, hidden, heads, key/value heads, inner.
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


def _llamas() -> list[Known]:
    made = [
        published(
            sized(_L3, size),
            f"Llama 3 {size.upper()}",
            _ARXIV_LLAMA3,
            {**LLAMA, "head_size": 64} if size == "1b" else LLAMA,
            *figures,
            context=8192,
            vocab=128256,
            tied=size in ("1b", "3b"),
        )
        for size, *figures in _L3_TABLE
    ]
    made += [
        published(
            sized(_L2, size),
            f"Llama 2 {size.upper()}",
            _ARXIV_LLAMA2,
            LLAMA,
            *figures,
            vocab=32000,
        )
        for size, *figures in _L2_TABLE
    ]
    made += [
        published(
            sized(r"llama(?!-?v?[234](?![0-9b]))", size),
            f"Llama {size.upper()}",
            "Touvron et al. 2023 (arXiv:2302.13971), table 2",
            LLAMA,
            *figures,
            context=2048,
            vocab=32000,
        )
        for size, *figures in _L1_TABLE
    ]
    return made


def _qwens() -> list[Known]:
    made = [
        published(
            sized(r"qwen-?3", size),
            f"Qwen3 {size.upper()}",
            _QWEN3,
            LLAMA,
            *figures,
            vocab=151936,
            head_size=128,
            qk_norm=True,
            tied=size in ("0.6b", "1.7b", "4b"),
        )
        for size, *figures in _QWEN3_TABLE
    ]
    made += [
        published(
            sized(r"qwen-?2(\.5)?", size),
            f"Qwen2.5 {size.upper()}",
            _QWEN25,
            LLAMA,
            *figures,
            vocab=152064 if size in ("7b", "14b", "32b", "72b") else 151936,
            tied=size in ("0.5b", "1.5b", "3b"),
            notes=("biases of queries, keys and values are left out",),
        )
        for size, *figures in _QWEN25_TABLE
    ]
    return made


#: All of them.
LLAMAS: tuple[Known, ...] = (
    published(
        r"internlm(?!-?[23]).*7b",
        "InternLM-7B",
        "InternLM/InternEvo, configs/7B_sft.py",
        LLAMA,
        32,
        4096,
        32,
        32,
        11008,
        context=2048,
        vocab=103168,
    ),
    published(
        r"mistral.*7b",
        "Mistral 7B",
        "Jiang et al. 2023 (arXiv:2310.06825), table 1",
        LLAMA,
        32,
        4096,
        32,
        8,
        14336,
        vocab=32000,
    ),
    *_llamas(),
    *_qwens(),
    *(
        published(
            pattern,
            title,
            "config.json of google/gemma-7b, gemma-2-9b and gemma-2-27b",
            {**LLAMA, "tied": True, "vocab": 256000},
            *figures,
            context=8192,
            head_size=head,
        )
        for pattern, title, head, *figures in (
            (r"gemma-?2-9b", "Gemma 2 9B", 256, 42, 3584, 16, 8, 14336),
            (r"gemma-?2-27b", "Gemma 2 27B", 128, 46, 4608, 32, 16, 36864),
            (r"gemma-?7b", "Gemma 7B", 256, 28, 3072, 16, 16, 24576),
        )
    ),
)
