"""The five networks of DT-FM, read from the folder that holds its matrices."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from planner.cluster.build import matrix_document
from planner.cluster.presets.devices import device_type
from planner.cluster.topology import FloatArray
from planner.errors import ClusterError, PlanFileError
from planner.schema.cluster import ClusterDocument

__all__ = ["DTFM_NAMES", "dtfm_document"]

_VARIABLE = "MESHWRIGHT_DATA"
_CASES = {
    "dtfm-1": "sched_case1_datacenter",
    "dtfm-2": "sched_case2_spot",
    "dtfm-3": "sched_case3_multi_dc",
    "dtfm-4": "sched_case4_regional",
    "dtfm-5": "sched_case5_worldwide",
}
DTFM_NAMES = tuple(_CASES)


def dtfm_document(name: str) -> ClusterDocument:
    """64 V100 GPUs, from one data centre (1) to eight cities (5).

    In cases 1 and 2 devices of one instance share a host; elsewhere each device is a
    host of its own.

    Args:
        name: ``dtfm-1`` … ``dtfm-5``.

    Raises:
        ClusterError: If the environment variable MESHWRIGHT_DATA is unset or its
            folder does not hold the matrices.
        PlanFileError: If a file is malformed.
    Source: Yuan et al. 2022, "Decentralized Training of Foundation Models in
        Heterogeneous Environments", arXiv 2206.01288; matrices of DS3Lab/DT-FM, MIT.
    """
    folder = _folder(name)
    case = _CASES[name]
    gbits = _matrix(folder / f"{case}_bandwidth_gbps.csv")
    milliseconds = _matrix(folder / f"{case}_delay_ms.csv")
    return matrix_document(
        gbits * 1.25e8,
        milliseconds * 1e-3,
        device_type("v100-16"),  # Yuan et al. 2022, section 4.1: AWS V100 instances
        _hosts(folder / "meta.json", case, len(gbits)),
        name=name,
        source=f"DS3Lab/DT-FM (MIT), {case}; Yuan et al. 2022, arXiv 2206.01288",
    )


def _folder(name: str) -> Path:
    root = os.environ.get(_VARIABLE)
    if not root:
        raise ClusterError(
            f"cluster {name!r} is read from measured matrices: set {_VARIABLE} to the "
            f"folder that has them in dtfm/"
        )
    folder = Path(root) / "dtfm"
    if not folder.is_dir():
        raise ClusterError(
            f"cluster {name!r}: {_VARIABLE}={root} has no folder dtfm; set {_VARIABLE} "
            f"to the folder that has the matrices in dtfm/"
        )
    return folder


def _matrix(path: Path) -> FloatArray:
    try:
        return np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot read the matrix {path}: {error}") from error


def _hosts(path: Path, case: str, count: int) -> list[int]:
    try:
        regions = json.loads(path.read_text(encoding="utf-8"))[case]["regions"]
    except (OSError, ValueError, KeyError) as error:
        raise PlanFileError(f"cannot read regions of {case} from {path}") from error
    hosts: list[int] = []
    previous = None
    for region in regions[:count]:
        shared = "instance" in region and region == previous
        hosts.append(hosts[-1] if shared else len(set(hosts)))
        previous = region
    return hosts
