"""GPT, MPT, BERT and NVIDIA's dense models, with their published figures."""

from __future__ import annotations

from typing import Any

from planner.calibration.models.known import NEMOTRON, Known, published, sized

__all__ = ["GPTS", "SIZED_GPTS"]

_MPT_SOURCE = "MosaicML llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml"
_NEMO_NEMOTRON = "NVIDIA NeMo, nemo/collections/llm/gpt/model/nemotron.py"
_BROWN = "Brown et al. 2020 (arXiv:2005.14165), table 2.1"
_NEMOTRON_NAME = r"^(nvidia-)?nemotron(?!-h)"
_MPT: dict[str, Any] = {"family": "gpt", "bias": False, "vocab": 50368}
#: Size: layers, hidden, heads.
_OPT_TABLE = (
    ("125m", 12, 768, 12),
    ("350m", 24, 1024, 16),
    ("1.3b", 24, 2048, 32),
    ("2.7b", 32, 2560, 32),
    ("6.7b", 32, 4096, 32),
    ("13b", 40, 5120, 40),
    ("30b", 48, 7168, 56),
    ("66b", 64, 9216, 72),
    ("175b", 96, 12288, 96),
)
_BLOOM_TABLE = (
    ("560m", 24, 1024, 16),
    ("1.1b", 24, 1536, 16),
    ("1.7b", 24, 2048, 16),
    ("3b", 30, 2560, 32),
    ("7.1b", 30, 4096, 32),
    ("176b", 70, 14336, 112),
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


def _gpts() -> list[Known]:
    made = [
        published(
            sized("mpt", size),
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
        published(
            sized(r"gpt-?3", size),
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
        published(
            rf"gpt-?2-{size}$" if size else r"gpt-?2(-small)?$",
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
        published(
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
    return [
        published(
            pattern,
            title,
            _NEMO_NEMOTRON,
            NEMOTRON,
            *figures,
        )
        for pattern, title, *figures in (
            (sized(_NEMOTRON_NAME, "340b"), "Nemotron-4 340B", 96, 18432, 96, 8, 73728),
            (sized(_NEMOTRON_NAME, "15b"), "Nemotron-4 15B", 32, 6144, 48, 8, 24576),
            (sized(_NEMOTRON_NAME, "22b"), "Nemotron-3 22B", 40, 6144, 48, 48, 24576),
            (
                sized(_NEMOTRON_NAME, "8b"),
                "Nemotron-3 8B",
                32,
                4096,
                32,
                32,
                16384,
            ),
        )
    ]


def _open_models() -> list[Known]:
    """OPT, BLOOM, GPT-NeoX and Falcon."""
    made = [
        published(
            sized("(^|-)opt", size),
            f"OPT-{size}",
            "Zhang et al. 2022 (arXiv:2205.01068), table 1",
            {"family": "gpt"},
            layers,
            hidden,
            heads,
            heads,
            4 * hidden,
            context=2048,
            vocab=50272,
        )
        for size, layers, hidden, heads in _OPT_TABLE
    ]
    made += [
        published(
            sized("bloom", size),
            f"BLOOM {size.upper()}",
            "BigScience 2022 (arXiv:2211.05100), table 3",
            {"family": "gpt", "positions": False},
            layers,
            hidden,
            heads,
            heads,
            4 * hidden,
            context=2048,
            vocab=250880,
        )
        for size, layers, hidden, heads in _BLOOM_TABLE
    ]
    neox = published(
        sized("neox", "20b"),
        "GPT-NeoX 20B",
        "EleutherAI/gpt-neox, configs/20B.yml",
        {"family": "gpt", "positions": False, "tied": False},
        44,
        6144,
        64,
        64,
        24576,
        context=2048,
        vocab=50432,
        notes=("attention and MLP one after the other, not side by side",),
    )
    made += [
        published(
            sized("falcon", size),
            f"Falcon {size.upper()}",
            f"config.json of tiiuae/falcon-{size}",
            {"family": "gpt", "positions": False, "bias": False},
            *figures,
            context=2048,
            vocab=65024,
            head_size=64,
            notes=("attention and MLP one after the other, not side by side",),
        )
        for size, *figures in (
            ("7b", 32, 4544, 71, 1, 18176),
            ("40b", 60, 8192, 128, 8, 32768),
            ("180b", 80, 14848, 232, 8, 59392),
        )
    ]
    return [*made, neox]


#: Parameters of a GPT that has no other name: layers, hidden, heads. Source: Brown et
#: al. 2020 (arXiv:2005.14165), table 2.1; Narayanan et al. 2021 (arXiv:2104.04473),
#: table 1; Korthikanti et al. 2022 (arXiv:2205.05198), table 3.
SIZED_GPTS: dict[float, tuple[int, int, int]] = {
    125e6: (12, 768, 12),
    350e6: (24, 1024, 16),
    760e6: (24, 1536, 16),
    1.3e9: (24, 2048, 16),
    1.7e9: (24, 2304, 24),
    2.7e9: (32, 2560, 32),
    3.6e9: (30, 3072, 32),
    6.7e9: (32, 4096, 32),
    7.5e9: (36, 4096, 32),
    13e9: (40, 5120, 40),
    18.4e9: (40, 6144, 48),
    22e9: (48, 6144, 64),
    39.1e9: (48, 8192, 64),
    76.1e9: (60, 10240, 80),
    145.6e9: (80, 12288, 96),
    175e9: (96, 12288, 96),
    310.1e9: (96, 16384, 128),
    530e9: (105, 20480, 128),
    1008e9: (128, 25600, 160),
}

#: All of them.
GPTS: tuple[Known, ...] = (*_nemotrons(), *_open_models(), *_gpts())
