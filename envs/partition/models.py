"""Catalogue of the models that worlds train, split by a hash of each.

Shapes are drawn, not taken from papers: a width, a depth in proportion to it, heads,
keys, inner width and vocabulary as published models combine them. The split of a shape
depends on a hash of its config, so that no shape is in two splits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from planner.capture import parse_profile

__all__ = [
    "COUNTS",
    "FAMILIES",
    "SPLITS",
    "ModelShape",
    "Split",
    "catalogue",
    "profiled",
    "split_of",
]

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

#: Upper ends of each split's share of the hashes, in thousandths.
_SHARES = {"train": 600, "validation": 750, "test": 1000}
#: Bytes of a scalar in a profile: float32.
_PROFILED_BYTES = 4
_VOCABULARIES = (32000, 50304, 64000, 100352, 128256, 151936)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model of the catalogue.

    Attributes:
        name: Name for display: ``dense-3.1b``.
        family: Key of :data:`FAMILIES`, or ``profile``.
        model: Fields of its transformers config, or the path of a profile.
        seq_len: Tokens per sample; None for images and profiles.
        parameters: Scalars, about: norms and biases are left out.
    """

    name: str
    family: str
    model: Mapping[str, Any] | str
    seq_len: int | None
    parameters: float


def split_of(key: str) -> Split:
    """Return the split of a key, the same in any process."""
    number = int.from_bytes(sha256(key.encode()).digest()[:8], "big") % 1000
    return next(split for split in SPLITS if number < _SHARES[split])


_Drawn = tuple[dict[str, Any], int | None, float]


