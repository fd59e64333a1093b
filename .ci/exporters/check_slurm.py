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
    assert "\n#SBATCH " not in text[len(head) :], "an option stands below the head"
    devices, types = 0, []
    parts = head.split("\n#SBATCH hetjob\n")
    for part in parts:
        found = re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", part, re.MULTILINE)
        asked = dict(found)
        # A component's first line may stand at its very beginning.
        lines = f"\n{part}".count("\n#SBATCH ")
        same("every #SBATCH line", (len(found), len(asked)), (lines, lines))
        wanted = asked.get("gpus-per-node") or asked["cpus-per-task"]
        kind, _, each = wanted.rpartition(":")
        devices += int(asked["nodes"]) * int(each)
        types.append([int(asked["nodes"]), kind])
        same("ntasks-per-node", asked["ntasks-per-node"], "1")
    same("devices", devices, plan["cluster"]["num_devices"])
    runs = plan["cluster"]["host_types"]
    if runs:
        chips = [[count, kind.rpartition("-")[0]] for count, kind in runs]
        same("components", types, chips)
        same("step", f"srun --het-group=0-{len(parts) - 1} " in text, True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    sys.exit(check_in_environment(__file__, "slurm", launcher_plans(), [PACKAGE]))
