"""Shapes of models, and the models that measurements name: ``known_models.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from planner.errors import CalibrationError
from planner.measurements.catalogues import read_rows, read_tree
from planner.measurements.points import Point

__all__ = [
    "Family",
    "KnownModel",
    "ModelShape",
    "alpa_figures",
    "find_known",
    "gpt_of_size",
    "known_models",
    "plain_name",
    "size_of",
]

#: ``gpt``: norm, attention, plain MLP, as Megatron-LM and MPT train it; ``bert``: the
#: same, attending both ways; ``hybrid``: one of scan, attention, MLP or experts a
#: layer; ``llama``: RMSNorm, rotary positions, gated MLP; ``moe``: that with experts;
#: ``deepseek``: that with latent attention.
Family = Literal["gpt", "bert", "hybrid", "llama", "moe", "deepseek"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a transformer, compared without the assumptions behind it.

    Attributes:
        family: Kind of its layers; see :data:`Family`.
        layers: Transformer layers.
        hidden: Size of the residual stream.
        heads: Attention heads (query).
        kv_heads: Key/value heads.
        head_size: Features of a head.
        inner: Features inside the dense MLPs.
        vocab: Token classes, padded as they are held.
        seq: Tokens of a sample.
        gated: Whether MLPs and experts have a gate, as in SwiGLU.
        activation: Activation of an MLP without a gate.
        tied: Whether the head is the embedding.
        bias: Whether linear layers and norms of ``gpt`` have biases.
        positions: Whether positions are learned, ``seq`` of them.
        qk_norm: Whether queries and keys are normalised.
        experts: Number of experts of a layer that has some; 0 without.
        experts_per_token: Number of experts that see a token.
        expert_inner: Features inside one expert.
        shared_inner: Features inside the experts that see every token; 0 without.
        dense_first: Leading layers without experts.
        expert_every: Distance of layers with experts; 2 for every second one.
        latent: Size that tokens are projected to for experts; 0 for ``hidden``.
        query_rank: Latent size of queries in ``deepseek``; 0 for none.
        key_rank: Latent size of keys and values.
        rotary_size: Features of a head with rotary positions, beside ``head_size``.
        pattern: Layers of a ``hybrid``: M scan, * attention, - MLP, E experts.
        scan_heads: Heads of a Mamba-2 scan.
        scan_head_size: Features of one.
        scan_groups: Groups that share input and output matrices.
        scan_state: Size of the state.
        assumed: Figures that no source of the measurement states, in words.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    seq: int
    gated: bool = False
    activation: Literal["gelu", "relu2"] = "gelu"
    tied: bool = True
    bias: bool = True
    positions: bool = True
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_first: int = 0
    expert_every: int = 1
    latent: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rotary_size: int = 0
    pattern: str = ""
    scan_heads: int = 0
    scan_head_size: int = 64
    scan_groups: int = 8
    scan_state: int = 128
    assumed: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One model that measurements name.

    Attributes:
        pattern: Found in its :func:`plain_name`.
        title: For people.
        source: Document that the figures are from.
        figures: Fields of a ModelShape.
        context: Tokens of a sample where a measurement states none.
        notes: Simplifications.
    """

    pattern: str
    title: str
    source: str
    figures: Mapping[str, Any]
    context: int
    notes: tuple[str, ...]


def plain_name(name: str) -> str:
    """Return a name in lower case, words joined by hyphens, without remarks."""
    bare = re.sub(r"\([^)]*\)|\[[^\]]*\]", " ", name.lower())
    return re.sub(r"[^a-z0-9.]+", "-", bare).strip("-")


def size_of(name: str) -> float | None:
    """Return the parameters that a name (``llama-8b``) states, or None."""
    units = {"m": 1e6, "b": 1e9, "t": 1e12}
    found = re.findall(
        r"(?<!-a)(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])",
        plain_name(re.sub(r"[()\[\]]", " ", name)),
    )
    return float(found[0][0]) * units[found[0][1]] if found else None


