"""Conversions at the edge. Inside, everything is SI: bytes, seconds, FLOPs.

1 GB = 1e9 bytes, 1 GiB = 2**30 bytes, 1 Gbit/s = 1.25e8 bytes/s.
"""

from __future__ import annotations

__all__ = [
    "GB",
    "GIB",
    "dtype_bytes",
    "format_bytes",
    "format_count",
    "format_seconds",
    "gbit_per_s",
]

GB = 10**9
GIB = 2**30

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


def gbit_per_s(value: float) -> float:
    """Bytes per second of a rate given in gigabits per second."""
    return value * 1.25e8


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a dtype given by its torch name, ``"bfloat16"``.

    Raises:
        ValueError: If the dtype is not known.
    """
    try:
        return _DTYPE_BYTES[name]
    except KeyError:
        raise ValueError(
            f"unknown dtype {name!r}; use one of {', '.join(_DTYPE_BYTES)}"
        ) from None


def format_bytes(value: float) -> str:
    """A size for people, SI prefixes: ``14.2 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1e15 else f"{value:.3g} B"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """A duration for people: ``4.21 s``, ``310 ms``, ``12.5 us``."""
    if abs(value) >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if abs(value) >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    if not value:
        return "0 s"
    return f"{value * 1e6:.3g} us"


def format_count(value: float) -> str:
    """A count for people: ``8.03B``, ``405B``, ``12.1M``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"
