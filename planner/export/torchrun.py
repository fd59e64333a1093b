"""The plan and a shell script that starts it with torchrun on every host."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from planner.errors import ExportError

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_torchrun", "torchrun_command"]

_SCRIPT = """#!/bin/sh
# Starts plan.json on this host. Run it once on every host, with NODE_RANK counting from
# 0 and MASTER_ADDR naming the host of rank 0. Arguments go on to meshwright run.
# Written for torch 2.11 to 2.13.
set -eu
cd "$(dirname "$0")"
: "${{NODE_RANK:={node_rank}}}" "${{MASTER_ADDR:=127.0.0.1}}" "${{MASTER_PORT:=29500}}"
exec {command} "$@"
"""


def _per_host(plan: Plan) -> tuple[int, int]:
    """Hosts and processes per host.

    Raises:
        ExportError: If hosts hold different numbers of ranks, or ranks are not in the
            order of devices, which torchrun cannot say.
    """
    count = plan.strategy.mesh.num_devices
    ids = plan.strategy.device_ids()
    if list(ids) != sorted(ids):
        raise ExportError(
            "strategy.device_ranges puts ranks out of the order of devices, and torchrun "
            "numbers ranks host by host; start one process per device yourself, with "
            "RANK set, or plan again with devices in order"
        )
    sizes = [size for count, size in plan.cluster.hosts for _ in range(count)]
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    used = [hosts[device] for device in ids]
    per_host = sorted({used.count(host) for host in set(used)})
    if len(per_host) > 1:
        raise ExportError(
            f"hosts of this plan hold {per_host[0]} to {per_host[-1]} of its {count} "
            f"ranks; torchrun wants the same number on each: plan for equal hosts, or "
            f"write one command a host yourself"
        )
    return len(set(used)), per_host[0]


def torchrun_command(plan: Plan) -> str:
    """The command of one host, in shell syntax; ``$NODE_RANK`` and the like are open.

    Raises:
        ExportError: If torchrun cannot say what the plan says.
    """
    if plan.not_runnable:
        raise ExportError(
            f"Meshwright's executors cannot run this plan: {plan.not_runnable[0]}"
        )
    hosts, per_host = _per_host(plan)
    words = ["torchrun", f"--nnodes={hosts}", f"--nproc-per-node={per_host}"]
    text = shlex.join(words)
    if hosts > 1:
        text += ' --node-rank="$NODE_RANK"'
    text += ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    return f"{text} --no-python meshwright run plan.json"


def export_torchrun(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``run.sh``."""
    hosts, _ = _per_host(plan)
    rank = "0" if hosts == 1 else "?set NODE_RANK to 0 ... hosts - 1"
    script = _SCRIPT.format(command=torchrun_command(plan), node_rank=rank)
    if hosts > 1:
        script = script.replace(
            '"${NODE_RANK:=' + rank + '}"',
            '"${NODE_RANK:?set NODE_RANK, 0 to ' + str(hosts - 1) + '}"',
        )
    return {"plan.json": plan.to_json(), "run.sh": script}