def _sized(family: str, size: str) -> str:
    """Return the pattern of a family, then a size that stands alone."""
    return rf"{family}.*(?<!-a)(?<![0-9.]){re.escape(size)}(?![a-z0-9])"


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return the models of ``known_models.yaml``; the first that matches counts."""
    return tuple(
        KnownModel(
            pattern=model.get("pattern") or _sized(entry["family"], model["size"]),
            title=model["title"],
            source=model.get("source", entry["source"]),
            figures={**entry.get("shared", {}), **model["figures"]},
            context=entry["context"],
            notes=tuple(entry.get("notes", ())),
        )
        for entry in read_tree("known_models.yaml")
        for model in entry["models"]
    )


def find_known(name: str) -> KnownModel | None:
    """Return the model that a measurement names; None if it is none of these."""
    # Remarks in brackets may mislead or hold the size: read if nothing else tells.
    for plain in (plain_name(name), plain_name(re.sub(r"[()\[\]]", " ", name))):
        for known in known_models():
            if re.search(known.pattern, plain):
                return known
    return None


@cache
def _sizes(suite: str) -> Mapping[float, Mapping[str, int]]:
    """Return the figures by parameter count of a suite of ``model_sizes.csv``."""
    names = ("layers", "hidden", "heads", "vocab", "experts")
    return {
        float(row["params"]): {name: int(row[name]) for name in names if row[name]}
        for row in read_rows("model_sizes.csv")
        if row["suite"] == suite
    }


def gpt_of_size(params: float, near: float) -> tuple[float, Mapping[str, int]] | None:
    """Return the parameters and figures of the published GPT nearest to a size.

    Args:
        params: Parameters of a GPT that has no other name.
        near: Share by which they may miss the published count.
    """
    sizes = _sizes("gpt")
    nearest = min(sizes, key=lambda count: abs(count / params - 1))
    if abs(nearest / params - 1) > near:
        return None
    return nearest, sizes[nearest]


# Alpa's suites name their models by family and parameter count alone. MLPs of its MoE
# models are 8 hidden wide, every second layer has experts, of which two see a token
# (compute_moe_parameter_count and MoEConfig of suite_manual_moe.py).

#: GPUs that the first, second, ... size runs on, by whether models are shallow.
#: Source: exp_intra_ablation.py, exp_intra_only.py and exp_inter_only.py there.
_SCALED = {True: (1, 2, 4, 8), False: (1, 2, 4, 8, 16, 32, 64)}
#: Share by which a stated count may miss a table's.
_NEAR = 0.04


def alpa_figures(point: Point) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of Alpa's ``gpt`` or ``moe``, and what was assumed.

    Args:
        point: A row without a shape.
    Raises:
        CalibrationError: If it states no parameter count, or one of none of them.
    """
    shallow = "intra_ablation" in point.source
    moe = "moe" in point.model.lower()
    sizes = _sizes(f"alpa_{'moe' if moe else 'gpt'}{'_shallow' if shallow else ''}")
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
    size = sizes[nearest]
    hidden, vocab = size["hidden"], size["vocab"]
    suite = "exp_intra_ablation.py" if shallow else f"suite_manual_{point.model}.py"
    figures: dict[str, Any] = {
        "family": "gpt",
        **size,
        "kv_heads": size["heads"],
        "inner": 4 * hidden,
        "seq": 1024,
    }
    assumed = [f"the shape that Alpa's benchmark/alpa/{suite} gives this size"]
    assumed += scaled
    if point.vocab is not None and point.vocab != vocab:
        assumed.append(
            f"a vocabulary of {vocab}, not {point.vocab}, as the parameter count has it"
        )
    if moe:
        figures |= {
            "inner": 8 * hidden,
            "experts_per_token": 2,
            "expert_inner": 8 * hidden,
            "expert_every": 2,
        }
        assumed.append("experts in every second layer, each token sent to two")
    return figures, assumed
