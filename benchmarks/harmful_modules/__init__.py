"""Small modules that mean harm: each does one thing that a split may get wrong.

Most are a causal language model of four blocks, whose attention is
``scaled_dot_product_attention``, with one change: an op that mixes tokens beside the
attention, features between its linear layers, or samples; or another way to wire,
share, hold or return things. ``MODULES`` has them by name, in groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.harmful_modules.features import FEATURES
from benchmarks.harmful_modules.heads import ACROSS_HEADS
from benchmarks.harmful_modules.interface import INTERFACE
from benchmarks.harmful_modules.parameters import PARAMETERS
from benchmarks.harmful_modules.plain import BATCH, SEQ, WIDTH, Build, Model, Tensor
from benchmarks.harmful_modules.samples import SAMPLES
from benchmarks.harmful_modules.tokens import POSITIONS, TOKENS
from benchmarks.harmful_modules.wiring import WIRING

__all__ = ["BATCH", "MODULES", "SEQ", "Specimen", "build_module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """One module of the zoo.

    Attributes:
        group: Kind of harm: a name of the registry's groups.
        build: Makes the module.
        tokens: Names of inputs that are tokens [batch, seq].
        vectors: Names of inputs that are vectors [batch, width].
    """

    group: str
    build: Build
    tokens: tuple[str, ...] = ("input_ids",)
    vectors: tuple[str, ...] = ()


_GROUPS: dict[str, dict[str, Build]] = {
    "plain": {"plain": Model},
    "tokens": TOKENS,
    "positions": POSITIONS,
    "features": FEATURES,
    "heads": ACROSS_HEADS,
    "samples": SAMPLES,
    "wiring": WIRING,
    "parameters": PARAMETERS,
    "interface": INTERFACE,
}
_TOWERS: dict[str, tuple[str, ...]] = {"tokens": (), "vectors": ("left", "right")}
#: Names of inputs, where they are not ``input_ids``.
_INPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "contrast": _TOWERS,
    "two towers": _TOWERS,
    "input named target": {"tokens": ("target",)},
    "input named layers": {"tokens": ("layers",)},
}
MODULES: dict[str, Specimen] = {
    name: Specimen(group=group, build=build, **_INPUTS.get(name, {}))
    for group, modules in _GROUPS.items()
    for name, build in modules.items()
}


def build_module(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a module of the zoo, always with the same weights, and its inputs."""
    torch.manual_seed(0)
    specimen = MODULES[name]
    module = specimen.build().train()
    tokens = {key: torch.randint(4, 90, (BATCH, SEQ)) for key in specimen.tokens}
    vectors = {key: torch.randn(BATCH, WIDTH) for key in specimen.vectors}
    return module, tokens | vectors
