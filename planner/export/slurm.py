"""The plan and a batch script that trains by it under SLURM.

Written for SLURM 25.05; ``sbatch``, ``srun`` and ``scontrol`` of recent years will do.
One task a node, torchrun inside. A plan for hosts with devices of several types is a
heterogeneous job: a component for each run of hosts that are alike, in the order of
hosts, and one step over all of them, whose tasks SLURM numbers through.
Source: slurm.schedmd.com/heterogeneous_jobs.html.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from planner.export.texts import label_name, run_name
from planner.export.torchrun import assignments, placed, torchrun_command
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
# or options of sbatch before the script's name, go before what stands here.{notes}
#SBATCH --job-name={name}
{components}
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
hosts=$(scontrol show hostnames "${node_list}")
MASTER_ADDR=${{hosts%%$'\\n'*}}
export MASTER_ADDR MASTER_PORT PLAN
{variables}
# In single quotes: each node has its own {rank}. Without --cpu-bind=none the one
# task of a node, and with it all of its ranks, could be bound to one core.
# shellcheck disable=SC2016
srun {groups}--kill-on-bad-exit=1 --cpu-bind=none bash -c '
  export NODE_RANK="${rank}"
  exec {command} "$PLAN" "$@"
' meshwright "$@"
"""

#: Behind the nodes that the first component, or the only one, asks for.
_REST = """#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
# Your site's, without the second #, if it has no default:
##SBATCH --partition=gpu
##SBATCH --account=mine"""

_TYPED = """
# {kinds}: as your site calls them in gpu:TYPE, see sinfo -o %G."""

_SEVERAL = """ Options
# before the name go for the first component alone; what the others need, such as a
# partition, has to stand behind their hetjob, or in the environment for all."""


def slurm_script(plan: Plan, plan_file: str | None = None) -> str:
    """The batch script.

    Args:
        plan: The plan to train by.
        plan_file: Where it is on every node; None for ``plan.json`` in the folder in
            which ``sbatch`` is called.

    Raises:
        ExportError: If torchrun cannot express the plan.
    """
    components = placed(plan).kinds
    several = len(components) > 1
    where = "$SLURM_SUBMIT_DIR/plan.json" if plan_file is None else None
    script = _SCRIPT.format(
        label=plan.strategy.label(),
        name=run_name(plan),
        components=_components(plan),
        notes=_notes(plan),
        node_list=f"SLURM_JOB_NODELIST{'_HET_GROUP_0' if several else ''}",
        # In a component, nodes are numbered from 0; in the step, tasks are not.
        rank="SLURM_PROCID" if several else "SLURM_NODEID",
        groups=f"--het-group=0-{len(components) - 1} " if several else "",
        plan=where or "$plan_file",
        variables="".join(f"export {each}\n" for each in assignments(plan)),
        command=torchrun_command(plan),
    )
    if plan_file is not None:
        given = f"plan_file={shlex.quote(plan_file)}\n# VENV:"
        script = script.replace("# VENV:", given, 1)
    return script


def _components(plan: Plan) -> str:
    """Lines that ask for the nodes of all components, and for time."""
    placement = placed(plan)
    asked = []
    for nodes, kind in placement.kinds:
        lines = [f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1"]
        lines += _devices(plan, kind, len(placement.local), placement.whole)
        asked.append("\n".join(lines))
    return "\n#SBATCH hetjob\n".join([f"{asked[0]}\n{_REST}", *asked[1:]])


def _devices(plan: Plan, kind: str, count: int, whole: bool) -> list[str]:
    """Lines that ask for the devices of one node."""
    kinds = plan.cluster.device_types
    if is_cpu(kind) or all(map(is_cpu, kinds)):
        return [f"#SBATCH --cpus-per-task={count}"]
    name = f"{_gres_type(plan, kind)}:" if len(kinds) > 1 else ""
    lines = [f"#SBATCH --gpus-per-node={name}{count}"]
    if whole:
        # All cores and all memory of the node, too.
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    return lines


def _gres_type(plan: Plan, kind: str) -> str:
    """Type of a GPU as sites call it: of the chip where that tells types apart."""
    chips = [_chip(other) for other in plan.cluster.device_types]
    name = _chip(kind) if chips.count(_chip(kind)) == 1 else kind
    # Names of a cluster file are anybody's.
    return label_name(name)


def _chip(kind: str) -> str:
    return kind.rpartition("-")[0] or kind


def _notes(plan: Plan) -> str:
    """Comments on types of devices, and on options of several components."""
    if len(plan.cluster.device_types) < 2:
        return ""
    runs = placed(plan).kinds
    gpus = {_gres_type(plan, kind): None for _, kind in runs if not is_cpu(kind)}
    notes = _SEVERAL if len(runs) > 1 else ""
    return notes + (_TYPED.format(kinds=", ".join(gpus)) if gpus else "")


def export_slurm(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``job.sbatch``.

    Raises:
        ExportError: As :func:`slurm_script`.
    """
    return {"plan.json": plan.to_json(), "job.sbatch": slurm_script(plan)}