def _round(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple


def _pick(rng: np.random.Generator, values: tuple[int, ...]) -> int:
    return values[int(rng.integers(len(values)))]


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _width_and_depth(
    rng: np.random.Generator, scalars: float, head: int
) -> tuple[int, int]:
    """Draw a width and a depth that together hold about so many scalars.

    Widths are 60 to 130 times the depth, as in models from GPT-2 to Llama 3: layers
    hold about 12 x width^2 scalars.
    """
    aspect = rng.uniform(60, 130)
    width = _round((scalars * aspect / 12) ** (1 / 3), 2 * head)
    depth = int(np.clip(round(scalars / (12 * width**2)), 6, 128))
    return width, depth


def _kv_heads(rng: np.random.Generator, heads: int) -> int:
    divisors = [k for k in (2, 4, 8, heads // 4, heads) if k and heads % k == 0]
    return int(rng.choice(sorted(set(divisors))))


def _dense(rng: np.random.Generator) -> _Drawn:
    scalars = _log_uniform(rng, 1e8, 1e11)
    head = 64 if scalars < 2e9 else 128
    width, depth = _width_and_depth(rng, scalars, head)
    heads = width // head
    kv = _kv_heads(rng, heads)
    inner = _round(width * rng.choice([8 / 3, 3.5, 4.0]), 256)
    words = _pick(rng, _VOCABULARIES)
    kind = str(rng.choice(["llama", "qwen2", "qwen3", "mistral"]))
    tied = bool(scalars < 3e9 and rng.random() < 0.5)
    config = {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": words,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen3":
        config["head_dim"] = head
    layer = 2 * width**2 + 2 * width * kv * head + 3 * width * inner
    total = depth * layer + (1 if tied else 2) * words * width
    return config, _pick(rng, (1024, 2048, 4096, 8192)), total


def _gpt2(rng: np.random.Generator) -> _Drawn:
    scalars = _log_uniform(rng, 1e8, 2e10)
    width, depth = _width_and_depth(rng, scalars, 64)
    length = _pick(rng, (512, 1024, 2048))
    words = _pick(rng, (50257, 50304, 65536))
    config = {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": depth,
        "n_head": width // 64,
        "n_positions": length,
        "vocab_size": words,
    }
    return config, length, 12 * depth * width**2 + words * width


def _moe(rng: np.random.Generator) -> _Drawn:
    scalars = _log_uniform(rng, 3e8, 1e10)
    width, depth = _width_and_depth(rng, scalars, 128)
    depth = min(depth, 64)
    heads = width // 128
    kv = _kv_heads(rng, heads)
    words = _pick(rng, _VOCABULARIES)
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": words,
        "max_position_embeddings": 32768,
    }
    if rng.random() < 0.5:
        experts, inner = _pick(rng, (4, 8, 16)), _round(2.5 * width, 256)
        config |= {
            "model_type": "mixtral",
            "intermediate_size": inner,
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
        }
    else:
        experts, inner = _pick(rng, (32, 64, 128)), _round(width * 3 / 8, 128)
        config |= {
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * width,
            "moe_intermediate_size": inner,
            "num_experts": experts,
            "num_experts_per_tok": _pick(rng, (4, 8)),
            "head_dim": 128,
        }
    layer = 2 * width**2 + 256 * width * kv + 3 * width * inner * experts
    total = depth * layer + 2 * words * width
    return config, _pick(rng, (1024, 2048, 4096)), total


def _t5(rng: np.random.Generator) -> _Drawn:
    width = _pick(rng, (512, 768, 1024, 1536, 2048, 4096))
    depth = _pick(rng, (6, 8, 12, 16, 24, 32))
    inner = width * _pick(rng, (2, 4, 8))
    config = {
        "model_type": "t5",
        "d_model": width,
        "d_ff": inner,
        "num_layers": depth,
        "num_heads": width // 64,
        "d_kv": 64,
    }
    total = depth * (12 * width**2 + 4 * width * inner) + 32128 * width
    return config, _pick(rng, (256, 512)), total


def _encoder(rng: np.random.Generator) -> _Drawn:
    width = _pick(rng, (512, 768, 1024, 1280, 1536, 2048, 2560))
    depth = _pick(rng, (8, 12, 16, 24, 32, 40, 48))
    shape = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }
    total = 12 * depth * width**2
    if rng.random() < 0.5:
        text = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
        length = _pick(rng, (128, 256, 512))
        return {**text, **shape}, length, total + 30522 * width
    image = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": _pick(rng, (224, 384)),
        "patch_size": 16,
        "num_labels": 1000,
    }
    return {**image, **shape}, None, total


def _convolutional(rng: np.random.Generator) -> _Drawn:
    middle = _pick(rng, (6, 9, 12, 18, 23, 27, 36))
    image = {"num_labels": 1000, "image_size": _pick(rng, (224, 288, 384))}
    depths = [3, _pick(rng, (3, 4, 8)), middle, 3]
    if rng.random() < 0.5:
        wide = _pick(rng, (1, 2, 3))
        sizes = [256 * wide, 512 * wide, 1024 * wide, 2048 * wide]
        config = {
            "model_type": "resnet",
            "architectures": ["ResNetForImageClassification"],
            "embedding_size": 64,
            "hidden_sizes": sizes,
            "depths": depths,
        }
        # A bottleneck: 1 x 1 to a quarter of the width, 3 x 3, 1 x 1 back.
        total = sum(d * s**2 * 17 / 16 for d, s in zip(depths, sizes, strict=True))
    else:
        first = _pick(rng, (96, 128, 192, 256, 352))
        sizes = [first, 2 * first, 4 * first, 8 * first]
        config = {
            "model_type": "convnext",
            "architectures": ["ConvNextForImageClassification"],
            "hidden_sizes": sizes,
            "depths": depths,
        }
        total = sum(d * 8 * s**2 for d, s in zip(depths, sizes, strict=True))
    return {**config, **image}, None, float(total)


#: Functions that draw a shape, by family.
FAMILIES: Mapping[str, Callable[[np.random.Generator], _Drawn]] = {
    "dense": _dense,
    "gpt2": _gpt2,
    "moe": _moe,
    "encoder-decoder": _t5,
    "encoder": _encoder,
    "convolutional": _convolutional,
}

#: Shapes of each family in the catalogue of each split.
COUNTS: Mapping[Split, Mapping[str, int]] = {
    "train": dict(zip(FAMILIES, (26, 8, 11, 5, 6, 4), strict=True)),
    "validation": dict(zip(FAMILIES, (6, 2, 3, 1, 2, 1), strict=True)),
    "test": dict(zip(FAMILIES, (12, 4, 6, 3, 3, 2), strict=True)),
}


@cache
def catalogue(split: Split) -> tuple[ModelShape, ...]:
    """Return the models of a split, the same in every process."""
    return tuple(shape for family in FAMILIES for shape in _shapes(family, split))


@cache
def profiled(folder: Path, split: Split) -> tuple[ModelShape, ...]:
    """Return the PipeDream profiles of a folder that belong to a split.

    Raises:
        CaptureError: If one is malformed.
    """
    found = []
    for path in sorted(folder.glob("*.txt")):
        if split_of(f"profile {path.name}") == split:
            nodes, _ = parse_profile(path)
            stored = sum(node.parameter_bytes for node in nodes.values())
            found.append(
                ModelShape(
                    name=path.stem,
                    family="profile",
                    model=str(path),
                    seq_len=None,
                    parameters=stored / _PROFILED_BYTES,
                )
            )
    return tuple(found)


def _shapes(family: str, split: Split) -> list[ModelShape]:
    found: dict[str, ModelShape] = {}
    number = 0
    while len(found) < COUNTS[split][family]:
        # The same stream for all splits: a hash decides the split of each shape.
        key = [*family.encode(), number]
        config, length, scalars = FAMILIES[family](np.random.default_rng(key))
        number += 1
        spoken = json.dumps([config, length], sort_keys=True)
        if split_of(spoken) == split:
            found.setdefault(
                spoken,
                ModelShape(
                    name=f"{family}-{scalars / 1e9:.2g}b",
                    family=family,
                    model=config,
                    seq_len=length,
                    parameters=scalars,
                ),
            )
    return list(found.values())
