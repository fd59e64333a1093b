"""The shape of the model that was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from planner.errors import CalibrationError
from planner.measurements.known_models import (
    KnownModel,
    ModelShape,
    alpa_figures,
    find_known,
    gpt_of_size,
    known_models,
    plain_name,
    size_of,
)
from planner.measurements.points import Point

__all__ = ["expected_parameters", "shape_of"]

#: Share by which a stated parameter count may miss a shape's.
_TOLERANCE = 0.02
#: Share by which a size in a name may miss the parameter count of a model.
_NEAR = 0.07
#: To a multiple of which vocabularies are padded, so that tp up to 64 divides them.
_PADDING = 64
_GATED_NAMES = re.compile(r"llama|qwen|mistral|internlm|baichuan|yi-|gemma|olmo|swiglu")
_MIXED = re.compile(r"moe|expert|mixture|[0-9]x[0-9]+b|\be\d+-?k\d+\b")
#: Experts, and how many of them a token is sent to: ``e16k4``.
_EXPERTS_CHOSEN = re.compile(r"\be(\d+)-?k(\d+)\b")
_STATED = ("layers", "hidden", "heads", "seq", "vocab")


def shape_of(point: Point) -> ModelShape:
    """Return the shape of the model that was measured.

    Figures that the row states count first, then those published of a model of that
    name, those that its parameter count implies, and custom; ``assumed`` names all but
    the first.

    Args:
        point: One measurement.
    Raises:
        CalibrationError: If neither row nor name says what the model looks like, or it
            is no transformer.
    """
    stated = {
        name: value for name in _STATED if (value := getattr(point, name)) is not None
    }
    plain = plain_name(point.model)
    if re.search(r"resnet|vit-|unet|swin|dlrm", plain):
        raise CalibrationError(
            f"point {point.point_id}: {point.model} is no language model; shapes are "
            f"known of transformers over tokens, leave the row out"
        )
    if plain in ("gpt", "moe") and not {"layers", "hidden"} <= stated.keys():
        figures, assumed = alpa_figures(point)
        return _finish({**stated, **figures}, assumed)
    known = find_known(point.model) or _alike(point, plain)
    if known is not None and _MIXED.search(plain) and not known.figures.get("experts"):
        # Experts in the place of that model's MLPs.
        names = ("layers", "hidden", "heads")
        stated = {**{name: known.figures[name] for name in names}, **stated}
    elif known is not None:
        return _from_known(known, stated)
    return _from_row(point, plain, stated)


def _alike(point: Point, plain: str) -> KnownModel | None:
    """Return the Llama of the row's shape and size, if the name does not tell which."""
    size = size_of(point.model) or point.params
    if "llama" not in plain or size is None:
        return None
    shape = (point.layers, point.hidden, point.heads)
    found: dict[float, KnownModel] = {}
    for known in known_models():
        figures = known.figures
        same = shape == (figures["layers"], figures["hidden"], figures["heads"])
        if known.title.startswith("Llama") and same and not figures.get("experts"):
            count = expected_parameters(_finish({"seq": known.context, **figures}, []))
            found.setdefault(abs(count / size - 1), known)
    nearest = min(found, default=1.0)
    return found[nearest] if nearest <= _NEAR else None


