"""Weights of a split policy in files; see :mod:`policies.weight_files`."""

from __future__ import annotations

from policies.split.features import FEATURES, PRIORS
from policies.split.network import NetworkConfig, SplitNetwork
from policies.split.standing import STANDING
from policies.weight_files import SavedNetwork, WeightFiles

__all__ = [
    "FILES",
    "SavedSplitPolicy",
    "load_policy",
    "save_policy",
    "shipped_folder",
]

#: How they are kept.
FILES = WeightFiles(
    kind="split",
    name="split",
    version=1,
    made=SplitNetwork,
    sizes=NetworkConfig,
    names={"features": FEATURES, "priors": PRIORS, "standing": STANDING},
)

SavedSplitPolicy = SavedNetwork[SplitNetwork]
load_policy, save_policy, shipped_folder = FILES.load, FILES.save, FILES.shipped_folder
