"""Built-in models: the figures of their configs, each with its source.

Each entry names a config class and a model class of transformers, and the arguments
that differ from the config's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model of transformers with its figures.

    Attributes:
        config: Name of the config class.
        model: Name of the model class.
        source: Where the figures are published.
        figures: Arguments of the config class.
        seq_len: Tokens per sample by default; None takes it from the config.
    """

    config: str
    model: str
    source: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    seq_len: int | None = None


def _llama(*sizes: int, source: str, **more: Any) -> Architecture:
    hidden, inner, layers, heads, kv = sizes
    figures = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
    return Architecture(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        source=source,
        figures={**figures, **more},
    )


def _gpt2(hidden: int, layers: int, heads: int) -> Architecture:
    return Architecture(
        config="GPT2Config",
        model="GPT2LMHeadModel",
        source="Radford et al. 2019, table 2; head size 64 as in the released code",
        figures={"n_embd": hidden, "n_layer": layers, "n_head": heads},
    )


def _bert(hidden: int, layers: int, heads: int) -> Architecture:
    return Architecture(
        config="BertConfig",
        model="BertForMaskedLM",
        source="Devlin et al. 2019 (arXiv:1810.04805), section 3",
        figures={
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
        },
    )


def _vit(hidden: int, layers: int, heads: int, patch: int) -> Architecture:
    return Architecture(
        config="ViTConfig",
        model="ViTForImageClassification",
        source="Dosovitskiy et al. 2021 (arXiv:2010.11929), table 1",
        figures={
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
            "patch_size": patch,
            "num_labels": 1000,
        },
    )


def _t5(hidden: int, inner: int, layers: int, heads: int, head: int) -> Architecture:
    return Architecture(
        config="T5Config",
        model="T5ForConditionalGeneration",
        source="Raffel et al. 2020 (arXiv:1910.10683), section 3.7",
        figures={
            "d_model": hidden,
            "d_ff": inner,
            "num_layers": layers,
            "num_heads": heads,
            "d_kv": head,
        },
        seq_len=512,
    )


def _whisper(
    hidden: int, layers: int, heads: int, mels: int, vocabulary: int
) -> Architecture:
    return Architecture(
        config="WhisperConfig",
        model="WhisperForConditionalGeneration",
        source="Radford et al. 2022 (arXiv:2212.04356), table 1; v3 model card",
        figures={
            "d_model": hidden,
            "encoder_layers": layers,
            "decoder_layers": layers,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": heads,
            "encoder_ffn_dim": 4 * hidden,
            "decoder_ffn_dim": 4 * hidden,
            "num_mel_bins": mels,
            "vocab_size": vocabulary,
        },
    )


def _mixtral(
    hidden: int, inner: int, layers: int, heads: int, *, vocabulary: int, source: str
) -> Architecture:
    return Architecture(
        config="MixtralConfig",
        model="MixtralForCausalLM",
        source=source,
        figures={
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": vocabulary,
            "max_position_embeddings": 32768,
        },
    )


def _qwen(
    family: str,
    *sizes: int,
    source: str,
    **more: Any,
) -> Architecture:
    hidden, inner, layers, heads, kv = sizes
    figures = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }
    return Architecture(
        config=f"{family}Config",
        model=f"{family}ForCausalLM",
        source=source,
        figures={**figures, **more},
    )


_LLAMA2 = "Touvron et al. 2023 (arXiv:2307.09288), table 1; config.json as released"
_LLAMA3 = "Llama team 2024 (arXiv:2407.21783), table 3"
_LLAMA32 = "config.json of meta-llama/Llama-3.2"
_QWEN25 = "Qwen team 2024 (arXiv:2412.15115), table 1; config.json as released"
_QWEN3 = "Qwen team 2025 (arXiv:2505.09388), tables 1 and 2; config.json as released"
_TWO = {"vocab_size": 32000, "max_position_embeddings": 4096}
_TIED = {"tie_word_embeddings": True}

#: Name on the command line to figures.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama2-7b": _llama(4096, 11008, 32, 32, 32, source=_LLAMA2, **_TWO),
    "llama2-13b": _llama(5120, 13824, 40, 40, 40, source=_LLAMA2, **_TWO),
    "llama2-70b": _llama(8192, 28672, 80, 64, 8, source=_LLAMA2, **_TWO),
    "llama3-8b": _llama(4096, 14336, 32, 32, 8, source=_LLAMA3),
    "llama3-70b": _llama(8192, 28672, 80, 64, 8, source=_LLAMA3),
    "llama3-405b": _llama(16384, 53248, 126, 128, 8, source=_LLAMA3),
    "llama3.2-1b": _llama(2048, 8192, 16, 32, 8, source=_LLAMA32, **_TIED),
    "llama3.2-3b": _llama(
        3072, 8192, 28, 24, 8, source=_LLAMA32, head_dim=128, **_TIED
    ),
    "mixtral-8x7b": _mixtral(
        4096,
        14336,
        32,
        32,
        vocabulary=32000,
        source="Jiang et al. 2024 (arXiv:2401.04088), table 1",
    ),
    "mixtral-8x22b": _mixtral(
        6144,
        16384,
        56,
        48,
        vocabulary=32768,
        source="config.json of mistralai/Mixtral-8x22B-v0.3",
    ),
    "deepseek-v3": Architecture(
        config="DeepseekV3Config",
        model="DeepseekV3ForCausalLM",
        source="DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2",
        figures={
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "vocab_size": 129280,
        },
        seq_len=4096,
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "vit-b": _vit(768, 12, 12, 16),
    "vit-l": _vit(1024, 24, 16, 16),
    "vit-h": _vit(1280, 32, 16, 14),
    "t5-small": _t5(512, 2048, 6, 8, 64),
    "t5-base": _t5(768, 3072, 12, 12, 64),
    "t5-large": _t5(1024, 4096, 24, 16, 64),
    "t5-3b": _t5(1024, 16384, 24, 32, 128),
    "t5-11b": _t5(1024, 65536, 24, 128, 128),
    "whisper-tiny": _whisper(384, 4, 6, 80, 51865),
    "whisper-large-v3": _whisper(1280, 32, 20, 128, 51866),
    "mamba-2.8b": Architecture(
        config="MambaConfig",
        model="MambaForCausalLM",
        source="config.json of state-spaces/mamba-2.8b-hf",
        figures={"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280},
        # Without its CUDA kernel the scan is a loop over positions, traced op by op.
        seq_len=256,
    ),
    "qwen2.5-0.5b": _qwen("Qwen2", 896, 4864, 24, 14, 2, source=_QWEN25, **_TIED),
    "qwen2.5-7b": _qwen(
        "Qwen2", 3584, 18944, 28, 28, 4, source=_QWEN25, vocab_size=152064
    ),
    "qwen2.5-72b": _qwen(
        "Qwen2", 8192, 29568, 80, 64, 8, source=_QWEN25, vocab_size=152064
    ),
    "qwen3-8b": _qwen("Qwen3", 4096, 12288, 36, 32, 8, source=_QWEN3, head_dim=128),
    "qwen3-30b-a3b": _qwen(
        "Qwen3Moe",
        2048,
        6144,
        48,
        32,
        4,
        source=_QWEN3,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
}
