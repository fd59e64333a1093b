"""Rows that scores and fits leave out, and groups of rows that can be compared."""

from __future__ import annotations

import re

from planner.measurements.contradictions import (
    batch_contradiction,
    degree_contradiction,
)
from planner.measurements.metrics import MEMORY_METRICS, time_metric_named
from planner.measurements.points import Point

__all__ = ["DOUBTFUL_RULE", "doubtful_reason", "group_of", "precision_family"]

#: Rule of :func:`doubtful_reason`, for people.
DOUBTFUL_RULE = (
    "Left out of scores: rows whose flag says what is doubtful about them (a sequence "
    "length or a batch that was guessed, a GPU that is not named), rows of a metric "
    "that is not predicted, figures of another plan than the row's, figures that are "
    "not positive, and rows that contradict themselves (degrees that do not multiply "
    "to the number of GPUs, a batch that dp and microbatch do not divide)."
)

#: Metrics that may be 0.
_YES_OR_NO = ("oom_or_failed", "feasible")
#: Widths of numbers, narrowest first; the narrowest of a row counts.
_FAMILIES = (
    ("4 bit", r"fp4"),
    ("8 bit", r"fp8|int8|f8"),
    ("16 bit", r"fp16|bf16|float16|half|amp|mixed"),
    ("32 bit", r"fp32|tf32|float32|single"),
)


def precision_family(precision: str) -> str:
    """Return the width of matmuls' numbers: ``8 bit`` of ``compile fp8 AsyncTP``.

    Args:
        precision: Words of the source.
    Returns:
        One of ``4 bit``, ``8 bit``, ``16 bit``, ``32 bit``; ``precision?`` if the words
        name none of them.
    """
    words = precision.lower().replace("-", "")
    for family, pattern in _FAMILIES:
        if re.search(pattern, words):
            return family
    return "precision?"


def _model(point: Point) -> str:
    shape = (point.layers, point.hidden, point.heads)
    if None not in shape:
        # Names differ between rows of one model more often than shapes do, but a
        # mixture of experts has the shape of a dense model.
        return f"{point.model} {point.layers}x{point.hidden}x{point.heads}"
    return point.model if point.params is None else f"{point.model} {point.params:g}"


def group_of(point: Point) -> str:
    """Return the group of a row as text: the same work on the same machine.

    Rows of one group have source, model and shape, sequence length, GPU, number of
    GPUs, global batch and width of numbers in common; a planner chooses among the rest.
    """
    length = "?" if point.seq is None else point.seq
    batch = "?" if point.global_batch is None else point.global_batch
    return (
        f"{point.source} | {_model(point)} | seq {length} | "
        f"{point.n_gpus} x {point.gpu} | batch {batch} | "
        f"{precision_family(point.precision)}"
    )


def doubtful_reason(point: Point) -> str:
    """Return the reason why a row is left out of scores, or ""; see DOUBTFUL_RULE."""
    if point.flag:
        return f"flag: {point.flag}"
    timed = time_metric_named(point.metric)
    if timed is None and point.metric not in MEMORY_METRICS:
        return f"metric {point.metric} is not predicted"
    if timed is not None and timed.rank is None:
        return f"{point.metric} is of another plan than the row's"
    if point.value <= 0 and point.metric not in _YES_OR_NO:
        return f"{point.metric}={point.value:g} is not positive"
    return _contradiction(point)


def _contradiction(point: Point) -> str:
    if point.tp is None or point.pp is None:
        return ""
    degrees = degree_contradiction(point)
    if degrees or point.microbatch is None:
        return degrees
    replicas = point.n_gpus // (point.tp * point.pp * (point.cp or 1))
    return batch_contradiction(point.global_batch, replicas, point.microbatch)
