"""Readers of the catalogues in ``data/``, and the catalogues that plans are priced by.

Each entry states its source. Plans need frameworks and constants alone; the other
catalogues are read by the modules that turn a measurement into a model, a machine and
a plan.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from planner.cost import RECIPES, Recipe

__all__ = [
    "DATA",
    "Constant",
    "Framework",
    "Variant",
    "fitted_constants",
    "frameworks",
    "read_rows",
    "read_tree",
]

#: Folder of the catalogues.
DATA = Path(__file__).with_name("data")


@cache
def read_rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a CSV catalogue, by column."""
    text = (DATA / name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def read_tree(name: str) -> Any:
    """Return the content of a YAML catalogue."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # Both loaders are safe ones.
    return yaml.load((DATA / name).read_text(encoding="utf-8"), loader)  # noqa: S506


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Fields of a framework's recipe that differ in runs which meet all conditions.

    Attributes:
        recipe: The fields.
        year_from: First year of the runs' source.
        year_to: Last year; a source of no year is old.
        unless_zero: ZeRO stage whose runs are left out.
        word: Word of the runs' precision or notes.
        bfloat16: Whether gradients are in bfloat16.
        old: Whether the runs had no flash attention yet, by year and device.
        source: Document or code that they are from.
    """

    recipe: Mapping[str, Any]
    year_from: int = 0
    year_to: int = 9999
    unless_zero: int | None = None
    word: str = ""
    bfloat16: bool = False
    old: bool = False
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework that measurements were taken with, at a certain age.

    Attributes:
        recipe: Facts, and starting values of what is fitted.
        fitted: Names of the recipe's constants that are fitted, those that its
            measurements determine: ``layer_overlap`` with tp, ``expert_overlap`` with
            experts, else ``overlap_cost`` where collectives of data parallelism hide
            and ``replica_efficiency`` where none does; ``newer_products`` without tp.
        zero_stage: ZeRO stage where a row states none.
        recompute: Recomputation where a row states none.
        sequence_parallel: Whether it comes with tp.
        virtual_stages: Virtual stages of an interleaved schedule where a row states
            none.
        memory_share: Share of a device's memory that it fills before it fails.
        reduce: Dtype of gradient reductions, of runs in bfloat16 and narrower.
        microbatches: Rule where a row states no microbatch. ``stages``: a pipeline cuts
            its batch into as many as it has ranks, if the row infers the microbatch;
            ``whole``: without a pipeline the batch is not cut.
        host: Program that launches kernels: ``eager`` modules of
            torch, ``megatron``'s and TransformerEngine's, or a ``compiled`` program.
        stage_assignment: ``even`` for equal numbers of layers a stage, ``weights`` for
            equal numbers of weights.
        spreads_experts: Whether experts are spread over the ranks of a host where a
            row states no ep.
        counts_recompute: Whether the FLOPs of its logs count full recomputation.
        variants: Recipes of some runs, the last that holds first.
        source: Documents and code that these fields are from.
    """

    recipe: Recipe
    fitted: tuple[str, ...]
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    virtual_stages: int = 2
    memory_share: float = 1.0
    reduce: Literal["float32", "bfloat16"] = "float32"
    microbatches: Literal["given", "stages", "whole"] = "given"
    host: Literal["eager", "megatron", "compiled"] = "eager"
    stage_assignment: Literal["even", "weights"] = "even"
    spreads_experts: bool = False
    counts_recompute: bool = False
    variants: tuple[Variant, ...] = ()
    source: str


@cache
def frameworks() -> Mapping[str, Framework]:
    """Return the frameworks of ``frameworks.yaml`` by name."""
    found = {}
    for name, entry in read_tree("frameworks.yaml")["frameworks"].items():
        recipe = replace(RECIPES.get(name, Recipe(name=name)), **entry["recipe"])
        fields = {
            **entry,
            "recipe": recipe,
            "fitted": tuple(entry["fitted"]),
            "variants": tuple(Variant(**one) for one in entry.get("variants", ())),
        }
        found[name] = Framework(**fields)
    return found


#: Share between the bounds that a fit keeps from them at its start: logits of bounds
#: have no slope.
_MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One fitted number.

    Attributes:
        name: Field of :class:`planner.cost.constants.DeviceConstants` or
            :class:`planner.cost.Recipe`.
        low: Lower bound.
        high: Upper bound.
        start: Value where a fit begins; for recipes the framework's own value counts.
        spread: Standard deviation of one device or recipe from the others, in logits.
        shared: Standard deviation of all of them from the start, in logits.
    """

    name: str
    low: float
    high: float
    start: float
    spread: float
    shared: float

    def to_logit(self, value: float) -> float:
        """Return the place of a value between the bounds, on an endless scale."""
        share = (value - self.low) / (self.high - self.low)
        share = min(max(share, _MARGIN), 1 - _MARGIN)
        return float(np.log(share / (1 - share)))

    def from_logit(self, place: float) -> float:
        """Return the value at a place; the inverse of :meth:`to_logit`."""
        return float(self.low + (self.high - self.low) / (1 + np.exp(-place)))


@cache
def fitted_constants(kind: Literal["device", "recipe"]) -> tuple[Constant, ...]:
    """Return the fitted constants of device types or of recipes, in their order.

    Each framework is fitted in four of those of recipes; see :attr:`Framework.fitted`.
    """
    names = ("low", "high", "start", "spread", "shared")
    return tuple(
        Constant(name=row["name"], **{name: float(row[name]) for name in names})
        for row in read_rows("constants.csv")
        if row["of"] == kind
    )
