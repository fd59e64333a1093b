"""The plan and a shell script that starts it with torchrun on every host.

Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import ExportError
from planner.export.checking import case_of
from planner.targets import Placement, Violation, placement_of

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_torchrun", "placed", "torchrun_command"]

_ONE_HOST = """#!/bin/sh
# Starts plan.json on this host. Arguments go on to meshwright run.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
{visible}exec {command} "$here/plan.json" "$@"
"""

_MANY_HOSTS = """#!/bin/sh
# Starts plan.json on this host. Run it once on each of {hosts} hosts: {used} of the
# cluster, in order. NODE_RANK counts them from 0, MASTER_ADDR names the first.
# Arguments go on to meshwright run.
set -eu
: "${{NODE_RANK:?set NODE_RANK, 0 to {last}}}"
: "${{MASTER_ADDR:?set MASTER_ADDR, the name of the first host}}"
: "${{MASTER_PORT:=29500}}"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
{visible}exec {command} "$here/plan.json" "$@"
"""


def placed(plan: Plan) -> Placement:
    """Where the ranks are.

    Raises:
        ExportError: If a launcher that counts host by host cannot say it.
    """
    found = placement_of(case_of(plan))
    if isinstance(found, Violation):
        raise ExportError(str(found))
    return found


def torchrun_command(plan: Plan) -> str:
    """The command of one host, in shell syntax, up to the path of the plan.

    On many hosts, NODE_RANK, MASTER_ADDR and MASTER_PORT are left open.

    Raises:
        ExportError: If torchrun cannot say what the plan says.
    """
    placement = placed(plan)
    hosts, per_host = len(placement.hosts), len(placement.local)
    if hosts == 1:
        where = "--standalone"
    else:
        where = (
            f'--nnodes={hosts} --node-rank="$NODE_RANK" '
            f'--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
        )
    return f"torchrun {where} --nproc-per-node={per_host} --no-python meshwright run"


def export_torchrun(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``run.sh``.

    Raises:
        ExportError: As :func:`torchrun_command`.
    """
    command = torchrun_command(plan)
    placement = placed(plan)
    count = len(placement.hosts)
    visible = ""
    if not placement.whole:
        devices = ",".join(map(str, placement.local))
        visible = f"export CUDA_VISIBLE_DEVICES={devices}\n"
    script = (_ONE_HOST if count == 1 else _MANY_HOSTS).format(
        command=command,
        visible=visible,
        hosts=count,
        last=count - 1,
        used=_host_names(placement.hosts),
    )
    return {"plan.json": plan.to_json(), "run.sh": script}


def _host_names(hosts: tuple[int, ...]) -> str:
    if hosts == tuple(range(hosts[0], hosts[-1] + 1)):
        return f"hosts {hosts[0]} to {hosts[-1]}"
    return "hosts " + ", ".join(map(str, hosts))
