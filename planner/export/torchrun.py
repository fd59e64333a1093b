"""The plan and a shell script that starts it with torchrun on every host.

Scripts of other trainers are made of the same pieces. Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.errors import ExportError
from planner.schema.nccl import nccl_environment
from planner.targets import Case, Placement, Violation, placement_of
from planner.targets.rules import is_cpu

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = [
    "HERE",
    "about",
    "assignments",
    "case_of",
    "export_torchrun",
    "placed",
    "rendezvous",
    "require_address",
    "sequence_length",
    "torchrun_command",
    "torchrun_script",
    "variables",
    "visible_devices",
]

#: Line of a shell script that sets ``$here`` to the script's folder.
HERE = """here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)"""

_SCRIPT = """#!/bin/sh
# Starts plan.json on this host. {once}Arguments go on to meshwright run.
set -eu
{address}{here}
{visible}{variables}exec {command} "$here/plan.json" "$@"
"""

_ONCE = """Run it once on each of {hosts} hosts: {used} of the
# cluster, in order. NODE_RANK counts them from 0, MASTER_ADDR names the first.
# """


def case_of(plan: Plan) -> Case:
    """Return a plan as the rules of targets read it."""
    return Case(
        strategy=plan.strategy,
        hosts=plan.cluster.hosts,
        tied=plan.model.tied,
        attention=plan.model.attention,
        spatial_sizes=plan.model.spatial_sizes,
        backend="gloo" if any(map(is_cpu, plan.cluster.device_types)) else "nccl",
        device_types=tuple(plan.cluster.device_types),
        host_types=plan.cluster.host_types,
        num_experts=plan.model.experts,
    )


def placed(plan: Plan) -> Placement:
    """Return the hosts and devices of the ranks.

    Raises:
        ExportError: If a launcher that counts host by host cannot express it.
    """
    found = placement_of(case_of(plan))
    if isinstance(found, Violation):
        raise ExportError(str(found))
    return found


def require_address(hosts: int) -> str:
    """Lines of a shell script that ask for its host's number and the first one's name.

    Args:
        hosts: Number of hosts; one needs no lines.
    """
    if hosts == 1:
        return ""
    return f"""\
: "${{NODE_RANK:?set NODE_RANK, 0 to {hosts - 1}}}"
: "${{MASTER_ADDR:?set MASTER_ADDR, the name of the first host}}"
: "${{MASTER_PORT:=29500}}"
"""


def visible_devices(placement: Placement) -> str:
    """Line of a shell script that hides devices which the plan leaves out."""
    if placement.whole:
        return ""
    return f"export CUDA_VISIBLE_DEVICES={','.join(map(str, placement.local))}\n"


def variables(plan: Plan) -> dict[str, str]:
    """Variables of every rank's environment that say how NCCL sums."""
    if case_of(plan).backend != "nccl":
        return {}
    return nccl_environment(plan.strategy)


def assignments(plan: Plan) -> tuple[str, ...]:
    """Return the same as ``NAME=value``, in shell syntax."""
    pairs = variables(plan).items()
    return tuple(f"{name}={shlex.quote(value)}" for name, value in pairs)


def rendezvous(hosts: int, apart: str = " ") -> str:
    """Arguments by which torchrun's agents find each other.

    Args:
        hosts: Number of hosts.
        apart: Text between the counts and the address.
    """
    if hosts == 1:
        return "--standalone"
    return (
        f'--nnodes={hosts} --node-rank="$NODE_RANK"{apart}'
        f'--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    )


def torchrun_command(plan: Plan) -> str:
    """The command of one host, in shell syntax, up to the path of the plan.

    On many hosts, NODE_RANK, MASTER_ADDR and MASTER_PORT are left open.

    Raises:
        ExportError: If torchrun cannot express the plan.
    """
    placement = placed(plan)
    where = rendezvous(len(placement.hosts))
    each = len(placement.local)
    return f"torchrun {where} --nproc-per-node={each} --no-python meshwright run"


def export_torchrun(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``run.sh``.

    Raises:
        ExportError: As :func:`torchrun_command`.
    """
    placement = placed(plan)
    count, used = len(placement.hosts), _host_names(placement.hosts)
    script = _SCRIPT.format(
        once=_ONCE.format(hosts=count, used=used) if count > 1 else "",
        address=require_address(count),
        here=HERE,
        visible=visible_devices(placement),
        variables="".join(f"export {each}\n" for each in assignments(plan)),
        command=torchrun_command(plan),
    )
    return {"plan.json": plan.to_json(), "run.sh": script}


def _host_names(hosts: tuple[int, ...]) -> str:
    if hosts == tuple(range(hosts[0], hosts[-1] + 1)):
        return f"hosts {hosts[0]} to {hosts[-1]}"
    return "hosts " + ", ".join(map(str, hosts))


def about(plan: Plan) -> tuple[str, ...]:
    """Comment lines about a plan; names are escaped, so that each keeps to its line."""
    return (
        f"Model: {plan.model.name!a}",
        f"Cluster: {plan.cluster.name!a}",
        f"Strategy: {plan.strategy.label()}",
    )


def sequence_length(plan: Plan, target: str, divisor: int) -> int:
    """Tokens per sample of a language model's plan.

    Args:
        plan: Any.
        target: Name of the target, for people.
        divisor: Number that must divide the sequence there.

    Raises:
        ExportError: If the model has no sequence, or it cannot be divided.
    """
    tokens = plan.workload.seq_len
    if tokens is None:
        raise ExportError(
            f"workload.seq_len=None: {target} trains language models; export this "
            f"model to another target"
        )
    if tokens % divisor:
        raise ExportError(
            f"workload.seq_len={tokens}: {target} divides sequences by {divisor} "
            f"(tp, and twice cp); plan with a seq_len that is a multiple of it"
        )
    return tokens


def torchrun_script(
    plan: Plan, *, notes: Sequence[str], setup: Sequence[str], program: str
) -> str:
    """A POSIX shell script that starts another trainer on every host.

    Its arguments go on to the program.

    Args:
        plan: The plan to start; ranks are numbered host by host.
        notes: Comment lines, without line breaks.
        setup: Lines before the start; ``$here`` is the script's folder.
        program: The program that torchrun starts, in shell syntax.

    Raises:
        ExportError: If a launcher that counts host by host cannot express it.
    """
    placement = placed(plan)
    hosts = len(placement.hosts)
    lines = ["#!/bin/sh", *(f"# {note}".rstrip() for note in notes), "set -eu"]
    if hosts > 1:
        lines += [
            f"# Run it once on each of {hosts} hosts, in order: NODE_RANK is 0 to "
            f"{hosts - 1}.",
            ': "${NODE_RANK:?set NODE_RANK, the number of this host}"',
            *require_address(hosts).splitlines()[1:],
        ]
    lines += [
        *visible_devices(placement).splitlines(),
        HERE,
        *setup,
        f"exec torchrun {rendezvous(hosts)} --nproc-per-node={len(placement.local)} \\",
        f"  {program}",
    ]
    return "\n".join(lines) + "\n"
