"""The plan and a shell script that starts it with torchrun on every host.

Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.errors import ExportError

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_torchrun", "torchrun_command"]

_ONE_HOST = """#!/bin/sh
# Starts plan.json on this host. Arguments go on to meshwright run.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
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
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
{visible}exec {command} "$here/plan.json" "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Which devices of which hosts the ranks have.

    Attributes:
        hosts: Indices of the hosts that are used, ascending.
        local: Devices of each of them, by their number inside the host.
        whole: Whether these are all the devices of the host.
    """

    hosts: tuple[int, ...]
    local: tuple[int, ...]
    whole: bool


def _placement(plan: Plan) -> _Placement:
    """Where the ranks are, if it is something that torchrun can say.

    Raises:
        ExportError: If hosts hold different ranks, ranks are not in the order of
            devices, or the plan does not know its hosts.
    """
    ids = plan.strategy.device_ids()
    if list(ids) != sorted(ids):
        raise ExportError(
            "strategy.device_ranges puts ranks out of the order of devices, and "
            "torchrun numbers ranks host by host; start one process per device "
            "yourself, with RANK set, or plan again with devices in order"
        )
    sizes = [size for count, size in plan.cluster.hosts for _ in range(count)]
    if not sizes:
        raise ExportError(
            "cluster.hosts is empty, so that it is not known which ranks share a host; "
            "plan again with this version of Meshwright"
        )
    place = [(h, i) for h, size in enumerate(sizes) for i in range(size)]
    local: dict[int, list[int]] = {}
    for device in ids:
        host, index = place[device]
        local.setdefault(host, []).append(index)
    counts = sorted({len(devices) for devices in local.values()})
    if len(counts) > 1:
        raise ExportError(
            f"hosts of this plan hold {counts[0]} to {counts[-1]} of its {len(ids)} "
            f"ranks, and torchrun wants the same number on each; plan for equal hosts, "
            f"or write one command a host yourself"
        )
    first, *others = local.values()
    if any(devices != first for devices in others):
        raise ExportError(
            "hosts of this plan use different devices (some are occupied), and one "
            "script cannot name them for all; plan with the same devices free on each"
        )
    return _Placement(
        hosts=tuple(local),
        local=tuple(first),
        whole=all(len(first) == sizes[host] for host in local),
    )


def torchrun_command(plan: Plan) -> str:
    """The command of one host, in shell syntax, up to the path of the plan.

    On many hosts, NODE_RANK, MASTER_ADDR and MASTER_PORT are left open.

    Raises:
        ExportError: If torchrun cannot say what the plan says, or Meshwright's
            executors cannot run it.
    """
    if plan.not_runnable:
        raise ExportError(
            f"Meshwright's executors cannot run this plan: {plan.not_runnable[0]}"
        )
    placement = _placement(plan)
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
    placement = _placement(plan)
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
