"""Switch off the caches of keys and values that transformers models keep by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["disable_kv_cache"]


def disable_kv_cache(modules: Iterable[Any]) -> None:
    """Tell the models among modules to keep no keys and values.

    Only generation needs them. A pipeline's stage could not hand them on, and
    recomputation would append them a second time.

    Args:
        modules: Of one model; each transformers model in it has a config.
    """
    for module in modules:
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # type: ignore[union-attr]
