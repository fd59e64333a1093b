"""Leaves of a document's schema by dotted name, so that nothing lists them by hand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

__all__ = ["leaf_defaults", "leaf_of"]


def leaf_defaults(
    document: type[BaseModel], *, whole: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Default of every leaf of a document, ``mesh.pp`` for one.

    Args:
        document: Class whose fields all have defaults.
        whole: Dotted names of parts that count as one leaf.
        prefix: Of the names.
    """
    found: dict[str, Any] = {}
    for name, field in document.model_fields.items():
        path, kind = prefix + name, field.annotation
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        if nested and path not in whole:
            found |= leaf_defaults(kind, whole=whole, prefix=f"{path}.")  # type: ignore[arg-type]
        else:
            found[path] = field.get_default(call_default_factory=True)
    return found


def leaf_of(document: BaseModel, name: str) -> Any:
    """Value of a leaf.

    Raises:
        AttributeError: If there is no such leaf.
    """
    value: Any = document
    for part in name.split("."):
        value = getattr(value, part)
    return value
