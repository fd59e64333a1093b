"""Scripts for Ray Train: Ray 2.60.0 takes their ScalingConfig.

They run on the project's own code, which is put on the path; tests/cli/test_on_ray.py
trains by one of them.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from checking import ROOT, check_in_environment, judge, same
from launcher_plans import launcher_plans

PACKAGES = ("ray[train]==2.60.0", "torch==2.13.0")


def _check(folder: Path, plan: dict[str, Any]) -> None:
    from ray.train import ScalingConfig

    names = runpy.run_path(str(folder / "train.py"))
    scaling = names["scaling"]()
    assert isinstance(scaling, ScalingConfig)
    same("workers", scaling.num_workers, plan["cluster"]["num_devices"])
    gpus = not set(plan["cluster"]["device_types"]) <= {"cpu"}
    same("GPUs", scaling.total_resources.get("GPU", 0), gpus * scaling.num_workers)
    one = plan["cluster"]["num_devices"] == names["PER_HOST"]
    same("packing", scaling.placement_strategy, "STRICT_PACK" if one else "PACK")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.path.insert(0, str(ROOT))
        sys.exit(judge(sys.argv[1], _check))
    # What the script imports of the project, pinned as everywhere.
    packages = [*PACKAGES, "-c", str(ROOT / "constraints.txt"), "-e", str(ROOT)]
    sys.exit(check_in_environment(__file__, "ray", launcher_plans(), packages))
