"""Short hashes by which a plan recognises its model and its cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["fingerprint_bytes", "fingerprint_parameters"]


def fingerprint_bytes(data: bytes) -> str:
    """First 16 hex digits of SHA-256: enough to tell documents apart."""
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint_parameters(shapes: Iterable[tuple[str, Iterable[int]]]) -> str:
    """Hash parameter names and shapes, leaving out dtype and order.

    The dtype is left out because a plan for bf16 training also fits the fp32 module
    that it starts from.

    Args:
        shapes: (FQN, shape) of every distinct parameter, as
            ``module.named_parameters()`` gives them (tied ones once).
    """
    lines = sorted(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes)
    return fingerprint_bytes("\n".join(lines).encode())
