"""Patterns of module names, as sharding uses them."""

from __future__ import annotations

__all__ = ["matches_pattern"]


def matches_pattern(pattern: str, fqn: str) -> bool:
    """True if a sharding pattern matches a module's name.

    ``*`` stands for one component; the pattern is matched against the end of the
    name, as Hugging Face's plans are relative to the base model.

    >>> matches_pattern("layers.*.mlp.up_proj", "model.layers.7.mlp.up_proj")
    True
    """
    want, have = pattern.split("."), fqn.split(".")
    if len(want) > len(have):
        return False
    pairs = zip(want, have[len(have) - len(want) :], strict=True)
    return all(w in ("*", h) for w, h in pairs)
