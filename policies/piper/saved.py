"""Weights of a Piper policy in files; see :mod:`policies.weight_files`."""

from __future__ import annotations

from policies.piper.features import CUTS, LAYERS, WHOLE
from policies.piper.network import NetworkConfig, PiperNetwork
from policies.weight_files import SavedNetwork, WeightFiles

__all__ = [
    "FILES",
    "SavedPiperPolicy",
    "load_policy",
    "save_policy",
    "shipped_folder",
]

#: How they are kept.
FILES = WeightFiles(
    kind="Piper",
    name="piper",
    version=1,
    made=PiperNetwork,
    sizes=NetworkConfig,
    names={"layers": LAYERS, "cuts": CUTS, "whole": WHOLE},
)

SavedPiperPolicy = SavedNetwork[PiperNetwork]
load_policy, save_policy, shipped_folder = FILES.load, FILES.save, FILES.shipped_folder
