"""Dtypes of a measured run, from a source's words."""

from __future__ import annotations

import re

from planner.calibration.frameworks import Framework
from planner.calibration.points import Point
from planner.schema import Precision

__all__ = ["keeps_bfloat16_alone", "precision_of", "product_dtype_of"]

#: Reduces gradients in bfloat16. Source: foundation-model-stack/fms-fsdp,
#: fms_fsdp/policies/mixed_precision.py, bfSixteen.
_NARROW = re.compile(r"\bfms-fsdp\b")


def keeps_bfloat16_alone(point: Point) -> bool:
    """Whether weights, gradients and states of a run are all in bfloat16.

    Args:
        point: ``pure bf16`` in its precision says so.
    """
    text = point.precision.lower()
    return "pure" in text and re.search(r"bf16|bfloat16", text) is not None


def precision_of(point: Point, framework: Framework) -> Precision:
    """What weights, products and reductions of a run are in.

    Args:
        point: The row.
        framework: In which dtype it reduces.
    """
    text = point.precision.lower()
    if any(word in text for word in ("fp8", "float8", "mxfp8", "fp4", "float4")):
        return Precision(compute="float8", reduce=framework.reduce)
    if keeps_bfloat16_alone(point):
        return Precision(parameter="bfloat16", compute="bfloat16", reduce="bfloat16")
    if "bf16" in text or "bfloat16" in text or not text:
        said = f"{point.source} {point.notes}".lower()
        reduce = "bfloat16" if _NARROW.search(said) else framework.reduce
        return Precision(compute="bfloat16", reduce=reduce)
    if "16" in text:
        # Gradients of half precision are reduced in two bytes.
        return Precision(compute="float16", reduce="bfloat16")
    return Precision(compute="float32")


def product_dtype_of(point: Point) -> str | None:
    """What no precision can say: narrower products, scales of blocks or of rows."""
    text = point.precision.lower()
    if "fp4" in text or "float4" in text:
        return "float4"
    if re.search(r"mx-?fp8|fp8-?mx", text):
        return "mxfp8"
    narrow = "fp8" in text or "float8" in text
    return "float8_rowwise" if narrow and re.search(r"row-?wise", text) else None
