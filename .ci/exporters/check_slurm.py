"""Batch scripts for SLURM: bash -n, shellcheck, and what its #SBATCH lines ask for.

SLURM itself has no package to install; its options are checked against the plan here,
and tests/export runs the script with stand-ins for scontrol and srun.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from checking import check_in_environment, judge, same
from launcher_plans import launcher_plans
from shell_scripts import PACKAGE, check_script


def _check(folder: Path, plan: dict[str, Any]) -> None:
    text = (folder / "job.sbatch").read_text()
    check_script(text)
    # sbatch stops at the first line that is neither empty nor a comment.
    head = text[: text.index("\nset -")]
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", head, re.MULTILINE))
    same("every #SBATCH line", len(asked), head.count("\n#SBATCH "))
    assert text.count("\n#SBATCH ") == len(asked), "an option stands below the head"
    each = int(asked.get("gpus-per-node") or asked["cpus-per-task"])
    same("devices", int(asked["nodes"]) * each, plan["cluster"]["num_devices"])
    same("ntasks-per-node", asked["ntasks-per-node"], "1")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    sys.exit(check_in_environment(__file__, "slurm", launcher_plans(), [PACKAGE]))
