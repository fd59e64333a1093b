"""One known model: the names it goes by, its figures, their source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LLAMA", "NEMOTRON", "Known", "plain_name", "published", "size_of", "sized"]

#: What models built like Llama have in common.
LLAMA: dict[str, Any] = {
    "family": "llama",
    "gated": True,
    "tied": False,
    "bias": False,
    "positions": False,
}
#: Dense models of NVIDIA with a squared ReLU (Parmar et al. 2024, arXiv:2402.16819).
NEMOTRON: dict[str, Any] = {
    "family": "gpt",
    "activation": "relu2",
    "tied": False,
    "bias": False,
    "positions": False,
    "vocab": 256000,
}


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


def size_of(name: str) -> float | None:
    """Parameters that a name states, as in ``llama-8b``; None if it states none."""
    units = {"m": 1e6, "b": 1e9, "t": 1e12}
    found = re.findall(
        r"(?<!-a)(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])",
        plain_name(re.sub(r"[()\[\]]", " ", name)),
    )
    return float(found[0][0]) * units[found[0][1]] if found else None


def sized(family: str, size: str) -> str:
    """Pattern: family, then a size that ends neither a number nor ``-a3b``."""
    return rf"{family}.*(?<!-a)(?<![0-9.]){re.escape(size)}(?![a-z0-9])"


def published(
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
    """An entry.

    Args:
        pattern: As of :class:`Known`; likewise title, source, context, notes.
        title: See there.
        source: See there.
        base: Fields that models of its kind share.
        sizes: Layers, hidden, heads, kv_heads, inner.
        context: See there.
        notes: See there.
        more: Further fields.
    """
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
