"""Replicas that die or hang, as ranks that ``executors.launch`` starts."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from executors import run
from executors.data import synthetic_batch
from executors.launching.process_group import own_numbers
from executors.replicas.groups import Group
from executors.replicas.local_steps import LocalStepsReplicas
from executors.replicas.membership import Membership, open_membership
from executors.replicas.pieces import local_part
from executors.replicas.recovery import pack_state, take_state
from planner.schema import Plan
from planner.schema.methods import read_method
from tests.distributed.cases import build

__all__ = ["exchange", "recovery", "train"]

Emit = Callable[[Any], None]


def _first_time(path: str) -> bool:
    """True once, for the first process that asks."""
    if Path(path).exists():
        return False
    Path(path).touch()
    return True


def train(args: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Train by a plan; ``doom`` is (rank, step, name of the signal) of the first try.

    Each rank tells its process id, and a digest of its weights after each step.
    """
    plan = Plan.from_json(args["plan"])
    rank, victim = int(os.environ["RANK"]), args["doom"]
    emit({"pid": os.getpid()})
    kept: list[nn.Module] = []

    def model() -> nn.Module:
        kept[:] = [build(plan.model.name)]
        return kept[0]

    def data(step: int) -> dict[str, torch.Tensor]:
        if [rank, step] == victim[:2] and _first_time(args["flag"]):
            os.kill(os.getpid(), getattr(signal, victim[2]))
        return synthetic_batch(plan.workload, step)

    def digest(step: int) -> None:
        found = hashlib.sha256()
        for parameter in kept[0].parameters():
            found.update(local_part(parameter).numpy().tobytes())
        emit({"step": step, "digest": found.hexdigest()})

    result = run(
        plan,
        model,
        data,
        steps=args["steps"],
        on_step=lambda report: digest(report.step),
        rank_timeout_s=args.get("silence_s", 60.0),
    )
    return {
        "first": result.first_step,
        "losses": list(result.losses),
        "weights": {n: local_part(p).tolist() for n, p in kept[0].named_parameters()},
    }


class _Trainer:
    """Stand-in for a trainer: two weights of 1 that go down by 2 a step."""

    def __init__(self, membership: Membership, pin: str) -> None:
        self.module = nn.ParameterList(torch.ones(1, 1) for _ in range(2))
        for weight in self.module:
            weight.grad = torch.full_like(weight, 2)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.parts = {0: SimpleNamespace(inner=self.module)}
        self.place = SimpleNamespace(group=lambda _: None, membership=membership)
        self.done = 0
        self.replicas = LocalStepsReplicas(read_method("synchronisation", pin))
        self.replicas.attach(self)

    def all_parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def recovery(args: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Weights before each local step, global ones after each exchange.

    As in torchft's test, the second replica dies behind its second exchange, trains
    three steps from the beginning, and has the first one's state at its third.
    """
    rank, world = own_numbers()
    history: dict[int, list[float]] = {}
    outer: dict[int, list[float]] = {}
    with (
        open_membership(
            rank, world, (), fewest=2, silence_s=60, timeout_s=120
        ) as membership,
        torch.no_grad(),
    ):
        trainer = _Trainer(membership, args["pin"])
        seen: set[int] = set()
        for step in range(1000):
            history[step] = [float(weight) for weight in trainer.module]
            exchanges = trainer.done // 3
            if exchanges == 7:
                break
            if exchanges not in seen:
                kept = trainer.replicas.state()["global"]
                outer[step] = [float(kept[weight]) for weight in trainer.module]
                seen.add(exchanges)
            trainer.optimizer.step()
            if membership.joins and step < 3:
                if step == 2:
                    take_state(trainer, membership.join())
                continue
            trainer.replicas.after_update(trainer.done)
            trainer.done += 1
            membership.admit(lambda: pack_state(trainer))
            if rank == 1 and trainer.done == 6 and not membership.joins:
                os.kill(os.getpid(), signal.SIGKILL)
    return {"history": history, "global_parameter_history": outer}


def exchange(args: dict[str, Any], emit: Emit) -> list[float]:
    """Sums of two messages; one rank ends between them, by the signal or an error."""
    rank, world = own_numbers()
    message = torch.full((4,), 10.0**rank)

    def work(group: Group) -> list[float]:
        first, second = message.clone(), message.clone()
        group.all_reduce(first)
        if rank == args["victim"]:
            sys.stdout.flush()
            if args["signal"] is None:
                raise LookupError("no such weight")
            os.kill(os.getpid(), getattr(signal, args["signal"]))
        group.all_reduce(second)
        return [float(first[0]), float(second[0])]

    with open_membership(
        rank, world, (), silence_s=args["silence_s"], timeout_s=60
    ) as membership:
        membership.begin(1, lambda group: [float(group.size)]).wait()
        return membership.begin(2, work).wait()
