"""The plan and a task of SkyPilot. Written for SkyPilot 0.14."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.errors import ExportError
from planner.export.texts import run_name, yaml_text
from planner.export.torchrun import placed, torchrun_command
from planner.targets.rules import SKYPILOT_NAMES, is_cpu

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_skypilot"]

_HEADER = """Trains by plan.json: {label}.

    sky launch task.yaml      in this folder: it becomes the working directory

Yours to set: resources.infra for the cloud or region, use_spot, disk_size, and the
variables under envs (or on the command line: --env STEPS=20)."""

_SETUP = """if [ -n "$MESHWRIGHT_INSTALL" ]; then
  python -m pip install --quiet "$MESHWRIGHT_INSTALL"
fi
"""

_RUN = """set -euo pipefail
NODE_RANK=$SKYPILOT_NODE_RANK
MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
MASTER_PORT=${{MASTER_PORT:-29500}}
export NODE_RANK MASTER_ADDR MASTER_PORT
arguments=(--steps "$STEPS")
if [ -n "$MODEL" ]; then arguments+=(--model "$MODEL"); fi
if [ -n "$DATA" ]; then arguments+=(--data "$DATA"); fi
if [ -n "$CHECKPOINTS" ]; then
  arguments+=(--checkpoint-dir "$CHECKPOINTS" --resume)
fi
exec {command} plan.json "${{arguments[@]}}"
"""


def export_skypilot(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``task.yaml``.

    Raises:
        ExportError: If ranks are not the same on every host, or SkyPilot has no name
            for the devices.
    """
    from planner import __version__

    placement = placed(plan)
    task = {
        "name": run_name(plan),
        "num_nodes": len(placement.hosts),
        "workdir": ".",
        "resources": _resources(plan, len(placement.local)),
        "envs": {
            # What pip installs first; empty where the image has it.
            "MESHWRIGHT_INSTALL": f"meshwright[hf]=={__version__}",
            "STEPS": "1000",
            "MODEL": "",
            "DATA": "",
            "CHECKPOINTS": "",
        },
        "setup": _SETUP,
        "run": _RUN.format(command=torchrun_command(plan)),
    }
    header = _HEADER.format(label=plan.strategy.label())
    return {"plan.json": plan.to_json(), "task.yaml": yaml_text(task, header=header)}


def _resources(plan: Plan, count: int) -> dict[str, Any]:
    kinds = tuple(plan.cluster.device_types)
    if len(kinds) == 1 and is_cpu(kinds[0]):
        return {"cpus": f"{count}+"}
    if len(kinds) != 1 or kinds[0] not in SKYPILOT_NAMES:
        raise ExportError(
            f"cluster.device_types={', '.join(kinds)}: a task of SkyPilot asks for one "
            f"kind of accelerator that it has a name for; plan for one of "
            f"{', '.join(SKYPILOT_NAMES)}"
        )
    return {
        "accelerators": f"{SKYPILOT_NAMES[kinds[0]]}:{count}",
        # The fastest network that the cloud has between these machines.
        "network_tier": "best",
    }
