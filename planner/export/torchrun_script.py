"""A script that starts a framework's own trainer with torchrun on every host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.errors import ExportError
from planner.export.torchrun import placed

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["about", "sequence_length", "torchrun_script"]


def about(plan: Plan) -> tuple[str, ...]:
    """What a file is for, a line each; escaped names keep to theirs."""
    return (
        f"Model: {plan.model.name!a}",
        f"Cluster: {plan.cluster.name!a}",
        f"Strategy: {plan.strategy.label()}",
    )


def sequence_length(plan: Plan, target: str, divisor: int) -> int:
    """Tokens per sample of a language model's plan.

    Args:
        plan: Any.
        target: As people know it.
        divisor: What must divide the sequence there.

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
    """A POSIX shell script; its arguments go on to the program.

    Args:
        plan: What is started; ranks are numbered host by host.
        notes: Comment lines, without line breaks.
        setup: Lines before the start; ``$here`` is the script's folder.
        program: What torchrun starts, in shell syntax.

    Raises:
        ExportError: If a launcher that counts host by host cannot say it.
    """
    placement = placed(plan)
    hosts = len(placement.hosts)
    lines = ["#!/bin/sh", *(f"# {note}".rstrip() for note in notes), "set -eu"]
    where = "--standalone"
    if hosts > 1:
        lines += [
            f"# Run it once on each of {hosts} hosts, in order: NODE_RANK is 0 to "
            f"{hosts - 1}.",
            ': "${NODE_RANK:?set NODE_RANK, the number of this host}"',
            ': "${MASTER_ADDR:?set MASTER_ADDR, the name of the first host}"',
            ': "${MASTER_PORT:=29500}"',
        ]
        where = (
            f'--nnodes={hosts} --node-rank="$NODE_RANK" '
            f'--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
        )
    if not placement.whole:
        devices = ",".join(map(str, placement.local))
        lines.append(f"export CUDA_VISIBLE_DEVICES={devices}")
    lines += [
        'here=$(CDPATH=\'\' cd -- "$(dirname -- "$0")" && pwd)',
        *setup,
        f"exec torchrun {where} --nproc-per-node={len(placement.local)} \\",
        f"  {program}",
    ]
    return "\n".join(lines) + "\n"
