"""The plan and a batch script that trains by it under SLURM.

Written for SLURM 25.05; ``sbatch``, ``srun`` and ``scontrol`` of recent years will do.
One task a node, torchrun inside.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from planner.export.texts import run_name
from planner.export.torchrun import placed, torchrun_command
from planner.targets.rules import is_cpu

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_slurm", "slurm_script"]

_SCRIPT = """#!/bin/bash
# Trains by plan.json: {label}.
#
#     sbatch job.sbatch --steps 1000
#
# Arguments go on to meshwright run. The folder and the environment have to be there on
# every node. SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT in the environment,
# or options of sbatch before the script's name, go before what stands here.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices}
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
# Your site's, without the second #, if it has no default:
##SBATCH --partition=gpu
##SBATCH --account=mine
set -euo pipefail

# VENV: a virtual environment that has meshwright; empty if PATH has it already.
: "${{VENV:=}}"
# PLAN: sbatch runs a copy of this script; the plan is looked for where it was called.
: "${{PLAN:={plan}}}"
# MASTER_PORT: free on the first node; another one for each job that runs there.
: "${{MASTER_PORT:=$((20000 + ${{SLURM_JOB_ID:-0}} % 20000))}}"

if [ -n "$VENV" ]; then
  # shellcheck disable=SC1091
  . "$VENV/bin/activate"
fi
if [ ! -f "$PLAN" ]; then
  echo "no plan at $PLAN; call sbatch in the folder of plan.json, or set PLAN" >&2
  exit 1
fi
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${{hosts%%$'\\n'*}}
export MASTER_ADDR MASTER_PORT PLAN

# In single quotes: each node has its own SLURM_NODEID. Without --cpu-bind=none the one
# task of a node, and with it all of its ranks, could be bound to one core.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
  export NODE_RANK="$SLURM_NODEID"
  exec {command} "$PLAN" "$@"
' meshwright "$@"
"""


def slurm_script(plan: Plan, plan_file: str | None = None) -> str:
    """The batch script.

    Args:
        plan: The plan to train by.
        plan_file: Where it is on every node; None for ``plan.json`` in the folder in
            which ``sbatch`` is called.

    Raises:
        ExportError: If torchrun cannot express the plan.
    """
    placement = placed(plan)
    count = len(placement.local)
    where = "$SLURM_SUBMIT_DIR/plan.json" if plan_file is None else None
    script = _SCRIPT.format(
        label=plan.strategy.label(),
        name=run_name(plan),
        nodes=len(placement.hosts),
        devices=_devices(plan, count, placement.whole),
        plan=where or "$plan_file",
        command=torchrun_command(plan),
    )
    if plan_file is not None:
        given = f"plan_file={shlex.quote(plan_file)}\n# VENV:"
        script = script.replace("# VENV:", given, 1)
    return script


def _devices(plan: Plan, count: int, whole: bool) -> str:
    """Lines that ask for the devices of one node."""
    if all(is_cpu(kind) for kind in plan.cluster.device_types):
        return f"#SBATCH --cpus-per-task={count}"
    lines = [f"#SBATCH --gpus-per-node={count}"]
    if whole:
        # All cores and all memory of the node, too.
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    return "\n".join(lines)


def export_slurm(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``job.sbatch``.

    Raises:
        ExportError: As :func:`slurm_script`.
    """
    return {"plan.json": plan.to_json(), "job.sbatch": slurm_script(plan)}
