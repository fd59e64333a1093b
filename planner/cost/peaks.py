"""Which rate a device computes a dtype at, where a datasheet does not give all."""

from __future__ import annotations

from planner.schema.cluster import DeviceType

__all__ = ["peak_flops_per_s"]

#: Next wider dtype to fall back on when a device has no peak of its own for one.
_WIDER = {
    "float4": "float8",
    "float8": "bfloat16",
    "bfloat16": "float16",
    "float16": "float32",
    "tensorfloat32": "float32",
    "float32": "float64",
}
#: Bytes of an element in memory.
_WIDTH = {
    "float64": 8,
    "float32": 4,
    "tensorfloat32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "float8_e4m3fn": 1,
    "float4": 0.5,
    "float4_e2m1fn_x2": 0.5,
}


def peak_flops_per_s(device: DeviceType, dtype: str) -> float:
    """Dense peak of a dtype on a device.

    Its own figure; else that of the next wider dtype that has one, which the products
    can be computed in; else that of the widest narrower dtype, divided by how many
    times as many bytes an element has: whatever makes wide products out of narrow
    units has at least to move them.
    """
    aliases = {"float8": ("float8_e4m3fn",), "float4": ("float4_e2m1fn_x2",)}
    name: str | None = dtype
    while name is not None:
        for alias in aliases.get(name, (name,)):
            if alias in device.peak_flops_per_s:
                return device.peak_flops_per_s[alias]
        name = _WIDER.get(name)
    widths = {known: _WIDTH[known] for known in device.peak_flops_per_s}
    widest = max(widths.values())
    slowest = min(
        device.peak_flops_per_s[known]
        for known, width in widths.items()
        if width == widest
    )
    return slowest * min(1.0, widest / _WIDTH[dtype])
