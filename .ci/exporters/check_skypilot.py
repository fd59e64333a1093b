"""Tasks, read by SkyPilot 0.14.1: sky.Task.from_yaml; their shell by shellcheck."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from checking import check_in_environment, judge, same
from launcher_plans import launcher_plans
from shell_scripts import PACKAGE, check_script

PACKAGES = ("skypilot==0.14.1", PACKAGE)


def _check(folder: Path, plan: dict[str, Any]) -> None:
    import sky

    # The working directory of a task is looked for from here.
    os.chdir(folder)
    task = sky.Task.from_yaml("task.yaml")
    (resources,) = task.resources
    if resources.accelerators:
        ((_, each),) = resources.accelerators.items()
    else:
        each = int(resources.cpus.rstrip("+"))
    same("devices", int(task.num_nodes * each), plan["cluster"]["num_devices"])
    check_script(f"#!/bin/bash\n{task.setup}")
    check_script(f"#!/bin/bash\n{task.run}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    sys.exit(check_in_environment(__file__, "skypilot", launcher_plans(), PACKAGES))