def _from_known(known: KnownModel, stated: Mapping[str, int]) -> ModelShape:
    figures = dict(known.figures)
    taken = sorted(
        name
        for name in ("layers", "hidden", "heads", "vocab")
        if name not in stated and name in figures
    )
    assumed = [f"{known.title} ({known.source})"]
    if taken:
        assumed.append(f"{', '.join(taken)} as published")
    if "seq" not in stated:
        assumed.append(f"{known.context} tokens a sample, the model's default")
    assumed.extend(known.notes)
    hidden = stated.get("hidden", figures["hidden"])
    if hidden != figures["hidden"]:
        share = hidden / figures["hidden"]
        for name in ("inner", "expert_inner", "shared_inner"):
            if figures.get(name):
                figures[name] = max(1, round(figures[name] * share))
        figures.pop("head_size", None)
        assumed.append("inner sizes scaled with the hidden size, which is another one")
    heads = stated.get("heads", figures["heads"])
    if heads != figures["heads"]:
        same = figures["kv_heads"] == figures["heads"]
        figures["kv_heads"] = heads if same else math.gcd(heads, figures["kv_heads"])
        figures.pop("head_size", None)
    if figures.get("pattern") and "layers" in stated:
        whole = figures["pattern"]
        figures["pattern"] = (whole * -(-stated["layers"] // len(whole)))[
            : stated["layers"]
        ]
    return _finish({"seq": known.context, **figures, **stated}, assumed)


def _from_row(point: Point, plain: str, stated: Mapping[str, int]) -> ModelShape:
    """Return a shape that only the row knows of."""
    assumed: list[str] = []
    size = size_of(point.model) or point.params
    if "gpt" in plain and size and not {"layers", "hidden"} & stated.keys():
        published = gpt_of_size(size, _NEAR)
        if published is not None:
            nearest, figures = published
            stated = {**figures, **stated}
            assumed.append(f"layers, hidden and heads of the GPT of {nearest:.4g}")
    missing = [name for name in ("layers", "hidden", "seq") if name not in stated]
    if missing:
        raise CalibrationError(
            f"point {point.point_id}: model {point.model!r} is not known and the row "
            f"has no {missing[0]}; fill layers, hidden, heads and seq, or use a known "
            f"name"
        )
    hidden = stated["hidden"]
    heads = stated.get("heads")
    if heads is None:
        heads = next(
            hidden // size for size in (128, 64, 96, 80, 1) if hidden % size == 0
        )
        assumed.append(f"{heads} attention heads, of {hidden // heads} features each")
    base: dict[str, Any] = {
        "layers": stated["layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "seq": stated["seq"],
    }
    base |= stated
    if "t5" in plain:
        assumed.append("encoder and decoder as one stack without cross attention")
    made = (_mixture if _MIXED.search(plain) else _implied)(point, plain, base, assumed)
    return _finish(made, assumed)


def _mixture(
    point: Point, plain: str, base: dict[str, Any], assumed: list[str]
) -> dict[str, Any]:
    """Return a GPT with experts in every second layer, by name or parameters."""
    hidden = base["hidden"]
    if "vocab" not in base:
        assumed.append("a vocabulary of 51200")
    figures = {"family": "gpt", "inner": 4 * hidden, "vocab": 51200, **base}
    figures["head_size"] = _head_size(hidden, base["heads"], assumed)
    named = re.search(
        r"(?:moe|experts?)-?(\d+)(?![0-9.]*[bm])|(\d+)-?(?:e\b|exp)", plain
    )
    chosen = _EXPERTS_CHOSEN.search(plain)
    if chosen:
        count = int(chosen[1])
    elif named:
        count = int(named[1] or named[2])
    elif point.params is None:
        count = 8
    else:
        dense = expected_parameters(ModelShape(**figures))
        each = base["layers"] // 2 * 8 * hidden**2
        exact = (point.params - dense) / max(1, each) + 1
        power = 2 ** max(0, round(math.log2(max(1.0, exact))))
        count = power if abs(power / exact - 1) <= _TOLERANCE else round(exact)
    if count < 2:
        raise CalibrationError(
            f"point {point.point_id}: {point.model!r} with params={point.params:.3g} "
            f"leaves no room for experts; correct params, or use a name such as "
            f"mixtral-8x7b"
        )
    top = min(int(chosen[2]) if chosen else 2, count)
    assumed.append(
        f"a GPT with {count} experts of 4 hidden in every second layer, each token "
        f"sent to {top}"
    )
    return {
        **figures,
        "experts": count,
        "experts_per_token": top,
        "expert_inner": 4 * hidden,
        "expert_every": 2,
    }


def _implied(
    point: Point, plain: str, base: dict[str, Any], assumed: list[str]
) -> dict[str, Any]:
    """Return family and inner size, by the name and the parameter count."""
    hidden = base["hidden"]
    if _GATED_NAMES.search(plain):
        vocab = 151936 if "qwen" in plain else 32000
        vocab = 128256 if re.search(r"llama-?v?3", plain) else vocab
        inner = 256 * math.ceil(8 * hidden / 3 / 256)
        made: dict[str, Any] = {
            "family": "llama",
            "gated": True,
            "tied": False,
            "bias": False,
            "positions": False,
            "inner": inner,
            "vocab": vocab,
        }
        words = f"a gated MLP of {inner} features (8/3 of hidden), no grouped queries"
    else:
        bert = "bert" in plain
        made = {
            "family": "bert" if bert else "gpt",
            "inner": 4 * hidden,
            "vocab": 30522 if bert else 51200,
        }
        words = "a GPT layer: LayerNorm, biases, learned positions, GELU over 4 hidden"
    if "vocab" not in base:
        assumed.append(f"a vocabulary of {made['vocab']}")
    figures = {**made, **base}
    figures["head_size"] = _head_size(hidden, base["heads"], assumed)
    found = expected_parameters(ModelShape(**figures))
    stated = point.params
    if stated is None or abs(found - stated) <= _rounding(stated):
        assumed.append(words)
        return figures
    for group in (2, 4, 8) if figures.get("gated") else ():
        saved = base["layers"] * 2 * hidden * (hidden - hidden // group)
        fits = abs(found - saved - stated) <= _TOLERANCE * stated
        if fits and base["heads"] % group == 0:
            assumed.append(f"{words[: words.index(',')]}, {group} queries to a key")
            return {**figures, "kv_heads": base["heads"] // group}
    untied = found + (figures["vocab"] * hidden if figures.get("tied", True) else 0)
    if abs(untied - stated) <= _rounding(stated):
        assumed.append(f"{words}; a head of its own, as the parameter count has it")
        return {**figures, "tied": False}
    each = base["layers"] * hidden * (3 if figures.get("gated") else 2)
    inner = round((stated - found) / each) + figures["inner"]
    if hidden <= inner <= 8 * hidden:
        rounded = max(64, 64 * round(inner / 64))
        assumed.append(f"{words}, but {rounded} inner, as the parameter count has it")
        return {**figures, "inner": rounded}
    assumed.append(
        f"{words}; that has {found / 1e9:.3g}e9 parameters where the source says "
        f"{stated / 1e9:.3g}e9"
    )
    return figures


def _rounding(stated: float) -> float:
    """Return by how much a stated count may be off: 2 %, or half its last digit."""
    digits = f"{stated:.0f}".rstrip("0")
    last = 10.0 ** (len(f"{stated:.0f}") - len(digits))
    return max(_TOLERANCE * stated, last / 2)


def _head_size(hidden: int, heads: int, assumed: list[str]) -> int:
    if hidden % heads == 0:
        return hidden // heads
    words = (
        f"heads={heads} do not divide hidden={hidden}: taken as heads of 128 features; "
        f"correct heads or hidden"
    )
    if words not in assumed:
        assumed.append(words)
    return 128


def _finish(figures: dict[str, Any], assumed: list[str]) -> ModelShape:
    """Check, pad the vocabulary, and put together."""
    hidden, heads = figures["hidden"], figures["heads"]
    if "head_size" not in figures:
        figures["head_size"] = _head_size(hidden, heads, assumed)
    padded = -(-figures["vocab"] // _PADDING) * _PADDING
    if padded != figures["vocab"]:
        assumed.append(f"a vocabulary of {figures['vocab']} padded to {padded}")
        figures["vocab"] = padded
    allowed = {field.name for field in fields(ModelShape)}
    kept = {name: value for name, value in figures.items() if name in allowed}
    return ModelShape(**kept, assumed=tuple(assumed))


def expected_parameters(shape: ModelShape) -> int:
    """Count the scalars of a dense ``gpt``, ``bert`` or ``llama`` by hand.

    Source: weights, biases and norms of a layer, embedding, positions, head.
    """
    hidden, inside = shape.hidden, shape.heads * shape.head_size
    fused = inside + 2 * shape.kv_heads * shape.head_size
    wide = shape.inner * (2 if shape.gated else 1)
    layer = hidden * (fused + inside + wide + shape.inner) + 2 * hidden
    if shape.bias:
        layer += fused + wide + 2 * hidden + 2 * hidden
    ends = hidden * (2 if shape.bias else 1)
    ends += shape.vocab * hidden * (1 if shape.tied else 2)
    ends += shape.seq * hidden if shape.positions else 0
    return shape.layers * layer + ends
