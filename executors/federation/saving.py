"""Checkpoints of the members of a federation.

A member saves by itself, in a folder of its name, and only behind an exchange, where
weights and outer state are those of all members. Its checkpoint holds them, and what is
its own: the state of its optimizer, batch norms, generators. All members go on from the
last step that all of them saved. A member that joins a run takes its own state from its
last checkpoint, and the rest from another member.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from executors.checkpoints.checkpoint import CheckpointOptions
from executors.checkpoints.folder import CheckpointFolder
from executors.federation.exchange import Place
from executors.replicas.all_reduce import AllReduceReplicas
from executors.replicas.pieces import local_part
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.schema import Federation

__all__ = [
    "MemberReplicas",
    "member_options",
    "require_checkpoints",
    "require_exchange",
]


class MemberReplicas(AllReduceReplicas):
    """Copies of a member, equal after every step, and the state of the outer optimizer.

    Args:
        trainer: Of this rank, whose copies are kept together in every step.
        period: Steps from one exchange to the next.
        kept: Weights of the last exchange (``global``) and ``momentum``, as this
            rank's parts; those that the exchange has.
    """

    def __init__(
        self,
        trainer: Trainer,
        period: int,
        kept: Mapping[str, Mapping[nn.Parameter, torch.Tensor]],
    ) -> None:
        super().__init__(trainer.plan.strategy.synchronisation)
        self._period, self._kept = period, kept

    @property
    def rests_every(self) -> int:  # type: ignore[override]
        """Steps from one exchange to the next."""
        return self._period

    def rests(self, done: int) -> bool:
        """Return True behind an exchange, where members are equal."""
        return done % self._period == 0

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Return the outer momentum; weights of the last exchange are the model's."""
        return {kind: one for kind, one in self._kept.items() if kind != "global"}

    def restored(self, *, complete: bool) -> None:
        """Go on from weights that were read, those of the last exchange."""
        for parameter, value in self._kept.get("global", {}).items():
            value.copy_(local_part(parameter).detach())
        if not complete:
            for value in self._kept.get("momentum", {}).values():
                value.zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """Steps of which each member has checkpoints."""

    steps: Mapping[str, frozenset[int]]

    def common(self, folder: Path, resume: bool | str) -> int | None:
        """Step that all members go on from; None to begin.

        Args:
            folder: Holds a folder for each member.
            resume: True for the last, or the name of one.

        Raises:
            ExecutionError: If some members have checkpoints that others lack, and none
                is of a step that all have.
        """
        common = frozenset.intersection(*self.steps.values())
        if isinstance(resume, str):
            step = int(resume.removeprefix("step-"))
            lacking = [name for name, one in self.steps.items() if step not in one]
            if not lacking:
                return step
            problem = f"{lacking[0]} has no {resume}"
        elif common:
            return max(common)
        elif not any(self.steps.values()):
            return None
        else:
            problem = "the members have no checkpoint of the same step"
        have = ", ".join(f"step-{step:06d}" for step in sorted(common))
        remedy = f"resume from {have}" if have else "begin in another checkpoint_dir"
        raise ExecutionError(f"{problem} in {folder}; {remedy}")


def require_checkpoints(
    federation: Federation, options: CheckpointOptions | None, steps: int
) -> CheckpointOptions | None:
    """Refuse checkpoints that would be due between exchanges.

    Args:
        federation: What is run.
        options: Of all members' checkpoints, whose folder holds a folder for each
            member; None for none.
        steps: Of the run.

    Returns:
        The options.

    Raises:
        ExecutionError: If one would be, or a member cannot be saved at an exchange.
    """
    if options is None:
        return None
    require_exchange(federation, "checkpoint_every", options.every)
    require_exchange(federation, "steps", steps, "with checkpoints")
    for member in federation.members:
        strategy = member.plan.strategy
        if strategy.asynchrony.unflushed:
            raise ExecutionError(
                f"checkpoint_dir with {member.name}, which has asynchrony="
                f"{strategy.asynchrony} and microbatches under way at an exchange; "
                f"leave it out or plan the member with asynchrony=flushed"
            )
    return options


def require_exchange(
    federation: Federation, name: str, value: int | None, why: str = ""
) -> None:
    """Refuse a number of steps behind which members are not equal.

    Raises:
        ExecutionError: If no exchange is due after so many steps.
    """
    period = federation.exchange.period
    if value is None or len(federation.members) == 1 or not value % period:
        return
    more = value + period - value % period
    raise ExecutionError(
        f"{name}={value}{' ' + why if why else ''}, but members are equal every "
        f"{period} steps alone; use {more} or another multiple of {period}"
    )


def member_options(
    options: CheckpointOptions, place: Place, store: Store, *, joins: bool
) -> CheckpointOptions:
    """Options of one member's checkpoints, after all agreed on a step to go on from.

    Collective over all processes that begin the run.

    Args:
        options: Of all members.
        place: Of this process.
        store: That all processes see.
        joins: Whether the member joins a run that others train; then it takes the last
            of its own checkpoints, if it has one.

    Raises:
        ExecutionError: If there is no step that all members can go on from.
    """
    members = place.federation.members
    folder = options.folder / members[place.member].name
    own = replace(options, folder=folder)
    if joins:
        return replace(own, resume=True)
    if not options.resume:
        return own
    if place.leads:
        found = CheckpointFolder(folder).steps()
        store.set(f"saved/{place.member}", json.dumps(found))
    steps = {
        member.name: frozenset(json.loads(str(store.get(f"saved/{number}"), "utf-8")))
        for number, member in enumerate(members)
    }
    step = _Saved(steps=steps).common(options.folder, options.resume)
    return replace(own, resume=True if step is None else f"step-{step:06d}")
