"""Tiny models of every architecture that plans are tried on, without dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models.convolutional import ResNet, UNet3d
from tests.models.other import Recommender

__all__ = ["TINY", "Tiny", "built"]

_LAYERS, _VOCAB, _LENGTH = 4, 96, 16

_Shapes = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A model, and what its forward takes.

    Attributes:
        build: Makes it.
        shapes: (shape of one sample, dtype) of each input.
    """

    build: Callable[[], nn.Module]
    shapes: _Shapes

    def example(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Inputs as ``capture`` takes them."""
        return {k: ((batch, *shape), kind) for k, (shape, kind) in self.shapes.items()}


_TOKENS: _Shapes = {"input_ids": ((_LENGTH,), "int64")}
_DECODER: _Shapes = {"decoder_input_ids": ((_LENGTH,), "int64")}
_WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
}
_DECODING: dict[str, Any] = {
    **_WIDTHS,
    "num_key_value_heads": 2,
    "vocab_size": _VOCAB,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _transformer(name: str, head: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        settings = getattr(transformers, f"{name}Config")(**config)
        model: nn.Module = getattr(transformers, f"{name}{head}")(settings)
        return model

    return build


def _whisper() -> nn.Module:
    return _transformer(
        "Whisper",
        "ForConditionalGeneration",
        vocab_size=_VOCAB,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=_LENGTH,
        max_target_positions=_LENGTH,
        use_cache=False,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )()


TINY: Mapping[str, Tiny] = {
    "tiny-llama": Tiny(
        build=_transformer("Llama", "ForCausalLM", **_DECODING), shapes=_TOKENS
    ),
    "tiny-qwen3": Tiny(
        build=_transformer("Qwen3", "ForCausalLM", head_dim=8, **_DECODING),
        shapes=_TOKENS,
    ),
    "tiny-gpt2": Tiny(
        build=_transformer(
            "GPT2",
            "LMHeadModel",
            n_embd=32,
            n_layer=_LAYERS,
            n_head=4,
            n_positions=_LENGTH,
            vocab_size=_VOCAB,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        ),
        shapes=_TOKENS,
    ),
    "tiny-mixtral": Tiny(
        build=_transformer(
            "Mixtral",
            "ForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            **_DECODING,
        ),
        shapes=_TOKENS,
    ),
    "tiny-bert": Tiny(
        build=_transformer(
            "Bert", "ForMaskedLM", vocab_size=_VOCAB, **_WIDTHS, **_NO_DROPOUT
        ),
        shapes=_TOKENS,
    ),
    "tiny-t5": Tiny(
        build=_transformer(
            "T5",
            "ForConditionalGeneration",
            d_model=32,
            d_ff=64,
            d_kv=8,
            num_heads=4,
            num_layers=2,
            vocab_size=_VOCAB,
            dropout_rate=0.0,
            use_cache=False,
        ),
        shapes={**_TOKENS, **_DECODER},
    ),
    "tiny-vit": Tiny(
        build=_transformer(
            "ViT",
            "ForImageClassification",
            image_size=16,
            patch_size=4,
            **_WIDTHS,
            **_NO_DROPOUT,
        ),
        shapes={"pixel_values": ((3, 16, 16), "float32")},
    ),
    "tiny-whisper": Tiny(
        build=_whisper,
        shapes={"input_features": ((8, 2 * _LENGTH), "float32"), **_DECODER},
    ),
    "tiny-mamba": Tiny(
        build=_transformer(
            "Mamba",
            "ForCausalLM",
            vocab_size=_VOCAB,
            hidden_size=32,
            state_size=4,
            num_hidden_layers=_LAYERS,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        ),
        shapes=_TOKENS,
    ),
    "tiny-resnet": Tiny(
        build=lambda: ResNet((2, 1, 1, 1), 4), shapes={"x": ((3, 32, 32), "float32")}
    ),
    "tiny-unet3d": Tiny(
        build=lambda: UNet3d(width=4, depth=2), shapes={"x": ((1, 8, 8, 8), "float32")}
    ),
    "tiny-recommender": Tiny(
        build=lambda: Recommender(rows=50, tables=4, width=8),
        shapes={"dense": ((13,), "float32"), "sparse": ((4, 3), "int64")},
    ),
}


def built(name: str) -> nn.Module:
    """One of them, with the same weights every time."""
    torch.manual_seed(0)
    return TINY[name].build()
